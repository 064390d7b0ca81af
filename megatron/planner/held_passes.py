# SPDX-License-Identifier: Apache-2.0
"""The activations that a rank of a pipeline schedule holds at a time, for any number of micro-batches.

Warm schedules are periodic: the maximum of held activations is reached within a few rounds, so that long schedules are
extrapolated from shorter ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import ge

from megatron.pipeline.custom_schedule import is_file, read_schedule
from megatron.pipeline.schedule import BESIDE, SCHEDULES, Op, make_schedule, v_shaped

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
    # Whole rounds of pp micro-batches less: an interleaved schedule of another number holds more.
    few = num_microbatches if num_microbatches < 4 * pp else 3 * pp + num_microbatches % pp
    return _most_held(schedule, pp, few, chunks, rank, together)


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
    most = _not_below(flat)
    return tuple(value for key, value in flat.items() if key in most)


def _not_below(counts: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Those that are not smaller than another one in every place.

    >>> sorted(_not_below([(1, 2), (2, 1), (1, 1)]))
    [(1, 2), (2, 1)]
    """
    most: list[tuple[int, ...]] = []
    for key in sorted(counts, key=sum, reverse=True):  # one above another has a larger sum
        if not any(all(map(ge, other, key)) for other in most):
            most.append(key)
    return set(most)


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
        pp, rank = LARGE, min(LARGE - 1, rank * LARGE // pp)
    if is_file(schedule) or num_microbatches <= 5 * pp:
        return _starts(schedule, pp, num_microbatches, chunks, rank, among)
    # A round is pp micro-batches; in the middle of a step each has as many.
    near = 3 * pp + num_microbatches % pp
    few, more = (_starts(schedule, pp, number, chunks, rank, among) for number in (near, near + pp))
    return few + (more - few) * (num_microbatches - near) // pp


def _starts(schedule: str, pp: int, num_microbatches: int, chunks: int, rank: int, among: tuple[int, ...]) -> int:
    held = count = 0
    for op in ops_of(schedule, pp, num_microbatches, chunks, rank):
        if op.chunk in among and op.kind != "W" and op != BESIDE:
            count += op.kind == "F" and held == 0
            held += 1 if op.kind == "F" else -1
    return count
