# SPDX-License-Identifier: Apache-2.0
"""Prove that the messages of data parallelism in a rank's list are right, before anything runs. Pure."""

from collections import Counter
from collections.abc import Sequence

from megatron.pipeline.schedule import BrokenSchedule, Op
from megatron.pipeline.sharding import (
    ALL,
    FORWARD,
    IN,
    MESSAGES,
    OUT,
    STARTED,
    TIED,
    Chunk,
    Group,
    Listed,
    Sharding,
    group_of,
    groups_of,
    passes_of,
    steps_of,
)


def verify_messages(listed: Listed, chunks: Sequence[Chunk], how: Sharding) -> None:
    """Prove that a rank's list is correct, or raise BrokenSchedule with the first error.

    Pieces come in the order in which a pass computes them. All weights are there when a pass uses them, and are freed
    after it (ZeRO 3). Each gradient is reduced once, after it is complete. Every message is waited for.
    """
    _verify_pieces(listed, chunks)
    proof = _Proof(chunks, how, passes_of(listed.ops))
    for op in (op for part in listed for op in part):
        proof.add(op)
    proof.end()


def _verify_pieces(listed: Listed, chunks: Sequence[Chunk]) -> None:
    for op, inside in steps_of(listed.ops):
        pieces = [one.piece for one in inside if one.kind not in MESSAGES]
        chunk = chunks[op.chunk]
        wanted = chunk.pieces if op.kind == "F" else chunk.backward() or [OUT]
        if pieces not in ([], [""], wanted):
            raise BrokenSchedule(f"the pieces of {op} are {' '.join(pieces)} instead of {' '.join(wanted)}")
        strange = [one for one in inside if one.kind not in MESSAGES and one.whole != op]
        if strange:
            raise BrokenSchedule(f"{strange[0]} stands inside {op}: only messages may")


class _Proof:
    """What a rank has, and what it owes, after each op of its list."""

    def __init__(self, chunks: Sequence[Chunk], how: Sharding, passes: Sequence[Op]):
        self.chunks, self.how, self.seen = chunks, how, set[Op]()
        self.weights = {group: "not there" for group, _ in groups_of(chunks)}
        self.kind = "W" if any(op.kind == "W" for op in passes) else "B"  # of passes that complete gradients
        self.owed = {group: Counter() for group, trained in groups_of(chunks) if trained}  # (micro, chunk) not reduced
        self.total = Counter(  # gradients of a step
            group
            for op in passes
            for piece in (chunks[op.chunk].backward() if op.kind == self.kind else ())
            for group in chunks[op.chunk].gradients(op.chunk, piece)
        )
        self.under_way: list[Op] = []  # reductions

    def add(self, op: Op) -> None:
        if op in self.seen:
            raise BrokenSchedule(f"{op} is there twice")
        self.seen.add(op)
        if op.kind not in MESSAGES:
            chunk = self.chunks[op.chunk]
            for piece in [op.piece] if op.piece else chunk.pieces if op.kind == "F" else chunk.backward():
                self.compute(op, piece)
        elif op.piece == ALL and op.kind == "R":
            self.sum_all(op)
        elif group_of(op) not in (self.owed if op.kind in "Rr" else self.weights):
            raise BrokenSchedule(f"{op}: the rank has no {'gradients' if op.kind in 'Rr' else 'weights'} of that name")
        elif op.kind in "Rr":
            self.reduce(op)
        else:
            self.move(op)

    def compute(self, op: Op, piece: str) -> None:
        """A piece of a pass uses weights, and may complete gradients."""
        chunk, own = self.chunks[op.chunk], (op.chunk, piece)
        used = chunk.roots(op.chunk) + [own] * (own in self.weights and piece not in (IN, OUT))
        for group in used if op.kind != "W" else ():
            if self.weights[group] != "there":
                raise BrokenSchedule(f"{op} uses the weights of {_name(group)}, which are {self.weights[group]}")
        for group in chunk.gradients(op.chunk, piece) if op.kind == self.kind else ():
            self.owed[group][op.micro, op.chunk] += 1

    def move(self, op: Op) -> None:
        """Gather or free weights."""
        before, after = {
            "G": ("not there", "on their way"),
            "g": ("on their way", "there"),
            "D": ("there", "not there"),
        }[FORWARD.get(op.kind, op.kind)]
        group = group_of(op)
        if self.weights[group] != before:
            raise BrokenSchedule(
                f"{op} needs weights of {_name(group)} that are {before}; they are {self.weights[group]}"
            )
        self.weights[group] = after

    def reduce(self, op: Op) -> None:
        """Start a reduction of complete gradients, or wait for the oldest that is under way."""
        if op.kind == "r":
            if not self.under_way or self.under_way.pop(0) != op._replace(kind=STARTED["r"]):
                raise BrokenSchedule(f"{op} waits for a reduction that is not the oldest under way")
            return
        owed = self.owed[group_of(op)]
        complete = owed.total() == self.total[group_of(op)] if self.how.zero < 2 else owed[op.micro, op.chunk]
        if not owed.total() or not complete:
            raise BrokenSchedule(f"{op} reduces gradients that are not complete, or that were reduced before")
        owed.clear() if self.how.zero < 2 else owed.pop((op.micro, op.chunk))
        self.under_way.append(op)

    def sum_all(self, op: Op) -> None:
        if not self.how.sharded and not self.how.reduce_beside:
            for group, owed in self.owed.items():
                if owed.total() != self.total[group]:
                    raise BrokenSchedule(f"{op} reduces gradients of {_name(group)} that are not complete")
                owed.clear()
        if self.under_way:
            raise BrokenSchedule(f"{op} comes before {self.under_way[0]} is waited for")

    def end(self) -> None:
        """After the last op: nothing is owed, on its way or, with ZeRO 3, left."""
        if self.under_way:
            raise BrokenSchedule(f"nothing waits for {self.under_way[0]}")
        for group, owed in self.owed.items():
            if owed.total():
                raise BrokenSchedule(f"gradients of {_name(group)} are never reduced")
        if any(self.total.values()) and Op("R", 0, 0, ALL) not in self.seen:
            raise BrokenSchedule("R0:all is missing: the sum over ranks that hold the same shard")
        for group, state in self.weights.items() if self.how.zero == 3 else ():
            if state != "not there":
                raise BrokenSchedule(f"the weights of {_name(group)} are never freed")


def _name(group: Group) -> str:
    chunk, piece = group
    return f"chunk {chunk}, {piece if piece in (IN, OUT, TIED) else f'layer {piece}'}"
