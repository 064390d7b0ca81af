# SPDX-License-Identifier: Apache-2.0
"""Check every distinct rank of the real job, built on torch's meta device, where tensors only have shapes.

Ranks that differ only in their data parallel index hold the same, so 128 ranks of tp 8 x pp 16 are all distinct, and
1,024 ranks of tp 8 x pp 16 x dp 8 are 128. The checks:

    groups       every rank is in one group of each axis, at the index that its number gives
    layers       each layer is on one pipeline rank, the one in the settings
    parameters   their number equals the formula's, and the planner's counts equal a rank's units
    shards       the pieces that saving gets from all ranks and ZeRO shards cover every logical tensor exactly once
    shapes       a micro-batch goes forward and back through every kind of stage, in the shapes of messages
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce

import torch
import torch.distributed as dist
from torch import nn

from megatron.checkpoint.boxes import Box, find_flaw
from megatron.data.loader import MicroBatch, named_batch
from megatron.errors import Failure
from megatron.model.facts import Facts
from megatron.model.recipe import MODEL_TYPES, recipe_of, sums_of
from megatron.model.recompute_plan import recompute_groups
from megatron.mpu.axis_sizes import sizes_of
from megatron.mpu.initialize import weight_format
from megatron.mpu.layers import map_buffers
from megatron.mpu.mesh import AXES, EXPERT_AXES, EXPERT_DP, JOINED, Axis, Mesh, mesh_of, ranks_along
from megatron.mpu.selection import Selection
from megatron.optimizer.units import flat_units_of, owned_ranges, pieces_of
from megatron.pipeline.build import build_stages
from megatron.pipeline.simulate import make_rank_schedules, verify
from megatron.pipeline.stages import Pipeline
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import rank_units
from megatron.planner.preflight.verdict import Check
from megatron.settings import schema

OURS = "this is a bug in this program: please report it with the command line"
THEIRS = "fix the model: docs/extending.md#a-model"


@dataclass(frozen=True)
class Design:
    """The inputs for building the ranks of a job.

    build:  a recipe's `build_model`
    """

    config: schema.Config  # resolved, with a precision that is a number format
    world_size: int
    facts: Facts
    build: Callable

    @property
    def known(self) -> bool:
        """Whether the model is one of the suite's."""
        return self.config.model.model_type in MODEL_TYPES

    @property
    def blame(self) -> str:
        """The advice if the model does not match its facts."""
        return OURS if self.known else THEIRS

    @property
    def sizes(self) -> dict[str, int]:
        return sizes_of(self.config.parallel, self.world_size)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline.of(self.config.parallel, self.config.model.num_layers)

    @property
    def dtype(self) -> torch.dtype:
        return weight_format(self.config.precision)

    @cached_property
    def distinct(self) -> list[Mesh]:
        """The mesh of every rank with different contents, the first with each. A stage's ranks are numbered so that
        dense weights repeat after tp ranks, and experts after ep x etp.
        """
        sizes, first = self.sizes, self.mesh(0)
        stage, period = self.world_size // sizes["pp"], math.lcm(sizes["tp"], first.ep.size * first.etp.size)
        return [self.mesh(pp * stage + place) for pp in range(sizes["pp"]) for place in range(period)]

    def mesh(self, rank: int) -> Mesh:
        """The mesh of a rank, without process groups."""
        return mesh_of(self.config.parallel, rank, self.world_size, create_groups=False)

    def stages(self, mesh: Mesh, pipeline: Pipeline) -> list[nn.Module]:
        """The model chunks of a rank, on the meta device."""
        build = partial(self.build, self.config, mesh, self.facts.vocab_size, dtype=self.dtype, device="meta")
        return build_stages(build, pipeline, mesh, Selection.of(self.config.optimizer))


def check_ranks(design: Design) -> Iterator[Check]:
    """Build all distinct ranks; yields one check at a time."""
    started = time.perf_counter()
    yield check_groups(design)
    yield check_schedule(design)
    held = inspect_ranks(design)
    took = time.perf_counter() - started
    pp, tp = design.sizes["pp"], design.sizes["tp"]
    divided = f"{tp} tensor parallel"
    if (mesh := design.mesh(0)).folded:
        divided += f", of experts {mesh.ep.size} x {mesh.etp.size},"
    model = design.config.model
    exact = design.facts.parameters
    yield Check(
        "layers",
        f"{model.num_layers} on {pp} pipeline rank(s); {held.ranks} distinct rank(s), {pp} x "
        f"{held.ranks // pp}, built in {took:.1f} s",
        "; ".join(held.misplaced[:4]),
        OURS,
    )
    count = sum(math.prod(shape) for shape in held.shapes.values())
    wrong = f"{count:,} parameters on all ranks, but the formula gives {exact:,}" if count != exact else ""
    listed = {name for name, placed in design.facts.weights.items() if not placed.buffer}
    if ghosts := sorted(listed - held.shapes.keys()):
        wrong = f"the model's facts list {', '.join(ghosts[:4])}, which no module creates"
    yield Check(
        "parameters",
        f"{count:,} in {len(held.shapes):,} tensors, equal to the formula",
        "; ".join([wrong] * bool(wrong) + held.miscounted[:4]),
        design.blame,
    )
    flaws = [f"{name}: {flaw}" for name, shape in held.shapes.items() if (flaw := find_flaw(shape, held.boxes[name]))]
    number = sum(map(len, held.boxes.values()))
    yield Check(
        "shards",
        f"{number:,} boxes cover every parameter exactly once ({divided} x {design.mesh(0).shard.size} ZeRO shards)",
        "; ".join(flaws[:4]),
        OURS,
    )
    yield check_shapes(design)


# ---- groups and order ------------------------------------------------------------------------------------------------


def check_groups(design: Design) -> Check:
    """Check that the groups of every axis partition the ranks, and a rank's index in them follows from its number."""
    first, world, wrong = design.mesh(0), design.world_size, []
    sizes = first.sizes | first.expert_sizes
    axes = {name: (name,) for name in (*AXES, *EXPERT_AXES)} | JOINED | dict(expert_dp=EXPERT_DP)
    grid_of = lambda of: first.sizes if set(of) <= set(AXES) else first.expert_sizes
    groups = {name: ranks_along(grid_of(of), of) for name, of in axes.items()}
    for name, of in axes.items():
        if sorted(rank for group in groups[name] for rank in group) != list(range(world)):
            wrong.append(f"the groups of {name} do not contain every rank once")
        if {len(group) for group in groups[name]} != {math.prod(sizes[axis] for axis in of)}:
            wrong.append(f"groups of {name} have other sizes than {'x'.join(map(str, of))}")
    for mesh in design.distinct:
        numbers = [_number(mesh, names) for names in (("pp", "dp", "cp", "tp"), ("pp", "expert_dp", "ep", "etp"))]
        ends = {mesh.pp.ranks[0], mesh.pp.ranks[-1]} if mesh.rank in (mesh.pp.ranks[0], mesh.pp.ranks[-1]) else None
        if set(numbers) != {mesh.rank} or set(mesh.tied.ranks) != (ends or {mesh.rank}):
            wrong.append(f"rank {mesh.rank} is not at the index that its number gives")
    summary = ", ".join(
        f"{len(groups[name])} {name} of {len(groups[name][0])}"
        for name in ("tp", *["cp"] * (sizes["cp"] > 1), "dp", "pp", *["ep", "etp", "expert_dp"] * first.folded)
    )
    return Check("groups", f"{world} ranks: {summary}", "; ".join(wrong[:4]), OURS)


def _number(mesh: Mesh, names: tuple[str, ...]) -> int:
    """A rank's number from its index on each axis. names: of the axes, slowest to fastest."""
    return reduce(lambda number, axis: number * axis.size + axis.rank, (getattr(mesh, name) for name in names), 0)


def check_schedule(design: Design) -> Check:
    """Check that the order of passes is complete and without deadlocks. Long steps are periodic: only a part is checked."""
    pipeline, batch = design.pipeline, design.config.batch
    dp = design.sizes["replicate"] * design.sizes["shard"]
    num_microbatches = batch.global_batch_size // (batch.micro_batch_size * dp)
    short = (
        pipeline.custom.num_microbatches
        if pipeline.custom
        else min(num_microbatches, max(8, 3 * pipeline.pp) + num_microbatches % pipeline.pp)
    )
    ops = (
        pipeline.custom.lists
        if pipeline.custom
        else make_rank_schedules(pipeline.order, pipeline.pp, short, pipeline.chunks)
    )
    fault = ""
    try:
        verify(ops, short, pipeline.stages)
    except (ValueError, AssertionError) as error:
        fault = str(error)
    part = f"{short} of {num_microbatches}" if short < num_microbatches else str(num_microbatches)
    return Check(
        "schedule",
        f"{pipeline.name}: {len(pipeline.stages)} stages x {part} micro-batches, no deadlock, every pass once",
        fault,
        OURS,
    )


# ---- contents of ranks -----------------------------------------------------------------------------------------------


@dataclass
class RankContents:
    """The contents of all distinct ranks together."""

    ranks: int = 0
    layers: set[int] = field(default_factory=set)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of logical parameters
    boxes: dict[str, list[Box]] = field(default_factory=dict)  # their pieces in a checkpoint
    misplaced: list[str] = field(default_factory=list)
    miscounted: list[str] = field(default_factory=list)


def inspect_ranks(design: Design) -> RankContents:
    """Build every distinct rank, and every shard of its flat units."""
    result, pipeline, sizes = RankContents(), design.pipeline, design.sizes
    config, layout = design.config, Layout.of(design.config, design.world_size)
    job = Job.of(config, design.facts, dp=layout.dp, device="cuda")
    units = [rank_units(job, layout, pp) for pp in range(sizes["pp"])]
    planned = [own.padded(layout.data_sizes) + own.padded_frozen(layout.data_sizes) for own in units]
    for mesh in design.distinct:
        stages = design.stages(mesh, pipeline)
        result.ranks += 1
        for chunk, (layers, stage) in enumerate(zip(pipeline.layers_of(mesh.pp.rank), stages)):
            held = [unit.layer for unit in stage.units if unit.layer is not None]
            result.layers.update(held)
            if held != list(layers):
                result.misplaced.append(f"chunk {chunk} of rank {mesh.rank} holds layers {', '.join(map(str, held))}")
        units = flat_units_of(stages, partial(getattr, mesh))
        if (size := sum(unit.size for unit in units)) != planned[mesh.pp.rank]:
            result.miscounted.append(
                f"rank {mesh.rank} holds {size:,} elements, but the planner counts {planned[mesh.pp.rank]:,}"
            )
        for unit in units:
            for slot in unit.slots:
                result.shapes.setdefault(slot.name, slot.placement.shape)
                result.boxes.setdefault(slot.name, [])
        for unit in units:
            if mesh.coordinates[unit.replicate] or mesh.coordinates[unit.sharded]:
                continue  # another distinct rank holds the same of it
            for rank in range(getattr(mesh, unit.sharded).size):
                [own] = owned_ranges([unit], partial(_axis_at, mesh, rank))
                for piece in pieces_of(own, _shapes_alone, mesh.coordinates, unique=True):
                    result.boxes[piece.name].append(piece.box)
    lost = set(range(config.model.num_layers)) - result.layers
    result.misplaced += [f"layers {sorted(lost)} are on no rank"] if lost else []
    return result


def _shapes_alone(where: slice) -> torch.Tensor:
    return torch.empty(where.stop - where.start, device="meta")


def _axis_at(mesh: Mesh, rank: int, name: str) -> Axis:
    """An axis of the mesh from the view of its `rank`."""
    return replace(getattr(mesh, name), rank=rank)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def check_shapes(design: Design) -> Check:
    """Run a micro-batch forward and back through each kind of stage, on the first and the last ranks of the axes that
    divide weights and sequences. For a user's model, through every layer of every stage.
    """
    started, kinds, wrong = time.perf_counter(), set(), []
    recompute = design.config.recompute
    pipeline = design.pipeline
    if design.known:
        kind_of = design.facts.design_of
        pipeline = replace(
            pipeline, layers=tuple(sample_layers(layers, recompute, kind_of) for layers in pipeline.layers)
        )
    tp, cp = design.sizes["tp"], design.sizes["cp"]
    last = [design.mesh(mesh.rank + (cp - 1 - mesh.cp.rank) * tp) for mesh in design.distinct] if cp > 1 else []
    axes = lambda mesh: (mesh.tp, mesh.cp, mesh.ep, mesh.etp)
    with _fake_process_group(max(axis.size for axis in axes(design.mesh(0)))):
        for mesh in (*design.distinct, *last):
            if any(axis.rank not in (0, axis.size - 1) for axis in axes(mesh)):
                continue
            alike = _kind(design, pipeline, mesh.pp.rank) if design.known else (mesh.pp.rank,)
            kind = (*(axis.rank for axis in axes(mesh)), *alike)
            if kind in kinds:
                continue
            kinds.add(kind)
            for stage in design.stages(mesh, pipeline):
                try:
                    faults = _check_stage_shapes(design, mesh, stage)
                except Failure as failure:
                    faults = [f"{failure.what} ({failure.why})"]
                except (RuntimeError, AssertionError, TypeError) as error:
                    faults = [" ".join(str(error).split())[:200]]
                wrong += [f"rank {mesh.rank}: {fault}" for fault in faults]
    model, micro = design.config.model, design.config.batch.micro_batch_size
    took = time.perf_counter() - started
    summary = (
        f"[s={model.seq_length}, b={micro}, h={model.hidden_size}] forward and back through {len(kinds)} kinds of ranks"
    )
    return Check("shapes", f"{summary} in {took:.1f} s", "; ".join(wrong[:4]), design.blame)


def _meta_batch(design: Design, mesh: Mesh, b: int) -> MicroBatch:
    """A micro-batch without memory, with the recipe's arrays, if it has some."""
    recipe = recipe_of(design.config)
    if recipe.arrays is None:
        tokens = torch.empty((design.facts.seq_length // mesh.cp.size, b), dtype=torch.int64, device="meta")
        return MicroBatch(tokens=tokens, labels=tokens, samples=torch.arange(b))
    arrays = {
        name: torch.empty((*array.shape, b), dtype=torch.float32 if array.mask else torch.int64, device="meta")
        for name, array in recipe.arrays(design.config, design.facts.vocab_size).items()
    }
    return named_batch(arrays, torch.arange(b))


def sample_layers(
    layers: Sequence[int], settings: schema.Recompute, kind_of: Callable[[int], object]
) -> tuple[int, ...]:
    """The first two groups of layers of each kind and recomputation.

    >>> sample_layers(range(4, 12), schema.Recompute("full", no_recompute_layers="4,5,6"), lambda layer: "layer")
    (4, 5, 7, 8)
    """
    seen, kept = Counter(), []
    for group in recompute_groups(layers, settings):
        kind = (group.modules, tuple(map(kind_of, group.layers)))
        seen[kind] += 1
        kept += group.layers if seen[kind] <= 2 else ()
    return tuple(kept)


def _kind(design: Design, pipeline: Pipeline, pp: int) -> tuple:
    """The properties of a pipeline rank that decide what it computes."""
    last, settings = len(pipeline.stages) - 1, design.config.recompute
    groups = [recompute_groups(pipeline.layers[stage], settings) for stage in pipeline.stages_of(pp)]
    kinds = lambda group: (group.modules, tuple(map(design.facts.design_of, group.layers)))
    return tuple(
        (stage == 0, stage == last, tuple(map(kinds, of_stage)))
        for stage, of_stage in zip(pipeline.stages_of(pp), groups)
    )


@contextlib.contextmanager
def _fake_process_group(ranks: int):
    """A default process group whose collectives return immediately. ranks: the size of the largest axis of a pass."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_stage_shapes(design: Design, mesh: Mesh, stage: nn.Module) -> list[str]:
    """The problems of the shapes of a micro-batch's passes through a stage. In evaluation mode, because random numbers
    cannot be drawn on the meta device.
    """
    b, config = design.config.batch.micro_batch_size, design.config
    wire = design.facts.message_of(config.parallel, b)
    batch = _meta_batch(design, mesh, b)
    given = None
    if not stage.first:
        given = torch.empty(wire, dtype=design.dtype, device="meta", requires_grad=True)
    map_buffers(stage, lambda buffer: buffer.to("meta"))
    out = stage.eval()(given, batch)
    out, sums = out if isinstance(out, tuple) else (out, {})
    minimised = [name for name, weight in sums_of(recipe_of(config), config).items() if weight]
    out, expected = (sum(sums[name] for name in minimised if name in sums), ()) if stage.last else (out, wire)
    wrong = [f"output {tuple(out.shape)} instead of {expected}"] if tuple(out.shape) != expected else []
    if not stage.last and out.dtype != design.dtype:
        wrong.append(f"output in {out.dtype} instead of {design.dtype}")
    out.backward(torch.empty_like(out))
    if given is not None and (given.grad is None or given.grad.shape != given.shape):
        wrong.append("no gradient for the previous stage")
    wrong += [f"no gradient for {name}" for name, weight in stage.named_parameters() if weight.grad is None]
    return wrong
