# SPDX-License-Identifier: Apache-2.0
"""A GPT in which some layers have maxout (arXiv:1302.4389) in the place of their MLP, which is a kind of its own.

    python -m tests.models.own_kind --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --vocab-size 100 --maxout-pieces 3 --maxout-from-layer 1

Legend: s tokens, b sequences, h hidden, p pieces, f width, n tokens of a micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Optional

from torch import nn

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.kinds.mixer import Mixer
from megatron.model.layer_ops import MLP, Kernel
from megatron.model.weights import add_prefix, column, output_std, row, take_prefix
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.settings.declare import Count, Natural, setting
from megatron.settings.rules import Rule


@dataclass(frozen=True)
class MaxoutSettings:
    maxout_pieces: Optional[Count] = setting("linear functions whose maximum is an activation", None)
    maxout_from_layer: Natural = setting("the first layer with maxout", 0, needs="maxout_pieces")


class Maxout(nn.Module):
    def __init__(self, weights, setup):
        super().__init__()
        self.up = ColumnParallelLinear(take_prefix(weights, "up"), setup.tp, **setup.linear)
        self.down = RowParallelLinear(take_prefix(weights, "down"), setup.tp, **setup.linear)
        self.pieces = setup.model.maxout_pieces

    def forward(self, x, context):  # [s, b, h] -> [s, b, h]
        return self.down(self.up(x).unflatten(-1, (self.pieces, -1)).amax(-2))


def weights(facts, m, sequence_parallel):  # up: [p, f, h], cut along f
    shape, bias = (m.maxout_pieces, m.ffn_size), not m.disable_bias_linear
    up = column(m.hidden_size, shape, m.init_method_std, cut=1, bias=bias, matrices=(0, (1,) * m.maxout_pieces))
    down = row(m.ffn_size, m.hidden_size, output_std(m), bias=bias, sequence_parallel=sequence_parallel)
    return {**add_prefix("up", up), **add_prefix("down", down)}


def ops(facts, x):
    f, again = x.model.ffn_size // x.share.tp, (MLP,)
    wide = x.tokens * f * x.model.maxout_pieces
    largest = Kernel("mlp", kept=wide * x.share.element, moved=wide, workspace=wide * x.share.element, again=again)
    return (
        *x.column("mlp", f, x.model.maxout_pieces, again=again, layer="maxout.up"),
        largest,
        *x.row("mlp", f, again=again, layer="maxout.down"),
    )


MAXOUT = Mixer(
    "maxout",
    "maxout",
    Maxout,
    weights,
    ops,
    symbol="X",  # in --hybrid-layer-pattern "*-*X"
    place="mlp",
    takes=lambda model, layer: bool(model.maxout_pieces) and layer >= model.maxout_from_layer,
    settings=MaxoutSettings,
    rules=(
        Rule(
            lambda s: s.settings.model.maxout_pieces == 1,
            lambda s: "--maxout-pieces 1: the largest of one is linear; give 2 or more",
        ),
    ),
    recomputes=(MLP,),
    divided=lambda model: {"ffn": model.ffn_size},
    shrunk=lambda model, small, tp: dict(maxout_from_layer=min(model.maxout_from_layer, small.num_layers - 1)),
)


def recipe():
    return replace(pretrain_gpt.recipe(), model_type="tests.models.own_kind", kinds={"maxout": MAXOUT})


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
