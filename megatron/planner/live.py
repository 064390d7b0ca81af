# SPDX-License-Identifier: Apache-2.0
"""The activations that a pipeline schedule holds, and its length, for any number of micro-batches.

Warm schedules are periodic, so long ones are extrapolated from shorter ones: the maximum of held activations is
reached within a few rounds, and each further round adds the same time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron.pipeline.custom_schedule import is_file, read_schedule
from megatron.pipeline.schedule import BESIDE, SCHEDULES, Op, make_schedule, stage_map, v_shaped
from megatron.pipeline.simulate import make_rank_schedules, simulate

LARGE = 16  # ranks of a V-shaped schedule that are simulated; larger ones are extrapolated

Held = tuple[tuple[int, ...], tuple[int, ...]]  # per chunk: passes between F and B (or I), and between I and W


def most_held(
    schedule: str, pp: int, num_microbatches: int, chunks: int, rank: int, together: bool = False
) -> tuple[Held, ...]:
    """The counts of held activations at a rank's fullest moments. No entry is smaller than another one in every place.

    Of two passes that take turns, the backward pass frees a layer's activations for each layer that the forward pass adds.
    together: it is slower, and both count (`Layout.lags`)
    """
    if schedule == "gpipe":
        return (((num_microbatches,) * chunks, (0,) * chunks),)
    if is_file(schedule):
        return _most_held(schedule, pp, num_microbatches, chunks, rank, together)
    if pp > LARGE and SCHEDULES[schedule].stages is v_shaped:  # needs a simulation, which is slow
        place = min(LARGE - 1, rank * LARGE // pp)
        fewer = min(max(1, num_microbatches * LARGE // pp), 3 * LARGE + 3)
        few = _most_held(schedule, LARGE, fewer, chunks, place, together)
        return tuple(tuple(tuple(-(-n * pp // LARGE) for n in side) for side in held) for held in few)
    return _most_held(schedule, pp, min(num_microbatches, 3 * pp + 3), chunks, rank, together)


@lru_cache(maxsize=8192)
def _most_held(
    schedule: str, pp: int, num_microbatches: int, chunks: int, rank: int, together: bool
) -> tuple[Held, ...]:
    alive, waiting, seen = [0] * chunks, [0] * chunks, set()
    for op in _as_held(ops_of(schedule, pp, num_microbatches, chunks, rank), together):
        if op.kind == "F":
            alive[op.chunk] += 1
        elif op.kind == "W":
            waiting[op.chunk] -= 1
        else:
            alive[op.chunk] -= 1
            waiting[op.chunk] += op.kind == "I"
        seen.add((tuple(alive), tuple(waiting)))
    flat = {(*held, *late): (held, late) for held, late in seen}
    return tuple(
        value
        for key, value in flat.items()
        if not any(other != key and all(a >= b for a, b in zip(other, key)) for other in flat)
    )


def _as_held(ops: Sequence[Op], together: bool) -> Iterator[Op]:
    """The passes in the order in which they count. F & B: B first, unless both count.

    >>> print(*_as_held(ops_of("1f1b &", 1, 3, 1, 0), False), "|", *_as_held(ops_of("1f1b &", 1, 3, 1, 0), True))
    F0 B0 F1 B1 F2 B2 | F0 F1 B0 F2 B1 B2
    """
    later = None
    for op, following in zip(ops, [*ops[1:], None]):
        if following == BESIDE and not together:
            later = op
        elif op != BESIDE:
            yield op
            if later:
                yield later
                later = None


def ops_of(schedule: str, pp: int, num_microbatches: int, chunks: int, rank: int) -> Sequence[Op]:
    """The ops of a rank in a named schedule or a schedule file."""
    if is_file(schedule):
        return read_schedule(schedule).plan[rank]
    return make_schedule(schedule, rank, pp, num_microbatches, chunks)


@lru_cache(maxsize=8192)
def starts(schedule: str, pp: int, num_microbatches: int, chunks: int, rank: int, among: tuple[int, ...]) -> int:
    """How many times per step a rank starts work on some of its chunks without holding any of their activations."""
    if schedule == "gpipe" or pp == 1:
        return 1 if schedule == "gpipe" else num_microbatches
    if pp > LARGE and not is_file(schedule) and SCHEDULES[schedule].stages is v_shaped:
        few = max(1, num_microbatches * LARGE // pp)
        count = starts(schedule, LARGE, few, chunks, min(LARGE - 1, rank * LARGE // pp), among)
        return count if count == 1 else count + num_microbatches - few
    short = min(num_microbatches, 3 * pp + 3)
    held = count = 0
    for op in ops_of(schedule, pp, short, chunks, rank):
        if op.chunk in among and op.kind != "W" and op != BESIDE:
            count += op.kind == "F" and held == 0
            held += 1 if op.kind == "F" else -1
    return count if count == 1 or is_file(schedule) else count + num_microbatches - short


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
        return _span(schedule, pp, num_microbatches, chunks, backward, split)
    if not exact and pp > SMALL:  # gaps grow only with the number of ranks
        fewer = max(1, round(num_microbatches * SMALL / pp))
        small = span(schedule, SMALL, fewer, chunks, backward=backward, split=split)
        return num_microbatches * chunks * whole + (small - fewer * chunks * whole) * (pp - 1) / (SMALL - 1)
    if num_microbatches <= 4 * pp:
        return _span(schedule, pp, num_microbatches, chunks, backward, split)
    # A round is pp micro-batches; each further round adds the same time.
    near = 2 * pp + num_microbatches % pp
    short, longer = (_span(schedule, pp, m, chunks, backward, split) for m in (near, near + pp))
    return short + (longer - short) * (num_microbatches - near) / pp


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


SMALL = 6  # ranks that a search simulates; more are extrapolated


@lru_cache(maxsize=8192)
def _span(schedule: str, pp: int, num_microbatches: int, chunks: int, backward: float, split: float) -> float:
    cost = dict(F=1.0, B=backward, I=backward * split, W=backward * (1 - split))
    if is_file(schedule):
        own = read_schedule(schedule)
        times = simulate(own.plan, own.stages, cost)
    else:
        times = simulate(
            make_rank_schedules(schedule, pp, num_microbatches, chunks), stage_map(schedule, pp, chunks), cost
        )
    return max(end for _, end in times.values())


def is_split(schedule: str) -> bool:
    """Whether weight gradients have separate passes."""
    return read_schedule(schedule).split if is_file(schedule) else SCHEDULES[schedule].split
