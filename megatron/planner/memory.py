# SPDX-License-Identifier: Apache-2.0
"""The memory of one rank, item by item: permanent state, and the additional memory of a step at its peak.

The permanent items are exact: the allocations of `optimizer/zero.py` (tests/planner/test_truth.py compares them
with runs). Activations are within 5 % of the tensors that autograd saves (tests/planner/test_activations.py).
Workspaces, buffers and the allowance for fragmentation are conservative estimates.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import NamedTuple, Optional

from megatron.model.layer_ops import Product
from megatron.mpu.expert_libraries import DispatchSizes, library_bytes
from megatron.mpu.placement import DATA_PARALLEL, EXPERT_DATA_PARALLEL
from megatron.optimizer.flat import WIDENED
from megatron.optimizer.scratch import buffer_bytes, file_bytes, part_size
from megatron.planner import activations
from megatron.planner.device import Device
from megatron.planner.held_passes import most_held
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import Sizes, Units, first_units, rank_units
from megatron.planner.schedule_time import is_split
from megatron.planner.traffic import shares_table, used_twice
from megatron.settings.kernel_sizes import LossChunks
from megatron.settings.schema import Recompute

LOSS = "output layer and loss"  # a kind of activations, which counts beside the logits
OF_DIVERGENCE = 9  # fp32 tensors of a chunk's logits in the loss on a teacher's: counted
NO_DEVICE = Device("none", context_gb=0.0, communication_gb=0.0)
FRAGMENTATION = dict(cuda=0.05, cpu=0.0)  # of activations, workspaces and buffers


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one pipeline rank: on its device, in host memory, and in files of optimizer state."""

    rank: int
    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    activations: dict[str, int] = field(default_factory=dict)  # "activations" by kind
    disk: int = 0

    @property
    def total(self) -> int:
        return sum(self.device.values())


def state(job: Job, layout: Layout, rank: int, place: Optional[Sizes] = None) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of permanent state (on the device, on the host): weights, gradients, optimizer state.

    place: index on each axis that shards; default: the last index, whose rank has most, because matrices come first
    """
    place = {axis: size - 1 for axis, size in layout.data_sizes.items()} if place is None else place
    device, host = _state(rank_units(job, layout, rank), job, layout, place, job.device == "cuda")
    if job.teacher is not None:
        device["teacher"] = teacher_weights(job, layout, rank)
    return device, host


def has_teacher(job: Job, layout: Layout, rank: int) -> bool:
    """Whether a pipeline rank has the teacher: the rank of the last stage."""
    return job.teacher is not None and rank == layout.pipeline(job.facts.num_layers).stages[-1][0]


def teacher_weights(job: Job, layout: Layout, rank: int) -> int:
    """Bytes of the teacher's weights and buffers on a pipeline rank. With ZeRO 3 ranks share its layers."""
    units = teacher_units(job, layout, rank)
    if not units:
        return 0
    layers = units.layers.bytes_of(lambda unit: unit.shared(layout.teacher_shard), job.teacher.element)
    return layers + units.others.bytes_of(lambda unit: unit.shared(1), job.teacher.element) + units.buffers


def teacher_units(job: Job, layout: Layout, rank: int) -> Units:
    """The units of the teacher on a pipeline rank: all, or of the layers up to those that it compares."""
    own = set(layout.pipeline(job.facts.num_layers).all_layers_of(rank))
    whole, teacher = has_teacher(job, layout, rank), layout.of_teacher
    part = job.teacher.facts.num_layers if whole else 1 + max((of for n, of in job.compared if n in own), default=-1)
    return first_units(job.teacher, teacher, part, whole) if part else Units()


def teacher_pass(teacher: Job, layout: Layout) -> tuple[int, int]:
    """Bytes of a teacher's forward pass without gradients: in its largest layer, and during the student's loss."""
    share, facts = layout.rank_setup(teacher), teacher.facts
    inside = max(
        sum(facts.layer_saved_bytes(share, kind).values()) + facts.layer_workspace(share, kind)
        for kind in facts.layer_kinds
    )
    n, rows = facts.loss_tokens(share), facts.vocabulary_rows(share.tp)
    chunk, block = LossChunks.of(rows, share.element, share.device, share.chunk)
    states, logits = n * facts.settings.hidden_size * share.element, min(n, block) * rows * share.element
    return inside, states + logits + OF_DIVERGENCE * 4 * min(n, chunk) * rows


def _state(units: Units, job: Job, layout: Layout, place: Sizes, cuda: bool):
    element, moments, sizes = job.element, sum(job.moments), layout.data_sizes
    gradient = job.shard_gradients(layout.zero)
    whole, own = units.padded(sizes), units.owned(sizes)
    weights = units.weights(sizes, element)
    away, filed = _shares(units, layout)
    here = own - away - filed
    keeps_all = layout.zero < 3
    shared = keeps_all and units.whole(sizes) and element == 4  # fp32 weights are the main weights
    device = {
        "weights": weights if keeps_all else 0,
        "gradients": gradient * own,
        "main weights": 0 if shared else 4 * here,
    }
    host = Counter()
    if job.reducing(layout.zero) < 2 and not units.whole(sizes):
        device["gradients"] += job.gradients * whole
    if not keeps_all:
        same = element == 4 and not (layout.param_offload and cuda)
        pieces = units.bytes_of(lambda unit: unit.padded_frozen(sizes) // sizes[unit.sharded], element)
        low = ((0 if same else here) + away + filed) * element + pieces  # the shards to gather
        (host if layout.param_offload and cuda else device)["weights"] += low
    device["optimizer moments"] = moments * here - _spared(units, job, layout, place)
    if units.scales:
        device["scales of fp8 weights"] = 4 * units.scales
    if units.buffers:
        device["buffers that training changes"] = units.buffers
    if away:  # main weights, arriving gradients, moments
        (host if cuda else device)["offloaded optimizer state"] = (4 + gradient + moments) * away
    if filed:
        planes = (4, *job.moments) if cuda else _planes(units, job, layout)
        size = buffer_bytes(filed, planes) + (gradient * part_size(filed) if cuda else 0)  # arriving gradients
        (host if cuda else device)["buffers of state on disk"] = size
    return device, dict(host)


def _spared(units: Units, job: Job, layout: Layout, place: Sizes) -> int:
    """Bytes of optimizer state that matrices save in comparison with other weights."""
    if job.matrix_moments is None:
        return 0
    elements = units.total(lambda unit: unit.in_matrices(place, layout.data_sizes))
    return (sum(job.moments) - sum(job.matrix_moments)) * elements


def on_disk(job: Job, layout: Layout, rank: int, copies: int = 1) -> int:
    """Bytes of a rank's files of optimizer state; two copies with --async-save."""
    units = rank_units(job, layout, rank)
    filed = _shares(units, layout)[1]
    return file_bytes(filed, copies * _planes(units, job, layout)) if filed else 0


def _planes(units: Units, job: Job, layout: Layout) -> tuple[int, ...]:
    """Bytes of the numbers of an element in a file: moments, and main weights unless they equal other weights in memory."""
    same = job.element == 4 and (layout.zero == 3 or units.whole(layout.data_sizes))
    return job.moments if same else (4, *job.moments)


def _shares(units: Units, layout: Layout) -> tuple[int, int]:
    """Elements of a rank's shard on the host and on disk, in whole units: the first on the host, the next on disk."""
    away = _first_units(units, layout.data_sizes, layout.offload)
    return away, _first_units(units, layout.data_sizes, layout.offload + layout.disk) - away


def _first_units(units: Units, sizes: Sizes, fraction: float) -> int:
    """Elements of the first units that together are at least `fraction` of a rank's shard."""
    total, elements = units.owned(sizes), 0
    if fraction == 0 or fraction >= 1:
        return total if fraction else 0
    for unit in units:
        if elements >= fraction * total:
            break
        elements += unit.owned(sizes)
    return elements


def static_memory(job: Job, layout: Layout, rank: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of `state` and of the buffers of the ZeRO stage: (on the device, on the host)."""
    held, host = state(job, layout, rank)
    units = rank_units(job, layout, rank)
    return held | {
        "gathered weights": _gathered(units, job, layout),
        "weights in fp8": _weights_in_fp8(job, layout, rank),
        "gradient buffers": _buffers(units, job, layout, rank),
        "sums of earlier passes": _earlier_sums(units, job, layout, rank),
    }, host


def _weights_in_fp8(job: Job, layout: Layout, rank: int) -> int:
    """Bytes of weights that are cast beside those in the format of --precision, rows and columns: of all layers of a rank
    until the update, or with ZeRO 3 of the largest.
    """
    if not job.fp8:
        return 0
    share, facts, pipeline = layout.rank_setup(job), job.facts, layout.pipeline(job.facts.num_layers)
    designs = Counter()
    for (design, _), count in activations.repeated(facts, Recompute(), pipeline.all_layers_of(rank)).items():
        designs[design] += count
    if pipeline.stages[-1][0] == rank:
        designs.update(facts.designs_ahead * facts.settings.own_depths)
    each = [
        (
            count,
            [op.weight_in_fp8 for op in facts.layer_ops(design.share(share), design.kind) if isinstance(op, Product)],
        )
        for design, count in designs.items()
    ]
    if layout.zero == 3:
        return max((size for _, sizes in each for size in sizes), default=0)
    return sum(count * sum(sizes) for count, sizes in each)


def step_memory(job: Job, layout: Layout, device: Device, rank: int) -> tuple[dict[str, int], Counter]:
    """The peak memory of a step in addition to state, for any ZeRO stage; and its activations by kind."""
    kept = _kept(job, layout, rank)
    kept.pop(LOSS, None)
    return step_entries(job, layout, device, rank), kept


def step_entries(job: Job, layout: Layout, device: Device, rank: int) -> dict[str, int]:
    """The first part of `step_memory`, which a search asks for."""
    full, pipeline = _fullest(job, layout, rank), layout.pipeline(job.facts.num_layers)
    loss, last, share = full.of(LOSS), rank == pipeline.stages[-1][0], layout.rank_setup(job)
    most = job.facts.loss_workspace(share) if last else 0
    freed = job.facts.loss_freed_bytes(share) if last and not is_split(layout.schedule) else 0
    units = rank_units(job, layout, rank)
    layers = pipeline.all_layers_of(rank)
    layer = activations.workspace(job, layout, layers) + units.largest * job.element
    if layout.turns:  # a forward pass has added a layer before the backward pass beside it has freed one
        layer += activations.largest_layer(job, layout, layers)
    passing, comparing = teacher_pass(job.teacher, layout.of_teacher) if has_teacher(job, layout, rank) else (0, 0)
    if layout.teacher_shard > 1 and job.teacher:  # a layer is gathered
        pieces = layout.teacher_shard
        whole = lambda unit: unit.bytes_of(unit.shared(pieces) * pieces, job.teacher.element)
        passing += teacher_units(job, layout, rank).largest_layer(whole)
    entries = {
        "activations": full.total - loss,
        "logits": loss + most,
        "teacher's passes": max(comparing, passing - loss - most),  # before the student's loss
        "workspace": max(0, layer - most - freed),  # no layer computes during the loss
        "pipeline buffers": _messages(job, layout, rank),
    }
    # The update comes after the passes, when none of this is allocated.
    entries["workspace"] += max(0, of_update(units, job, layout) - sum(entries.values()))
    entries["fragmentation"] = int(FRAGMENTATION[job.device] * sum(entries.values()))
    groups, of_library = [layout.tp, layout.cp, layout.weight_ranks, layout.pp], _library_buffer(job, layout)
    levels = (not of_library and layout.ep_levels) or (layout.ep,)
    groups += (*(layout.cp_levels or ()), *levels)  # and the counts of experts' rows
    groups += [*layout.expert_sizes.values()][1:] if layout.folded else []
    entries["communication buffers"] = device.communication_bytes * sum(n > 1 for n in groups) + of_library
    entries["device context"] = device.context_bytes
    return entries


def _library_buffer(job: Job, layout: Layout) -> int:
    """Bytes in which a library (--moe-flex-dispatcher-backend) sends experts' tokens; 0 without one."""
    if not (job.library and layout.ep_inner):
        return 0
    model, (backend, multiprocessors) = job.facts.settings, job.library
    sizes = DispatchSizes(layout.ep, layout.ep_inner, model.num_experts // layout.ep, model.expert_hidden_size)
    gathered = layout.expert_sizes["etp"]
    n = layout.micro_batch_size * job.facts.seq_length * gathered // (layout.tp * layout.cp)
    return library_bytes(backend, multiprocessors, sizes, n)


def of_update(units: Units, job: Job, layout: Layout) -> int:
    """Bytes that an update allocates: whole matrices, and fp32 copies of bf16 tensors."""
    total, owned = whole_matrices(units, job, layout), units.owned(layout.data_sizes)
    narrow = job.shard_gradients(layout.zero) < 4
    if narrow and job.matrix_moments is not None:
        total += 4 * owned  # gradients, which directions replace
    moments = sum(size < 4 for size in job.moments)
    if narrow or moments:  # gradients and moments in fp32, and two numbers for random words
        total += 4 * (narrow + moments + 2 * bool(moments)) * min(owned, WIDENED[job.device])
    return total


def whole_matrices(units: Units, job: Job, layout: Layout) -> int:
    """Bytes of an update that orthogonalizes matrices: a gathered unit, its directions, and the workspace of one tensor."""
    gathered = [unit for unit in units.counts if unit.matrices] if job.matrix_moments is not None else []
    parts = dict(zip((DATA_PARALLEL, EXPERT_DATA_PARALLEL), (layout.tp, layout.cuts.etp)))
    tensor = lambda unit: max(slot.size for slot in unit.slots if slot.matrices)
    each = (parts[unit.axes] * (2 * unit.padded(layout.data_sizes) + 6 * tensor(unit)) for unit in gathered)
    return 4 * max(each, default=0)


def memory_report(job: Job, layout: Layout, device: Device, rank: int = 0) -> MemoryReport:
    """The memory of a pipeline rank at the peak of a step."""
    job = job.at_fullest
    held, host = static_memory(job, layout, rank)
    entries, kept = step_memory(job, layout, device, rank)
    device_entries = {name: size for name, size in (held | entries).items() if size}
    return MemoryReport(rank, device_entries, host, dict(kept), on_disk(job, layout, rank))


def peaks(job: Job, layout: Layout, device: Device) -> list[int]:
    """Bytes that each pipeline rank needs on its device at its peak."""
    return [memory_report(job, layout, device, rank).total for rank in range(layout.pp)]


def certain(job: Job, layout: Layout, rank: int, state_alone: bool = False) -> tuple[int, int]:
    """A lower bound of a pipeline rank's memory (on its device, on the host).

    Counts state, and at the peak of a step saved activations with the larger of the logits and recomputed activations. It
    leaves out the estimates of `memory_report`: workspaces, buffers, fragmentation, process and driver; and attention
    within documents, which may be short.
    """
    held, host = state(job, layout, rank)
    least, on_host = sum(held.values()), sum(host.values())
    if state_alone:
        return least, on_host
    entries, kinds = step_memory(job, layout, NO_DEVICE, rank)
    kept, again = entries["activations"], 0
    if job.documents:
        kept -= kinds["attention core"]
    else:
        layers = layout.pipeline(job.facts.num_layers).all_layers_of(rank)
        plain = replace(layout, recompute=Recompute())
        again = activations.workspace(job, layout, layers) - activations.workspace(job, plain, layers)
    return least + kept + max(entries["logits"], again), on_host


class Fullest(NamedTuple):
    """The passes that a rank holds at its fullest moment. Of each of its chunks:

    each:    bytes that a pass saves, by kind, and their sum
    alive:   passes between F and B (or I); waiting: between I and W
    late:    bytes of a pass's deferred products (zero-bubble W)
    """

    each: Sequence[activations.SavedBytes]
    alive: tuple[int, ...]
    waiting: tuple[int, ...]
    late: Sequence[int]

    @property
    def total(self) -> int:
        return sum(map(mul, self.alive, (one.total for one in self.each))) + sum(map(mul, self.waiting, self.late))

    def of(self, kind: str) -> int:
        return sum(count * one.kinds.get(kind, 0) for count, one in zip(self.alive, self.each))


def _kept(job: Job, layout: Layout, rank: int) -> Counter:
    """Activations by kind at the peak."""
    full, total = _fullest(job, layout, rank), Counter()
    for count, one in zip(full.alive, full.each):
        for kind, size in one.kinds.items():
            total[kind] += count * size
    if is_split(layout.schedule):
        total["products that wait"] = sum(map(mul, full.waiting, full.late))
    return total


def _fullest(job: Job, layout: Layout, rank: int) -> Fullest:
    pipeline = layout.pipeline(job.facts.num_layers)
    last = len(pipeline.stages) - 1
    stages = pipeline.stages_of(rank)
    each = [activations.stage_saved(job, layout, pipeline.layers[stage], stage == 0, stage == last) for stage in stages]
    if job.compared:
        compared = [_compared_bytes(job, layout, pipeline.layers[stage]) for stage in stages]
        each = [one.plus("teacher's states", size) for one, size in zip(each, compared)]
    late = [activations.deferred(job, layout, pipeline.layers[stage]) for stage in stages]
    if last in stages:
        late[stages.index(last)] += job.facts.loss_deferred(layout.rank_setup(job))
    sums = [one.total for one in each]
    moments = most_held(layout.order, layout.pp, layout.num_microbatches(job), len(each), rank, layout.lags)
    alive, waiting = max(moments, key=lambda m: sum(map(mul, m[0], sums)) + sum(map(mul, m[1], late)))
    return Fullest(each, alive, waiting, late)


def _compared_bytes(job: Job, layout: Layout, layers: Sequence[int]) -> int:
    """Bytes of the teacher's hidden states that these layers are compared with, and of the differences in fp32."""
    tokens = job.facts.loss_tokens(layout.rank_setup(job))
    states = job.teacher.facts.settings.hidden_size * tokens * (job.element + 4)
    return states * sum(student in layers for student, _ in job.compared)


def _gathered(units: Units, job: Job, layout: Layout) -> int:
    """ZeRO 3: the units that are used throughout a chunk, and one layer, or two while the next one is gathered; twice as
    many if two passes take turns.
    """
    if layout.zero < 3:
        return 0
    sizes = layout.data_sizes
    size_of = lambda unit: unit.bytes_of(unit.padded(sizes) + unit.padded_frozen(sizes), job.element)
    layers = (1 + layout.overlap) * (1 + layout.turns)
    return units.others.total(size_of) + layers * units.largest_layer(size_of)


def _buffers(units: Units, job: Job, layout: Layout, rank: int) -> int:
    """ZeRO 2 and 3: gradients of a unit between its first gradient and its reduction, with the reduced piece. With
    --batch-invariant-mode of all stages; each pass has its own, which pass W completes.
    """
    if job.reducing(layout.zero) < 2:
        return 0
    sizes = layout.data_sizes
    block = units.largest_layer(lambda unit: unit.padded(sizes) + unit.owned(sizes))
    size = units.others.padded(sizes) + (1 + layout.overlap) * block
    if job.ordered:
        size += used_twice(units, layout) if shares_table(job, layout, rank) else 0
        size += _reducing(units, layout)
        size += _waiting_passes(job, layout, rank) * units.layers.padded(sizes) // layout.chunks
    return job.gradients * size


def _reducing(units: Units, layout: Layout) -> int:
    """Elements that a sum over ranks of one order needs: the pieces of all ranks; of an all-reduce twice."""
    over = lambda unit, axis: layout.data_sizes[unit.axes[axis]] > 1
    return max((unit.padded(layout.data_sizes) * (over(unit, 1) or 2 * over(unit, 0)) for unit in units), default=0)


def _waiting_passes(job: Job, layout: Layout, rank: int) -> int:
    """The most passes of a rank's chunks between their passes B and W."""
    held = most_held(layout.order, layout.pp, layout.num_microbatches(job), layout.chunks, rank, layout.lags)
    return max(sum(waiting) for _, waiting in held)


def _earlier_sums(units: Units, job: Job, layout: Layout, rank: int) -> int:
    """--batch-invariant-mode: sums over earlier passes that wait for as many later ones (`ordered_sums.Tree`)."""
    if not job.ordered:
        return 0
    waiting, sizes = (layout.num_microbatches(job) + 1).bit_length() - 1, layout.data_sizes
    pieces = units.owned(sizes)
    if shares_table(job, layout, rank):
        pieces += sum(unit.owned(sizes) for unit in units.others if len(unit.ends) > 1)
    return job.gradients * waiting * pieces


def _messages(job: Job, layout: Layout, rank: int) -> int:
    """Messages that are posted, arrive or leave. gloo does not report completion: outputs are held until their gradient."""
    if layout.pp == 1:
        return 0
    waiting = 3 + layout.chunks
    if job.device == "cpu":
        alive = most_held(layout.order, layout.pp, layout.num_microbatches(job), layout.chunks, rank, layout.lags)
        waiting += max(sum(counts) for counts, _ in alive)
    return waiting * job.facts.message_bytes(layout.rank_setup(job))
