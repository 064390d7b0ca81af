# SPDX-License-Identifier: Apache-2.0
"""The length of a step by its pipeline schedule: a simulation with every stage's own times, or with equal ones.

Warm schedules are periodic, so long ones are extrapolated from shorter ones: each further round adds the same time. So are
those of many ranks. Tests compare with `simulate`.

`unequal_span` is exact but for that. A search compares thousands of layouts by `sharded_span`, with equal stages, rounded
times and fewer ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.pipeline.custom_schedule import is_file, read_schedule
from megatron.pipeline.data_parallel_messages import without_messages
from megatron.pipeline.schedule import SCHEDULES, stage_map
from megatron.pipeline.simulate import Order, hidden_by_turns, make_rank_schedules

SMALL = 6  # ranks that are simulated with equal stages; more are extrapolated
FEW = 16  # the same with unequal ones

Both = tuple[float, float]  # seconds of a stage's forward and backward pass


@dataclass(frozen=True)
class ShardingTimes:
    """The ZeRO stage and the times of one chunk's messages, in the unit of the passes; equal on all ranks.

    All gathers of a chunk count as one message, and so do its reductions. With ZeRO 1 and 2 there is one gather before its
    first pass, with ZeRO 3 one for each pass. There is one reduction after its last pass, with ZeRO 2 and 3 after each
    pass. A pass that is shorter than the messages during it takes as long as they do.

    gather, reduce:                time of one message
    gather_overlap, reduce_overlap:  share of it that overlaps its pass; 0: without --overlap-param-gather and
                                   --overlap-grad-reduce
    """

    zero: int
    gather: float = 0.0
    reduce: float = 0.0
    gather_overlap: float = 0.0
    reduce_overlap: float = 0.0
    update: float = 0.0

    def gathers(self, kind: str) -> bool:
        """Whether every pass of this kind has a gather of its own."""
        return self.zero == 3 and kind != "W"

    def reduces(self, kind: str) -> bool:
        """Whether every pass of this kind has a reduction of its own."""
        return self.zero >= 2 and kind in "BW"

    def stretched(self, kind: str, time: float) -> float:
        """Duration of a pass including the communication before, during and after it.

        >>> ShardingTimes(3, gather=1.0, reduce=2.0, gather_overlap=0.5).stretched("B", 4.0)
        6.5
        """
        gather, reduce = self.gather * self.gathers(kind), self.reduce * self.reduces(kind)
        overlapped = gather * self.gather_overlap + reduce * self.reduce_overlap
        return gather + reduce - overlapped + max(time, overlapped)


# -- equal stages ----------------------------------------------------------------------------------------------------


def span(
    schedule: str, pp: int, num_microbatches: int, chunks: int, *, backward: float, split: float = 0.5, exact=False
) -> float:
    """Time from the first op to the last, if a chunk's forward pass takes 1 and its backward pass `backward`.
    split: the fraction of `backward` for the gradient of the inputs. Messages take no time. exact: simulate all ranks.
    """
    whole = 1.0 + backward
    if pp == 1:
        return num_microbatches * chunks * whole
    if schedule in ("1f1b", "gpipe", "interleaved") and (chunks == 1 or num_microbatches % pp == 0):
        return (num_microbatches * chunks + pp - 1) * whole
    if is_file(schedule) or exact and num_microbatches <= 4 * pp:
        return _equal(schedule, pp, num_microbatches, chunks, backward, split)
    if not exact and pp > SMALL:  # gaps grow only with the number of ranks
        fewer = max(1, round(num_microbatches * SMALL / pp))
        small = span(schedule, SMALL, fewer, chunks, backward=backward, split=split)
        return num_microbatches * chunks * whole + (small - fewer * chunks * whole) * (pp - 1) / (SMALL - 1)
    if num_microbatches <= 4 * pp:
        return _equal(schedule, pp, num_microbatches, chunks, backward, split)
    # A round is pp micro-batches; each further round adds the same time.
    near = 2 * pp + num_microbatches % pp
    short, longer = (_equal(schedule, pp, m, chunks, backward, split) for m in (near, near + pp))
    return short + (longer - short) * (num_microbatches - near) / pp


def sharded_span(
    schedule: str,
    pp: int,
    num_microbatches: int,
    chunks: int,
    *,
    forward: float,
    backward: float,
    sharding: ShardingTimes,
    exact: bool = False,
) -> float:
    """Time from the first op of a step to the last reduction, as in `simulate` with these messages; without the update.

    With ZeRO 2 and 3 a rank communicates during its passes, so the span is computed with longer passes. The time
    before the first pass and after the last does not depend on the number of micro-batches. With several chunks, messages
    longer than a pass are counted as if their passes followed each other directly, which is slightly pessimistic.
    exact: for these times and all ranks, not for rounded times and fewer ranks.
    """
    f, stretched = sharding.stretched("F", forward), sharding.stretched
    if is_split(schedule):
        i, w = stretched("I", backward / 2), stretched("W", backward / 2)
    else:
        i, w = stretched("B", backward), 0.0
    b, last = i + w, backward / 2 if w else backward
    ratio, split = (b / f, i / b) if exact else (round(4 * b / f) / 4, round(8 * i / b) / 8)
    units = span(schedule, pp, num_microbatches, chunks, backward=ratio, split=split if w else 0.5, exact=exact)
    length = max(num_microbatches * chunks * (f + b), units * (f + b) / (1 + ratio))
    return gather_delay(sharding, chunks, forward) + length + reduce_delay(sharding, chunks, last)


@lru_cache(maxsize=8192)
def _equal(schedule: str, pp: int, num_microbatches: int, chunks: int, backward: float, split: float) -> float:
    passes = (1.0, backward * split, backward * (1 - split)) if is_split(schedule) else (1.0, backward, 0.0)
    return _clocked(schedule, pp, num_microbatches, chunks, (passes,) * (pp * chunks), ())


def is_split(schedule: str) -> bool:
    """Whether weight gradients have separate passes."""
    return read_schedule(schedule).split if is_file(schedule) else SCHEDULES[schedule].split


# -- unequal stages --------------------------------------------------------------------------------------------------


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
    them (`simulate.hidden_by_turns`). All-gathers and reductions are treated as in `sharded_span`.
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
    order, which, pairs = _order(schedule, pp, num_microbatches, chunks)
    times = [time for own in passes for time in own]
    took = [times[number] for number in which]
    saved = {at: _saved(passes, exchanges, *both) for at, both in pairs} if exchanges else {}
    return max(order.clock(took, saved=saved)[1])


@lru_cache(maxsize=64)
def _order(schedule: str, pp: int, num_microbatches: int, chunks: int) -> tuple[Order, list, list]:
    """The passes of all ranks in order; which of all stages' times each takes; (place, stages of both) of those that take
    turns.
    """
    if is_file(schedule):
        own = read_schedule(schedule)
        plan, stages = list(map(without_messages, own.lists)), own.stages
    else:
        plan, stages = make_rank_schedules(schedule, pp, num_microbatches, chunks), stage_map(schedule, pp, chunks)
    order, stage_of = Order.of(plan, stages), {place: stage for stage, place in enumerate(stages)}
    kinds = dict(F=0, B=1, I=1, W=2)
    which = [3 * stage_of[step.rank, op.chunk] + kinds[op.kind] for step, op in zip(order.steps, order.ops)]
    return order, which, [(at, (which[one] // 3, which[at] // 3)) for at, one in order.pairs]


# -- messages of data parallelism before the first pass and after the last -------------------------------------------


def gather_delay(sharding: ShardingTimes, chunks: int, forward: float) -> float:
    """The delay of the chunks' first passes by all-gathers of ZeRO 1 and 2."""
    if sharding.zero not in (1, 2):
        return 0.0
    if not sharding.gather_overlap:
        return chunks * sharding.gather
    held = max((1 - sharding.gather_overlap) * sharding.gather, sharding.gather - forward)
    return held + (chunks - 1) * max(0.0, sharding.gather - forward)


def reduce_delay(sharding: ShardingTimes, chunks: int, backward: float) -> float:
    """The time of reductions of ZeRO 0 and 1 after the chunks' last passes. backward: time of one such pass."""
    if sharding.zero > 1:
        return 0.0
    if not sharding.reduce_overlap:
        return chunks * sharding.reduce
    free = 0.0
    for chunk in range(chunks):
        end = max((chunk + 1) * backward, max(free, chunk * backward) + sharding.reduce_overlap * sharding.reduce)
        free = end + (1 - sharding.reduce_overlap) * sharding.reduce
    return free - chunks * backward
