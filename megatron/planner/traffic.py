# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank communicates in a step, by collective and axis, exactly as the code does.

Bytes are those of the whole tensor: what is reduced, what a gathering results in, what a reduce-scatter starts from, what
a message holds. Tests compare with what runs send. Legend as in `model/facts.py`.
"""

from collections import Counter
from dataclasses import dataclass

from megatron.model.recompute_plan import recompute_groups
from megatron.planner.layout import Job, Layout
from megatron.planner.live import starts
from megatron.planner.parameters import layer_sizes, rank_units


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
    found = _tensor_parallel(job, layout, rank) if layout.tp > 1 else []
    found += _context_parallel(job, layout, rank) if layout.cp > 1 else []
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


def _tensor_parallel(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    num_microbatches, pipeline, share = (
        layout.num_microbatches(job),
        layout.pipeline(job.facts.num_layers),
        layout.rank_setup(job),
    )
    facts, n, scores = job.facts, job.facts.loss_tokens(share), job.facts.score_sums(share)
    row = facts.settings.hidden_size * job.element
    reduces, gathers, scatters = Counter(), Counter(), Counter()  # tokens of a call -> calls
    for stage in pipeline.stages_of(rank):
        layers = pipeline.layers[stage]
        twice = recomputed(job, layout, layers)
        ends = Counter({facts.embedded_tokens(share): stage == 0})
        ends.update({n: stage == len(pipeline.stages) - 1 and scores is None})
        reduces.update(ends), gathers.update(ends), scatters.update(ends)
        reduces.update(twice[1]), gathers.update(twice[0]), scatters.update(twice[1])
        for branch in (branch for layer in layers for branch in facts.branches(share, facts.layer_kind(layer))):
            tokens = facts.tokens_of(share, branch)
            gathers[tokens] += 3  # inputs of column-parallel layers twice
            reduces[tokens] += 2
            scatters[tokens] += 2
            if branch.memory:  # the input of another product
                gathers[branch.memory[0]] += 2
                reduces[branch.memory[0]] += 1
                scatters[branch.memory[0]] += 1
    asked = (("all_gather", gathers), ("reduce_scatter", scatters)) if layout.sp else (("all_reduce", reduces),)
    found = []
    for op, sizes in asked:
        whole, calls = sum(tokens * count for tokens, count in sizes.items()), sum(sizes.values())
        found.append(Transfer("activations", op, "tp", num_microbatches * whole * row, num_microbatches * calls))
    if pipeline.stages[-1][0] == rank and scores is not None:
        calls = num_microbatches * len(scores)
        return [*found, Transfer("scores", "all_reduce", "tp", num_microbatches * sum(scores), calls)]
    if pipeline.stages[-1][0] == rank:
        chunks = num_microbatches * job.facts.loss_chunks(share)
        found.append(Transfer("loss", "all_gather", "tp", 4 * n * layout.tp * num_microbatches, chunks))
        found.append(Transfer("loss", "all_reduce", "tp", 4 * n * num_microbatches, chunks))
    return found


def _context_parallel(job: Job, layout: Layout, rank: int) -> list[Transfer]:
    """What ranks that share sequences send of each layer with attention: keys and values of all tokens, gathered, and their
    gradients; or queries, keys and values, and what they attend to, for other heads.
    """
    num_microbatches, pipeline, share = (
        layout.num_microbatches(job),
        layout.pipeline(job.facts.num_layers),
        layout.rank_setup(job),
    )
    sent, calls = Counter(), Counter()
    for stage in pipeline.stages_of(rank):
        for group in recompute_groups(pipeline.layers[stage], layout.recompute):
            for layer in group.layers:
                branches = job.facts.branches(share, job.facts.layer_kind(layer))
                for exchange in (branch.exchange for branch in branches if branch.exchange):
                    for op, size, times in exchange.calls(group.granularity):
                        sent[op] += times * size
                        calls[op] += times
    return [
        Transfer("attention", op, "cp", num_microbatches * sent[op], num_microbatches * calls[op])
        for op in sorted(sent)
    ]


def recomputed(job: Job, layout: Layout, layers) -> tuple[Counter, Counter]:
    """(gatherings, sums) that recomputing these layers of a stage repeats, tokens of one -> how many; it stops at the last
    tensor that is needed.
    """
    gathers, sums, share, facts = Counter(), Counter(), layout.rank_setup(job), job.facts
    for group in recompute_groups(layers, layout.recompute):
        kinds = [facts.layer_kind(layer) for layer in group.layers]
        branches = [branch for kind in kinds for branch in facts.branches(share, kind)]
        whole = group.granularity == "full"
        for branch in branches if whole else []:
            sums[facts.tokens_of(share, branch)] += 1
        if whole and not facts.keeps_last_sum(kinds[-1]):  # nothing behind it keeps anything
            sums[facts.tokens_of(share, branches[-1])] -= 1
        for branch in branches:
            if whole or group.granularity == "full_attn" and branch.core is not None:
                gathers[facts.tokens_of(share, branch)] += 1
                gathers.update({branch.memory[0]: 1} if branch.memory else {})
    return gathers, sums


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
        designs = Counter(map(job.facts.design_of, held))
        sizes = {one: layer_sizes(job.facts, one, layout.tp, layout.sp).padded(layout.shard) for one in designs}
        layers += sum(count * sizes[one] for one, count in designs.items())
        calls += num_microbatches * len(held)
    for unit in units.others:
        among = tuple(chunk for chunk, stage in enumerate(stages) if _used(unit.ends, stage, len(pipeline.stages)))
        begun = starts(layout.schedule, layout.pp, num_microbatches, layout.chunks, rank, among)
        elements += begun * unit.padded(layout.shard)
        calls += begun
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
