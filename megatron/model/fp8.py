# SPDX-License-Identifier: Apache-2.0
"""Which linear layers have products in fp8 (`--fp8-format`), and the sizes that they need. Needs no torch.

All linear layers of blocks, without those that --fp8-skip, --first-last-layers-bf16, --linear and their size leave out.
FP8 belongs to a run and not to a model: weights, optimizer and checkpoints are those of the format of --precision. The
products: `model/fp8_product.py`.

Ranks of tensor parallelism cast their pieces of a weight as one process casts the whole, if a cut is at a whole tile. Other
cuts are refused.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Optional

from megatron.model.facts import Facts
from megatron.model.linear_kinds import WEIGHT, LinearChoice, chosen_of, linear_layers, no_layers
from megatron.model.weights import Table
from megatron.mpu.placement import Placement
from megatron.settings.schema import Config, Precision

# Recipe -> what inputs and outputs of a layer, and of its piece, are multiples of: tiles, or what tensor cores multiply.
MULTIPLE = dict(tensorwise=16, blockwise=128, mxfp8=32)
SMALLEST = 128  # inputs and outputs of a layer; products of smaller ones are slower in fp8 than in bf16
FLAGS = ("fp8_layers", "fp8_skip")


def with_recipe(config: Config) -> Config:
    """The settings with the recipe that `delayed` stands for: scales without a history."""
    if config.precision.fp8_recipe != "delayed":
        return config
    return config.derive("--fp8-recipe delayed", fp8_recipe="tensorwise")


AHEAD = "mtp.layers"  # of all depths of multi-token prediction, which are alike


def full_name(layer: int, name: str, blocks: int) -> str:
    """The name of a linear layer of a model with so many blocks.

    >>> full_name(3, "mlp.up", 4), full_name(4, "mlp.up", 4)
    ('blocks.3.mlp.up', 'mtp.layers.0.mlp.up')
    """
    return f"blocks.{layer}.{name}" if layer < blocks else f"{AHEAD}.{layer - blocks}.{name}"


class Fp8Layers(NamedTuple):
    """The linear layers of all blocks and of depths, by their full names.

    fp8: with products in fp8, and their weights; others: why they have none -> their names
    by_layer: layer, from those of `tables_of` -> name within it -> weight, of those with products in fp8
    """

    fp8: dict[str, Placement]
    others: dict[str, list[str]]
    by_layer: dict[int, dict[str, Placement]]


def patterns(text: Optional[str]) -> list[LinearChoice]:
    """The patterns of a flag."""
    return [LinearChoice(one, "") for one in (text or "").replace(",", " ").split()]


def tables_of(facts: Facts) -> dict[int, Table]:
    """The weights of each block, and after these of each layer of a depth of multi-token prediction."""
    return facts.tables | facts.tables_ahead


def fp8_layers(config: Config, tables: Mapping[int, Table]) -> Fp8Layers:
    """Choose the layers. tables: `tables_of` the model."""
    precision, found, blocks = config.precision, Fp8Layers({}, {}, {}), config.model.num_layers
    if precision.fp8_format is None:
        return found
    for layer, table in tables.items():
        kinds = dict(chosen_of(config.model, layer, table)) if layer < blocks else {}
        for name in linear_layers(table):
            full, weight = full_name(layer, name, blocks), table[name + WEIGHT]
            if reason := _left_out(precision, full, layer, blocks, weight, kinds.get(name)):
                found.others.setdefault(reason, []).append(full)
            else:
                found.fp8[full] = weight
                found.by_layer.setdefault(layer, {})[name] = weight
    return found


def layers_in_fp8(config: Config, facts: Facts) -> tuple[tuple[str, ...], ...]:
    """The linear layers of each layer with products in fp8, as `Facts.in_fp8`; () without any."""
    if config.precision.fp8_format is None:
        return ()
    tables = tables_of(facts)
    found = fp8_layers(config, tables).by_layer
    return tuple(tuple(found.get(layer, ())) for layer in tables) if found else ()


def gathered_in_fp8(precision: Precision) -> bool:
    """Whether ranks keep and gather the weights of these layers as fp8 numbers, except those of experts and frozen ones.

    The rows and the columns of a weight have to be the same numbers: those of mxfp8, and of experts, are not.
    """
    return bool(precision.fp8_format and precision.fp8_param_gather and precision.fp8_recipe != "mxfp8")


def _left_out(
    precision: Precision, name: str, layer: int, count: int, weight: Placement, kind: Optional[str]
) -> Optional[str]:
    """Why a layer has no products in fp8; None: it has."""
    only, skip = (patterns(getattr(precision, flag)) for flag in FLAGS)
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if only and not any(one.matches(name) for one in only):
        return "--fp8-layers"
    if any(one.matches(name) for one in skip):
        return "--fp8-skip"
    if precision.first_last_layers_bf16 and layer < count and not start <= layer < count - end:
        return "--first-last-layers-bf16"
    if kind is not None:
        return f"--linear {kind}"
    multiple, sizes = _multiple(precision, weight), _matrix(weight)
    if min(sizes) < SMALLEST or any(size % multiple for size in sizes):
        return f"{sizes[0]} x {sizes[1]}: both have to be multiples of {multiple}, at least {SMALLEST}"
    return None


def _matrix(weight: Placement) -> tuple[int, int]:
    """(outputs, inputs), of an expert."""
    return math.prod(weight.shape[weight.stacked : -1]), weight.shape[-1]


def _multiple(precision: Precision, weight: Placement) -> int:
    return MULTIPLE["tensorwise" if weight.stacked else precision.fp8_recipe]


def problems(config: Config, tables: Mapping[int, Table], tp: int) -> list[str]:
    """The problems of --fp8-format with these layers on `tp` ranks, as messages."""
    if config.precision.fp8_format is None:
        return []
    blocks = config.model.num_layers
    names = {full_name(layer, name, blocks): name for layer, table in tables.items() for name in linear_layers(table)}
    each = f"each block has {', '.join(dict.fromkeys(names.values()))}"
    unknown = {
        flag: [one.pattern for one in patterns(getattr(config.precision, flag)) if not any(map(one.matches, names))]
        for flag in FLAGS
    }
    if any(unknown.values()):
        return [no_layers(f"--{flag.replace('_', '-')}", own, each) for flag, own in unknown.items() if own]
    layers = fp8_layers(config, tables)
    if not layers.fp8:
        why = "; ".join(f"{reason}: {', '.join(_short(names))}" for reason, names in layers.others.items())
        return [f"--fp8-format {config.precision.fp8_format} has no layer left ({why}); leave the flag out"]
    return _cuts(config, layers.fp8, tp)


def _cuts(config: Config, layers: Mapping[str, Placement], tp: int) -> list[str]:
    """The problem of ranks whose pieces of weights are no whole tiles."""
    recipe, multiple, wrong = config.precision.fp8_recipe, MULTIPLE[config.precision.fp8_recipe], {}
    # Rows have one scale over all ranks
    layers = {name: weight for name, weight in layers.items() if not weight.stacked}
    for name, weight in layers.items():
        if (run := piece(weight, tp)) % multiple:
            wrong.setdefault(run, []).append(name)
    if tp == 1 or not wrong:
        return []
    fits = [n for n in range(1, tp) if tp % n == 0 and not any(piece(w, n) % multiple for w in layers.values())]
    short = {run: _short(names) for run, names in wrong.items()}
    found = ", ".join(f"{run} of {' and '.join(names)}" for run, names in short.items())
    left = _with_skip(config.precision, [name for names in short.values() for name in names])
    others = [one for one in MULTIPLE if all(run % MULTIPLE[one] == 0 for run in wrong)]
    do = [
        *([f"--tensor-model-parallel-size {' or '.join(map(str, fits))}"] if fits else []),
        *([f"--fp8-recipe {' or '.join(others)}"] if others else []),
        f"--fp8-skip {left}",
    ]
    tile = "tensor cores multiply" if recipe == "tensorwise" else f"--fp8-recipe {recipe} casts"
    return [
        f"with --tensor-model-parallel-size {tp} a rank has as many consecutive rows or inputs of a weight: {found}; "
        f"{tile} {multiple} at a time: give {', or '.join(do)}"
    ]


def piece(weight: Placement, tp: int) -> int:
    """The length of a run of rows, or of inputs, that a rank has of a weight without a gap.

    >>> from megatron.mpu.placement import Constant
    >>> gate_and_values = Placement((2, 512, 256), Constant(0.0), cut={"tp": 1})
    >>> piece(gate_and_values, 4), piece(Placement((256, 512), Constant(0.0), cut={"tp": 1}), 2)
    (128, 256)
    """
    cut = weight.cut.get("tp")
    if cut is None:
        return 0
    local = weight.local_shape({"tp": tp})
    return local[-1] if cut == len(local) - 1 else math.prod(local[cut:-1])


def _short(names: list[str]) -> list[str]:
    """The names within blocks and layers of depths."""
    return list(dict.fromkeys(name.removeprefix("mtp.").split(".", 2)[2] for name in names))


def _with_skip(precision: Precision, names: list[str]) -> str:
    return ",".join([*(one.pattern for one in patterns(precision.fp8_skip)), *names])


def remarks(config: Config, tables: Mapping[int, Table]) -> list[str]:
    """What a log says about fp8: the layers, and what does not know of it."""
    precision = config.precision
    if precision.fp8_format is None:
        return []
    layers = fp8_layers(config, tables)
    left = [f"{len(names)} without, {', '.join(_short(names))} ({why})" for why, names in layers.others.items()]
    count = len(layers.fp8) + sum(map(len, layers.others.values()))
    said = [
        "; ".join([f"{len(layers.fp8)} of {count} linear layers multiply in fp8 ({precision.fp8_recipe})", *left]),
        "fp8 products have kernels for H100 and later GPUs (mxfp8: B200), which were never run; elsewhere plain torch "
        "computes them, slower than those of bf16",
    ]
    if gathered_in_fp8(precision):
        dense = sum(not weight.stacked for weight in layers.fp8.values())
        said.append(
            f"weights of {dense} of them are kept and gathered as fp8 numbers (--fp8-param-gather)"
            + "; those of experts in bf16: their rows and columns are cast apart" * (dense < len(layers.fp8))
        )
    given = config.given("fp8_recipe")
    if given and given.value == "delayed":
        said.append("--fp8-recipe delayed is tensorwise here: scales of the numbers themselves, and no history of them")
    return said
