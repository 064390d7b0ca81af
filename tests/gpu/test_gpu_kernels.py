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
from tests.fused_kernels.test_causal_conv import test_equals_conv1d
from tests.fused_kernels.test_documents import test_every_kernel, test_half_precision
from tests.fused_kernels.test_layer_kernels import (
    test_cross_entropy,
    test_dropout,
    test_gated_norm_of_a_scan,
    test_linear,
    test_norms,
    test_products_of_any_strides,
    test_rotary,
)
from tests.fused_kernels.test_ssd import test_equals_the_recurrence

__all__ = [
    "test_bf16",
    "test_cached_keys",
    "test_capped_scores",
    "test_cross_entropy",
    "test_dropout",
    "test_equals_conv1d",
    "test_equals_the_recurrence",
    "test_every_kernel",
    "test_fp32",
    "test_gated_norm_of_a_scan",
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
