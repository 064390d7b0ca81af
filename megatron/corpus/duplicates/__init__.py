# SPDX-License-Identifier: Apache-2.0
"""Finding texts that repeat: signatures, candidate pairs, comparison, groups, removal."""
