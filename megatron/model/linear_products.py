# SPDX-License-Identifier: Apache-2.0
"""The classes of the kinds of linear layers: `linear_kinds.KINDS`, which need no torch, have their products here."""

from megatron.model import lora, quantization, sparsity
from megatron.model.fake_quantize import FakeQuantizeProduct
from megatron.model.lora_product import DoRAProduct, LoRAProduct
from megatron.model.sparse_product import SparseProduct
from megatron.mpu.linear_product import LinearProduct
from megatron.settings.schema import Model


def products_of(settings: Model) -> dict[str, type[LinearProduct]]:
    """The kinds of linear layers of a model: name -> class. Those of its recipe come first."""
    return {
        lora.KIND: DoRAProduct if settings.use_dora else LoRAProduct,
        quantization.KIND: FakeQuantizeProduct,
        sparsity.KIND: SparseProduct,
        **settings.own_linears,
    }
