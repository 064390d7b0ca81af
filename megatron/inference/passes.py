# SPDX-License-Identifier: Apache-2.0
"""One forward pass of the generation engine: what each rank computes, and what the last stage answers. Needs no torch.

The first rank plans a pass and sends it to the others as integers. The last stage answers with float64 numbers: tokens,
which are exact in this format, and log-probabilities. Both ranks know how many there are.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron.inference.scheduler import Row


class PassRow(NamedTuple):
    """The new tokens of one text: those at the positions from `start` on. The other fields are those of `scheduler.Row`."""

    number: int
    start: int
    chooses: bool
    scores: range
    runs: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, row: Row) -> "PassRow":
        tokens = tuple(row.text.tokens[row.start : row.stop])
        return cls(row.text.number, row.start, row.chooses, row.scores, row.runs, tokens)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def wanted(self) -> Iterator[int]:
        """The tokens whose successors are scored or chosen, counted from the row's first."""
        yield from (place - self.start for place in self.scores)
        if self.chooses:
            yield len(self.tokens) - 1
