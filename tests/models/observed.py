# SPDX-License-Identifier: Apache-2.0
"""A GPT with buffers that training changes: observers of how large values become, a counter of tokens, and a bias without
a gradient that evens out how much the channels of a layer's input carry, as a router's bias evens out its experts.
"""

from dataclasses import replace

import torch
from torch import nn

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.model.kinds.attention.module import Attention
from megatron.model.kinds.table import KINDS
from megatron.model.layer import Layer
from megatron.model.weights import add_prefix, take_prefix
from megatron.mpu.layers import create_parameters
from megatron.mpu.placement import Buffer, Constant, Placement

RATE = 0.05


def zeros(shape, combine, dtype="float32", **more):
    return Placement(shape, Constant(0), buffer=Buffer(combine, dtype), **more)


class Watch(nn.Module):
    """x [s, b, h], or [s/tp, b, h] under sequence parallelism, plus a bias that is no parameter."""

    def __init__(self, weights, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                sizes = x.abs().float()
                self.largest.copy_(torch.maximum(self.largest, sizes.amax((0, 1))))
                self.load += sizes.sum((0, 1))
                self.seen += x.shape[0] * x.shape[1]
        return x + self.bias.to(x.dtype)

    def update_buffers(self):
        """Once a step, when `load` is the sum of all ranks."""
        self.bias += RATE * (self.load / self.load.mean() - 1)
        self.load.zero_()


class Heads(nn.Module):
    """attended [s, b, heads/tp x d], of which it notes the largest element of each head."""

    def __init__(self, weights, tp, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, tp, **factory_kwargs)

    def forward(self, attended):
        if self.training:
            with torch.no_grad():
                sizes = attended.float().unflatten(-1, (len(self.largest), -1)).abs().amax((0, 1, 3))
                self.largest.copy_(torch.maximum(self.largest, sizes))
        return attended


class ObservedAttention(Attention):
    def __init__(self, weights, setup):
        super().__init__(weights, setup)
        self.heads = Heads(take_prefix(weights, "heads"), setup.tp, **setup.factory)

    def project(self, attended, x):
        return super().project(self.heads(attended), x)


def observed_weights(facts, model, sequence_parallel):
    heads = zeros((model.num_attention_heads,), "max", cut={"tp": 0})
    return {**KINDS["attention"].weights(facts, model, sequence_parallel), "heads.largest": heads}


class ObservedFacts(GPTFacts):
    def layer_weights(self, kind, sequence_parallel):
        m, partial = self.settings, ("tp",) if sequence_parallel else ()  # each rank then sees its own tokens
        watch = {
            "largest": zeros((m.hidden_size,), "max", partial=partial),
            "load": zeros((m.hidden_size,), "sum", partial=partial),
            "seen": zeros((), "sum", "int64", partial=partial),
            "bias": zeros((m.hidden_size,), "same"),
        }
        return {**super().layer_weights(kind, sequence_parallel), **add_prefix("watch", watch)}


class ObservedLayer(Layer):
    def __init__(self, weights, setup):
        super().__init__(weights, setup)
        self.watch = Watch(take_prefix(weights, "watch"), **setup.factory)

    def forward(self, x, context):
        return super().forward(self.watch(x), context)


class ObservedGPT(GPT):
    layer_class = ObservedLayer


def recipe():
    attention = replace(KINDS["attention"], module=ObservedAttention, weights=observed_weights)
    own = dict(facts=ObservedFacts, kinds={"attention": attention}, shares_sequences=False)
    return pretrain_gpt.variant("tests.models.observed", ObservedGPT, **own)


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
