# SPDX-License-Identifier: Apache-2.0
"""What scans along a sequence have in common: chunks of tokens, and the decays between the tokens of a chunk.

A scan carries a state from token to token, which decays by exp(log decay) at each. Sums of log decays grow far beyond
their differences, so they are taken in fp64 and kept as two fp32 numbers; only differences, which are never positive, are
exponentiated; those of tokens that do not see each other are -inf before that.

Legend: b samples, G groups of r heads, c tokens of a chunk.
"""

from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch


def chunks(s: int, chunk: int) -> Iterator[slice]:
    """The rows of each chunk of s tokens; the last may have fewer.

    >>> list(chunks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return (slice(first, min(first + chunk, s)) for first in range(0, s, chunk))


class Decays(NamedTuple):
    """Decays in a chunk, head by head.

    sums:   [b, G, r, c] of log decays, up to each token, in fp64
    begin:  [b, c] the first token of each token's document; None: one document
    start:  [b, G, r, c], from the state before the chunk to each token; 0 if its document began in the chunk
    end:    [b, G, r, c], from each token to the state after the chunk; 0 if its document ends in it
    """

    sums: torch.Tensor
    begin: Optional[torch.Tensor]
    start: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, logs: torch.Tensor, starts: Optional[torch.Tensor], rows: slice) -> "Decays":
        """logs: [c, b, G, r] of these rows, fp32; starts: [b, s] the first token of each token's document, or None."""
        sums, begin = logs.double().cumsum(0).movedim(0, 3), None
        start, end = sums.exp().float(), (sums[..., -1:] - sums).exp().float()
        if starts is not None:
            begin = starts[:, rows]
            start = start * (begin <= max(rows.start - 1, 0))[:, None, None]
            end = end * (begin == begin[:, -1:])[:, None, None]
        return cls(sums, begin, start, end)

    @property
    def whole(self) -> torch.Tensor:
        """[b, G, r], from the state before the chunk to that after it."""
        return self.start[..., -1]

    def between(self) -> torch.Tensor:
        """[b, G, r, c, c], from the token of a column to that of a row; 0 if it is later, or of another document."""
        c, high = self.sums.shape[-1], self.sums.float()
        low = (self.sums - high).float()
        unseen = torch.ones(c, c, dtype=torch.bool, device=high.device).triu(1)
        if self.begin is not None:
            unseen = (unseen | (self.begin.unsqueeze(-1) != self.begin.unsqueeze(-2)))[:, None, None]
        between = (high.unsqueeze(-1) - high.unsqueeze(-2)).add_(low.unsqueeze(-1) - low.unsqueeze(-2))
        return between.masked_fill_(unseen, float("-inf")).exp_()

    @staticmethod
    def gradients(of_between, of_start, of_end, of_whole) -> torch.Tensor:
        """The gradient of log decays [c, b, G, r], from those of the logarithms of `between`, `start`, `end` and `whole`.

        The decay of token t is in what later tokens, or it, read from earlier ones, or from the state before the chunk; and
        in what the state after the chunk has of these. Sums of only such terms cancel nothing.
        """
        crossing = torch.ones_like(of_between[0, 0, 0]).triu() @ of_between  # of rows from t on
        found = crossing.tril_(-1).sum(-1) + of_start.flip(-1).cumsum(-1).flip(-1)
        return (found + of_end.cumsum(-1) - of_end + of_whole.unsqueeze(-1)).movedim(-1, 0)
