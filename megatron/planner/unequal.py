# SPDX-License-Identifier: Apache-2.0
"""The length of a pipeline step with unequal stages: a simulation of the schedule with every stage's own times.

As in `live.py`, many micro-batches and more than `FEW` ranks are extrapolated. Tests compare with `simulate`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.pipeline.custom_schedule import is_file, read_schedule
from megatron.pipeline.data_parallel_messages import pairs_of, without_messages
from megatron.pipeline.schedule import Op, dependencies, stage_map
from megatron.pipeline.simulate import hidden_by_turns, make_rank_schedules, simulate
from megatron.planner.live import ShardingTimes, gather_delay, is_split, reduce_delay

FEW = 16  # ranks that are simulated; more are extrapolated

Both = tuple[float, float]  # seconds of a stage's forward and backward pass


class _Step(NamedTuple):
    """An op in the simulation."""

    rank: int
    cost: tuple[int, str]  # stage, kind
    need: int  # index of the op on another rank that it waits for; -1: none
    also: int = -1  # another one: of the pass that takes turns with it
    beside: int = -1  # if it takes turns with the step before it, the stage of that one


def unequal_span(
    schedule: str,
    pp: int,
    num_microbatches: int,
    chunks: int,
    stages: Sequence[Both],
    sharding: ShardingTimes,
    exchanges: Sequence[Both] = (),
) -> float:
    """Seconds from the first op of a step to the last reduction. stages: the passes of each, in order.

    exchanges: of each stage, the seconds of its passes that are exchanges of experts' tokens. Passes that take turns hide
    them (`simulate.hidden_by_turns`). All-gathers and reductions are treated as in `live.sharded_span`.
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
    length = _length(schedule, pp, num_microbatches, chunks, tuple(passes), tuple(exchanges))
    return gather_delay(sharding, chunks, mean[0]) + length + reduce_delay(sharding, chunks, last)


@lru_cache(maxsize=65536)
def _length(schedule: str, pp: int, num_microbatches: int, chunks: int, passes: tuple, exchanges: tuple = ()) -> float:
    if pp == 1 and not is_file(schedule) and not exchanges:
        return num_microbatches * sum(map(sum, passes))
    slowest = _slowest(schedule, pp, chunks, passes, exchanges)
    if pp > FEW and not is_file(schedule):  # gaps grow with the number of ranks
        few = max(1, round(num_microbatches * FEW / pp))
        sample = _sample(passes, FEW * chunks), _sample(exchanges, FEW * chunks) if exchanges else ()
        gaps = _length(schedule, FEW, few, chunks, *sample) - few * _slowest(schedule, FEW, chunks, *sample)
        return num_microbatches * slowest + gaps * (pp - 1) / (FEW - 1)
    if is_file(schedule) or num_microbatches <= 5 * pp:
        return _clocked(schedule, pp, num_microbatches, chunks, passes, exchanges)
    # A round is pp micro-batches. Once the slowest rank limits the speed, each round adds its time.
    near = 3 * pp + num_microbatches % pp
    short, longer = (_clocked(schedule, pp, m, chunks, passes, exchanges) for m in (near, near + pp))
    return short + max(longer - short, pp * slowest) * (num_microbatches - near) / pp


def _slowest(schedule: str, pp: int, chunks: int, passes: Sequence, exchanges: Sequence = ()) -> float:
    """Seconds of a micro-batch through all stages of the slowest rank, in the middle of a step."""
    stages = read_schedule(schedule).stages if is_file(schedule) else stage_map(schedule, pp, chunks)
    ranks = [0.0] * pp
    for stage, (rank, _) in enumerate(stages):
        ranks[rank] += sum(passes[stage])
        if exchanges:
            ranks[rank] -= _saved(passes, exchanges, stage, stage)
    return max(ranks)


def _saved(passes: Sequence, exchanges: Sequence, one: int, other: int) -> float:
    """Seconds that a forward pass of one stage and a backward pass of another stage save by turns."""
    return hidden_by_turns((passes[one][0], exchanges[one][0]), (passes[other][1], exchanges[other][1]))


def _sample(passes: tuple, number: int) -> tuple:
    """A sample of the stages: the first, the last, and some between."""
    last = len(passes) - 1
    return tuple(passes[round(n * last / (number - 1))] for n in range(number))


def _clocked(schedule: str, pp: int, num_microbatches: int, chunks: int, passes: tuple, exchanges: tuple) -> float:
    costs = [dict(F=first, B=back, I=back, W=late) for first, back, late in passes]
    clock, ends = [0.0] * pp, []
    for rank, (stage, kind), need, also, beside in _steps(schedule, pp, num_microbatches, chunks):
        start = clock[rank]
        if need >= 0 and ends[need] > start:
            start = ends[need]
        if also >= 0 and ends[also] > start:
            start = ends[also]
        end = start + costs[stage][kind]
        if beside >= 0:  # both end together
            end -= _saved(passes, exchanges, beside, stage) if exchanges else 0.0
            ends[-1] = end
        clock[rank] = end
        ends.append(end)
    return max(clock)


@lru_cache(maxsize=64)
def _steps(schedule: str, pp: int, num_microbatches: int, chunks: int) -> tuple[_Step, ...]:
    """The ops of all ranks, each after the ops that it waits for."""
    if is_file(schedule):
        own = read_schedule(schedule)
        plan, stages = list(map(without_messages, own.lists)), own.stages
    else:
        plan, stages = make_rank_schedules(schedule, pp, num_microbatches, chunks), stage_map(schedule, pp, chunks)
    order, stage_of = list(simulate(plan, stages)), {place: stage for stage, place in enumerate(stages)}
    at, steps = {op: number for number, op in enumerate(order)}, []
    pairs = [pairs_of(ops) for ops in plan]
    firsts = [{back: one for one, back in own.items()} for own in pairs]

    def others(rank: int, op: Op) -> int:  # the clock of its own rank includes earlier ops
        needs = [at[need] for need in dependencies(op, rank, stages) if need[0] != rank]
        return needs[0] if needs else -1

    for rank, op in order:
        one, back = firsts[rank].get(op), pairs[rank].get(op)
        also = -1 if back is None else others(rank, back)
        beside = -1 if one is None else stage_of[rank, one.chunk]
        steps.append(_Step(rank, (stage_of[rank, op.chunk], op.kind), others(rank, op), also, beside))
    return tuple(steps)
