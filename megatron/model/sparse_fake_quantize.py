# SPDX-License-Identifier: Apache-2.0
"""The products of a linear layer with a mask, whose weights and inputs are rounded: y = q(x) q(mask * W)^T + b.

Zeros stay zeros: 0 is a value of every format. The scales of output channels are those of the weights that stay.
"""

import torch

from megatron.model.fake_quantize import FakeQuantizeProduct
from megatron.model.sparse_product import SparseProduct


class SparseFakeQuantizeProduct(SparseProduct, FakeQuantizeProduct):
    """`transform` is that of the mask, `prepare_weight` and `transform_input` are those of rounding."""

    def mask_at(self, weight: torch.Tensor, step: int) -> torch.Tensor:
        self._largest = None  # of the weights that the last mask has kept
        return super().mask_at(weight, step)

    def update_buffers(self) -> None:
        SparseProduct.update_buffers(self)
        if self.observes:
            FakeQuantizeProduct.update_buffers(self)

    def after_update(self) -> None:
        SparseProduct.after_update(self)
        FakeQuantizeProduct.after_update(self)
