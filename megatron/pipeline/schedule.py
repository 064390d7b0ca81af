# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: what each rank computes, in what order. No torch, no processes.

A schedule is a list of ops per rank, made by a pure function. The same list is simulated, verified and drawn
(`check.py`) and run (`execute.py`); without pipeline parallelism it is the list F0 B0 F1 B1 ... of one rank. Two
ranks, three micro-batches:

    >>> for rank in range(2):
    ...     print(*make_schedule("1f1b", rank, pp=2, micros=3))
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2

Which part of the model a rank's chunk is says the *map of stages*: stage -> (rank, chunk). `looped` is the usual one:
the stages go round the ranks, chunk by chunk. `needs` and the verifier take any map.
"""

from typing import NamedTuple


class Op(NamedTuple):
    """One piece of work of a rank: a pass of one micro-batch through one of the rank's model chunks.

    kind: F forward, B backward, or B in two halves: I gradient of the input, W gradient of the weights.
    """

    kind: str
    micro: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}" + f".{self.chunk}" * (self.chunk > 0)


Stages = tuple[tuple[int, int], ...]  # stage -> (rank, chunk)


def looped(pp: int, chunks: int = 1) -> Stages:
    """Stage s lies on rank s % pp as its chunk s // pp.

    >>> looped(2, 2)
    ((0, 0), (1, 0), (0, 1), (1, 1))
    """
    return tuple((rank, chunk) for chunk in range(chunks) for rank in range(pp))


def needs(op: Op, rank: int, stages: Stages) -> list[tuple[int, Op]]:
    """The ops that this op of `rank` waits for, as (rank, op). These lines are the whole data flow of a pipeline.

    >>> needs(Op("B", 5), rank=1, stages=looped(4))
    [(1, Op(kind='F', micro=5, chunk=0)), (2, Op(kind='B', micro=5, chunk=0))]
    """

    def at(kind: str, stage: int) -> tuple[int, Op]:
        where, chunk = stages[stage]
        return where, Op(kind, op.micro, chunk)

    stage = stages.index((rank, op.chunk))
    if op.kind == "F":
        return [at("F", stage - 1)] if stage > 0 else []
    if op.kind == "W":
        return [at("I", stage)]
    return [at("F", stage)] + ([at(op.kind, stage + 1)] if stage < len(stages) - 1 else [])


def make_schedule(name: str, rank: int, pp: int, micros: int, chunks: int = 1) -> list[Op]:
    """The ops of `rank`, in order. `name` is a key of SCHEDULES. Raises ValueError for what `problems` names."""
    wrong = problems(name, pp, micros, chunks)
    if wrong:
        raise ValueError("; ".join(wrong))
    return SCHEDULES[name](rank, pp, micros, chunks)


def problems(name: str, pp: int, micros: int, chunks: int = 1) -> list[str]:
    """Why this schedule cannot run: one sentence each; empty when it can."""
    if name not in SCHEDULES:
        return [f"no pipeline schedule {name!r}: choose from {', '.join(SCHEDULES)}"]
    found = []
    if micros < 1:
        found.append(f"{micros} micro-batches a step: at least 1 is needed")
    if chunks > 1 and pp == 1:
        found.append("several model chunks a rank need --pipeline-model-parallel-size of at least 2")
    if chunks > 1 and name == "zb-h1":
        found.append("schedule zb-h1 has one model chunk a rank")
    if chunks > 1 and pp > 1 and name == "1f1b" and micros % pp:
        near = " or ".join(str(n) for n in (micros // pp * pp, micros // pp * pp + pp) if n)
        found.append(
            f"the interleaved schedule needs micro-batches in groups of --pipeline-model-parallel-size {pp}: "
            f"{micros} is no multiple; {near} would work (--global-batch-size, --micro-batch-size)"
        )
    return found


def gpipe(rank: int, pp: int, micros: int, chunks: int = 1) -> list[Op]:
    """All forward passes, then all backward passes (arXiv:1811.06965). Holds every micro-batch's activations."""
    return _visits("F", pp, micros, range(chunks)) + _visits("B", pp, micros, range(chunks)[::-1])


def one_f_one_b(rank: int, pp: int, micros: int, chunks: int = 1) -> list[Op]:
    """Warm up, then one backward after each forward, then drain; Megatron-LM's order.

    One chunk: PipeDream-flush (arXiv:2104.04473, section 2.2.1), at most pp - rank micro-batches alive. Several:
    interleaved (section 2.2.2), the bubble shrinks to (pp - 1) / (chunks x micros + pp - 1).
    """
    warmup = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp
    forward = _visits("F", pp, micros, range(chunks))
    backward = _visits("B", pp, micros, range(chunks)[::-1])
    warmup = min(warmup, len(forward))
    steady = [op for pair in zip(forward[warmup:], backward) for op in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


def zb_h1(rank: int, pp: int, micros: int, chunks: int = 1) -> list[Op]:
    """1F1B whose backward is split, with W lagging by `rank` (arXiv:2401.10241, section 2).

    The input's gradient travels on at once, the weights' gradient fills what was the bubble: about a third of 1F1B's
    is left, with no more than pp activations alive on any rank, as on 1F1B's first.
    """
    order, waiting = [], []
    for op in one_f_one_b(rank, pp, micros, chunks):
        if op.kind == "F":
            order.append(op)
            continue
        order.append(op._replace(kind="I"))
        waiting.append(op._replace(kind="W"))
        if len(waiting) > rank:
            order.append(waiting.pop(0))
    return order + waiting


def forward_only(rank: int, pp: int, micros: int, chunks: int = 1) -> list[Op]:
    """Forward passes alone: evaluation."""
    return _visits("F", pp, micros, range(chunks))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "forward-only": forward_only}


def _visits(kind: str, pp: int, micros: int, chunks) -> list[Op]:
    """Every (micro, chunk) once: micro-batches in groups of pp, each group through all chunks before the next one."""
    groups = [range(start, min(start + pp, micros)) for start in range(0, micros, pp)]
    return [Op(kind, micro, chunk) for group in groups for chunk in chunks for micro in group]
