# SPDX-License-Identifier: Apache-2.0
"""Parts of deduplication: signatures, candidate pairs, comparison, groups, removal."""
