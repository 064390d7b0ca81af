# SPDX-License-Identifier: Apache-2.0
"""One forward pass of the generation engine, as the first rank plans it and all ranks compute it. Needs no torch.

Ranks get a pass as integers, and the requests that the last stage sees for the first time as bytes:

    >>> from megatron.inference.sampling import Sampling
    >>> row = PassRow(7, 16, True, range(0), ((3, 2),), (464, 2068))
    >>> plan = PassPlan((row,), ((7, Request((5,) * 17, Sampling(4)), 4),), (2, 3))
    >>> PassPlan.decoded(*plan.encoded()) == plan
    True

The last stage answers with numbers: tokens, which are exact in fp64, and log-probabilities. The first rank knows how many.
"""

import pickle
from collections.abc import Iterator
from typing import NamedTuple

from megatron.inference.requests import Request
from megatron.inference.scheduler import NONE, PlannedRow


class PassRow(NamedTuple):
    """The new tokens of one text, those at the positions from `start` on. Other fields: see `scheduler.PlannedRow`."""

    number: int
    start: int
    chooses: bool
    scores: range
    runs: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    source: int = NONE
    keep: int = NONE

    @classmethod
    def of(cls, row: PlannedRow) -> "PassRow":
        tokens = tuple(row.text.tokens[row.start : row.stop])
        return cls(row.text.number, row.start, row.chooses, row.scores, row.runs, tokens, row.source, row.keep)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def wanted(self) -> Iterator[int]:
        """The tokens whose successors are scored or chosen, counted from the row's first."""
        yield from (place - self.start for place in self.scores)
        if self.chooses:
            yield len(self.tokens) - 1

    def answer_size(self, request: Request) -> int:
        """How many numbers answer the row."""
        score = 1 + 2 * (request.logprobs or 0)
        return len(self.scores) * score + self.chooses * (1 + (0 if request.logprobs is None else score))


class PassPlan(NamedTuple):
    """The texts of a pass; (number, request, limit of new tokens) of new ones; the numbers of those that have ended, and of
    snapshots that are dropped after it.
    """

    rows: tuple[PassRow, ...]
    new: tuple[tuple[int, Request, int], ...] = ()
    ended: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [token for row in self.rows for token in row.tokens]

    @property
    def wanted(self) -> list[int]:
        """The tokens whose successors are scored or chosen."""
        places, first = [], 0
        for row in self.rows:
            places += [first + place for place in row.wanted()]
            first += len(row.tokens)
        return places

    def encoded(self) -> tuple[list[int], bytes]:
        numbers = [len(self.rows), len(self.ended), len(self.dropped), *self.ended, *self.dropped]
        for row in self.rows:
            numbers += [row.number, row.start, row.chooses, row.scores.start, row.scores.stop, row.source, row.keep]
            numbers += [len(row.runs), len(row.tokens), *(number for run in row.runs for number in run), *row.tokens]
        return numbers, pickle.dumps(self.new) if self.new else b""

    @classmethod
    def decoded(cls, numbers: list[int], requests: bytes) -> "PassPlan":
        each = iter(numbers)
        take = lambda count: tuple(next(each) for _ in range(count))
        rows, ended, dropped = take(3)
        names = dict(ended=take(ended), dropped=take(dropped))
        return cls(rows=tuple(_row(take) for _ in range(rows)), new=pickle.loads(requests or EMPTY), **names)


EMPTY = pickle.dumps(())


def _row(take) -> PassRow:
    number, start, chooses, first, last, source, keep, runs, tokens = take(9)
    runs = tuple(take(2) for _ in range(runs))
    return PassRow(number, start, bool(chooses), range(first, last), runs, take(tokens), source, keep)
