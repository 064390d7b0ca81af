# SPDX-License-Identifier: Apache-2.0
"""The length of a pipeline step with unequal stages: a simulation of the schedule with every stage's own times.

As in `live.py`, many micro-batches and more than `FEW` ranks are extrapolated. Tests compare with `simulate`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.pipeline.custom_schedule import is_file, read_schedule
from megatron.pipeline.schedule import dependencies, stage_map
from megatron.pipeline.simulate import make_rank_schedules, simulate
from megatron.planner.live import ShardingTimes, gather_delay, is_split, reduce_delay

FEW = 16  # ranks that are simulated; more are extrapolated

Both = tuple[float, float]  # seconds of a stage's forward and backward pass


class _Step(NamedTuple):
    """An op in the simulation."""

    rank: int
    cost: tuple[int, str]  # stage, kind
    need: int  # index of the op on another rank that it waits for; -1: none


def unequal_span(
    schedule: str, pp: int, num_microbatches: int, chunks: int, stages: Sequence[Both], sharding: ShardingTimes
) -> float:
    """Seconds from the first op of a step to the last reduction. stages: the passes of each, in order.

    All-gathers and reductions are treated as in `live.sharded_span`.
    """
    split, passes = is_split(schedule), []
    for forward, backward in stages:
        first = sharding.stretched("F", forward)
        if split:
            passes.append((first, sharding.stretched("I", backward / 2), sharding.stretched("W", backward / 2)))
        else:
            passes.append((first, sharding.stretched("B", backward), 0.0))
    mean = [sum(one) / len(stages) for one in zip(*passes)]
    last = mean[2] if split else mean[1]  # the kind of the last passes
    length = _length(schedule, pp, num_microbatches, chunks, tuple(passes))
    return gather_delay(sharding, chunks, mean[0]) + length + reduce_delay(sharding, chunks, last)


@lru_cache(maxsize=65536)
def _length(schedule: str, pp: int, num_microbatches: int, chunks: int, passes: tuple) -> float:
    if pp == 1 and not is_file(schedule):
        return num_microbatches * sum(map(sum, passes))
    slowest = _slowest(schedule, pp, chunks, passes)
    if pp > FEW and not is_file(schedule):  # gaps grow with the number of ranks
        few = max(1, round(num_microbatches * FEW / pp))
        sample = _sample(passes, FEW * chunks)
        gaps = _length(schedule, FEW, few, chunks, sample) - few * _slowest(schedule, FEW, chunks, sample)
        return num_microbatches * slowest + gaps * (pp - 1) / (FEW - 1)
    if is_file(schedule) or num_microbatches <= 5 * pp:
        return _clocked(schedule, pp, num_microbatches, chunks, passes)
    # A round is pp micro-batches. Once the slowest rank limits the speed, each round adds its time.
    near = 3 * pp + num_microbatches % pp
    short, longer = (_clocked(schedule, pp, m, chunks, passes) for m in (near, near + pp))
    return short + max(longer - short, pp * slowest) * (num_microbatches - near) / pp


def _slowest(schedule: str, pp: int, chunks: int, passes: Sequence) -> float:
    """Seconds of a micro-batch through all stages of the slowest rank."""
    stages = read_schedule(schedule).stages if is_file(schedule) else stage_map(schedule, pp, chunks)
    ranks = [0.0] * pp
    for (rank, _), own in zip(stages, passes, strict=True):
        ranks[rank] += sum(own)
    return max(ranks)


def _sample(passes: tuple, number: int) -> tuple:
    """A sample of the stages: the first, the last, and some between."""
    last = len(passes) - 1
    return tuple(passes[round(n * last / (number - 1))] for n in range(number))


def _clocked(schedule: str, pp: int, num_microbatches: int, chunks: int, passes: tuple) -> float:
    costs = [dict(F=first, B=back, I=back, W=late) for first, back, late in passes]
    clock, ends = [0.0] * pp, []
    for rank, (stage, kind), need in _steps(schedule, pp, num_microbatches, chunks):
        start = clock[rank]
        if need >= 0 and ends[need] > start:
            start = ends[need]
        clock[rank] = end = start + costs[stage][kind]
        ends.append(end)
    return max(clock)


@lru_cache(maxsize=64)
def _steps(schedule: str, pp: int, num_microbatches: int, chunks: int) -> tuple[_Step, ...]:
    """The ops of all ranks, each after the ops that it waits for."""
    if is_file(schedule):
        own = read_schedule(schedule)
        plan, stages = own.plan, own.stages
    else:
        plan, stages = make_rank_schedules(schedule, pp, num_microbatches, chunks), stage_map(schedule, pp, chunks)
    order, stage_of = list(simulate(plan, stages)), {place: stage for stage, place in enumerate(stages)}
    at, steps = {op: number for number, op in enumerate(order)}, []
    for rank, op in order:  # the clock of its own rank includes earlier ops
        others = [at[need] for need in dependencies(op, rank, stages) if need[0] != rank]
        steps.append(_Step(rank, (stage_of[rank, op.chunk], op.kind), others[0] if others else -1))
    return tuple(steps)
