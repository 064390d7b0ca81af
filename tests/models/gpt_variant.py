# SPDX-License-Identifier: Apache-2.0
"""A variant of GPT: attention and MLP beside each other, a gate for each head, and a loss on what layers add."""

from dataclasses import dataclass, replace

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.gpt.module import GPT
from megatron.model.kinds.attention.module import Attention
from megatron.model.kinds.table import KINDS
from megatron.model.language_model import sum_over_tokens
from megatron.model.layer import Layer
from megatron.model.weights import add_prefix, column, take_prefix
from megatron.mpu.layers import ColumnParallelLinear
from megatron.settings.schema import setting


@dataclass(frozen=True)
class VariantSettings:
    added_loss_coeff: float = setting("weight of the loss on the mean square of what layers add", 0.0)


class GatedAttention(Attention):
    def __init__(self, weights, setup):
        super().__init__(weights, setup)
        self.gate = ColumnParallelLinear(take_prefix(weights, "gate"), setup.tp, **setup.linear)

    def project(self, attended, x):  # [s, b, heads/tp x head_dim], [s, b, h] or [s/tp, b, h]
        gates = 2 * self.gate(x).sigmoid()  # [s, b, heads/tp]
        return super().project((attended.unflatten(-1, (-1, self.head_dim)) * gates.unsqueeze(-1)).flatten(-2), x)


def gated_weights(facts, m, sequence_parallel):
    weights = KINDS["attention"].weights(facts, m, sequence_parallel)
    gate = column(m.hidden_size, (m.num_attention_heads,), m.init_method_std, bias=False)
    return {**weights, **add_prefix("gate", gate)}


GATED = replace(KINDS["attention"], module=GatedAttention, weights=gated_weights)


class VariantLayer(Layer):
    def forward(self, x, context):
        added = self.part("attention", x, context) + self.part("mlp", x, context)
        return x + added, {"added": sum_over_tokens(added.float().square().mean(-1), context.loss_mask, self)}


class Variant(GPT):
    layer_class = VariantLayer


def sums(config):
    return {"lm loss": 1.0, "added": config.extra["variant"].added_loss_coeff}


def recipe():
    own = dict(kinds={"attention": GATED}, sums=sums, groups={"variant": VariantSettings})
    return pretrain_gpt.variant("tests.models.gpt_variant", Variant, **own)


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
