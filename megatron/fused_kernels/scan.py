# SPDX-License-Identifier: Apache-2.0
"""What scans along a sequence have in common: passes over chunks of tokens, and decays between the tokens of a chunk.

A scan carries a state from token to token, which decays by exp(log decay) at each. Sums of log decays grow far beyond
their differences, so they are taken in fp64 and kept as two fp32 numbers; only differences, which are never positive, are
exponentiated; those of tokens that do not see each other are -inf before that.

`scan` keeps its inputs. The backward pass computes the states at the starts of chunks again, and goes back through them.

**States between samples.** The state after some tokens is an affine function of that before them: a map of it, plus what
the tokens leave from zeros. So parts of one sequence can be scanned at once: each computes its map and its state, `Passing`
joins those of the parts before it, and each goes on from there. Gradients of states go back through the same maps.

Legend: s tokens, b samples, G groups of r heads, c tokens of a chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional, Protocol

import torch

from megatron.fused_kernels.documents import Documents


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


class ScanRule(Protocol):
    """The tokens of a chunk, and what a scan does with them; states and results are in fp32.

    TOKENS: the first so many inputs of `scan` are [s, b, ...], the others have no tokens
    """

    TOKENS: int

    @classmethod
    def of(cls, inputs: Sequence[torch.Tensor], starts: Optional[torch.Tensor], rows: slice) -> "ScanRule":
        """The tokens of these rows. starts: as in `Decays.of`"""

    @staticmethod
    def zeros(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(a state of zeros [b, ...], the map [b, ...] that changes none)."""

    @staticmethod
    def mapped(maps: torch.Tensor, states: torch.Tensor, transposed: bool = False) -> torch.Tensor:
        """Maps of states, or of their gradients by the transposed maps."""

    @staticmethod
    def like(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The input that what tokens read has the shape and format of."""

    def visit(self, state: torch.Tensor) -> tuple:
        """What the other methods need from the state before the chunk; the first of it is the state."""

    def read(self, *visit: torch.Tensor) -> torch.Tensor:
        """What the tokens read, [c, b, ...]."""

    def after(self, *visit: torch.Tensor) -> torch.Tensor:
        """The state after the chunk."""

    def joined(self, state: torch.Tensor, maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after the chunk, and the map from before the first chunk."""

    def of_state(self, d_y: torch.Tensor, d_after: torch.Tensor) -> torch.Tensor:
        """The gradient of the state before the chunk, from those of what the tokens read and of the state after it."""

    def gradients(self, *visit_d_y_d_after: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of the inputs, [c, b, ...] or sums over tokens, and `of_state`."""


class Passing(Protocol):
    """How samples that are parts of a sequence pass states on; other ranks may have some of the parts.

    mapped: of the `ScanRule`
    """

    def states(self, states: torch.Tensor, maps: torch.Tensor, mapped: Callable) -> torch.Tensor:
        """The states before the samples, from those that each leaves from zeros, and its map."""

    def gradients(self, gradients: torch.Tensor, maps: torch.Tensor, mapped: Callable) -> torch.Tensor:
        """What later parts add to the gradients of the states after the samples, from those of the states before them
        without it."""


def scan(
    rule: type[ScanRule],
    inputs: Sequence[torch.Tensor],
    state: Optional[torch.Tensor],
    documents: Optional[Documents],
    chunk: int,
    passing: Optional[Passing],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what tokens read, in the shape and format of the rule's `like`, the state after the last token).

    state: before the first; None: zeros. documents: of the s tokens. passing: the state comes from other samples
    """
    assert state is None or passing is None
    return _Scan.apply(rule, None if documents is None else documents.starts, chunk, passing, state, *inputs)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rule, starts, chunk, passing, state, *inputs):
        maps, (zeros, same) = None, rule.zeros(inputs)
        parts = lambda: ((rows, rule.of(inputs, starts, rows)) for rows in chunks(len(inputs[0]), chunk))
        if passing is not None:
            left, maps = zeros, same
            for _, part in parts():
                left, maps = part.joined(left, maps)
            maps = maps.contiguous()  # it is saved, and may be a part of another tensor
            state = passing.states(left, maps, rule.mapped)
        ctx.save_for_backward(starts, state, maps, *inputs)
        ctx.of = rule, chunk, passing
        state, like = zeros if state is None else state, rule.like(inputs)
        y = like.new_empty(like.shape)
        for rows, part in parts():
            visit = part.visit(state)
            y[rows], state = part.read(*visit), part.after(*visit)
        return y, state

    @staticmethod
    def backward(ctx, d_y, d_after):
        (starts, before, maps, *inputs), (rule, chunk, passing) = ctx.saved_tensors, ctx.of
        of = lambda rows: rule.of(inputs, starts, rows)
        state, visits, count = rule.zeros(inputs)[0] if before is None else before, [], len(d_y)
        for rows in chunks(count, chunk):
            part = of(rows)
            visits.append((rows, part.visit(state)))
            state = part.after(*visits[-1][1]) if rows.stop < count else None
        if passing is not None:
            own = d_after
            for rows, _ in reversed(visits):
                own = of(rows).of_state(d_y[rows].float(), own)
            d_after = d_after + passing.gradients(own, maps, rule.mapped)
        found = [torch.empty_like(one) for one in inputs[: rule.TOKENS]]
        found += [torch.zeros_like(one, dtype=torch.float32) for one in inputs[rule.TOKENS :]]
        for rows, visit in reversed(visits):
            *own, d_after = of(rows).gradients(*visit, d_y[rows].float(), d_after)
            for place, (whole, part) in enumerate(zip(found, own, strict=True)):
                if place < rule.TOKENS:
                    whole[rows] = part
                else:
                    whole += part
        d_inputs = (one.to(given.dtype) for one, given in zip(found, inputs, strict=True))
        return None, None, None, None, None if passing or before is None else d_after, *d_inputs
