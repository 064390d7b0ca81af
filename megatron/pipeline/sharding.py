# SPDX-License-Identifier: Apache-2.0
"""Messages of data parallelism as ops of a schedule: gathers of weights, reductions of gradients. Pure.

`list_messages` puts them into the passes of a rank, `verify_messages` proves the list (`verify_messages.py`), the simulator
times it (`simulate.py`), and a training step runs it (`execute.py`, `optimizer/messages.py`). A pass with messages inside
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
    >>> listed = list_messages([Op("F", 0), Op("B", 0)], [Chunk(2, held=("0", "1"), trained=("0", "1"))], how)
    >>> print(*listed.ops)
    G0:0 F0:in g0:0 G0:1 F0:0 D0:0 g0:1 F0:1 D0:1 F0:out H0:1 B0:out h0:1 H0:0 B0:1 R0:1 E0:1 h0:0 B0:0 R0:0 r0:1 E0:0
    >>> print(*listed.after)
    r0:0 R0:all
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megatron.pipeline.schedule import Op

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
class Chunk:
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
    return list(dict.fromkeys(op.whole for op in ops if op.kind not in MESSAGES))


# ---- from passes to a list ---------------------------------------------------------------------------------------------


def list_messages(passes: Sequence[Op], chunks: Sequence[Chunk], how: Sharding) -> Listed:
    """Put the messages of data parallelism into the passes of a rank. chunks: of the rank, by number."""
    return _Lister(passes, chunks, how).listed()


class _Lister:
    def __init__(self, passes: Sequence[Op], chunks: Sequence[Chunk], how: Sharding):
        self.passes, self.chunks, self.how = passes, chunks, how
        self.keeps_weights, self.keeps_gradients = how.zero < 3, how.zero < 2
        kinds = {op.kind for op in passes}
        self.trains, self.last_kind = bool(kinds - {"F"}), "W" if "W" in kinds else "B"
        self.first = {op.chunk: op for op in reversed(passes) if op.kind == "F"}
        self.last = {op.chunk: op for op in passes if op.kind == self.last_kind}
        self.alive = Counter[Group]()  # roots -> passes F whose backward pass has not come
        self.arrived: set[Group] = set()  # roots that a pass has waited for after the update
        self.under_way: list[Op] = []  # reductions
        self.ops: list[Op] = []

    def listed(self) -> Listed:
        for op in self.passes:
            {"F": self.forward, "W": self.reduced}.get(op.kind, self.backward)(op)
        if not self.trains:
            return Listed(self.before(), self.ops, [])
        groups = [group for group, trained in groups_of(self.chunks) if trained]
        together = self.keeps_gradients and not self.how.sharded and not self.how.reduce_beside
        if self.keeps_gradients and not together and not self.how.reduce_beside:
            self.under_way = [Op("R", 0, *group) for group in groups]
            after = [*self.under_way, *map(_end, self.under_way)]
        else:
            after = list(map(_end, self.under_way))
        return Listed(self.before(), self.ops, [*after, Op("R", 0, 0, ALL)])

    def before(self) -> list[Op]:
        """The gathers after an update, in the order of use: a chunk waits for its roots first."""
        if not self.keeps_weights:
            return []
        groups = [group for group, _ in groups_of(self.chunks)]
        groups.sort(key=lambda group: (group[0], group[1] not in (IN, OUT, TIED)))
        started = [Op("G", 0, *group) for group in groups]
        return started + ([] if self.how.gather_ahead else list(map(_end, started)))

    def forward(self, op: Op) -> None:
        chunk, roots = self.chunks[op.chunk], self.chunks[op.chunk].roots(op.chunk)
        if self.keeps_weights:
            if not self.how.gather_ahead or self.first[op.chunk] != op:
                self.ops.append(op)
                return
            self.ops += [Op("g", 0, *group) for group in roots if group not in self.arrived]
            self.arrived.update(roots)
            for name in chunk.pieces:
                self.ops += [Op("g", 0, op.chunk, name)] * (name in chunk.held and name not in (IN, OUT))
                self.ops.append(op._replace(piece=name))
            return
        self.used_weights(op, chunk.pieces, [group for group in roots if not self.alive[group]])
        self.alive.update(roots)
        if not self.trains:
            self.leave(op)

    def backward(self, op: Op) -> None:
        """B or I: pieces where messages stand inside."""
        names = self.chunks[op.chunk].backward()
        if self.keeps_weights:
            self.reduced(op) if op.kind == "B" else self.ops.append(op)
        else:
            self.used_weights(op, names, [])
            self.leave(op)

    def used_weights(self, op: Op, names: Sequence[str], roots: Sequence[Group]) -> None:
        """A pass around which the weights of its layers are gathered and freed; roots: gathered before it."""
        start, arrived, freed = GATHERS[op.kind]
        own = [name for name in names if name in self.chunks[op.chunk].held and name not in (IN, OUT)]
        gather = lambda kind, names: [Op(kind, op.micro, op.chunk, name) for name in names]
        ahead = self.how.gather_ahead
        started = gather(start, [name for _, name in roots])
        self.ops += [*started, *gather(start, own[:1] if ahead else []), *map(_end, started)]
        for name in names or [OUT]:
            if name in own:
                following = own[own.index(name) + 1 :][:1]
                self.ops += [] if ahead else gather(start, [name])
                self.ops += gather(arrived, [name]) + gather(start, following if ahead else [])
            self.ops.append(op._replace(piece=name))
            if op.kind == self.last_kind:
                self.reduce(op, name)
            self.ops += gather(freed, [name] if name in own else [])

    def leave(self, op: Op) -> None:
        """Free the roots of a chunk after the last pass that uses them."""
        for group in self.chunks[op.chunk].roots(op.chunk):
            self.alive[group] -= 1
            self.ops += [Op(GATHERS[op.kind][2], op.micro, op.chunk, group[1])] * (not self.alive[group])

    def reduced(self, op: Op) -> None:
        """A pass that completes gradients, with their reductions unless these come after all passes."""
        inside = op == self.last[op.chunk] and self.how.reduce_beside if self.keeps_gradients else True
        names = self.chunks[op.chunk].backward()
        if not inside or not any(self.chunks[op.chunk].gradients(op.chunk, name) for name in names):
            self.ops.append(op)
            return
        for name in names:
            self.ops.append(op._replace(piece=name))
            self.reduce(op, name)

    def reduce(self, op: Op, piece: str) -> None:
        """Start the reductions of gradients that a piece completes; with ZeRO 2 and 3 at most one other is under way."""
        for _, name in self.chunks[op.chunk].gradients(op.chunk, piece):
            if self.keeps_gradients and name == TIED and self.last_of_tied() != op:
                continue
            self.under_way.append(Op("R", op.micro, op.chunk, name))
            self.ops.append(self.under_way[-1])
            while not self.keeps_gradients and len(self.under_way) > self.how.reduce_beside:
                self.ops.append(_end(self.under_way.pop(0)))

    def last_of_tied(self) -> Op:
        """The last pass that gives shared weights a gradient."""
        return [op for op in self.last.values() if self.chunks[op.chunk].tied][-1]


def group_of(op: Op) -> Group:
    """The weights or gradients that a message is about."""
    return (0 if op.piece == TIED else op.chunk, op.piece)


def groups_of(chunks: Sequence[Chunk]) -> list[tuple[Group, bool]]:
    """All groups of a rank, and whether they are trained."""
    tied = [((0, TIED), bool(chunk.tied)) for chunk in chunks if chunk.tied is not None][:1]
    own = [((number, name), name in chunk.trained) for number, chunk in enumerate(chunks) for name in chunk.held]
    return tied + own


def _end(op: Op) -> Op:
    """The op that waits for a message."""
    return op._replace(kind=op.kind.lower())
