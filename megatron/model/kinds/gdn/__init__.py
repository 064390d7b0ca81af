# SPDX-License-Identifier: Apache-2.0
"""Gated delta net (arXiv:2412.06464): linear attention with a state for each head, as in Qwen3-Next."""
