# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv:2405.21060): a scan with a state for each head, `M` in a pattern of layers."""
