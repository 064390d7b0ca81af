# SPDX-License-Identifier: Apache-2.0
"""This rank's model chunks, and the proof that all ranks together hold the model, each part of it once."""

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from megatron.errors import SettingsError
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.pipeline.stages import Pipeline


def build_stages(build: Callable[..., nn.Module], pipeline: Pipeline, mesh: Mesh, tied: bool) -> list[nn.Module]:
    """The chunks of this rank. `build(layers=range, first=bool, last=bool)` makes one, on the meta device say.

    tied: the table of the first stage's embedding is the last stage's output weight too. One rank holds one table; where
    the ends are on two ranks, each has a copy and half of its gradient.
    """
    last = len(pipeline.stages) - 1
    stages = [
        build(layers=pipeline.layers[stage], first=stage == 0, last=stage == last)
        for stage in pipeline.stages_of(mesh.pp.rank)
    ]
    tables = [stage.embedding for stage in stages if stage.first or stage.last] if tied and last else []
    if len(tables) == 2:
        tables[1].word = tables[0].word
    elif tables:
        word = tables[0].word
        word.placements["weight"] = replace(word.placements["weight"], partial=("tied",))
    return stages


def prove_complete(stages: list[nn.Module], mesh: Mesh, exchange: Callable, num_layers: int, parameters: int) -> None:
    """Raise SettingsError unless all ranks together hold every layer and exactly so many parameters.

    exchange: value -> [value of every rank]. A parameter counts by the boxes of its logical tensor that ranks hold, so
    copies (data parallel ranks, norms on tensor parallel ranks, tied embeddings) count once.
    """
    own = set()
    if mesh.dp.rank == 0:
        for name, (parameter, placement) in placements(stages).items():
            own.add((name, *placement.box(tuple(parameter.shape), mesh.place)))
    held = set().union(*exchange(own))
    layers = {int(name.split(".")[1]) for name, _, _ in held if name.startswith("blocks.")}
    count = sum(math.prod(extent) for _, _, extent in held)
    wrong = []
    if layers != set(range(num_layers)):
        wrong.append(f"layers {sorted(layers)} instead of 0 to {num_layers - 1}")
    if count != parameters:
        wrong.append(f"{count:,} parameters instead of {parameters:,}")
    if wrong:
        raise SettingsError(
            "the ranks do not hold the model that the settings describe",
            "; ".join(wrong),
            "this is a mistake of this program: please report it with the command line",
        )
