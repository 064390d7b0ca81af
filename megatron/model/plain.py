# SPDX-License-Identifier: Apache-2.0
"""Pretrain an ordinary `torch.nn.Module` as a model, on one process or with data parallelism and ZeRO.

    def recipe():
        return plain_recipe("my_module", MyModel, build_datasets)   # MyModel(config, vocab_size)

Its forward takes (None, MicroBatch) and returns (None, {"lm loss": sum over tokens, "tokens": their number}). Tensor
and pipeline parallelism need placements and facts: docs/extending.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from megatron.errors import SettingsError
from megatron.model.facts import Facts
from megatron.model.recipe import Recipe
from megatron.mpu.layers import map_buffers, place_buffers
from megatron.mpu.placement import Constant, Normal, Own, Placement, elements, placed_buffers, placements
from megatron.settings.declare import Needs
from megatron.settings.schema import Config

MODULE, SUITE = INITS = ("module", "suite")  # the source of a plain module's initial values
NEEDS = "give its layers placements and the model facts (docs/extending.md), or leave the flag out"


def plain_recipe(model_type: str, build: Callable, build_datasets: Callable, *, init: str = MODULE, **more) -> Recipe:
    """The recipe of a plain module.

    model_type: the name of the module with a function `recipe()` that returns this
    build:      (config, vocab_size) -> torch.nn.Module
    init:       "module": the initial values are those of `build`, after torch.manual_seed(--seed), on every rank; each
                keeps the whole module in CPU memory until they are read.
                "suite": `build` runs on the meta device, and values are drawn as in `as_stage`, one unit at a time
    more:       other fields of the `Recipe`: groups, defaults, sums

    Sizes that all models have (--num-layers ...) are 1 by default: the module may read them from `config.model`.
    """

    if init not in INITS:
        raise SettingsError(f"plain_recipe(init={init!r}): there are {' and '.join(map(repr, INITS))}")

    def make(config: Config, vocab_size: int) -> torch.nn.Module:
        refuse_split(config)
        made = lambda: build(config, vocab_size)
        return build_stage(made, config.model.init_method_std, init=init, seed=config.logging.seed)

    def facts(config: Config, vocab_size: int) -> PlainFacts:
        module = make(config, vocab_size)
        table = {name: placement for name, (_, placement) in placements(module).items()}
        table |= {name: held.placement for name, held in placed_buffers(module).items()}
        return PlainFacts(config.model, vocab_size, table)

    def build_model(config: Config, mesh, vocab_size: int, *, layers=None, first=True, last=True, dtype, device):
        module = make(config, vocab_size)
        own = {id(held.tensor) for held in placed_buffers(module).values()}
        cast = lambda buffer: buffer.to(dtype) if buffer.is_floating_point() and id(buffer) not in own else buffer
        map_buffers(module, cast)
        return module

    made = Recipe(model_type, facts, build_model, build_datasets, predicts=lambda config: "nothing", **more)
    idle = (
        {} if init == SUITE else {"init_method_std": Needs('plain_recipe(..., init="suite")', lambda settings: False)}
    )
    defaults = dict(num_layers=1, hidden_size=1, num_attention_heads=1)
    return replace(made, defaults=defaults | dict(made.defaults), idle=idle | dict(made.idle))


def build_stage(
    build: Callable[[], torch.nn.Module], init_std: float, *, init: str = SUITE, seed: int = 1234
) -> torch.nn.Module:
    """Build a module with a placement for each parameter.

    "module": on the CPU, with values that `build` draws from torch's generator after `seed`; "suite": on the meta device.
    Raises SettingsError for buffers that it makes there.
    """
    if init == MODULE:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            return as_stage(build(), init_std, init)
    with torch.device("meta"):
        module = build()
    place_buffers(module, "cpu")
    return as_stage(module, init_std)


def as_stage(module: torch.nn.Module, init_std: float = 0.02, init: str = SUITE) -> torch.nn.Module:
    """Add `placements` to each part of the module that has none for its parameters.

    Nothing divides them, matrices have weight decay, and parameters without gradient are frozen. They keep their own values
    ("module"), or matrices are drawn from N(0, init_std), biases are 0 and other vectors 1 ("suite"). Optimizers for
    matrices apply to the weights of linear layers in `blocks`.
    """
    layers = getattr(module, "blocks", None)
    within = set(layers.modules()) if isinstance(layers, torch.nn.Module) else set()
    for part in module.modules():
        listed = getattr(part, "placements", {})
        if all(placed.buffer for placed in listed.values()):
            own = part.named_parameters(recurse=False)
            inner = part in within and isinstance(part, torch.nn.Linear)
            placed = {name: _placement(name, parameter, init_std, inner) for name, parameter in own}
            placed = {n: replace(p, init=Own()) for n, p in placed.items()} if init == MODULE else placed
            part.placements = {**placed, **listed}
    return module


def refuse_split(config: Config) -> None:
    """Raise SettingsError for settings that divide or change the inside of the model, which a plain module would ignore."""
    p, granularity = config.parallel, config.recompute.recompute_granularity
    given = {
        f"--tensor-model-parallel-size {p.tensor_model_parallel_size}": p.tensor_model_parallel_size > 1,
        f"--pipeline-model-parallel-size {p.pipeline_model_parallel_size}": p.pipeline_model_parallel_size > 1,
        f"--expert-model-parallel-size {p.expert_model_parallel_size}": p.expert_model_parallel_size > 1,
        f"--expert-tensor-parallel-size {p.expert_tensor_parallel_size}": (p.expert_tensor_parallel_size or 1) > 1,
        f"--recompute-granularity {granularity}": granularity is not None,
        f"--linear {config.model.linear}": config.model.linear is not None,
        f"--fp8-format {config.precision.fp8_format}": config.precision.fp8_format is not None,
        "--amp-level O1": config.precision.amp_level == "O1",
        "--torch-compile": config.kernels.torch_compile,
        f"--z-loss-coeff {config.model.z_loss_coeff:g}": config.model.z_loss_coeff > 0,
    }
    wrong = [flag for flag, so in given.items() if so]
    if wrong:
        raise SettingsError(
            f"{', '.join(wrong)}: this model is a plain torch.nn.Module",
            "it trains on one process or with data parallelism: it does not define how its layers are divided or "
            "recomputed, and computes its loss itself",
            NEEDS,
        )


def _placement(name: str, parameter: torch.nn.Parameter, std: float, inner: bool) -> Placement:
    """The default placement of a parameter; inner: it belongs to a linear layer in `blocks`."""
    matrix, shape = parameter.dim() > 1, tuple(parameter.shape)
    init = Normal(std) if matrix else Constant(float("bias" not in name))
    return Placement(
        shape,
        init,
        decay=matrix,
        matrices=(0, shape[:1]) if matrix and inner else None,
        frozen=not parameter.requires_grad,
    )


@dataclass(frozen=True, eq=False)
class PlainFacts(Facts):
    """The facts of a plain module: only its parameters. table: all of them, by name."""

    table: Mapping[str, Placement] = field(default_factory=dict)

    name = "plain module"

    @property
    def weights(self) -> dict[str, Placement]:
        return dict(self.table)

    @property
    def experts(self) -> dict[str, Placement]:
        return {}

    @property
    def parameters(self) -> int:
        return elements(self.table)

    def describe(self, count: str) -> str:
        return f"{self.name} of {count} parameters, sequence {self.seq_length}, vocabulary {self.vocab_size}"

    def flops(self, seen: bool = False) -> float:
        """Two per parameter and token forward, and twice that backward; attention is unknown."""
        return 6.0 * self.parameters

    def trained_flops(self, selection, seen: bool = False) -> float:
        """The same, whatever is frozen."""
        return self.flops()

    def units(self, layers, first: bool, last: bool, sequence_parallel: bool = False):
        raise SettingsError(
            "this model is a plain torch.nn.Module: memory, time and messages of its layers are unknown",
            "--dry-run, --preflight and layout searches need a model's facts",
            NEEDS,
        )

    def layer_weights(self, kind: str, sequence_parallel: bool):
        return self.units((), True, True)

    def layer_ops(self, share, kind: str):
        return self.units((), True, True)
