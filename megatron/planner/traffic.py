# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank communicates in a step, by collective and axis, exactly as the code does.

Bytes count the whole tensor: the input of a reduction, the result of an all-gather, the input of a reduce-scatter, the
content of a message. Tests compare with the traffic of runs. Legend as in `model/facts.py`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.model.facts import Facts
from megatron.model.layer_ops import Collective, LayerOp, Residual, ops_again
from megatron.model.recompute_plan import last_modules, recompute_groups
from megatron.mpu.placement import DATA_PARALLEL
from megatron.mpu.selection import Selection
from megatron.planner.held_passes import starts
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import LayerOf, Sizes, Units, layer_sizes, layers_of, rank_units
from megatron.settings.groups.kernels import BLOCKS
from megatron.settings.schema import Recompute

FIRST = dict(shard=0, expert_shard=0)  # the place of a rank with the first shards
PARTIAL = dict(tp="norms and biases", ep="experts", etp="experts' biases", tied="the tied table")


@dataclass(frozen=True)
class Transfer:
    """The calls of one collective in a step. bytes: sum over the calls; beside: whether they overlap with computation."""

    what: str
    op: str  # all_reduce, all_gather, reduce_scatter, all_to_all, shift or send
    # tp, cp (cp_inner, cp_outer), pp, shard, replicate, tied; of experts ep (ep_inner, ep_outer, ep_counts), etp,
    # expert_shard, expert_replicate
    axis: str
    bytes: int
    calls: int
    beside: bool = False


def transfers(job: Job, layout: Layout, rank: int = 0, place: Sizes = FIRST) -> list[Transfer]:
    """The transfers of one step of a pipeline rank. place: its index on each axis that shards."""
    result = _in_layers(job, layout, rank) + (_of_loss(job, layout, rank) if layout.tp > 1 else [])
    result += _sums_over_tokens(job, layout, rank) if job.ordered else []
    result.sort(key=lambda transfer: transfer.axis != "tp")
    result += _messages(job, layout, rank) if layout.pp > 1 else []
    return [transfer for transfer in result if transfer.bytes] + once_a_step(job, layout, rank, place)


def once_a_step(job: Job, layout: Layout, rank: int = 0, place: Sizes = FIRST) -> list[Transfer]:
    """The transfers that synchronize data parallel ranks and copies of parameters."""
    own = job, layout, rank
    result = [*_data_parallel(*own), *_partial(*own, place), *_whole(*own)]
    return [transfer for transfer in result if transfer.bytes]


def totals(transfers: list[Transfer]) -> dict[tuple[str, str], int]:
    """Sum the bytes of transfers by (op, axis)."""
    sums: dict[tuple[str, str], int] = {}
    for transfer in transfers:
        key = (transfer.op, transfer.axis)
        sums[key] = sums.get(key, 0) + transfer.bytes
    return sums


# Inside a micro-batch -------------------------------------------------------------------------------------------------


def _in_layers(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """The collectives among the ops of layers, and those of embedding and output layer."""
    pipeline, facts, share = layout.pipeline(job.facts.num_layers), job.facts, layout.rank_setup(job)
    sent, counts, number = Counter(), Counter(), layout.num_microbatches(job)
    stream = lambda tokens: Residual(facts.settings, share, tokens)
    for stage in pipeline.stages_of(rank):
        calls = []
        for group in recompute_groups(pipeline.layers[stage], layout.recompute):
            ops = [op for layer in group.layers for op in facts.layer_ops(share, facts.layer_kind(layer))]
            calls += calls_of(ops, group.modules)
        if stage == 0:
            calls += calls_of([stream(facts.embedded_tokens(share)).summed], ())
        if stage == len(pipeline.stages) - 1 and facts.score_sums(share) is None:
            copied = replace(stream(facts.loss_tokens(share)).copied, overlapped=())
            calls += calls_of([copied] * (1 + facts.settings.depths), ())
            modules = last_modules(pipeline.layers[stage], layout.recompute)
            ops = [op for one in facts.designs_ahead for op in facts.layer_ops(one.share(share), one.kind)]
            calls += [*calls_of(ops, modules), *calls_of(facts.depth_ops(share), ())] * facts.settings.depths
        for op, call in calls:
            key = op.axis, call, op.name, op.in_ring
            sent[key] += number * op.size
            counts[key] += number
    return [
        Transfer(name, call, axis, size, counts[axis, call, name, beside], beside)
        for (axis, call, name, beside), size in sorted(sent.items())
    ]


def calls_of(ops: list[LayerOp], modules: Sequence[str]) -> Iterator[tuple[Collective, str]]:
    """List (collective, call) of a forward and a backward pass through layers that are recomputed together."""
    for op in ops:
        if isinstance(op, Collective) and op.ranks > 1:
            yield from ((op, call) for call in (*op.ahead, *op.back, *op.overlapped))
    for op in ops_again(ops, modules):
        if isinstance(op, Collective) and op.ranks > 1:
            yield from ((op, call) for call in op.ahead)


def _sums_over_tokens(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """--batch-invariant-mode sums gradients over a sample's tokens in each pass, of which ranks of tp and cp have parts:
    those of norms and biases in `BLOCKS` blocks, and those of tables over whole samples (`mpu/ordered_tokens.py`).
    Without sequence parallelism, ranks of tp have other heads: these are added up first.
    """
    name, number, cp, share = "sums over tokens", layout.num_microbatches(job), layout.cp, layout.rank_setup(job)
    slots_of = lambda layout: [slot for unit in rank_units(job, layout, rank) for slot in unit.slots if not slot.decay]
    slots, heads = slots_of(layout), [slot for slot in slots_of(replace(layout, sp=False)) if "tp" in slot.partial]
    calls = sum("tp" in slot.partial for slot in slots) - len(heads)
    size = sum(slot.size for slot in slots if "tp" in slot.partial) - sum(slot.size for slot in heads)
    blocks = 4 * number * BLOCKS // cp
    found = [Transfer(name, "all_gather", "tp", blocks * size, calls)]
    found.append(Transfer(name, "all_reduce", "tp", blocks * sum(slot.size for slot in heads), len(heads)))
    if cp == 1:
        return found
    found.append(Transfer(name, "all_gather", "cp", 4 * number * BLOCKS * sum(slot.size for slot in slots), len(slots)))
    stages, facts, calls = layout.pipeline(job.facts.num_layers).stages, job.facts, []
    if stages[0][0] == rank:  # gradients of the embedding, and tokens
        n = facts.embedded_tokens(share)
        calls += [("all_to_all", n * facts.settings.hidden_size * share.element), ("all_gather", 8 * n * cp)]
    if stages[-1][0] == rank:
        n = facts.loss_tokens(share)
        states = Residual(facts.settings, share, n)
        calls += [("all_gather", 4 * n * cp)] * 2  # of losses, and of z-losses
        calls += [(op.back[0], op.size) for op in states.over_tokens(facts.vocabulary_rows(share.tp), states.h)]
    return found + [Transfer(name, op, "cp", number * size, number) for op, size in calls]


def _of_loss(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """The collectives of the loss, or of scores, over tp."""
    number, share = layout.num_microbatches(job), layout.rank_setup(job)
    if layout.pipeline(job.facts.num_layers).stages[-1][0] != rank:
        return []
    if (scores := job.facts.score_sums(share)) is not None:
        return [Transfer("scores", "all_reduce", "tp", number * sum(scores), number * len(scores))]
    n, chunks = job.facts.loss_tokens(share), number * job.facts.loss_chunks(share)
    number, chunks = (one * (1 + job.facts.settings.depths) for one in (number, chunks))
    statistics = BLOCKS if job.ordered else layout.tp  # of each token
    smoothed = 1 + (job.ordered and job.facts.settings.label_smoothing > 0)  # its label, and the whole vocabulary
    return [
        Transfer("loss", "all_gather", "tp", 4 * n * statistics * number, chunks),
        Transfer("loss", "all_reduce", "tp", 4 * n * number * smoothed, chunks),
    ]


def _messages(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    pipeline, num_microbatches = layout.pipeline(job.facts.num_layers), layout.num_microbatches(job)
    size, stages, ahead, back = job.facts.message_bytes(layout.rank_setup(job)), pipeline.stages, 0, 0
    for stage in pipeline.stages_of(rank):
        ahead += stage + 1 < len(stages) and stages[stage + 1][0] != rank
        back += stage > 0 and stages[stage - 1][0] != rank
    return [
        Transfer("activations", "send", "pp", num_microbatches * ahead * size, num_microbatches * ahead),
        Transfer("their gradients", "send", "pp", num_microbatches * back * size, num_microbatches * back),
    ]


# Once a step, or once a micro-batch -----------------------------------------------------------------------------------


def _data_parallel(job: Job, layout: Layout, rank: int) -> Iterator[Transfer]:
    """Gradients and weights, of dense weights and of experts."""
    sizes, num_microbatches, beside = layout.data_sizes, layout.num_microbatches(job), layout.overlap
    for (replicate, shard), units in rank_units(job, layout, rank).over.items():
        count = len(units)
        if sizes[shard] > 1:
            rounds = num_microbatches if job.reducing(layout.zero) >= 2 else 1
            size = rounds * _reduced(units, job, layout, rank)
            yield Transfer("gradients", "reduce_scatter", shard, size, rounds * count, beside)
            size, calls = units.bytes_of(lambda unit: unit.padded(sizes), job.element), count
            size, calls = _gathered(units, job, layout, rank) if layout.zero == 3 else (size, calls)
            yield Transfer("weights", "all_gather", shard, size, calls, beside)
        for axis, ranks in ((shard, sizes[shard]), ("tp", layout.tp if job.fp8 == "tensorwise" else 1)):
            scales = units.scales if ranks > 1 else 0
            yield Transfer("largest values of fp8 weights", "all_reduce", axis, 4 * scales, 1)
        if sizes[replicate] > 1:
            size, rounds = job.shard_gradients(layout.zero) * units.owned(sizes), 1
            if job.ordered:  # what a reduction over shards leaves, or all of it
                rounds = num_microbatches
                size = rounds * _reduced(units, job, layout, rank) // sizes[shard]
            yield Transfer("gradients", "all_reduce", replicate, size, rounds * count if job.ordered else 1, beside)


def _reduced(units: Units, job: Job, layout: Layout, rank: int) -> int:
    """Bytes of the gradients of one round; stages 2 and 3 reduce a table that two chunks of a rank share twice."""
    size = job.gradients * units.padded(layout.data_sizes)
    if job.reducing(layout.zero) >= 2 and shares_table(job, layout, rank):
        size += job.gradients * used_twice(units, layout)
    return size


def used_twice(units: Units, layout: Layout) -> int:
    """Elements of the buffers of units that first and last stage use."""
    return sum(unit.padded(layout.data_sizes) for unit in units.others if len(unit.ends) > 1)


def _gathered(units: Units, job: Job, layout: Layout, rank: int) -> tuple[int, int]:
    """(bytes, calls) of all-gathers in a step of stage 3: layers before each pass, others when its chunk begins."""
    pipeline, num_microbatches = layout.pipeline(job.facts.num_layers), layout.num_microbatches(job)
    stages, axes = pipeline.stages_of(rank), {unit.axes for unit in units}
    sizes = layout.data_sizes
    whole = lambda unit: unit.bytes_of(unit.padded(sizes) + unit.padded_frozen(sizes), job.element)
    layers = size = calls = 0  # of the layers of one micro-batch; then of the other units
    for stage in stages:
        for layer, count in _gathered_layers(job.facts, job.selection, pipeline.layers[stage], layout.recompute):
            for unit in layer_sizes(job.facts, layer, layout.cuts, layout.sp):
                if unit.axes in axes:
                    layers += count * whole(unit)
                    calls += num_microbatches * count * (bool(unit.slots) + bool(unit.frozen))
    for unit in units.others:
        among = tuple(chunk for chunk, stage in enumerate(stages) if _used(unit.ends, stage, len(pipeline.stages)))
        begun = starts(layout.order, layout.pp, num_microbatches, layout.chunks, rank, among)
        size += begun * whole(unit)
        calls += begun * (bool(unit.slots) + bool(unit.frozen))
    return size + num_microbatches * layers, calls


@lru_cache(maxsize=4096)
def _gathered_layers(
    facts: Facts, selection: Selection, layers: Sequence[int], settings: Recompute
) -> tuple[tuple[LayerOf, int], ...]:
    """How many times each kind of these layers is gathered for a micro-batch."""
    held = [layer for layer in layers for _ in range(2)]  # before the forward and the backward pass
    for group in recompute_groups(layers, settings):
        if "full" in group.modules:  # recomputation gathers all layers of a group except its last
            held += group.layers[:-1]
    return tuple(Counter(layers_of(facts, selection, tuple(held))).items())


def _used(ends: tuple[str, ...], stage: int, stages: int) -> bool:
    """Whether a stage uses a unit with these ends."""
    return (stage == 0 and "first" in ends) or (stage == stages - 1 and "last" in ends)


def shares_table(job: Job, layout: Layout, rank: int) -> bool:
    """Whether a rank's table has two gradients in a pass, or those of two chunks, which are reduced one by one."""
    stages = layout.pipeline(job.facts.num_layers).stages
    several = job.ordered or len(stages) > 1
    return job.facts.shares_embedding and several and stages[0][0] == stages[-1][0] == rank


def _partial(job: Job, layout: Layout, rank: int, place: Sizes) -> list[Transfer]:
    """Reductions of partial gradients: norms and biases over tp, experts' biases over etp, a tied table over first and last
    stage.
    """
    units = rank_units(job, layout, rank)
    element = job.shard_gradients(layout.zero)
    size = lambda axis: element * units.total(lambda unit: unit.partial(axis, place, layout.data_sizes))
    return [
        Transfer(f"gradients of {what}", "all_reduce", axis, size(axis), 1)
        for axis, what in PARTIAL.items()
        if axis in units.partial_axes
    ]


def _whole(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """Transfers of matrices that an optimizer orthogonalizes: gathered over shards, then over tp, and scattered back."""
    if job.matrix_moments is None:
        return []
    result, sizes = [], layout.data_sizes | layout.cuts._asdict()
    for axes, held in rank_units(job, layout, rank).over.items():
        parts, units = "tp" if axes == DATA_PARALLEL else "etp", [unit for unit in held if unit.matrices]
        size = 4 * sum(unit.padded(sizes) for unit in units)
        result += [
            Transfer("matrices", op, axis, size * (sizes[parts] if axis == parts else 1), len(units))
            for axis in (axes[1], parts)
            for op in ("all_gather", "reduce_scatter")
            if sizes[axis] > 1
        ]
    return result
