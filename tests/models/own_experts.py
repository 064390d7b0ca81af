# SPDX-License-Identifier: Apache-2.0
"""A language model whose layers have experts, in one file: each token goes to the few that its router prefers, however
many others prefer them (dropless), over ranks that hold different experts (`mesh.ep`) and parts of each (`mesh.etp`).

A layer is y = x + down(gelu(up(norm(x)))), then y + experts(experts_norm(y)); there is no attention. Ranks of etp gather
their tokens, as those of tp do under sequence parallelism; ranks of ep exchange them, in as uneven parts as they come.

Legend: n tokens of this rank, k experts that a token goes to, E experts, f width of an expert's MLP, h hidden.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.facts import Facts
from megatron.model.language_model import LanguageModel
from megatron.model.layer_ops import Collective, Kernel, LayerOp, Product, RankSetup, Residual
from megatron.model.norms import NORMS
from megatron.model.recipe import Recipe
from megatron.model.weights import Table, add_prefix, column, norm, output_std, row, take_prefix
from megatron.mpu import collectives, mappings
from megatron.mpu.layers import ColumnParallelLinear, Given, LinearOptions, RowParallelLinear, create_parameters
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Normal, Placement
from megatron.settings.rules import Rule
from megatron.settings.schema import Config, setting


@dataclass(frozen=True)
class ExpertSettings:
    """Settings that only this model has."""

    experts: int = setting("experts of a layer", 8, on_resume="another model")
    experts_of_token: int = setting("experts that each token goes to", 2, on_resume="another model")


@dataclass(frozen=True)
class ExpertFacts(Facts):
    """What the model says of itself."""

    number: int = 8
    chosen: int = 2

    name = "language model with experts"

    def layer_weights(self, kind: str, sequence_parallel: bool) -> Table:
        m, sp, experts = self.settings, sequence_parallel, dict(experts=self.number)
        router = Placement((self.number, m.hidden_size), Normal(m.init_method_std), partial=("tp",) * sp)
        return {
            **add_prefix("norm", norm(m, m.hidden_size, sp)),
            **add_prefix("up", column(m.hidden_size, (m.ffn_size,), m.init_method_std)),
            **add_prefix("down", row(m.ffn_size, m.hidden_size, output_std(m), sequence_parallel=sp)),
            **add_prefix("experts_norm", norm(m, m.hidden_size, sp)),
            "router.weight": router,
            **add_prefix("experts.up", column(m.hidden_size, (m.ffn_size,), m.init_method_std, **experts)),
            **add_prefix("experts.down", row(m.ffn_size, m.hidden_size, output_std(m), **experts)),
        }

    def layer_ops(self, share: RankSetup, kind: str) -> tuple[LayerOp, ...]:
        x = Residual(self.settings, share, self.settings.seq_length // share.cp * share.micro_batch_size)
        n, f, e, h = x.tokens, self.settings.ffn_size // share.tp, share.element, x.h
        return (
            x.norm(),
            *x.column("mlp", f),
            Kernel("mlp", kept=n * f * e, moved=2 * n * f),
            *x.row("mlp", f),
            x.add(),
            x.norm(),
            *self.expert_ops(share, x.elements // h, h),
            x.add(),
        )

    def expert_ops(self, share: RankSetup, n: int, h: int) -> tuple[LayerOp, ...]:
        """The ops of router and experts. n: tokens between layers; loads of experts are taken to be equal."""
        e, k, f = share.element, self.chosen, self.settings.ffn_size // share.etp
        gathered = n * share.etp
        rows = gathered * k  # of all experts, sent by a rank, and on average as many arrive
        own, of_expert = self.number // share.ep, rows * share.ep // self.number
        halves = ("all_gather",), ("reduce_scatter",)
        over = lambda axis, size, *calls: Collective("experts", axis, getattr(share, axis), size, *calls)
        exchange = over("ep", rows * h * e, ("all_to_all",), ("all_to_all",))
        return (
            Product("experts", n, h, self.number, kept=n * h * e, given=n * h * e),
            Kernel("routing", kept=n * self.number * e + 8 * n * k, moved=2 * n * self.number),
            over("etp", gathered * h * e, *halves),
            over("etp", 8 * rows, ("all_gather",)),  # the experts of each token
            over("ep", 8 * self.number, ("all_to_all",)),  # tokens of each expert
            exchange,
            Kernel("routing", kept=4 * 8 * rows, moved=8 * rows * h),  # four orders
            Product("experts", of_expert, h, f, own, kept=rows * h * e),
            Kernel("experts", kept=rows * f * e, moved=2 * rows * f),
            Product("experts", of_expert, f, h, own, kept=rows * f * e),
            exchange,
            over("etp", rows * h * e, *reversed(halves)),
            Kernel("experts", kept=n * k * (h + 1) * e, moved=2 * n * k * h),
        )


# ---- the module ------------------------------------------------------------------------------------------------------


class GroupedLinear(nn.Module):
    """Rows in the order of experts [m, inputs] -> [m, outputs], each times the matrix of its expert.

    with_bias: whether this rank adds the bias, of which ranks of etp have copies.
    """

    weight_grad_store = accumulate = None  # set for pipelines with W passes, and where products add to fp32 gradients

    def __init__(self, weights: Table, axes: tuple[Axis, Axis], *, with_bias: bool = True, **factory_kwargs):
        super().__init__()
        self.with_bias = with_bias
        create_parameters(self, weights, axes, **factory_kwargs)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        handler = LinearOptions(None, None, self.weight_grad_store, self.accumulate).wgrad_handler(x, self.weight)
        weight = self.weight.detach() if handler else self.weight
        y = GroupedProduct.apply(x, weight, counts.tolist(), handler)
        expert = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        return y + (self.bias * self.with_bias)[expert]


class GroupedProduct(torch.autograd.Function):
    """The products of a `GroupedLinear`; handler: takes that for the weight's gradient, instead of autograd."""

    @staticmethod
    def forward(ctx, x, weight, counts, handler):
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.handler = counts, handler
        return torch.cat([rows @ own.t() for rows, own in zip(x.split(counts), weight, strict=True)])

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = gradient.split(ctx.counts)
        d_x = torch.cat([row @ own for row, own in zip(rows, weight, strict=True)])
        wgrad = GroupedWgrad(rows, x.split(ctx.counts))
        if ctx.handler:
            ctx.handler(wgrad)
        return d_x, None if ctx.handler else wgrad(), None, None


class GroupedWgrad(NamedTuple):
    """The products for the weights' gradients, not done yet; that of an expert without tokens is 0."""

    rows: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]

    def __call__(self) -> torch.Tensor:
        return torch.stack([row.t() @ x for row, x in zip(self.rows, self.inputs, strict=True)])

    def start(self) -> None:
        pass

    def add_to(self, total: torch.Tensor, overwrite: bool) -> None:
        Given(self()).add_to(total, overwrite)


class Experts(nn.Module):
    """Tokens [n, h] and the experts that each goes to [n, k] -> what these make of it [n, k, h]."""

    def __init__(self, weights: Table, ep: Axis, etp: Axis, **factory_kwargs):
        super().__init__()
        self.ep, self.etp = ep, etp
        self.up = GroupedLinear(take_prefix(weights, "up"), (ep, etp), **factory_kwargs)
        down = take_prefix(weights, "down")
        self.down = GroupedLinear(down, (ep, etp), with_bias=etp.rank == 0, **factory_kwargs)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        k = chosen.shape[1]
        x = mappings.gather_from_sequence_parallel_region(x, self.etp)
        expert = collectives.all_gather(chosen, self.etp).flatten()
        order = expert.argsort(stable=True)
        # Tokens for each rank's experts, and from each rank for the experts of this one.
        leaving, arriving = collectives.count_rows(expert, self.ep.size * len(self.up.weight), self.ep)
        sent, received = leaving.sum(1), arriving.sum(1)
        rows = mappings.all_to_all(x[order // k], self.ep, sent, received)
        by_expert = (
            torch.arange(arriving.shape[1], device=arriving.device)
            .repeat(self.ep.size)
            .repeat_interleave(arriving.flatten())
        )
        by_expert = by_expert.argsort(stable=True)
        loads = arriving.sum(0)
        y = self.down(F.gelu(self.up(rows[by_expert], loads), approximate="tanh"), loads)
        y = mappings.all_to_all(y[by_expert.argsort()], self.ep, received, sent)[order.argsort()]
        return mappings.reduce_scatter_to_sequence_parallel_region(y, self.etp).view(-1, k, x.shape[1])


class Router(nn.Module):
    """Tokens [n, h] -> (weights [n, k], numbers [n, k]) of the experts that each prefers."""

    def __init__(self, weights: Table, k: int, **factory_kwargs):
        super().__init__()
        self.k = k
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.linear(x.float(), self.weight.float()).softmax(-1)
        weights, chosen = scores.topk(self.k, -1)
        return weights.to(x.dtype), chosen


class Layer(nn.Module):
    """[s, b, h] (or [s/tp, b, h]) in and out."""

    def __init__(self, facts: ExpertFacts, tp, ep, etp, weights: Table, *, sequence_parallel, **factory_kwargs):
        super().__init__()
        model, of = facts.settings, lambda name: take_prefix(weights, name)
        common = dict(sequence_parallel=sequence_parallel, **factory_kwargs)
        make_norm = NORMS[model.normalization]
        self.norm = make_norm(of("norm"), model.norm_epsilon, **factory_kwargs)
        self.up = ColumnParallelLinear(of("up"), tp, **common)
        self.down = RowParallelLinear(of("down"), tp, **common)
        self.experts_norm = make_norm(of("experts_norm"), model.norm_epsilon, **factory_kwargs)
        self.router = Router(of("router"), facts.chosen, **factory_kwargs)
        self.experts = Experts(of("experts"), ep, etp, **factory_kwargs)

    def forward(self, x: torch.Tensor, batch):
        x = x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        rows = self.experts_norm(x).flatten(0, 1)
        weights, chosen = self.router(rows)
        return x + (self.experts(rows, chosen) * weights.unsqueeze(-1)).sum(1).view_as(x)


class ExpertLanguageModel(LanguageModel):
    """See `LanguageModel`."""

    def build_layer(self, layer: int, weights: Table, recompute: tuple[str, ...]) -> Layer:
        own = dict(sequence_parallel=self.sequence_parallel, **self.factory_kwargs)
        return Layer(self.facts, self.tp, self.ep, self.etp, weights, **own)


# ---- the recipe ------------------------------------------------------------------------------------------------------

RULES = (
    Rule(
        lambda s: s.tp > 1 and not s.sequence_parallel,
        lambda s: (
            f"--tensor-model-parallel-size {s.tp}: tensor parallel ranks would send the same tokens to experts; "
            "add --sequence-parallel"
        ),
    ),
)


def recipe() -> Recipe:
    """What is trained."""
    return Recipe(
        "tests.models.own_experts",
        facts,
        build_model,
        pretrain_gpt.build_datasets,
        groups={"experts": ExpertSettings},
        defaults=dict(hidden_dropout=0.0, attention_dropout=0.0),
        rules=RULES,
        shares_sequences=True,
    )


def facts(config: Config, vocab_size: int) -> ExpertFacts:
    own = config.extra["experts"]
    return ExpertFacts(config.model, vocab_size, own.experts, own.experts_of_token)


def build_model(config: Config, mesh, vocab_size: int, *, layers=None, first=True, last=True, dtype, device):
    stage = dict(layers=layers, first=first, last=last, dtype=dtype, device=device)
    return ExpertLanguageModel.of(config, mesh, facts(config, vocab_size), **stage)


def main(argv: list[str]) -> None:
    start(argv, recipe())


if __name__ == "__main__":
    run_main(main)
