# SPDX-License-Identifier: Apache-2.0
"""Messages of data parallelism as ops of a schedule: gathers of weights, reductions of gradients. Pure.

`list_messages` puts them into the passes of a rank and proves the list (`verify_messages`), the simulator times it
(`simulate.py`), and a training step runs it (`execute.py`, `optimizer/messages.py`). A pass with messages inside
is a row of *pieces*: `in` (the embedding), the layers of its chunk from 0, `out` (last norm, output layer, loss).

| op              | what                                                                                 |
|-----------------|--------------------------------------------------------------------------------------|
| F3:2 B3:2 W3:2  | layer 2 in the forward pass (backward pass, pass W) of micro-batch 3                  |
| G3:2 g3:2 D3:2  | the all-gather of layer 2's weights for F3 starts, has arrived; the weights are freed |
| H3:2 h3:2 E3:2  | the same for the backward pass                                                       |
| R3:2 r3:2       | the reduction of layer 2's gradients starts, is added up                             |
| R0:all          | the sum over ranks that hold the same shard; without any, of all gradients           |

A chunk is written as in F3.1:2. Weights that several chunks of a rank share are `tied`. ZeRO 3, a
layer after the other, with both overlaps:

    >>> how = Sharding(zero=3, gather_ahead=True, reduce_beside=True)
    >>> listed = list_messages([Op("F", 0), Op("B", 0)], [ChunkPieces(2, held=("0", "1"), trained=("0", "1"))], how)
    >>> print(*listed.ops)
    G0:0 F0:in g0:0 G0:1 F0:0 D0:0 g0:1 F0:1 D0:1 F0:out H0:1 B0:out h0:1 H0:0 B0:1 R0:1 E0:1 h0:0 B0:0 R0:0 r0:1 E0:0
    >>> print(*listed.after)
    r0:0 R0:all
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megatron.pipeline.schedule import BESIDE, BrokenSchedule, Op

GATHERS = {"F": "GgD", "B": "HhE", "I": "HhE"}  # pass -> its gather starts, has arrived, is freed
FORWARD = dict(H="G", h="g", E="D")  # a message for a backward pass -> the same for a forward pass
STARTED = {"g": "G", "h": "H", "r": "R"}  # the end of a message -> its start
MESSAGES = frozenset("GgDHhERr")
IN, OUT, TIED, ALL = "in", "out", "tied", "all"

Group = tuple[int, str]  # chunk and piece: weights that are gathered and reduced together


@dataclass(frozen=True)
class Sharding:
    """When a rank sends: the ZeRO stage, and what overlaps with computation.

    sharded: ranks divide gradients; otherwise they hold copies. gather_ahead, reduce_beside: --overlap-param-gather,
    --overlap-grad-reduce
    """

    zero: int
    sharded: bool = True
    gather_ahead: bool = False
    reduce_beside: bool = False


@dataclass(frozen=True)
class ChunkPieces:
    """The pieces of a rank's model chunk. held: those with weights of their own; trained: those with gradients.

    learns: something before the chunk is trained, so that all its layers have a backward pass
    tied: it uses weights that several chunks share, and whether these are trained
    """

    layers: int
    held: Sequence[str]
    trained: Sequence[str]
    learns: bool = False
    tied: Optional[bool] = None

    @property
    def pieces(self) -> list[str]:
        """All pieces, in the order of a forward pass."""
        return [IN, *map(str, range(self.layers)), OUT]

    def backward(self) -> list[str]:
        """The pieces with a backward pass, in its order."""
        names = self.pieces
        first = 0 if self.learns or self.tied else min((names.index(name) for name in self.trained), default=len(names))
        return names[first:][::-1]

    def roots(self, number: int) -> list[Group]:
        """Weights that passes of the chunk, which has this number, use throughout."""
        return [(0, TIED)] * (self.tied is not None) + [(number, name) for name in (IN, OUT) if name in self.held]

    def gradients(self, number: int, piece: str) -> list[Group]:
        """The weights whose gradients are complete after a piece of a pass B or W. number: of the chunk."""
        own = [(number, piece)] * (piece in self.trained)
        return own + [(0, TIED)] * bool(self.tied and piece == IN)


class Listed(NamedTuple):
    """The ops of a rank in a step. before: from the last update to the first pass; after: from the last pass on."""

    before: list[Op]
    ops: list[Op]
    after: list[Op]


Step = list[tuple[Op, list[Op]]]


def steps_of(ops: Iterable[Op]) -> Iterator[Step]:
    """The parts of a list that a rank runs one after the other: a message, with []; or a pass, with what is inside; or two
    passes that take turns.
    """
    ops = list(ops)
    last = {op.whole: place for place, op in enumerate(ops) if _is_pass(op)}
    place, step = 0, Step()
    while place < len(ops):
        op = ops[place]
        end = last[op.whole] if _is_pass(op) else place
        step.append((op.whole, ops[place : end + 1]) if _is_pass(op) else (op, []))
        place = end + 1
        if ops[place : place + 1] == [BESIDE]:
            place += 1
        else:
            yield step
            step = []
    if step:
        yield step


def passes_of(ops: Iterable[Op]) -> list[Op]:
    """The passes of a list, one after the other, without messages and pieces."""
    ops, cut = list(filter(_is_pass, ops)), set()
    return [op.whole for op in ops if not op.piece or not (op.whole in cut or cut.add(op.whole))]


def pairs_of(ops: Iterable[Op]) -> dict[Op, Op]:
    """The passes that take turns: F -> B or I."""
    return {step[0][0]: step[1][0] for step in steps_of(ops) if len(step) > 1}


def without_messages(ops: Iterable[Op]) -> list[Op]:
    """The passes of a list, with & between those that take turns."""
    ops = list(ops)
    pairs = pairs_of(ops)
    return [one for op in passes_of(ops) for one in ((op, BESIDE) if op in pairs else (op,))]


def apart(ops: Iterable[Op]) -> list[Op]:
    """The same list with all passes one after the other."""
    return [op for op in ops if op != BESIDE]


def _is_pass(op: Op) -> bool:
    return op.kind not in MESSAGES and op != BESIDE


# ---- from passes to a list ---------------------------------------------------------------------------------------------


def list_messages(ops: Sequence[Op], chunks: Sequence[ChunkPieces], how: Sharding) -> Listed:
    """Put the messages of data parallelism into the passes of a rank, and prove the list.

    ops: the passes; or a list that has its messages, but for those after the update and R0:all. chunks: of the rank, by
    number. Raises BrokenSchedule with the first error.
    """
    listed = _Lister(ops, chunks, how).listed()
    if any(op.kind in MESSAGES for op in ops):
        end = 1 + max(place for place, op in enumerate(ops) if _is_pass(op))
        listed = Listed(listed.before, list(ops[:end]), [*ops[end:], *listed.after[-1:]])
    verify_messages(listed, chunks, how)
    return listed


class _Lister:
    def __init__(self, ops: Sequence[Op], chunks: Sequence[ChunkPieces], how: Sharding):
        self.passes, self.pairs, self.chunks, self.how = passes_of(ops), pairs_of(ops), chunks, how
        kinds = {op.kind for op in self.passes}
        self.trains, self.last_kind = bool(kinds - {"F"}), "W" if "W" in kinds else "B"
        self.first = {op.chunk: op for op in reversed(self.passes) if op.kind == "F"}
        self.last = {op.chunk: op for op in self.passes if op.kind == self.last_kind}
        self.alive = Counter[Group]()  # weights used throughout passes -> passes F whose backward pass has not come
        self.under_way: list[Op] = []  # reductions

    def listed(self) -> Listed:
        groups = groups_of(self.chunks)
        # A chunk waits for these first
        use = sorted(groups, key=lambda group: (group[0], group[1] not in (IN, OUT, TIED)))
        gathers = [Op("G", 0, *group) for group in use] if self.how.zero < 3 else []
        if not self.how.gather_ahead:
            gathers += list(map(_end, gathers))
        ops: list[Op] = []
        second = set(self.pairs.values())
        for op in self.passes:
            if op not in second:
                ops += self.together(op, self.pairs[op]) if op in self.pairs else self.alone(op)
        after = []
        if self.how.zero < 2 and self.how.sharded and not self.how.reduce_beside:
            after = self.under_way = [Op("R", 0, *group) for group, trained in groups.items() if trained]
        after = [*after, *map(_end, self.under_way), Op("R", 0, 0, ALL)]
        return Listed(gathers, ops, after if self.trains else [])

    def alone(self, op: Op) -> list[Op]:
        """A pass with its messages."""
        return [*self.before(op), *self.inside(op), *self.behind(op)]

    def together(self, op: Op, other: Op) -> list[Op]:
        """Two passes that take turns. What comes before or after them is no part of a turn."""
        before = [*self.before(op), *self.before(other)]
        return [*before, *self.inside(op), BESIDE, *self.inside(other), *self.behind(op), *self.behind(other)]

    def message(self, op: Op, kind: str, names: Iterable[str]) -> list[Op]:
        return [Op(kind, 0 if self.is_first(op) else op.micro, op.chunk, name) for name in names]

    def is_first(self, op: Op) -> bool:
        """Whether a pass waits for the gathers after the update."""
        return self.how.zero < 3 and self.how.gather_ahead and op == self.first.get(op.chunk)

    def gathers(self, op: Op) -> bool:
        """Whether a pass has gathers of its own."""
        return self.how.zero == 3 and op.kind != "W"

    def names(self, op: Op) -> list[str]:
        chunk = self.chunks[op.chunk]
        return chunk.pieces if op.kind == "F" else chunk.backward()

    def layers(self, op: Op) -> list[str]:
        """The layers that a pass waits for."""
        if not (self.gathers(op) or self.is_first(op)):
            return []
        return [name for name in self.names(op) if name in self.chunks[op.chunk].held and name not in (IN, OUT)]

    def before(self, op: Op) -> list[Op]:
        """The messages before a pass: the weights that it uses throughout, and its first layer."""
        chunk, first = self.chunks[op.chunk], self.is_first(op)
        start, arrived, _ = GATHERS.get(op.kind, "   ")
        roots = [group for group in chunk.roots(op.chunk) if not self.alive[group]]
        roots = roots if self.gathers(op) or first else []
        ops: list[Op] = []
        if op.kind == "F" and not first:
            ops += self.message(op, start, [name for _, name in roots])
        if self.gathers(op) and self.how.gather_ahead:
            ops += self.message(op, start, self.layers(op)[:1])
        if op.kind == "F":
            ops += [
                one._replace(chunk=group[0]) if first else one
                for group in roots
                for one in self.message(op, arrived, group[1:])
            ]
            self.alive.update(chunk.roots(op.chunk))
        return ops

    def inside(self, op: Op) -> list[Op]:
        """The pass itself: in pieces, if there are messages between them."""
        start, arrived, freed = GATHERS.get(op.kind, "   ")
        names, layers, own, ahead = self.names(op), self.layers(op), self.gathers(op), self.how.gather_ahead
        ops: list[Op] = []
        for name in names:
            if name in layers:
                following = layers[layers.index(name) + 1 :][:1] if ahead else []
                ops += self.message(op, start, [name]) if own and not ahead else []
                ops += self.message(op, arrived, [name]) + (self.message(op, start, following) if own else [])
            ops.append(op._replace(piece=name))
            ops += self.reductions(op, name) + self.message(op, freed, [name] if own and name in layers else [])
        return ops if len(ops) > len(names) else [op]

    def behind(self, op: Op) -> list[Op]:
        """The messages after a pass: weights are freed that nothing uses any more."""
        ops: list[Op] = []
        for group in self.chunks[op.chunk].roots(op.chunk) if op.kind in "BI" or not self.trains else ():
            self.alive[group] -= 1
            freed = self.gathers(op) and not self.alive[group]
            ops += self.message(op, GATHERS[op.kind][2], group[1:]) if freed else []
        return ops

    def reductions(self, op: Op, piece: str) -> list[Op]:
        """Reductions of gradients that a piece completes; with ZeRO 2 and 3 at most one other is under way."""
        once, found = self.how.zero < 2, []
        for group in self.chunks[op.chunk].gradients(op.chunk, piece) if op.kind == self.last_kind else ():
            users = [last for chunk, last in self.last.items() if group[0] == chunk or group[1] == TIED]
            if once and (op != users[-1] or not self.how.reduce_beside):
                continue
            self.under_way.append(Op("R", op.micro, op.chunk, group[1]))
            found.append(self.under_way[-1])
            while not once and len(self.under_way) > self.how.reduce_beside:
                found.append(_end(self.under_way.pop(0)))
        return found


def group_of(op: Op) -> Group:
    """The weights or gradients that a message is about."""
    return (0 if op.piece == TIED else op.chunk, op.piece)


def groups_of(chunks: Sequence[ChunkPieces]) -> dict[Group, bool]:
    """The weights of a rank that are gathered together -> whether they are trained."""
    tied = [chunk.tied for chunk in chunks if chunk.tied is not None]
    own = {(number, name): name in chunk.trained for number, chunk in enumerate(chunks) for name in chunk.held}
    return ({(0, TIED): tied[0]} if tied else {}) | own


def _end(op: Op) -> Op:
    """The op that waits for a message."""
    return op._replace(kind=op.kind.lower())


# ---- proof -------------------------------------------------------------------------------------------------------------


def verify_messages(listed: Listed, chunks: Sequence[ChunkPieces], how: Sharding) -> None:
    """Prove that a rank's list is correct, or raise BrokenSchedule with the first error.

    Pieces come in the order in which a pass computes them. All weights are there when a pass uses them, and are freed
    after it (ZeRO 3). Each gradient is reduced once, after it is complete. Every message is waited for.
    """
    _verify_pieces(listed, chunks)
    proof = _Proof(chunks, how, listed.ops)
    for op in (op for part in listed for op in part):
        proof.add(op)
    proof.end()


def _verify_pieces(listed: Listed, chunks: Sequence[ChunkPieces]) -> None:
    for op, inside in (one for step in steps_of(listed.ops) for one in step):
        pieces = [one for one in inside if one.kind not in MESSAGES]
        strange = [one for one in pieces if one.whole != op]
        if strange:
            raise BrokenSchedule(f"{strange[0]} stands inside {op}: only messages may")
        found, chunk = [one.piece for one in pieces], chunks[op.chunk]
        wanted = chunk.pieces if op.kind == "F" else chunk.backward()
        if found not in ([], [""], wanted):
            raise BrokenSchedule(f"the pieces of {op} are {' '.join(found)} instead of {' '.join(wanted)}")


class _Proof:
    """A rank's gathered units and unreduced gradients after each op of its list.

    Layers have a state for gathers of forward passes, and one for those of backward passes. Two passes that take turns may
    use a layer at the same time: it is freed when both have freed it.
    """

    def __init__(self, chunks: Sequence[ChunkPieces], how: Sharding, ops: Sequence[Op]):
        self.chunks, self.how, self.seen = chunks, how, set[Op]()
        passes, pairs = passes_of(ops), pairs_of(ops)
        self.in_turns = {(op.micro, op.chunk, op.kind != "F") for op in (*pairs, *pairs.values())}
        self.weights = dict.fromkeys((*groups_of(chunks), *map(_again, groups_of(chunks))), "not there")
        self.kind = "W" if any(op.kind == "W" for op in passes) else "B"  # of passes that complete gradients
        # (micro, chunk) not reduced
        self.owed = {group: Counter() for group, trained in groups_of(chunks).items() if trained}
        self.total = Counter(  # gradients of a step
            group
            for op in passes
            for piece in (chunks[op.chunk].backward() if op.kind == self.kind else ())
            for group in chunks[op.chunk].gradients(op.chunk, piece)
        )
        self.under_way: list[Op] = []  # reductions

    def add(self, op: Op) -> None:
        if op == BESIDE:
            return
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
            state = self.weights[_of_pass(group, op.kind != "F" and self.how.zero == 3)]
            if state != "there":
                raise BrokenSchedule(f"{op} uses the weights of {_name(group)}, which are {state}")
        for group in chunk.gradients(op.chunk, piece) if op.kind == self.kind else ():
            self.owed[group][op.micro, op.chunk] += 1

    def move(self, op: Op) -> None:
        """Gather or free weights."""
        before, after = {
            "G": ("not there", "on their way"),
            "g": ("on their way", "there"),
            "D": ("there", "not there"),
        }[FORWARD.get(op.kind, op.kind)]
        backward = op.kind in FORWARD
        group, other = (_of_pass(group_of(op), of) for of in (backward, not backward))
        states = [self.weights[group]]
        if before == "not there" and (op.micro, op.chunk, backward) not in self.in_turns:
            states.append(self.weights[other])
        for state in states:
            if state != before:
                raise BrokenSchedule(f"{op} needs weights of {_name(group_of(op))} that are {before}; they are {state}")
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
                raise BrokenSchedule(f"the weights of {_name(group[:2])} are never freed")


def _again(group: Group) -> tuple:
    """The key of weights that are gathered for a backward pass."""
    return *group, "again"


def _of_pass(group: Group, backward: bool) -> tuple:
    """The key of a layer in the gathers of a pass. Other weights are gathered for both passes of a micro-batch."""
    return _again(group) if backward and group[1] not in (IN, OUT, TIED) else group


def _name(group: Group) -> str:
    chunk, piece = group
    return f"chunk {chunk}, {piece if piece in (IN, OUT, TIED) else f'layer {piece}'}"
