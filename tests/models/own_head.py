# SPDX-License-Identifier: Apache-2.0
"""A GPT with a second head, for the token after the next one (arXiv:2404.19737), and its loss."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.model.weights import Unit
from megatron.mpu.cross_entropy import linear_cross_entropy
from megatron.mpu.layers import create_parameters
from megatron.mpu.placement import Normal, Placement
from megatron.settings.schema import setting


@dataclass(frozen=True)
class AheadSettings:
    ahead_loss_coeff: float = setting("weight of the loss of the token after the next one", 0.3)


class AheadFacts(GPTFacts):
    def units(self, layers, first, last, sequence_parallel=False):
        m, partial = self.settings, ("tp",) if sequence_parallel else ()  # each rank then sees its own tokens
        matrix = Placement((m.hidden_size, m.hidden_size), Normal(m.init_method_std), partial=partial)
        own = Unit("ahead", {"weight": matrix}, ends=("last",))
        return [*super().units(layers, first, last, sequence_parallel), *([own] if last else [])]


class Ahead(nn.Module):
    def __init__(self, weights, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, x):  # [s, b, h], or [s/tp, b, h] under sequence parallelism
        return x + F.linear(x, self.weight)


class AheadGPT(GPT):
    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        if self.last:
            weights = next(unit.weights for unit in self.units if unit.name == "ahead")
            self.ahead = Ahead(weights, **self.factory_kwargs)

    def head_sums(self, x, batch):
        x = self.gather_input(self.ahead(x), self.tp)[:-1].flatten(0, 1)  # [(s - 1) b, h]
        labels, mask = batch.labels[1:].flatten(), batch.loss_mask
        mask = None if mask is None else mask[1:].flatten()
        common = dict(vocab_size=self.vocab_size, tp=self.tp)
        return {"ahead loss": linear_cross_entropy(x, self.output_weight, labels, mask=mask, **common)[0]}


def sums(config):
    return {"lm loss": 1.0, "ahead loss": config.extra["ahead"].ahead_loss_coeff}


def recipe():
    own = dict(facts=AheadFacts, sums=sums, groups={"ahead": AheadSettings}, shares_sequences=False)
    return pretrain_gpt.variant("tests.models.own_head", AheadGPT, **own)


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
