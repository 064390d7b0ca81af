# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for functions of `reference.py`, with fp32 arithmetic for any format of the tensors.

Modules here import triton; `probe.kernel` imports them when a kernel is used. Row offsets are int64: the logits of 64 Ki
tokens have more than 2^31 elements. Accesses beyond the end of a row are masked.
"""
