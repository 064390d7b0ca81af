# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: the ops of each rank in their order. No torch, no processes.

A schedule is a list of ops per rank, built by a pure function. The same list is simulated, verified and drawn
(`check.py`) and run (`execute.py`); without pipeline parallelism it is the list F0 B0 F1 B1 ... of one rank. Two
ranks, three micro-batches:

    >>> for rank in range(2):
    ...     print(*make_schedule("1f1b", rank, pp=2, num_microbatches=3))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2

The *map of stages*, stage -> (rank, chunk), assigns parts of the model to the chunks of ranks. `looped` is the usual one:
the stages go round the ranks, chunk by chunk. `v_shaped` goes there and back. `dependencies` and the verifier take any map.
"""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Optional

from megatron.errors import did_you_mean


class Op(NamedTuple):
    """One piece of work of a rank: a pass of one micro-batch through one of the rank's model chunks.

    kind: F forward, B backward, or B in two halves: I gradient of the input, W gradient of the weights. & between F and B
        (or I) of different micro-batches: the two passes take turns, and each computes while a message of experts of the
        other is under way. Other kinds are messages of data parallelism (`sharding.py`).
    piece: the part of the pass, or of the chunk's weights; "": the whole pass
    """

    kind: str
    micro: int
    chunk: int = 0
    piece: str = ""

    def __str__(self) -> str:
        return (
            self.kind
            if self == BESIDE
            else f"{self.kind}{self.micro}" + f".{self.chunk}" * (self.chunk > 0) + f":{self.piece}" * bool(self.piece)
        )

    @property
    def whole(self) -> "Op":
        """The pass of which this is a piece."""
        return Op(self.kind, self.micro, self.chunk) if self.piece else self


BESIDE = Op("&", 0)

_OP = re.compile(r"([FBIW]|[GgDHhERr](?=.*:))([0-9]+)(?:\.([0-9]+))?(?::(in|out|tied|all|[0-9]+))?")


def parse_op(word: str) -> Op:
    """Parse an op such as `B12`, `F3.1` (of chunk 1) or `G3:0` (of layer 0). Raises ValueError for any other word.

    >>> print(parse_op("I7.1"), parse_op("R0.1:in").piece)
    I7.1 in
    """
    if word == BESIDE.kind:
        return BESIDE
    match = _OP.fullmatch(word)
    if match is None:
        raise ValueError(
            f"{word!r} is no op: F0, B12, I3 and W3, with .1 for chunk 1, and & are; messages are such as G0:1, R0:out "
            "(megatron/pipeline/data_parallel_messages.py)"
        )
    return Op(word[0], int(match[2]), int(match[3] or 0), match[4] or "")


class BrokenSchedule(ValueError):
    """A schedule that would hang, repeat or omit ops, or mix up its messages. `rank`: of the first error, if known"""

    def __init__(self, text: str, rank: Optional[int] = None):
        super().__init__(text)
        self.rank = rank


StageMap = tuple[tuple[int, int], ...]  # stage -> (rank, chunk)


def looped(pp: int, chunks: int = 1) -> StageMap:
    """The map with stage s on rank s % pp as its chunk s // pp.

    >>> looped(2, 2)
    ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    return tuple((rank, chunk) for chunk in range(chunks) for rank in range(pp))


def v_shaped(pp: int, chunks: int = 2) -> StageMap:
    """The map whose stages go down the ranks and back: the first and the last stage are on rank 0.

    >>> v_shaped(2)
    ((0, 0), (1, 0), (1, 1), (0, 1))
    """
    assert chunks == 2, "a V has two arms"
    return tuple((rank, 0) for rank in range(pp)) + tuple((rank, 1) for rank in reversed(range(pp)))


def dependencies(op: Op, rank: int, stages: StageMap) -> list[tuple[int, Op]]:
    """The ops that this op of `rank` waits for, as (rank, op). This function is the whole data flow of a pipeline.

    >>> dependencies(Op("B", 5), rank=1, stages=looped(4))
    [(1, Op(kind='F', micro=5, chunk=0, piece='')), (2, Op(kind='B', micro=5, chunk=0, piece=''))]
    """

    kind, micro, chunk, _ = op
    stage = stages.index((rank, chunk))
    if kind == "W":
        return [(rank, Op("I", micro, chunk))]
    needs = [] if kind == "F" else [(rank, Op("F", micro, chunk))]
    beside = stage - 1 if kind == "F" else stage + 1
    if 0 <= beside < len(stages):
        where, its = stages[beside]
        needs.append((where, Op(kind, micro, its)))
    return needs


def make_schedule(name: str, rank: int, pp: int, num_microbatches: int, chunks: Optional[int] = None) -> list[Op]:
    """The ops of `rank`, in order. `name` is a key of SCHEDULES; chunks: default the schedule's own number.

    Raises ValueError with the messages of `problems`.
    """
    chunks = chunks or default_chunks(name)
    wrong = problems(name, pp, num_microbatches, chunks)
    if wrong:
        raise ValueError("; ".join(wrong))
    return SCHEDULES[name].make(rank, pp, num_microbatches, chunks)


def stage_map(name: str, pp: int, chunks: int = 1) -> StageMap:
    """The map of stages of a schedule."""
    return SCHEDULES[name].stages(pp, chunks)


def default_chunks(name: str) -> int:
    """Model chunks of a rank by default."""
    return SCHEDULES[name].chunks[0] if name in SCHEDULES else 1


def unknown(name: str) -> str:
    """The message for an unknown name of a training schedule."""
    near = did_you_mean(name, TRAINING)
    return f"no pipeline schedule {name!r}: choose from {', '.join(TRAINING)} (or FILE.txt){near}"


def problems(name: str, pp: int, num_microbatches: int, chunks: int = 1) -> list[str]:
    """Reasons why this schedule cannot run, one sentence each; empty when it can."""
    if name not in SCHEDULES:
        return [unknown(name)]
    wrong = []
    low, high = SCHEDULES[name].chunks
    if pp < 1 or chunks < 1:
        return [f"{pp} ranks with {chunks} model chunks each: at least 1 of both is needed"]
    if num_microbatches < 1:
        wrong.append(f"{num_microbatches} micro-batches a step: at least 1 is needed")
    if high is not None and not low <= chunks <= high:
        many = "one model chunk" if high == 1 else f"{high} model chunks"
        wrong.append(f"schedule {name} has {many} a rank, not {chunks}")
    elif chunks < low:
        wrong.append(
            f"schedule {name} needs at least {low} model chunks a rank "
            "(--num-virtual-stages-per-pipeline-rank 2), not 1; with one, 1f1b is the schedule"
        )
    elif pp == 1 and high is None and chunks > 1 and name != "forward-only":
        wrong.append("several model chunks a rank need --pipeline-model-parallel-size of at least 2")
    return wrong


def gpipe(rank: int, pp: int, num_microbatches: int, chunks: int = 1) -> list[Op]:
    """All forward passes, then all backward passes (arXiv:1811.06965). Holds every micro-batch's activations."""
    return _visits("F", pp, num_microbatches, range(chunks)) + _visits("B", pp, num_microbatches, range(chunks)[::-1])


def one_f_one_b(rank: int, pp: int, num_microbatches: int, chunks: int = 1, beside: bool = False) -> list[Op]:
    """Warm up, then one backward after each forward, then drain; Megatron-LM's order.

    One chunk: PipeDream-flush (arXiv:2104.04473, section 2.2.1), at most pp - rank micro-batches alive. Several:
    interleaved (section 2.2.2), the bubble shrinks to (pp - 1) / (chunks x num_microbatches + pp - 1).
    beside: the forward and the backward pass take turns. A rank then works on both at a time, so a micro-batch comes back
    from the next stage two pairs later: one chunk needs as long a warm-up as several, and both need one pass more.
    """
    warmup = pp - rank - 1
    if chunks > 1:
        warmup = 2 * warmup + (chunks - 1) * len(_groups(pp, num_microbatches)[0]) + beside
    elif beside:
        warmup = 2 * warmup + 1
    forward = _visits("F", pp, num_microbatches, range(chunks))
    backward = _visits("B", pp, num_microbatches, range(chunks)[::-1])
    warmup = min(warmup, len(forward))
    between = [BESIDE] * beside
    steady = [op for one, back in zip(forward[warmup:], backward) for op in (one, *between, back)]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


def zb_h1(rank: int, pp: int, num_microbatches: int, chunks: int = 1, beside: bool = False) -> list[Op]:
    """1F1B with a split backward pass, W delayed by `rank` (arXiv:2401.10241, section 2).

    The input's gradient is sent immediately, the weights' gradient fills the bubble, of which a third remains. No rank
    holds more than pp activations, as 1F1B's first rank.
    """
    order, waiting = [], []
    for op in one_f_one_b(rank, pp, num_microbatches, chunks, beside):
        if op.kind != "B":
            order.append(op)
            continue
        order.append(op._replace(kind="I"))
        waiting.append(op._replace(kind="W"))
        if len(waiting) > rank:
            order.append(waiting.pop(0))
    return order + waiting


def zb_v(rank: int, pp: int, num_microbatches: int, chunks: int = 2, beside: bool = False) -> list[Op]:
    """Two chunks per rank in a V, with a split backward pass: almost no bubble (after ZB-V of arXiv:2405.15362).

    Every rank holds pp micro-batches, as 1F1B's first rank; half as many more if passes take turns.
    """
    return list(_packed(pp, num_microbatches, 3 * pp + 2 if beside else 2 * pp, beside)[rank])


def v_half(rank: int, pp: int, num_microbatches: int, chunks: int = 2, beside: bool = False) -> list[Op]:
    """The same V in half the memory: pp / 2 + 1 micro-batches on every rank (after V-Half of arXiv:2405.15362).

    With passes that take turns these are pp + 1.
    """
    return list(_packed(pp, num_microbatches, (2 if beside else 1) * pp + 2, beside)[rank])


def forward_only(rank: int, pp: int, num_microbatches: int, chunks: int = 1) -> list[Op]:
    """Only forward passes: evaluation, on any map of stages."""
    return _visits("F", pp, num_microbatches, range(chunks))


class Schedule(NamedTuple):
    """A named schedule: its function, and the chunks and stages it needs."""

    make: Callable  # (rank, pp, num_microbatches, chunks) -> ops of the rank
    chunks: tuple[int, Optional[int]] = (1, None)  # fewest and most model chunks of a rank
    stages: Callable = looped  # (pp, chunks) -> map of stages
    split: bool = False  # the backward pass is split into I and W


SCHEDULES = {
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(one_f_one_b, chunks=(2, None)),
    "zb-h1": Schedule(zb_h1, chunks=(1, 1), split=True),
    "zb-v": Schedule(zb_v, chunks=(2, 2), stages=v_shaped, split=True),
    "v-half": Schedule(v_half, chunks=(2, 2), stages=v_shaped, split=True),
    "forward-only": Schedule(forward_only),
}

TRAINING = tuple(name for name in SCHEDULES if name != "forward-only")


def in_turns(name: str) -> str:
    """The name of the schedule whose forward and backward passes take turns (`Op`); not all have one."""
    return f"{name} &"


SCHEDULES |= {
    in_turns(name): own._replace(make=partial(own.make, beside=True))
    for name, own in SCHEDULES.items()
    if name not in ("gpipe", "forward-only")  # a backward pass comes after all forward passes, or there is none
}


def _visits(kind: str, pp: int, num_microbatches: int, chunks) -> list[Op]:
    """Every (micro, chunk) once: a group of micro-batches goes through all chunks before the next group."""
    return [Op(kind, micro, chunk) for group in _groups(pp, num_microbatches) for chunk in chunks for micro in group]


def _groups(pp: int, num_microbatches: int) -> list[range]:
    """Micro-batches in even groups of at least pp: with smaller groups the interleaved schedule would hang.

    >>> _groups(4, 8), _groups(4, 11)
    ([range(0, 4), range(4, 8)], [range(0, 6), range(6, 11)])
    """
    count = max(1, num_microbatches // pp)
    ends = [(num_microbatches * n + count - 1) // count for n in range(count + 1)]
    return [range(start, end) for start, end in zip(ends, ends[1:])]


@lru_cache(maxsize=64)  # every rank takes its row of the same plan, at every step; a search, of many plans
def _packed(pp: int, num_microbatches: int, limit: int, beside: bool = False) -> tuple[tuple[Op, ...], ...]:
    """A V-shaped schedule by simulation: at each tick every idle rank runs its first op with available inputs.

    All ops take one tick. A rank prefers, in this order, ops that feed its neighbours (F of the way back, I, F of the way
    out), and fills gaps with W. It holds at most `limit` (micro, chunk) activations: a micro-batch only enters if there is
    also room for its way back, so that no rank can get stuck. beside: if F and I are both available, they take turns for
    two ticks; if one of them is, W comes first, and then the other one may be available, too.
    """
    last = 2 * pp - 1
    ends = {kind: [[] for _ in range(last + 1)] for kind in "FIW"}  # of each stage's passes, in order of micro-batches
    needs = [
        dict(F=[("F", at - 1)][: at > 0], I=[("F", at), ("I", at + 1)][: 1 + (at < last)], W=[("I", at)])
        for at in range(last + 1)
    ]
    waits = {(kind, at): [ends[one][stage] for one, stage in own[kind]] for at, own in enumerate(needs) for kind in own}
    # Of each rank, passes in the order in which it prefers them: kind, chunk, their ends, those of what they wait for.
    eager = [
        [(kind, chunk, ends[kind][at := last - rank if chunk else rank], waits[kind, at]) for kind, chunk in _EAGER]
        for rank in range(pp)
    ]
    full = [[one for one in own if one[:2] != ("F", 0)] for own in eager]  # there is no room for another micro-batch
    plan: list[list[Op]] = [[] for _ in range(pp)]
    tick, free, left = 0, [0] * pp, 2 * pp * num_microbatches  # passes W

    def ready(rank: int, most: int) -> list[VisitEnds]:
        held = 2 * len(ends["F"][rank]) - len(ends["W"][rank]) - len(ends["W"][last - rank])
        return _available(eager[rank] if limit - held >= 2 else full[rank], num_microbatches, tick, most)

    def chosen(rank: int) -> list[VisitEnds]:
        if not beside:
            return ready(rank, 1)
        every = ready(rank, len(_EAGER))
        first = {one[0]: one for one in reversed(every)}
        if {"F", "I"} <= first.keys():
            return [first["F"], first["I"]]
        back = last - rank
        mixed = len(ends["I"][back]) > 0 and len(ends["F"][back]) < num_microbatches  # both kinds are to come
        return [first["W"]] if mixed and "W" in first else every[:1]

    while left:
        for rank in range(pp):
            if free[rank] > tick:
                continue
            begun = chosen(rank)
            free[rank] = tick + max(1, len(begun))
            ops = [Op(kind, len(own), chunk) for kind, chunk, own, _ in begun]
            plan[rank] += [ops[0], BESIDE, ops[1]] if len(ops) == 2 else ops
            for kind, _, own, _ in begun:
                own.append(free[rank])
                left -= kind == "W"
        tick += 1
    return tuple(map(tuple, plan))


# Passes of a rank of one kind: kind, chunk, when those that are over ended, when those ended that they wait for.
VisitEnds = tuple[str, int, list[int], list[list[int]]]


def _available(passes: list[VisitEnds], num_microbatches: int, tick: int, most: int) -> list[VisitEnds]:
    """The first of these whose next pass has its inputs."""
    found = []
    for one in passes:
        _, _, own, waited = one
        micro = len(own)
        for times in waited:
            if micro == num_microbatches or len(times) <= micro or times[micro] > tick:
                break
        else:
            if micro < num_microbatches:
                found.append(one)
                if len(found) == most:
                    break
    return found


_EAGER = (("F", 1), ("I", 0), ("F", 0), ("I", 1), ("W", 1), ("W", 0))
