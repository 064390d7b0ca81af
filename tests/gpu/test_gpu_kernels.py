# SPDX-License-Identifier: Apache-2.0
"""On a GPU: every kernel equals its formula. The tests are those of `tests/fused_kernels`, with another `device`."""

import pytest

from tests.fused_kernels.test_attention import (
    test_bf16,
    test_cached_keys,
    test_capped_scores,
    test_fp32,
    test_scaled_softmax_in_fp16,
    test_windows,
    test_windows_over_cached_keys,
)
from tests.fused_kernels.test_documents import test_every_kernel, test_half_precision
from tests.fused_kernels.test_layer_kernels import (
    test_cross_entropy,
    test_dropout,
    test_linear,
    test_norms,
    test_products_of_any_strides,
    test_rotary,
)

__all__ = [
    "test_bf16",
    "test_cached_keys",
    "test_capped_scores",
    "test_cross_entropy",
    "test_dropout",
    "test_every_kernel",
    "test_fp32",
    "test_half_precision",
    "test_linear",
    "test_norms",
    "test_products_of_any_strides",
    "test_rotary",
    "test_scaled_softmax_in_fp16",
    "test_windows",
    "test_windows_over_cached_keys",
]

pytestmark = pytest.mark.gpu
