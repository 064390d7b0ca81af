# SPDX-License-Identifier: Apache-2.0
"""The story of a run: loop, what it is built from, what moves, how it recovers."""
