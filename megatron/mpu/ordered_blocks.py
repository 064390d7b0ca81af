# SPDX-License-Identifier: Apache-2.0
"""The blocks of sums in --batch-invariant-mode (`ordered_sums.py`). Needs no torch: rules read it."""

BLOCKS = 8  # of a sum that tensor parallel ranks divide: the most ranks there can be
