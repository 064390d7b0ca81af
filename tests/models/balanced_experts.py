# SPDX-License-Identifier: Apache-2.0
"""The model of `own_experts.py`, whose routers are balanced in two ways: by a bias that no gradient moves, which rises
for experts with fewer tokens than the mean (arXiv:2408.15664), and by a loss over each sequence (arXiv:2405.04434).

Legend: s sequence, b micro-batch, h hidden, k experts that a token goes to, E experts. Under sequence parallelism and
with context parallelism s is one rank's part.
"""

from dataclasses import dataclass, replace
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.entry import start
from megatron.errors import run_main
from megatron.model.language_model import LOSS, sum_over_tokens
from megatron.model.recipe import Recipe
from megatron.model.weights import Table, take_prefix
from megatron.mpu import collectives
from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Buffer, Constant, Placement
from megatron.settings.schema import Config, setting
from tests.models import own_experts

BALANCE = "balance loss"


@dataclass(frozen=True)
class BalanceSettings(own_experts.ExpertSettings):
    """Settings that only this model has."""

    bias_rate: float = setting("by how much a step moves the bias of an expert", 0.001, on_resume="refused")
    balance_coeff: float = setting("weight of the balance loss", 0.01, on_resume="refused")


@dataclass(frozen=True)
class BalancedFacts(own_experts.ExpertFacts):
    """What the model says of itself."""

    bias_rate: float = 0.001

    name = "language model with balanced experts"

    def layer_weights(self, kind: str, sequence_parallel: bool) -> Table:
        zeros = lambda combine, dtype, partial=(): Placement(
            (self.number,), Constant(0), partial=partial, buffer=Buffer(combine, dtype)
        )
        return {
            **super().layer_weights(kind, sequence_parallel),
            "router.bias": zeros("same", "float32"),
            "router.load": zeros("sum", "int64", ("tp",) * sequence_parallel),
        }


class BalancedRouter(nn.Module):
    """Hidden states [s, b, h] -> (weights [s, b, k] and numbers [s, b, k] of experts, each token's balance loss [s, b]).

    axes: those along which ranks have other parts of the same sequences.
    """

    def __init__(self, weights: Table, facts: BalancedFacts, axes: tuple[Axis, ...], **factory_kwargs):
        super().__init__()
        self.k, self.rate, self.axes = facts.chosen, facts.bias_rate, axes
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, x: torch.Tensor, counts: Optional[torch.Tensor]):
        """counts: [s, b], 1 for a token that counts and 0 for padding; None if all of them count."""
        scores = F.linear(x.float(), self.weight.float()).softmax(-1)  # [s, b, E]
        chosen = (scores + self.bias).topk(self.k, -1).indices
        with torch.no_grad():
            picked = F.one_hot(chosen, len(self.bias)).sum(-2)  # [s, b, E]
            if counts is not None:
                picked = picked * (counts > 0).unsqueeze(-1)
            loads = picked.sum(0)  # [b, E] of whole sequences
            for axis in self.axes:
                loads = collectives.all_reduce(loads, axis)
            if self.training:
                self.load += picked.sum((0, 1))
            share = loads / loads.sum(-1, keepdim=True).clamp_min(1)
        balance = len(self.bias) * (share * scores).sum(-1)  # 1 if all experts have equally many tokens
        return scores.gather(-1, chosen).to(x.dtype), chosen, balance

    def update_buffers(self):
        """Called once a step, when `load` is the sum over all ranks."""
        self.bias += self.rate * torch.sign(self.load.sum() - len(self.load) * self.load)
        self.load.zero_()


class BalancedLayer(own_experts.Layer):
    """[s, b, h] (or [s/tp, b, h]) in, and out with the sum of the balance loss."""

    def __init__(self, facts, tp, ep, etp, weights, *, cp, sequence_parallel, **factory_kwargs):
        super().__init__(facts, tp, ep, etp, weights, sequence_parallel=sequence_parallel, **factory_kwargs)
        self.tp, self.sequence_parallel = tp, sequence_parallel
        axes = (cp, tp) if sequence_parallel else (cp,)
        self.router = BalancedRouter(take_prefix(weights, "router"), facts, axes, **factory_kwargs)

    def forward(self, x: torch.Tensor, batch):
        x = x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        rows, mask = self.experts_norm(x), batch.loss_mask
        own = mask.chunk(self.tp.size)[self.tp.rank] if mask is not None and self.sequence_parallel else mask
        weights, chosen, balance = self.router(rows, own)
        made = self.experts(rows.flatten(0, 1), chosen.flatten(0, 1)).view(*chosen.shape, -1)
        return x + (made * weights.unsqueeze(-1)).sum(2), {BALANCE: sum_over_tokens(balance, mask, self)}


class BalancedLanguageModel(own_experts.ExpertLanguageModel):
    """See `LanguageModel`."""

    def build_layer(self, layer: int, weights: Table, recompute: tuple[str, ...]) -> BalancedLayer:
        own = dict(cp=self.cp, sequence_parallel=self.sequence_parallel, **self.factory_kwargs)
        return BalancedLayer(self.facts, self.tp, self.ep, self.etp, weights, **own)


def recipe() -> Recipe:
    """What is trained."""
    return replace(
        own_experts.recipe(),
        model_type="tests.models.balanced_experts",
        facts=facts,
        build_model=build_model,
        sums=lambda config: {LOSS: 1.0, BALANCE: config.extra["experts"].balance_coeff},
        groups={"experts": BalanceSettings},
    )


def facts(config: Config, vocab_size: int) -> BalancedFacts:
    own = config.extra["experts"]
    return BalancedFacts(config.model, vocab_size, own.experts, own.experts_of_token, own.bias_rate)


def build_model(config: Config, mesh, vocab_size: int, *, layers=None, first=True, last=True, dtype, device):
    stage = dict(layers=layers, first=first, last=last, dtype=dtype, device=device)
    return BalancedLanguageModel.of(config, mesh, facts(config, vocab_size), **stage)


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
