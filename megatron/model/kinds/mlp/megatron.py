# SPDX-License-Identifier: Apache-2.0
"""MLPs in Megatron-LM's checkpoints: of a gated one, the rows of the gate, then those of values."""

from megatron.model.megatron_form import NORM, KindNames, MegatronForm, Names, RowOrder
from megatron.settings.schema import Model

PARTS = RowOrder(parts={"_w": (0,), "_v": (1,)})


def _names(model: Model, version: float) -> KindNames:
    norm = Names(
        "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", "post_attention_layernorm.", ("post_attention_norm.",)
    )
    modules = {
        NORM: norm,
        "up": Names("mlp.linear_fc1.", legacy="mlp.dense_h_to_4h."),
        "down": Names("mlp.linear_fc2.", legacy="mlp.dense_4h_to_h."),
    }
    return KindNames(modules, {"up.weight": PARTS, "up.bias": PARTS} if model.gated else {})


FORM = MegatronForm(_names)
