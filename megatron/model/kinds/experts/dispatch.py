# SPDX-License-Identifier: Apache-2.0
"""Dispatch: tokens are sent to their experts, and the results back.

A *pair* is a token and one of its k experts; pair number t k + j is token t and its j-th expert. Rows are pairs in the
order of their experts, and within an expert in the order of tokens, so equal routing gives equal sums in every run.

    x [n, h] -> rows of all experts -> all-to-all over ep -> rows of this rank's experts -> experts -> back -> [n, h]

The weight of a pair goes with its row, and the expert multiplies it in before its second product, as in Megatron-Core: what
comes back is only added, so no output of an expert is kept for the backward pass.

Without padding, sizes depend on the data (`Dispatcher`): ranks exchange how many rows they send, which the host reads
once for each layer; with ep 1 and no drops it reads nothing. With padding to a capacity (`PaddedDispatcher`) all sizes
are fixed, and the host reads nothing.

Legend: n tokens of this rank, h hidden, k experts of a token, E experts, C capacity, m rows.
"""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels import Case, choose_kernel
from megatron.model.kinds.experts.grouped import Rows, row_unit
from megatron.mpu import collectives, mappings
from megatron.mpu.mesh import Axis
from megatron.mpu.transfer import Arriving


class Counts(NamedTuple):
    """The numbers of rows. The host waits for them once; recomputation takes those of the first pass.

    kept: pairs of this rank that have an expert. sent, received: rows to and from each rank of ep. arriving: [ep, E/ep],
    rows from each rank for each expert of this one. rows: of the experts of this rank
    """

    kept: int
    sent: list[int]
    received: list[int]
    arriving: torch.Tensor
    rows: Rows


class Counting:
    """Counts [ranks, c] of rows for each rank of an axis, on their way to these ranks and to the host. Whatever is launched
    after it runs while the host waits.
    """

    def __init__(self, leaving: torch.Tensor, axis: Axis, alike: bool = False):
        self.leaving = leaving
        self.arriving, self._message = collectives.start_counts(leaving, axis, alike)
        self._read = None
        if leaving.device.type == "cuda":
            self.read()

    def read(self) -> Arriving:
        if self._read is None:
            self._message.wait()
            self._read = Arriving(torch.cat((self.leaving, self.arriving)).flatten())
        return self._read

    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """The counts on the host: (for each rank, from each rank)."""
        numbers, (ranks, width) = self.read().read(), self.leaving.shape
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        return rows[:ranks], rows[ranks:]


class Dispatcher:
    """Sends each expert as many rows as it has pairs. A recipe may bring a subclass (`parts.ExpertParts`), with `dispatch`,
    `combine`, and after `dispatch` `rows`, the numbers of rows of this rank's experts, and `counts`, which recomputation
    passes on.

    experts: [n, k], the expert of each pair; E marks pairs without one. number: E. drops: whether there may be such pairs.
    counts: those of the first pass, in recomputation. over: an axis with the ranks of ep, for the counts; None: ep
    """

    counts: Optional[Counts] = None
    filled = True  # each row of this rank's experts is one that arrived
    # --batch-invariant-mode: so many neighbouring ranks of ep have the rows of a sample, in their order, and each sample's
    # rows of an expert are a sum of their own; 0: without the mode
    sample_ranks = 0

    def __init__(
        self,
        experts: torch.Tensor,
        number: int,
        ep: Axis,
        drops: bool,
        counts: Optional[Counts] = None,
        over: Optional[Axis] = None,
    ):
        self.ep, self.k, self.counts, self._flat, self._counting = ep, experts.shape[1], counts, experts.flatten(), None
        if counts is None:
            leaving = collectives.count_kinds(self._flat, number).view(ep.size, -1)
            if self._flat.is_meta or drops or ep.size > 1:
                self._counting = Counting(leaving, over or ep, self._flat.is_meta)
            else:
                self.counts = Counts(len(self._flat), [], [], leaving, Rows(leaving.sum(0), len(self._flat)))

    def _count(self) -> Counts:
        leaving, arriving = self._counting.lists()  # the host waits for the device, once
        sent, received = ([sum(row) for row in rows] for rows in (leaving, arriving))
        lengths = [sum(of_expert) for of_expert in zip(*arriving)]
        numbers = self._counting.arriving
        return Counts(sum(sent), sent, received, numbers, Rows(numbers.sum(0), sum(received), lengths))

    def _arrange(self) -> None:
        """Find the order of rows."""
        self.counts, flat = self.counts or self._count(), self._flat
        kept, self.sent, self.received, arriving, self.rows = self.counts
        order = flat.argsort(stable=True)  # pairs without an expert are last
        self.whole = kept == len(flat)
        self.order, self.place = order[:kept], _inverse(order).clamp_max(kept)
        if self.ep.size > 1:
            kinds = torch.arange(arriving.shape[1], device=arriving.device).repeat(self.ep.size)
            kinds = kinds.repeat_interleave(arriving.flatten(), output_size=self.rows.total)
            self.by_expert = kinds.argsort(stable=True)  # of arrived rows
            self.by_rank = _inverse(self.by_expert)
        if self.sample_ranks and not flat.is_meta:
            return self._align_samples(kinds if self.ep.size > 1 else flat)
        unit = row_unit(self.rows, flat.device.type)
        if unit > 1 and self.ep.size > 1:
            self.by_expert, self.by_rank, self.rows = _aligned(self.by_rank, kinds, self.rows, unit)
            self.filled = False
        elif unit > 1:
            self.order, self.place, self.rows = _aligned(self.place, flat, self.rows, unit)
            self.whole = False

    def _align_samples(self, experts: torch.Tensor) -> None:
        """Add rows of zeros after those of each sample for each expert, as many as if it were on a rank alone. experts: of
        each pair, or row that has arrived.
        """
        arriving, ranks, each = self.counts.arriving, self.ep.size, self.sample_ranks
        mean = Rows(arriving.new_zeros(arriving.shape[1] * ranks), len(self._flat) * each)  # alone, with all experts
        samples, unit = ranks // each, row_unit(mean, self._flat.device.type)
        by_sample = arriving.unflatten(0, (samples, each)).sum(1).t().flatten()
        kinds = experts
        if ranks > 1:
            sample = torch.arange(ranks).div_(each, rounding_mode="floor")
            kinds = experts * samples + sample.repeat_interleave(arriving.sum(1), output_size=len(experts))
        before = self.place if ranks == 1 else self.by_rank
        order, place, parts = _aligned(before, kinds, Rows(by_sample, self.rows.total), unit)
        sources = parts.counts.view(-1, samples)
        self.rows = Rows(sources.sum(1), parts.total, sources.sum(1).tolist(), sources=sources.tolist())
        if ranks > 1:
            self.by_expert, self.by_rank, self.filled = order, place, False
        else:
            self.order, self.place, self.whole = order, place, False

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, h] and the weights of its pairs, [n, k] -> the rows of this rank's experts, [m, h], and their weights,
        [m, 1]; 0 for a row without a pair.
        """
        self._arrange()
        leaving = self._leaving(x, weights)
        if self.ep.size == 1:
            return leaving
        arrived = mappings.all_to_all_of(leaving, self.ep, self.sent, self.received)
        rows, own = (permuted(one, self.by_expert, self.by_rank, whole=self.filled) for one in arrived)
        return rows, own

    def _leaving(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of all experts from this rank, and their weights."""
        rows = permuted(x, self.order, self.place, self.k, self.whole)
        return rows, permuted(weights.reshape(-1, 1), self.order, self.place, whole=self.whole)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank's experts, [m, h] -> their sums for each token, [n, h]."""
        if self.ep.size > 1:
            y = permuted(y, self.by_rank, self.by_expert, whole=self.filled)
            y = mappings.all_to_all(y, self.ep, self.received, self.sent)
        return summed(y, self.order, self.place, self.k, self.whole)


class PaddedDispatcher(Dispatcher):
    """Sends each expert `capacity` rows from each rank. Rows without a pair are 0.

    experts: [n, k], no more than `capacity` pairs of each expert
    """

    def __init__(self, experts: torch.Tensor, number: int, ep: Axis, capacity: int):
        flat = experts.flatten()
        self.ep, self.k, self.capacity, self.whole = ep, experts.shape[1], capacity, False
        slots, own, even = number * capacity, number // ep.size, ep.size * capacity
        order = flat.argsort(stable=True)
        ordered = flat[order]
        first = torch.searchsorted(ordered, torch.arange(number + 1, device=flat.device))  # of each expert
        slot = ordered * capacity + torch.arange(len(flat), device=flat.device) - first[ordered]
        slot = torch.where(ordered < number, slot, slots)
        self.place = torch.empty_like(flat).scatter_(0, order, slot)
        self.order = torch.full((slots + 1,), len(flat), device=flat.device).scatter_(0, slot, order)[:-1]
        counts, sources = torch.full((own,), even, device=flat.device), [[capacity] * ep.size] * own
        self.rows = Rows(counts, own * even, [even] * own, even, sources)

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arrived = mappings.all_to_all_of(self._leaving(x, weights), self.ep)
        rows, own = (self._turned(one, self.ep.size, -1) for one in arrived)
        return rows, own

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        y = mappings.all_to_all(self._turned(y, -1, self.ep.size), self.ep)
        return summed(y, self.order, self.place, self.k, self.whole)

    def _turned(self, rows: torch.Tensor, first: int, second: int) -> torch.Tensor:
        """Rows [first, second, C] -> [second, first, C]."""
        return rows.view(first, second, self.capacity, rows.shape[-1]).transpose(0, 1).flatten(0, 2)


def permuted(x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int = 1, whole: bool = True) -> torch.Tensor:
    """See `fused_kernels.reference.permute`."""
    return choose_kernel("permute", Case(x.device.type, x.dtype)).run(x, order, place, k, whole)


def summed(y: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """See `fused_kernels.reference.unpermute`."""
    return choose_kernel("unpermute", Case(y.device.type, y.dtype)).run(y, order, place, k, whole)


def _aligned(
    place: torch.Tensor, experts: torch.Tensor, rows: Rows, unit: int
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """(order, place, rows) with rows of zeros after those of each expert, up to a multiple of `unit`.

    place: the row of each pair so far. experts: the expert of each pair
    """
    counts = (rows.counts + unit - 1) // unit * unit
    lengths = counts.tolist()
    total = sum(lengths)
    added = F.pad((counts - rows.counts).cumsum(0), (1, 0))  # before the rows of each expert
    place = place + added.index_select(0, experts)
    order = torch.full((total + 1,), len(place)).scatter_(0, place, torch.arange(len(place)))[:-1]
    return order, place, Rows(counts, total, lengths)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
