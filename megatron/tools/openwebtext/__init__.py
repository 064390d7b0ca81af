# SPDX-License-Identifier: Apache-2.0
"""From lists of web addresses to documents, by commands with the names and flags of Megatron-LM's tools/openwebtext."""
