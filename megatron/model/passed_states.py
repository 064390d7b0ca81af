# SPDX-License-Identifier: Apache-2.0
"""Scans over sequences that ranks share: each scans its own two chunks of a sequence, and passes states on.

The two chunks are two samples of half as many tokens, `halves`. Each leaves a state and a map of the state before it
(`fused_kernels.scan`); all ranks gather those of all chunks, and join those before their own. Two ranks, chunks 0 to 3:

    rank 0: chunk 0 begins with zeros       rank 1: chunk 1 begins with S0
            chunk 3           M2 (M1 S0 + S1) + S2          chunk 2           M1 S0 + S1

The backward pass joins the gradients of states from the last chunk back. A convolution before the scan needs the last rows
of the chunk before, which are gathered, too; with short chunks, those of several.

Legend: s rows of a rank in two chunks of c, b samples, cp ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

from megatron.fused_kernels.documents import Documents
from megatron.mpu import collectives
from megatron.mpu.chunks import own_chunks
from megatron.mpu.context_parallel import gather_from_context_parallel_region
from megatron.mpu.mesh import Axis


def halves(x: torch.Tensor) -> torch.Tensor:
    """[s, b, ...] -> [s/2, 2 b, ...]: a rank's chunks as samples, the early one of each, then the late one."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)


def whole(x: torch.Tensor) -> torch.Tensor:
    """[s/2, 2 b, ...] -> [s, b, ...]"""
    return x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)


@dataclass(frozen=True)
class PassedStates:
    """A `fused_kernels.scan.Passing` between the `halves` of these ranks. documents: of the halves, `Documents.of_parts`"""

    ranks: Axis
    documents: Optional[Documents] = None

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of the rank's chunks in the sequence."""
        return self.ranks.rank, 2 * self.ranks.size - 1 - self.ranks.rank

    def rows_before(self, x: torch.Tensor, n: int) -> torch.Tensor:
        """[n, 2 b, ...]: the n rows before each half [c, 2 b, ...] in its sequence and document; zeros where none are."""
        if n == 0:
            return x[:0]
        last = whole(x[len(x) - min(n, len(x)) :])
        every = gather_from_context_parallel_region(last, self.ranks)  # [2 cp n, b, ...], those of chunk after chunk
        each = len(last) // 2
        of_chunk = lambda number: every[max(0, number * each - n) : number * each]
        padded = (torch.cat((own.new_zeros(n - len(own), *own.shape[1:]), own)) for own in map(of_chunk, self.chunks))
        rows = torch.cat(tuple(padded), 1)
        if self.documents is None:
            return rows
        # how far each is before the first token of a half
        back = torch.arange(n, 0, -1, device=x.device).view(n, *(1 for _ in x.shape[1:]))
        return rows.masked_fill(back > self.documents.past.view(-1, *(1 for _ in x.shape[2:])), 0.0)

    def states(self, states: torch.Tensor, maps: torch.Tensor, mapped: Callable) -> torch.Tensor:
        return self._go_on(self._joined(states, self._go_on(maps), mapped))

    def gradients(self, gradients: torch.Tensor, maps: torch.Tensor, mapped: Callable) -> torch.Tensor:
        return self._joined(self._go_on(gradients), self._go_on(maps), mapped, back=True)

    def _go_on(self, x: torch.Tensor) -> torch.Tensor:
        """x [2 b, ...], with zeros for halves that begin with a document."""
        if self.documents is None:
            return x
        return x * (self.documents.past > 0).view(-1, *(1 for _ in x.shape[1:]))

    def _joined(self, own: torch.Tensor, maps: torch.Tensor, mapped: Callable, back: bool = False) -> torch.Tensor:
        """What reaches the rank's halves [2 b, ...] of what all halves before them leave, or back: after them."""
        size = self.ranks.size
        sent = torch.cat((own.flatten(1), maps.flatten(1)), 1).unflatten(0, (2, -1))
        every = collectives.all_gather(sent, self.ranks)  # [2 cp, b, numbers]: the chunks of rank after rank
        total, found = torch.zeros_like(own[: len(own) // 2]), {}
        for number in range(2 * size)[:: -1 if back else 1]:
            found[number] = total
            if found.keys() >= set(self.chunks):
                break
            part = every[2 * min(number, 2 * size - 1 - number) + (number >= size)]
            left, of_chunk = part.split((own[0].numel(), maps[0].numel()), 1)
            total = left.view(-1, *own.shape[1:]) + mapped(of_chunk.view(-1, *maps.shape[1:]), total, back)
        return torch.cat([found[number] for number in self.chunks])


def documents_of_halves(starts: np.ndarray, ranks: Axis, device) -> Documents:
    """The documents of the rank's halves, from the start positions [b, whole s] of documents in whole samples."""
    return Documents.of_parts(starts, own_chunks(starts.shape[1], ranks.rank, ranks.size), device)
