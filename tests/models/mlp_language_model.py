# SPDX-License-Identifier: Apache-2.0
"""A language model without attention, in one file: what it takes to add a model (docs/extending.md goes through it).

    python -m tests.models.mlp_language_model --num-layers 4 --hidden-size 64 --seq-length 64 --mlp-window 8 \\
        --micro-batch-size 4 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 512

A layer is x + down(gelu(mix(up(norm(x))))): a column-parallel product, a sum over this token's and the last tokens'
channels, each with a weight of its own, and a row-parallel product. Every channel is mixed by itself, so tensor parallel
ranks mix theirs without a message; under sequence parallelism the column-parallel layer has gathered all tokens by then.

Legend: s sequence, b micro-batch, n = s x b tokens, h hidden, f width of the MLP, tp ranks that divide f.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import pretrain_gpt
from megatron.entry import start
from megatron.errors import SettingsError, run_main
from megatron.fused_kernels.autocast import autocast_of
from megatron.model.facts import Facts
from megatron.model.language_model import LanguageModel
from megatron.model.layer_ops import ACTIVATION, NORM, Kernel, LayerOp, RankSetup, Residual
from megatron.model.norms import NORMS
from megatron.model.recipe import Recipe
from megatron.model.recompute import recompute_output
from megatron.model.weights import Table, add_prefix, column, norm, output_std, row, take_prefix
from megatron.mpu import mappings
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, create_parameters
from megatron.mpu.placement import Constant, Placement
from megatron.mpu.random import Dropout
from megatron.settings.schema import Config, setting


@dataclass(frozen=True)
class MLPSettings:
    """Settings that only this model has."""

    mlp_window: int = setting("tokens that a layer mixes: this one and those before it", 4, on_resume="another model")


@dataclass(frozen=True)
class MLPFacts(Facts):
    """What the model says of itself. window: --mlp-window."""

    window: int = 4

    name = "MLP language model"
    recomputes = frozenset({NORM, ACTIVATION})

    def layer_weights(self, kind: str, sequence_parallel: bool) -> Table:
        m, bias = self.settings, not self.settings.disable_bias_linear
        mix = Placement((self.window, m.ffn_size), Constant(1 / self.window), cut={"tp": 1}, decay=False)
        down = row(m.ffn_size, m.hidden_size, output_std(m), bias=bias, sequence_parallel=sequence_parallel)
        return {
            **add_prefix("norm", norm(m, m.hidden_size, sequence_parallel)),
            **add_prefix("up", column(m.hidden_size, (m.ffn_size,), m.init_method_std, bias=bias)),
            "mix.weight": mix,
            **add_prefix("down", down),
        }

    def layer_ops(self, share: RankSetup, kind: str) -> tuple[LayerOp, ...]:
        x = Residual(self.settings, share, self.settings.seq_length * share.micro_batch_size)
        n, f, h = x.tokens, self.settings.ffn_size // share.tp, self.settings.hidden_size
        mixing = Kernel(
            "mlp",
            kept=2 * n * f * share.element,  # the inputs of the mixing and of GeLU
            given=n * f * share.element,
            moved=n * f * (2 + 2 * self.window),
            workspace=n * (3 * f + h) * share.element,
            again=(ACTIVATION,),
        )
        return x.norm(NORM), *x.column("mlp", f), mixing, *x.row("mlp", f), x.add()


# ---- the module ------------------------------------------------------------------------------------------------------


class Mix(nn.Module):
    """u [s, b, f/tp] -> sum over k of weight[k] * u[s - k]."""

    def __init__(self, weights: Table, tp, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, tp, **factory_kwargs)

    def forward(self, u: torch.Tensor, document_ids) -> torch.Tensor:
        mixed = u * self.weight[0]
        for k in range(1, min(len(self.weight), len(u))):
            before = u[:-k] * self.weight[k]
            if document_ids is not None:  # --reset-attention-mask: a document sees none of the one before it
                before = before * (document_ids[k:] == document_ids[:-k]).unsqueeze(-1)
            mixed = mixed + F.pad(before, (0, 0, 0, 0, k, 0))
        return mixed


class Layer(nn.Module):
    """[s, b, h] (or [s/tp, b, h]) in and out; with it the sum over tokens of the squares of what goes out."""

    def __init__(self, model, layer, tp, weights, *, seed, sequence_parallel, recompute, region, **factory_kwargs):
        super().__init__()
        self.tp, self.sequence_parallel, self.recompute, self.region = tp, sequence_parallel, recompute, region
        common = dict(sequence_parallel=sequence_parallel, **factory_kwargs)
        self.norm = NORMS[model.normalization](take_prefix(weights, "norm"), model.norm_epsilon, **factory_kwargs)
        self.up = ColumnParallelLinear(take_prefix(weights, "up"), tp, **common)
        self.mix = Mix(take_prefix(weights, "mix"), tp, **factory_kwargs)
        self.down = RowParallelLinear(take_prefix(weights, "down"), tp, **common)
        axis = tp if sequence_parallel else None
        self.dropout = Dropout(model.hidden_dropout, "after mlp", layer, seed, axis=axis)

    def forward(self, x: torch.Tensor, batch):
        normal, reading = self.kept_or_not(NORM, self.norm, x)
        with reading:
            u = self.up(normal)  # [s, b, f/tp]
        mixed, reading = self.kept_or_not(ACTIVATION, lambda u: F.gelu(self.mix(u, batch.document_ids)), u)
        with reading:
            x = x + self.dropout(self.down(mixed), batch.samples)
        return x, {"activity": self.activity(x, batch)}

    def kept_or_not(self, part: str, function, x: torch.Tensor):
        """function(x), and a context for what reads it."""
        if part not in self.recompute:
            return function(x), nullcontext()
        return recompute_output(function, x, inside=self.region)

    def activity(self, x: torch.Tensor, batch) -> torch.Tensor:
        squares, mask = x.float().square().sum(-1), batch.loss_mask
        if mask is not None:
            squares = squares * (mask.chunk(self.tp.size)[self.tp.rank] if self.sequence_parallel else mask)
        total = squares.sum()
        return mappings.reduce_from_tensor_model_parallel_region(total, self.tp) if self.sequence_parallel else total


class MLPLanguageModel(LanguageModel):
    """See `LanguageModel`."""

    def build_layer(self, layer: int, weights: Table, recompute: tuple[str, ...]) -> Layer:
        own = dict(seed=self.seed, sequence_parallel=self.sequence_parallel, recompute=recompute, region=self.region)
        own |= self.factory_kwargs
        return Layer(self.facts.settings, layer, self.tp, weights, **own)


# ---- the recipe ------------------------------------------------------------------------------------------------------


def recipe() -> Recipe:
    """What is trained."""
    return Recipe(
        "tests.models.mlp_language_model",  # checkpoints keep it: by this name tools find the recipe again
        facts,
        build_model,
        pretrain_gpt.build_datasets,
        groups={"mlp": MLPSettings},
        # There are no heads: numbers that fit any layout.
        defaults=dict(num_attention_heads=64, kv_channels=1, position_embedding_type="none", attention_dropout=0.0),
        sums={"lm loss": 1.0, "activity": 0.0},
    )


def facts(config: Config, vocab_size: int) -> MLPFacts:
    """What the model says of itself. Raises SettingsError for settings of which it could make no such model."""
    window, m = config.extra["mlp"].mlp_window, config.model
    if window < 1:
        raise SettingsError(f"--mlp-window {window} must be at least 1")
    missing = {
        "--swiglu": m.swiglu,
        "--squared-relu": m.squared_relu,
        "--window-size": m.window_size is not None,
        "--attn-logit-softcapping": m.attn_logit_softcapping is not None,
        "--position-embedding-type rope": m.position_embedding_type == "rope",
    }
    for flag, given in missing.items():
        if given:
            raise SettingsError(f"{flag}: this model has none", do="leave it out")
    return MLPFacts(m, vocab_size, window)


def build_model(config: Config, mesh, vocab_size: int, *, layers=None, first=True, last=True, dtype, device):
    """The model, or what a rank of the mesh holds of it: the layers of a pipeline stage (default: all)."""
    return MLPLanguageModel(
        facts(config, vocab_size),
        mesh,
        layers=layers,
        first=first,
        last=last,
        sequence_parallel=config.parallel.sequence_parallel,
        kernels=config.kernels,
        recompute=config.recompute,
        autocast=autocast_of(config.precision),
        seed=config.logging.seed,
        dtype=dtype,
        device=device,
    )


def main(argv: list[str]) -> None:
    start(argv, recipe())


if __name__ == "__main__":
    run_main(main)
