# SPDX-License-Identifier: Apache-2.0
"""Commands from lists of URLs to documents, with the names and flags of Megatron-LM's tools/openwebtext."""
