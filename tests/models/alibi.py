# SPDX-License-Identifier: Apache-2.0
"""A GPT whose attention looks at distances instead of positions: ALiBi (arXiv:2108.12409)."""

from dataclasses import replace

import torch

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.kinds.attention.module import Attention, attention_core
from megatron.model.kinds.table import KINDS


class AlibiAttention(Attention):
    def __init__(self, weights, setup):
        super().__init__(weights, setup)
        heads, tp = setup.model.num_attention_heads, setup.tp
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes.chunk(tp.size)[tp.rank], persistent=False)  # of this rank's heads
        self.core = with_distances


def with_distances(query, key, value, layer, context):  # [s, b, g/tp, q, d], and [t, b, g/tp, d]: with a cache t > s
    places = torch.arange(len(key), device=key.device)
    distances = places[-len(query) :, None] - places  # [s, t]
    bias = -layer.slopes[:, None, None] * distances  # [heads/tp, s, t], added to scores
    return attention_core(query, key, value, layer, replace(context, bias=bias))


def recipe():
    own = dict(
        kinds={"attention": replace(KINDS["attention"], module=AlibiAttention)},
        defaults={"position_embedding_type": "none"},
        shares_sequences=False,
    )
    return pretrain_gpt.variant("tests.models.alibi", **own)


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
