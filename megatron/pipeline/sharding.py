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

from megatron.pipeline.schedule import BrokenSchedule, Op

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


def steps_of(ops: Iterable[Op]) -> Iterator[tuple[Op, list[Op]]]:
    """The ops between which a rank is free: messages, each with [], and whole passes, each with what is inside."""
    ops = list(ops)
    last = {op.whole: place for place, op in enumerate(ops) if op.kind not in MESSAGES}
    place = 0
    while place < len(ops):
        op = ops[place]
        end = place if op.kind in MESSAGES else last[op.whole]
        yield (op, []) if op.kind in MESSAGES else (op.whole, ops[place : end + 1])
        place = end + 1


def passes_of(ops: Iterable[Op]) -> list[Op]:
    """The passes of a list, without messages and pieces."""
    ops, cut = [op for op in ops if op.kind not in MESSAGES], set()
    return [op.whole for op in ops if not op.piece or not (op.whole in cut or cut.add(op.whole))]


# ---- from passes to a list ---------------------------------------------------------------------------------------------


def list_messages(ops: Sequence[Op], chunks: Sequence[ChunkPieces], how: Sharding) -> Listed:
    """Put the messages of data parallelism into the passes of a rank, and prove the list.

    ops: the passes; or a list that has its messages, but for those after the update and R0:all. chunks: of the rank, by
    number. Raises BrokenSchedule with the first error.
    """
    listed = _Lister(passes_of(ops), chunks, how).listed()
    if any(op.kind in MESSAGES for op in ops):
        end = 1 + max(place for place, op in enumerate(ops) if op.kind not in MESSAGES)
        listed = Listed(listed.before, list(ops[:end]), [*ops[end:], *listed.after[-1:]])
    verify_messages(listed, chunks, how)
    return listed


class _Lister:
    def __init__(self, passes: Sequence[Op], chunks: Sequence[ChunkPieces], how: Sharding):
        self.passes, self.chunks, self.how = passes, chunks, how
        kinds = {op.kind for op in passes}
        self.trains, self.last_kind = bool(kinds - {"F"}), "W" if "W" in kinds else "B"
        self.first = {op.chunk: op for op in reversed(passes) if op.kind == "F"}
        self.last = {op.chunk: op for op in passes if op.kind == self.last_kind}
        self.alive = Counter[Group]()  # weights used throughout passes -> passes F whose backward pass has not come
        self.under_way: list[Op] = []  # reductions
        self.ops: list[Op] = []

    def listed(self) -> Listed:
        groups = groups_of(self.chunks)
        use = sorted(
            groups, key=lambda group: (group[0], group[1] not in (IN, OUT, TIED))
        )  # a chunk waits for these first
        gathers = [Op("G", 0, *group) for group in use] if self.how.zero < 3 else []
        if not self.how.gather_ahead:
            gathers += list(map(_end, gathers))
        for op in self.passes:
            self.add(op)
        after = []
        if self.how.zero < 2 and self.how.sharded and not self.how.reduce_beside:
            after = self.under_way = [Op("R", 0, *group) for group, trained in groups.items() if trained]
        after = [*after, *map(_end, self.under_way), Op("R", 0, 0, ALL)]
        return Listed(gathers, self.ops, after if self.trains else [])

    def add(self, op: Op) -> None:
        """Add a pass: in pieces, if there are messages between them."""
        chunk, ahead = self.chunks[op.chunk], self.how.gather_ahead
        start, arrived, freed = GATHERS.get(op.kind, "   ")
        names = chunk.pieces if op.kind == "F" else chunk.backward()
        gathers = self.how.zero == 3 and op.kind != "W"
        first = (
            self.how.zero < 3 and ahead and op == self.first.get(op.chunk)
        )  # it waits for the gathers after the update
        layers = [name for name in names if name in chunk.held and name not in (IN, OUT)] if gathers or first else []
        roots = [group for group in chunk.roots(op.chunk) if not self.alive[group]] if gathers or first else []
        message = lambda kind, names: [Op(kind, 0 if first else op.micro, op.chunk, name) for name in names]
        if op.kind == "F" and (gathers or first):
            self.ops += [] if first else message(start, [name for _, name in roots])
        self.ops += message(start, layers[:1]) if gathers and ahead else []
        if op.kind == "F":
            self.ops += [
                one._replace(chunk=group[0]) if first else one for group in roots for one in message(arrived, group[1:])
            ]
            self.alive.update(chunk.roots(op.chunk))
        inside: list[Op] = []
        for name in names:
            if name in layers:
                following = layers[layers.index(name) + 1 :][:1] if ahead else []
                inside += message(start, [name]) if gathers and not ahead else []
                inside += message(arrived, [name]) + (message(start, following) if gathers else [])
            inside.append(op._replace(piece=name))
            inside += self.reductions(op, name) + message(freed, [name] if gathers and name in layers else [])
        self.ops += inside if len(inside) > len(names) else [op]
        for group in chunk.roots(op.chunk) if op.kind in "BI" or not self.trains else ():
            self.alive[group] -= 1
            self.ops += message(freed, group[1:]) if gathers and not self.alive[group] else []

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
    proof = _Proof(chunks, how, passes_of(listed.ops))
    for op in (op for part in listed for op in part):
        proof.add(op)
    proof.end()


def _verify_pieces(listed: Listed, chunks: Sequence[ChunkPieces]) -> None:
    for op, inside in steps_of(listed.ops):
        pieces = [one for one in inside if one.kind not in MESSAGES]
        strange = [one for one in pieces if one.whole != op]
        if strange:
            raise BrokenSchedule(f"{strange[0]} stands inside {op}: only messages may")
        found, chunk = [one.piece for one in pieces], chunks[op.chunk]
        wanted = chunk.pieces if op.kind == "F" else chunk.backward()
        if found not in ([], [""], wanted):
            raise BrokenSchedule(f"the pieces of {op} are {' '.join(found)} instead of {' '.join(wanted)}")


class _Proof:
    """A rank's gathered units and unreduced gradients after each op of its list."""

    def __init__(self, chunks: Sequence[ChunkPieces], how: Sharding, passes: Sequence[Op]):
        self.chunks, self.how, self.seen = chunks, how, set[Op]()
        self.weights = dict.fromkeys(groups_of(chunks), "not there")
        self.kind = "W" if any(op.kind == "W" for op in passes) else "B"  # of passes that complete gradients
        self.owed = {
            group: Counter() for group, trained in groups_of(chunks).items() if trained
        }  # (micro, chunk) not reduced
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
