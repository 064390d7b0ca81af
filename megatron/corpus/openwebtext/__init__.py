# SPDX-License-Identifier: Apache-2.0
"""The parts of the downloader: requests, text of pages, the record of what was downloaded."""
