# SPDX-License-Identifier: Apache-2.0
"""Blocks of the cache under random texts that come, grow, are copied and end, and weights that change meanwhile: what a
text finds of others is of its own tokens and of the present weights, and no block has two owners that write.
"""

import random
from itertools import pairwise

import pytest

from megatron.inference.blocks import BlockPool, Table

SIZE, BLOCKS, LONGEST = 3, 14, 15


class Cache:
    """A pool, and in place of keys and values what they were computed of: (token, weights) for each token before."""

    def __init__(self, seed: int):
        self.pool, self.random, self.weights = BlockPool(BLOCKS, SIZE), random.Random(seed), 0
        self.texts: list[tuple[Table, list[int], list[int]]] = []  # table, tokens, weights of each computed token
        self.content: dict[int, list] = {}
        self.found = 0

    def compute(self, table: Table, tokens: list[int], made: list[int], more: int) -> bool:
        """Compute the next tokens of a text, whether there was room."""
        start, stop = len(made), min(len(tokens), len(made) + more)
        writes = table.blocks[start // SIZE] if start < len(table.blocks) * SIZE else None
        shared = writes is not None and start % SIZE > 0 and self.owners(writes) > 1
        copies = self.pool.own(table, start, LONGEST) if writes is not None else []
        assert shared == (copies != []), "copied without need, or not copied"
        if copies is None:
            return False
        for old, new in copies:
            self.content[new] = list(self.content[old])
        if not self.pool.grow(table, stop, LONGEST):
            return False
        for at in range(start, stop):
            block = table.blocks[at // SIZE]
            assert self.owners(block) == 1, "two texts write into a block"
            made.append(self.weights)
            kept = self.content.get(block, [])[: at % SIZE] if at % SIZE else []
            self.content[block] = [*kept, list(zip(tokens[: at + 1], made, strict=True))]
        self.pool.remember(table, tokens[:stop])
        return True

    def owners(self, block: int) -> int:
        return sum(block in table.blocks for table, *_ in self.texts)

    def begin(self) -> None:
        tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, LONGEST))]
        table, most = Table(), (len(tokens) - 1) // SIZE
        count, unused = self.pool.found(tokens, most)
        free = self.pool.free
        shared = self.pool.share(table, tokens, most)
        assert shared == count * SIZE and self.pool.free == free - unused
        for place, block in enumerate(table.blocks):
            end = (place + 1) * SIZE
            wanted = [[(token, self.weights) for token in tokens[: at + 1]] for at in range(end - SIZE, end)]
            assert self.content[block] == wanted, "of other tokens, or of other weights"
            self.found += 1
        self.texts.append((table, tokens, [self.weights] * shared))

    def step(self) -> None:
        kind = self.random.choices(["begin", "compute", "fork", "end", "weights"], [5, 9, 2, 2, 0.3])[0]
        if kind == "begin" or not self.texts:
            self.begin()
        elif kind == "weights":
            self.weights += 1
            self.pool.forget()
        else:
            table, tokens, made = self.texts[number := self.random.randrange(len(self.texts))]
            if kind == "fork":
                self.texts.append((self.pool.fork(table), [*tokens, self.random.randrange(2)][:LONGEST], list(made)))
                tokens.append(self.random.randrange(2))
                del tokens[LONGEST:]
            elif kind == "end" or not self.compute(table, tokens, made, self.random.randrange(1, 7)):
                self.pool.release(table)
                del self.texts[number]
        used = {block for table, *_ in self.texts for block in table.blocks}
        assert self.pool.free == BLOCKS - len(used)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_found_is_of_the_same_tokens_and_weights(seed):
    cache = Cache(seed)
    for _ in range(400):
        cache.step()
    assert cache.found > 3 and cache.weights > 1


def test_blocks_of_a_text_that_new_weights_continued_are_not_found():
    """Its later keys and values follow from earlier ones of the old weights, though another text has the same beginning."""
    pool, old, new, later = BlockPool(8, 4), Table(), Table(), Table()
    tokens = list(range(9))
    assert pool.grow(old, 8, 8)
    pool.remember(old, tokens[:4])
    pool.forget()
    assert pool.grow(new, 4, 4)
    pool.remember(old, tokens[:8])
    pool.remember(new, tokens[:4])
    assert pool.share(later, tokens, 2) == 4 and later.blocks == new.blocks


def test_a_block_that_was_begun_with_other_weights_is_not_found():
    """A text that has filled a part of its first block when the weights change."""
    pool, begun, later = BlockPool(8, 4), Table(), Table()
    assert pool.grow(begun, 3, 8)
    pool.remember(begun, [1, 2, 3])
    pool.forget()
    pool.remember(begun, [1, 2, 3, 4])
    assert pool.share(later, [1, 2, 3, 4, 5], 1) == 0
    pool.release(begun)
    assert pool.grow(begun, 4, 8)  # computed again
    pool.remember(begun, [1, 2, 3, 4])
    assert pool.share(later, [1, 2, 3, 4, 5], 1) == 4


def test_a_copy_of_a_text_is_found_as_the_text_is():
    """Also where its first block was not full, and after new weights."""
    pool, text, later = BlockPool(8, 4), Table(), Table()
    pool.forget()
    assert pool.grow(text, 3, 8)
    copy = pool.fork(text)
    pool.remember(copy, [1, 2, 3, 4])
    assert pool.share(later, [1, 2, 3, 4, 5], 1) == 4 and later.blocks == copy.blocks == text.blocks


@pytest.mark.parametrize("shared", [False, True])
def test_only_a_block_that_a_text_goes_on_within_is_copied(shared):
    """At a block's end the next token gets a new one."""
    for tokens in range(1, 3 * SIZE + 1):
        pool, table = BlockPool(BLOCKS, SIZE), Table()
        assert pool.grow(table, tokens, LONGEST)
        other = pool.fork(table) if shared else None
        before = list(table.blocks)
        copies = pool.own(table, tokens, LONGEST)
        assert len(copies) == (shared and tokens % SIZE > 0)
        for old, new in copies:
            assert (old, new) == (before[-1], table.blocks[-1]) and new not in before
            assert other.blocks == before
        assert pool.grow(table, tokens + 1, LONGEST) and table.blocks[:-1] == before[: (tokens // SIZE)]
        assert pool.free == BLOCKS - len({*table.blocks, *before})


def test_blocks_that_hold_nothing_are_taken_before_those_that_do():
    """A block that is not full, or whose content another one has, too, is as good as empty, though it was used last."""
    pool, one, again, part = BlockPool(6, 2), Table(), Table(), Table()
    for table, tokens in ((one, [1, 2, 3, 4]), (again, [1, 2]), (part, [5, 6, 7])):
        assert pool.grow(table, len(tokens), len(tokens))
        pool.remember(table, tokens)
    known, nothing = {*one.blocks, part.blocks[0]}, {again.blocks[0], part.blocks[1]}
    for table in (one, again, part):
        pool.release(table)
    taken = [Table() for _ in range(6)]
    for table in taken:
        assert pool.grow(table, 1, 1)
    first, rest = [table.blocks[0] for table in taken[:3]], [table.blocks[0] for table in taken[3:]]
    assert nothing <= set(first) and set(rest) <= known


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("block", [2, 5, 6, 8, 20])
def test_a_block_is_put_at_any_place_of_a_table(place, block):
    """The others stay, and runs are those of consecutive ones, as long as possible."""
    table, wanted = Table(), [3, 4, 7, 9, 10]
    for one in wanted:
        table.append(one)
    wanted[place] = block
    table.replace(place, block)
    assert table.blocks == wanted == [one for first, count in table.runs for one in range(first, first + count)]
    assert len(table.runs) == 1 + sum(after != before + 1 for before, after in pairwise(wanted))


def used_pool(draw: random.Random) -> BlockPool:
    """A pool after some texts that have all ended, and new weights."""
    pool, tables = BlockPool(BLOCKS, SIZE), []
    for _ in range(12):
        tokens, table = draw.choices(range(2), k=draw.randrange(1, LONGEST)), Table()
        pool.share(table, tokens, draw.randrange(LONGEST))
        tables.append(table)
        if pool.grow(table, len(tokens), LONGEST):
            pool.remember(table, tokens)
        for _ in range(draw.randrange(len(tables))):
            pool.release(tables.pop(draw.randrange(len(tables))))
    for table in tables:
        pool.release(table)
    pool.forget()
    return pool


@pytest.mark.parametrize("seed", range(6))
def test_after_new_weights_a_pool_without_texts_is_as_new(seed):
    """What was used lately, or set aside, has no part in which blocks later texts get."""
    draw = random.Random(seed)
    pools, tables = (used_pool(draw), BlockPool(BLOCKS, SIZE)), []
    for _ in range(30):
        tokens, both = draw.choices(range(2), k=draw.randrange(1, LONGEST)), (Table(), Table())
        shared = [pool.share(table, tokens, 2) for pool, table in zip(pools, both, strict=True)]
        grown = [pool.grow(table, len(tokens), LONGEST) for pool, table in zip(pools, both, strict=True)]
        for pool, table in zip(pools, both, strict=True):
            pool.remember(table, tokens[: len(table.blocks) * SIZE])
        tables.append(both)
        assert shared[0] == shared[1] and grown[0] == grown[1] and pools[0].free == pools[1].free
        assert both[0].blocks == both[1].blocks
        for _ in range(draw.randrange(2) if grown[0] else len(tables)):
            for pool, table in zip(pools, tables.pop(draw.randrange(len(tables))), strict=True):
                pool.release(table)


def plain_run(uses, cost, aside, wanted: int, last) -> range | None:
    """The run of free blocks that costs least: half as many as long as there is none of that length."""
    length = min(wanted, BLOCKS)
    while length:
        free = [start for start in range(BLOCKS - length + 1) if not any(uses[start : start + length])]
        costs = {start: max((aside[at] > 0, cost[at]) for at in range(start, start + length)) for start in free}
        best = [start for start in free if costs[start] == min(costs.values())]
        if best:
            start = last + 1 if last is not None and last + 1 in best else best[0]
            return range(start, start + length)
        length //= 2
    return None


def test_a_run_of_blocks_is_that_of_a_plain_loop():
    """Those of other texts are taken last, and empty ones first; the next one of a text if that costs no more."""
    lengths = []
    for seed in range(400):
        draw, pool = random.Random(seed), BlockPool(BLOCKS, SIZE)
        busy = draw.random()
        uses, aside = ([int(draw.random() < share) for _ in range(BLOCKS)] for share in (busy, 0.3))
        cost = [draw.choice([0, 0, 1, 2, 5]) for _ in range(BLOCKS)]
        pool._uses[:], pool._cost[:], pool._aside[:] = uses, cost, aside
        wanted, last = draw.randrange(1, BLOCKS + 3), draw.choice([None, *range(BLOCKS)])
        found = pool._run(wanted, [] if last is None else [last])
        assert found == plain_run(uses, cost, aside, wanted, last), seed
        lengths.append(found and len(found))
    assert len(set(lengths)) > 8 and None in lengths
