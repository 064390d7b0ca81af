# SPDX-License-Identifier: Apache-2.0
"""Export trained models as files that other programs run, and use such files in place of a checkpoint."""
