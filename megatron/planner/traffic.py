# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank communicates in a step, by collective and axis, exactly as the code does.

Bytes are those of the whole tensor: what is reduced, what a gathering results in, what a reduce-scatter starts from, what
a message holds. Tests compare with what runs send. Legend as in `model/facts.py`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.model.layer_ops import Collective, LayerOp, Residual, ops_again
from megatron.model.recompute_plan import recompute_groups
from megatron.planner.layout import Job, Layout
from megatron.planner.live import starts
from megatron.planner.parameters import layer_sizes, layers_of, rank_units


@dataclass(frozen=True)
class Transfer:
    """bytes: of all calls of a step together; beside: it runs while the rank computes."""

    what: str
    op: str  # all_reduce, all_gather, reduce_scatter, all_to_all or send
    axis: str  # tp, cp, pp, shard, replicate, tied
    bytes: int
    calls: int
    beside: bool = False


def transfers(job: Job, layout: Layout, rank: int = 0, shard_rank: int = 0) -> list[Transfer]:
    """Of one step of a pipeline rank (and of one place on the shard axis)."""
    found = _in_layers(job, layout, rank) + (_of_loss(job, layout, rank) if layout.tp > 1 else [])
    found.sort(key=lambda transfer: transfer.axis != "tp")
    found += _messages(job, layout, rank) if layout.pp > 1 else []
    return [transfer for transfer in found if transfer.bytes] + once_a_step(job, layout, rank, shard_rank)


def once_a_step(job: Job, layout: Layout, rank: int = 0, shard_rank: int = 0) -> list[Transfer]:
    """What keeps data parallel ranks, and copies of parameters, together."""
    found = _data_parallel(job, layout, rank) + _partial(job, layout, rank, shard_rank) + _whole(job, layout, rank)
    return [transfer for transfer in found if transfer.bytes]


def totals(found: list[Transfer]) -> dict[tuple[str, str], int]:
    """(op, axis) -> bytes."""
    sums: dict[tuple[str, str], int] = {}
    for transfer in found:
        key = (transfer.op, transfer.axis)
        sums[key] = sums.get(key, 0) + transfer.bytes
    return sums


# Inside a micro-batch -------------------------------------------------------------------------------------------------


def _in_layers(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """What the collectives among the ops of layers send, and those of embedding and output layer."""
    pipeline, facts, share = layout.pipeline(job.facts.num_layers), job.facts, layout.rank_setup(job)
    sent, counts, number = Counter(), Counter(), layout.num_microbatches(job)
    stream = lambda tokens: Residual(facts.settings, share, tokens)
    for stage in pipeline.stages_of(rank):
        found = []
        for group in recompute_groups(pipeline.layers[stage], layout.recompute):
            ops = [op for layer in group.layers for op in facts.layer_ops(share, facts.layer_kind(layer))]
            found += calls_of(ops, group.granularity)
        if stage == 0:
            found += calls_of([stream(facts.embedded_tokens(share)).summed], "")
        if stage == len(pipeline.stages) - 1 and facts.score_sums(share) is None:
            found += calls_of([replace(stream(facts.loss_tokens(share)).copied, beside=())], "")
        for op, call in found:
            sent[op.axis, call, op.name] += number * op.size
            counts[op.axis, call, op.name] += number
    return [
        Transfer(name, call, axis, size, counts[axis, call, name]) for (axis, call, name), size in sorted(sent.items())
    ]


def calls_of(ops: list[LayerOp], granularity: str) -> Iterator[tuple[Collective, str]]:
    """(collective, its call) of a forward and a backward pass of layers that are recomputed together."""
    for op in ops:
        if isinstance(op, Collective) and op.ranks > 1:
            yield from ((op, call) for call in (*op.ahead, *op.back, *op.beside))
    for op in ops_again(ops, granularity):
        if isinstance(op, Collective) and op.ranks > 1:
            yield from ((op, call) for call in op.ahead)


def _of_loss(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """What the ranks of tp tell each other of the loss, or of scores."""
    number, share = layout.num_microbatches(job), layout.rank_setup(job)
    if layout.pipeline(job.facts.num_layers).stages[-1][0] != rank:
        return []
    if (scores := job.facts.score_sums(share)) is not None:
        return [Transfer("scores", "all_reduce", "tp", number * sum(scores), number * len(scores))]
    n, chunks = job.facts.loss_tokens(share), number * job.facts.loss_chunks(share)
    return [
        Transfer("loss", "all_gather", "tp", 4 * n * layout.tp * number, chunks),
        Transfer("loss", "all_reduce", "tp", 4 * n * number, chunks),
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


def _data_parallel(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    units = rank_units(job, layout, rank)
    whole, e, num_microbatches = units.padded(layout.shard), job.element, layout.num_microbatches(job)
    count, beside = len(units), layout.overlap
    found = []
    if layout.shard > 1:
        rounds = num_microbatches if layout.zero >= 2 else 1
        found.append(
            Transfer(
                "gradients", "reduce_scatter", "shard", rounds * _reduced(job, layout, rank), rounds * count, beside
            )
        )
        if layout.zero < 3:
            found.append(Transfer("weights", "all_gather", "shard", whole * e, count, beside))
        else:
            size, calls = _gathered(job, layout, rank)
            found.append(Transfer("weights", "all_gather", "shard", size * e, calls, beside))
    if layout.replicate > 1:
        found.append(Transfer("gradients", "all_reduce", "replicate", 4 * whole // layout.shard, 1, beside))
    return found


def _reduced(job: Job, layout: Layout, rank: int) -> int:
    """Bytes of gradients of one round; a table that two chunks of a rank share comes twice in stages 2 and 3."""
    units = rank_units(job, layout, rank)
    size = 4 * units.padded(layout.shard)
    if layout.zero >= 2 and _shares_table(job, layout, rank):
        size += 4 * next(unit.padded(layout.shard) for unit in units.others if len(unit.ends) > 1)
    return size


def _gathered(job: Job, layout: Layout, rank: int) -> tuple[int, int]:
    """(elements, calls) of a step of stage 3: layers before each pass, the rest when work on its chunk begins."""
    pipeline, num_microbatches = layout.pipeline(job.facts.num_layers), layout.num_microbatches(job)
    units, stages = rank_units(job, layout, rank), pipeline.stages_of(rank)
    layers = elements = calls = 0  # of the layers of one micro-batch; then of the other units
    for stage in stages:
        held = [layer for layer in pipeline.layers[stage] for _ in range(2)]  # before the forward and the backward pass
        for group in recompute_groups(pipeline.layers[stage], layout.recompute):
            if group.granularity == "full":  # all of a group but its last layer are gathered to run again
                held += group.layers[:-1]
        for layer, count in Counter(layers_of(job.facts, job.selection, tuple(held))).items():
            size = layer_sizes(job.facts, layer, layout.tp, layout.sp)
            layers += count * (size.padded(layout.shard) + size.padded_frozen(layout.shard))
            calls += num_microbatches * count * (bool(size.slots) + bool(size.frozen))
    for unit in units.others:
        among = tuple(chunk for chunk, stage in enumerate(stages) if _used(unit.ends, stage, len(pipeline.stages)))
        begun = starts(layout.schedule, layout.pp, num_microbatches, layout.chunks, rank, among)
        elements += begun * (unit.padded(layout.shard) + unit.padded_frozen(layout.shard))
        calls += begun * (bool(unit.slots) + bool(unit.frozen))
    return elements + num_microbatches * layers, calls


def _used(ends: tuple[str, ...], stage: int, stages: int) -> bool:
    """Whether a stage uses a unit of these ends."""
    return (stage == 0 and "first" in ends) or (stage == stages - 1 and "last" in ends)


def _shares_table(job: Job, layout: Layout, rank: int) -> bool:
    stages = layout.pipeline(job.facts.num_layers).stages
    return job.facts.tied and len(stages) > 1 and stages[0][0] == stages[-1][0] == rank


def _partial(job: Job, layout: Layout, rank: int, shard_rank: int) -> list[Transfer]:
    """Gradients that are partial sums: of norms and biases over tp, of a tied table over first and last stage."""
    units, found = rank_units(job, layout, rank), []
    for axis, what in (("tp", "gradients of norms and biases"), ("tied", "gradients of the tied table")):
        size = 4 * sum(count * unit.partial(axis, shard_rank, layout.shard) for unit, count in units.counts.items())
        found.append(Transfer(what, "all_reduce", axis, size, 1))
    return found


def _whole(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """Matrices that an optimizer orthogonalises: gathered over shards, then over tp, and back; units that have some."""
    if job.matrix_moments is None:
        return []
    units = [unit for unit in rank_units(job, layout, rank) if unit.matrices]
    size = 4 * sum(unit.padded(layout.shard) for unit in units)
    return [
        Transfer("matrices", op, axis, size * (layout.tp if axis == "tp" else 1), len(units))
        for axis, ranks in (("shard", layout.shard), ("tp", layout.tp))
        for op in ("all_gather", "reduce_scatter")
        if ranks > 1
    ]
