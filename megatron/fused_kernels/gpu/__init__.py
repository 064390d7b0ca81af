# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton, twins of functions of `reference.py`: arithmetic in fp32 whatever the format of the tensors.

A module here imports triton, so that it is imported where a kernel is used (`probe.kernel`) and nowhere else. Offsets of
rows are int64: the logits of 64 Ki tokens have more than 2^31 elements. What lies beyond the end of a row is masked.
"""
