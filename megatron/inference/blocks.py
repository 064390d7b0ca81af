# SPDX-License-Identifier: Apache-2.0
"""Blocks of the key-value cache: which are free, which texts use them, and which prefix of a text each full block holds.

A block has room for the keys and values of `size` tokens. Texts with a common beginning share its full blocks: a block is
known by a digest of all tokens up to its end, so texts that agree in a block's digest agree in everything before it. A
block that no text uses keeps its content until it is needed for another text; the least recently used go first.

    >>> pool = BlockPool(8, 4)
    >>> one, other = Table(), Table()
    >>> pool.grow(one, 10, 10), one.blocks
    (True, [0, 1, 2])
    >>> pool.remember(one, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14])
    >>> pool.share(other, [5, 6, 7, 8, 9, 10, 11, 12, 40], 2), other.blocks, pool.free
    (8, [0, 1], 5)

On a CPU, attention reads consecutive blocks as one view of the cache, without a copy. So a text gets consecutive blocks
wherever possible: a run of free ones for its greatest length is set aside for it, which others use only if they must.
Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Optional

import numpy as np

NEVER = np.iinfo(np.int64).max  # of a block in use
ASIDE = NEVER // 2  # added for a block that is set aside for another text


@dataclass
class Table:
    """The blocks of one text, in the order of its tokens.

    runs     the same as [first block, number] of consecutive ones
    digests  of its full blocks whose content is known
    aside    the blocks that are set aside for it
    root     what its first digest follows: another one after a change of the weights
    """

    blocks: list[int] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    aside: range = range(0)
    root: bytes = b""

    def append(self, block: int) -> None:
        self.blocks.append(block)
        if self.runs and sum(self.runs[-1]) == block:
            self.runs[-1][1] += 1
        else:
            self.runs.append([block, 1])

    def replace(self, place: int, block: int) -> None:
        """Put another block at a place of the table."""
        blocks = [*self.blocks[:place], block, *self.blocks[place + 1 :]]
        self.blocks, self.runs = [], []
        for one in blocks:
            self.append(one)


class BlockPool:
    """The blocks of a cache, and what is in them."""

    def __init__(self, blocks: int, size: int):
        self.blocks, self.size, self.free = blocks, size, blocks
        self._uses = np.zeros(blocks, dtype=np.int32)  # tables with the block
        self._cost = np.zeros(blocks, dtype=np.int64)  # of taking it: 0 if it holds nothing, else when it was last used
        self._aside = np.zeros(blocks, dtype=np.int32)
        self._digest: dict[int, bytes] = {}  # block -> digest of the tokens up to its end
        self._block: dict[bytes, int] = {}  # the same, reversed
        self._clock, self._root = 0, b""

    def grow(self, table: Table, tokens: int, longest: int) -> bool:
        """Add blocks to a table until it has room for `tokens` of a text that may reach `longest`; whether that worked.

        If it did not, all blocks are in use. Those that were added stay.
        """
        needed = -(-tokens // self.size)
        if not table.blocks:
            table.root = self._root
        while len(table.blocks) < needed:
            block = self._next(table, max(longest, tokens))
            if block is None:
                return False
            self._take(block)
            table.append(block)
        return True

    def share(self, table: Table, tokens: Sequence[int], most: int) -> int:
        """Begin an empty table with blocks, at most `most`, that hold the first of these tokens. Returns their tokens."""
        assert not table.blocks
        table.root = self._root
        for digest in self._digests(tokens, [], most, self._root):
            block = self._block.get(digest)
            if block is None:
                break
            self._take(block)
            table.append(block)
            table.digests.append(digest)
        return len(table.blocks) * self.size

    def found(self, tokens: Sequence[int], most: int) -> tuple[int, int]:
        """(blocks that `share` would find, those of them that no text uses)."""
        blocks = [self._block[digest] for digest in self.known(tokens, most)]
        return len(blocks), int((self._uses[blocks] == 0).sum()) if blocks else 0

    def known(self, tokens: Sequence[int], most: int) -> list[bytes]:
        """The digests of the blocks that `share` would find."""
        digests = []
        for digest in self._digests(tokens, [], most, self._root):
            if digest not in self._block:
                break
            digests.append(digest)
        return digests

    def remember(self, table: Table, tokens: Sequence[int]) -> None:
        """The table's blocks hold these tokens: let other texts find those that are full."""
        known = len(table.digests)
        for digest in self._digests(tokens, table.digests, len(tokens) // self.size, table.root):
            block = table.blocks[len(table.digests)]
            table.digests.append(digest)
            self._block.setdefault(digest, block)
            if self._block[digest] == block:
                self._digest[block] = digest
        assert known <= len(table.digests) <= len(table.blocks)

    def _digests(self, tokens: Sequence[int], known: Sequence[bytes], most: int, root: bytes):
        """The digests of the full blocks of a text after the `known` ones, in order, up to block number `most`."""
        digest = known[-1] if known else root
        for number in range(len(known), min(most, len(tokens) // self.size)):
            own = np.asarray(tokens[number * self.size : (number + 1) * self.size], dtype=np.int64)
            digest = blake2b(digest + own.tobytes(), digest_size=16).digest()
            yield digest

    def fork(self, table: Table) -> Table:
        """A second table with the same blocks."""
        for block in table.blocks:
            self._take(block)
        return Table(list(table.blocks), [list(run) for run in table.runs], list(table.digests), root=table.root)

    def own(self, table: Table, tokens: int, longest: int) -> Optional[list[tuple[int, int]]]:
        """Before tokens are written after the first `tokens` of a table: the blocks to copy, as (from, to), because another
        table has them, too (copy-on-write). None if there is no free block.
        """
        place = tokens // self.size
        if tokens % self.size == 0 or self._uses[table.blocks[place]] == 1:
            return []
        old, new = table.blocks[place], self._next(Table(), longest)
        if new is None:
            return None
        self._take(new)
        self._drop(old)
        table.replace(place, new)
        return [(old, new)]

    def release(self, table: Table) -> None:
        """Give back all blocks of a table, and empty it. Full blocks with known content can still be found."""
        self._set_aside(table, range(0))
        self._clock += 1
        for block in table.blocks:
            self._drop(block)
        table.blocks, table.runs, table.digests = [], [], []

    def forget(self) -> None:
        """Let no text find the content of earlier blocks or those of running texts: the weights have changed."""
        self._clock += 1
        self._root = self._clock.to_bytes(8, "little")  # those of running texts follow the one of before
        self._digest, self._block = {}, {}
        self._cost[self._uses == 0] = 0

    def _take(self, block: int) -> None:
        self.free -= int(self._uses[block] == 0)
        self._uses[block] += 1

    def _drop(self, block: int) -> None:
        self._uses[block] -= 1
        self.free += int(self._uses[block] == 0)
        self._cost[block] = self._clock if block in self._digest else 0

    def _next(self, table: Table, longest: int) -> Optional[int]:
        """A free block for the end of a table: the next one if possible. Its content is forgotten. None: there is none."""
        after = table.blocks[-1] + 1 if table.blocks else None
        if after not in table.aside or self._uses[after]:
            found = self._run(max(1, -(-longest // self.size) - len(table.blocks)), table.blocks[-1:])
            if found is None:
                return None
            self._set_aside(table, found)
            after = found.start
        if digest := self._digest.pop(after, None):
            del self._block[digest]
        return after

    def _run(self, length: int, last: Sequence[int]) -> Optional[range]:
        """The run of free blocks whose loss costs least: as many as wanted, or fewer if there is no such run; one that
        continues after the block `last` if that costs no more.
        """
        cost = np.where(self._uses > 0, NEVER, self._cost + ASIDE * (self._aside > 0))
        length = min(length, self.blocks)
        while length:
            costs = _greatest(cost, length)
            start = int(costs.argmin())
            for after in (block + 1 for block in last):
                start = after if after < len(costs) and costs[after] == costs[start] else start
            if costs[start] < NEVER:
                return range(start, start + length)
            length //= 2
        return None

    def _set_aside(self, table: Table, run: range) -> None:
        self._aside[table.aside.start : table.aside.stop] -= 1
        self._aside[run.start : run.stop] += 1
        table.aside = run


def _greatest(x: np.ndarray, length: int) -> np.ndarray:
    """The greatest value in each run of `length` neighbours.

    >>> _greatest(np.array([3, 1, 4, 1, 5, 9]), 3).tolist()
    [4, 4, 5, 9]
    """
    span = 1
    while 2 * span <= length:  # x[i] is now that of `span` neighbours
        x, span = np.maximum(x[:-span], x[span:]), 2 * span
    rest = length - span
    return np.maximum(x[:-rest], x[rest:]) if rest else x
