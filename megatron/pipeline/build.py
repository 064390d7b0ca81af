# SPDX-License-Identifier: Apache-2.0
"""Build this rank's model chunks, and check that all ranks together hold each part of the model once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from megatron.errors import SettingsError
from megatron.mpu.layers import place_persistent_buffers
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Own, placed_buffers, placements
from megatron.mpu.selection import ALL, Selection
from megatron.pipeline.stages import Pipeline


def build_stages(
    build: Callable[..., nn.Module], pipeline: Pipeline, mesh: Mesh, selection: Selection = ALL
) -> list[nn.Module]:
    """Build the chunks of this rank by `build(layers=range, first=bool, last=bool)`, for example on the meta device.

    A unit of both ends of the pipeline, such as a tied table, exists once where one rank has both ends; else each end has a
    copy and a part of its gradient. selection: which parameters are trained.
    """
    last = len(pipeline.stages) - 1
    numbers = pipeline.stages_of(mesh.pp.rank)
    stages = [build(layers=pipeline.layers[n], first=n == 0, last=n == last) for n in numbers]
    place_persistent_buffers(stages)
    _mark_frozen(stages, selection)
    shared = [unit.name for stage in stages for unit in getattr(stage, "units", ()) if len(unit.ends) > 1]
    for name in dict.fromkeys(shared) if last else ():
        holders = [stage for stage in stages if name in {unit.name for unit in stage.units}]
        if len(holders) == 2:
            parent, _, attribute = name.rpartition(".")
            setattr(holders[1].get_submodule(parent), attribute, holders[0].get_submodule(name))
        else:
            _share(holders[0].get_submodule(name))
    return stages


def needs_gradient(stages: list[nn.Module], pipeline: Pipeline, mesh: Mesh, all_gather_object: Callable) -> list[bool]:
    """For each chunk of this rank, whether an earlier stage has trained parameters. All ranks call it."""
    numbers = pipeline.stages_of(mesh.pp.rank)
    own = {
        number: any(not placed.frozen for _, placed in placements(stage).values())
        for number, stage in zip(numbers, stages)
    }
    trained = {number for found in all_gather_object(own) for number, some in found.items() if some}
    return [bool(trained) and min(trained) < number for number in numbers]


def _mark_frozen(stages: list[nn.Module], selection: Selection) -> None:
    """Note which parameters are not trained."""
    for prefix, module in (found for stage in stages for found in stage.named_modules()) if selection else ():
        module.placements = selection.marked(getattr(module, "placements", {}), f"{prefix}." if prefix else "")


def _share(module: nn.Module) -> None:
    """Mark these parameters as copies: the other end of the pipeline holds them too."""
    for part in module.modules():
        own = getattr(part, "placements", {})
        part.placements = {name: replace(placed, partial=(*placed.partial, "tied")) for name, placed in own.items()}


def check_model_complete(stages: list[nn.Module], mesh: Mesh, all_gather_object: Callable, weights: Mapping) -> None:
    """Raise SettingsError unless all ranks together hold every element of these weights (name -> `Placement`).

    all_gather_object: value -> [value of every rank]. Parameters are counted by their boxes of the logical tensor, so that
    copies (data parallel ranks, norms on tensor parallel ranks, tied embeddings) count once.
    """
    own = set()
    held_here = {name: (parameter.shape, placed) for name, (parameter, placed) in placements(stages).items()}
    for name, buffer in placed_buffers(stages).items():
        if name in weights or not isinstance(buffer.placement.init, Own):  # a module may have some of its own
            held_here[name] = buffer.tensor.shape, buffer.placement
    for name, (shape, placement) in held_here.items():
        if all(getattr(mesh, axis).rank == 0 for axis in placement.data_axes):
            own.add((name, *placement.box(tuple(shape), mesh.coordinates)))
    held: dict[str, int] = {}
    for name, _, extent in set().union(*all_gather_object(own)):
        held[name] = held.get(name, 0) + math.prod(extent)
    if ghosts := sorted(weights.keys() - held.keys()):
        raise SettingsError(
            f"the model's facts list {', '.join(ghosts[:8])} and no module creates {'them' if len(ghosts) > 1 else 'it'}",
            "facts are `layer_weights` of each layer, and the tables of embedding, norm and output",
            "create parameters from their table (mpu.layers.create_parameters), or take them out of it "
            "(docs/extending.md#a-model)",
        )
    wrong = _different(held, {name: math.prod(placed.shape) for name, placed in weights.items()})
    if wrong:
        raise SettingsError(
            "the ranks do not hold the model that the settings describe",
            "; ".join(wrong[:8]),
            "a model of your own: docs/extending.md#a-model; one of the suite's: please report it with the command line",
        )


def _different(held: Mapping[str, int], wanted: Mapping[str, int]) -> list[str]:
    """Messages for parameters with a wrong number of elements."""
    return [
        f"{name}: {held.get(name, 0):,} elements instead of {wanted.get(name, 0):,}"
        for name in sorted(held.keys() | wanted.keys())
        if held.get(name) != wanted.get(name)
    ]
