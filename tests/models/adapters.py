# SPDX-License-Identifier: Apache-2.0
"""A GPT that is frozen, with small trained adapters behind its layers (arXiv:1902.00751): out of a GPT's checkpoint.

    python -m tests.models.adapters --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --lr 1e-2 \\
        --micro-batch-size 2 --train-iters 4 --mock-data --vocab-size 100 --load gpt --finetune
"""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import nn

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.model.layer import Layer
from megatron.model.weights import add_prefix, frozen, take_prefix
from megatron.mpu.layers import create_parameters
from megatron.mpu.placement import Normal, Placement
from megatron.settings.schema import setting


@dataclass(frozen=True)
class AdapterSettings:
    adapter_width: int = setting("channels of each adapter", 4, on_resume="another model")


@dataclass(frozen=True)
class AdapterFacts(GPTFacts):
    width: int = 4

    @classmethod
    def of(cls, config, vocab_size):
        return replace(super().of(config, vocab_size), width=config.extra["adapters"].adapter_width)

    def layer_weights(self, kind, sequence_parallel):
        m, partial = self.settings, ("tp",) if sequence_parallel else ()  # each rank then sees its own tokens
        matrix = lambda *shape: Placement(shape, Normal(m.init_method_std), partial=partial)
        own = {"down": matrix(self.width, m.hidden_size), "up": matrix(m.hidden_size, self.width)}
        return {**frozen(super().layer_weights(kind, sequence_parallel)), **add_prefix("adapter", own)}

    def units(self, layers, first, last, sequence_parallel=False):
        found = super().units(layers, first, last, sequence_parallel)
        return [unit if unit.layer is not None else replace(unit, weights=frozen(unit.weights)) for unit in found]


class Adapter(nn.Module):
    def __init__(self, weights, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, x):  # [s, b, h], or [s/tp, b, h] under sequence parallelism
        return x + F.linear(F.relu(F.linear(x, self.down)), self.up)


class AdaptedLayer(Layer):
    def __init__(self, weights, setup):
        super().__init__(weights, setup)
        self.adapter = Adapter(take_prefix(weights, "adapter"), **setup.factory)

    def forward(self, x, context):
        return self.adapter(super().forward(x, context))


class AdaptedGPT(GPT):
    layer_class = AdaptedLayer


def recipe():
    own = dict(facts=AdapterFacts, groups={"adapters": AdapterSettings}, starts_from=("GPT",))
    reinitialize = lambda name, stored: ".adapter." in name and not stored
    return pretrain_gpt.variant("tests.models.adapters", AdaptedGPT, reinitialize=reinitialize, **own)


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
