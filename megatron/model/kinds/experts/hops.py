# SPDX-License-Identifier: Apache-2.0
"""Dispatch in hops (--moe-token-dispatcher-type flex): a token is sent once to each node that has some of its experts, and
there once to each rank, as DeepEP (github.com/deepseek-ai/DeepEP) and HybridEP do.

    tokens [n, h] -> all-to-all between nodes (`ep_outer`) -> inside a node (`ep_inner`) -> rows of this rank's experts

With a token go the numbers of its experts and their weights. A rank sends tokens to the rank with its own place on another
node, which passes them on. On the way back each rank adds up what its experts made of a token, and so does each node: one
row goes back for each that came. With 256 experts on 8 nodes, 8 of them for a token from 4 nodes at most (DeepSeek-V3), 3.6
rows of a token cross between nodes in each direction, instead of 7.

Legend: n tokens, h hidden, k experts of a token, E experts.
"""

from typing import NamedTuple, Optional

import torch

from megatron.model.kinds.experts.dispatch import Counting, Counts, Dispatcher, permuted, summed
from megatron.model.kinds.experts.grouped import Rows
from megatron.mpu import collectives, mappings
from megatron.mpu.mesh import Axis


class HopCounts(NamedTuple):
    """hops: of each, rows to and from each rank of its axis. pairs: those of this rank's experts, as of one rank alone"""

    hops: tuple[tuple[list[int], list[int]], ...]
    pairs: Counts


class HopDispatcher:
    """Sends each token once to a node, and once to a rank of it. Arguments as of `Dispatcher`.

    levels: `ep_outer`, `ep_inner`
    """

    def __init__(
        self,
        experts: torch.Tensor,
        number: int,
        ep: Axis,
        drops: bool,
        counts: Optional[HopCounts] = None,
        *,
        over: Axis,
        levels: tuple[Axis, Axis],
    ):
        self.experts, self.number, self.levels, self.alone = experts, number, levels, ep.alone
        self.counts, self.hops = counts, []
        if counts is None:
            self._counting = Counting(_leaving(experts, number, *levels), over, experts.is_meta)

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Dispatcher.dispatch`."""
        self.counts = self.counts or self._count()
        experts, number = self.experts, self.number
        for axis, (sent, received) in zip(self.levels, self.counts.hops, strict=True):
            if axis.size > 1:
                hop = Hop(experts, number, axis, sent, received)
                x, weights, experts = hop.send(x, weights)
                self.hops.append(hop)
            number //= axis.size
        self._local = Dispatcher(experts, number, self.alone, True, self.counts.pairs)
        rows = self._local.dispatch(x, weights)
        self.rows = self._local.rows
        return rows

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """See `Dispatcher.combine`."""
        y = self._local.combine(y)
        for hop in reversed(self.hops):
            y = hop.back(y)
        return y

    def _count(self) -> HopCounts:
        """Of the counts of `_leaving`, what this rank sends and gets in each hop."""
        (outer, inner), (leaving, arriving) = self.levels, self._counting.lists()
        own, here = self.number // (outer.size * inner.size), inner.rank
        alike = arriving[here :: inner.size]  # from the ranks with this place on each node
        first = [rows[-1] for rows in leaving[:: inner.size]], [rows[-1] for rows in alike]
        sent = [sum(rows[own + place] for rows in alike) for place in range(inner.size)]
        received = [sum(rows[own + here] for rows in arriving[place :: inner.size]) for place in range(inner.size)]
        lengths = [sum(of_expert) for of_expert in zip(*(rows[:own] for rows in arriving))]
        numbers = self._counting.arriving[:, :own].sum(0)
        pairs = Counts(sum(lengths), [], [], numbers, Rows(numbers, sum(lengths), lengths))
        return HopCounts((first, (sent, received)), pairs)


class Hop:
    """Tokens to each rank of an axis that has some of their experts.

    experts: [n, k], E for none. number: E, of all ranks of the axis. sent, received: tokens to and from each rank
    """

    def __init__(self, experts: torch.Tensor, number: int, axis: Axis, sent: list[int], received: list[int]):
        self.axis, self.sent, self.received, self.experts, self.own = axis, sent, received, experts, number // axis.size
        # A pair is a token and a rank here; its row comes after those for ranks before, in the order of tokens.
        n, m, reached = len(experts), sum(sent), _reached(experts // self.own, axis.size)
        place = (reached.t().flatten().cumsum(0) - 1).view(axis.size, n).t()
        self.place = place.masked_fill(~reached, m).flatten()
        pairs = torch.arange(n * axis.size, device=experts.device)
        self.order = torch.full((m + 1,), len(pairs), device=experts.device).scatter_(0, self.place, pairs)[:-1]

    def send(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [n, h] and weights [n, k] -> those that arrive, and their experts, counted from this rank's first."""
        ranks = self.axis.size
        rows, factors = (permuted(one, self.order, self.place, ranks, False) for one in (x, weights))
        experts = self.experts[self.order // ranks] - (self.order % ranks * self.own).unsqueeze(1)
        experts = experts.masked_fill((experts < 0) | (experts >= self.own), self.own).to(torch.int16)
        rows, factors, experts = mappings.all_to_all_of((rows, factors, experts), self.axis, self.sent, self.received)
        return rows, factors, experts.long()

    def back(self, y: torch.Tensor) -> torch.Tensor:
        """The sums of each rank, in the order in which tokens arrived -> the sums of these for tokens [n, h]."""
        y = mappings.all_to_all(y, self.axis, self.received, self.sent)
        return summed(y, self.order, self.place, self.axis.size, False)


def _leaving(experts: torch.Tensor, number: int, outer: Axis, inner: Axis) -> torch.Tensor:
    """What each rank of ep has to know of this rank's tokens, [ep, E/ep + inner + 1]: the pairs of each of its experts, the
    tokens for each rank of its node, and for its node.
    """
    n, ranks = len(experts), outer.size * inner.size
    pairs = collectives.count_kinds(experts.flatten(), number).view(ranks, -1)
    if experts.is_meta:  # as if each token had experts on all ranks
        reached = torch.ones(n, ranks, dtype=torch.bool)
    else:
        reached = _reached(experts // (number // ranks), ranks)
    of_nodes = reached.view(n, outer.size, inner.size)
    tokens = torch.cat((of_nodes.sum(0), of_nodes.any(2).sum(0).unsqueeze(1)), 1)  # [outer, inner + 1]
    return torch.cat((pairs, tokens.repeat_interleave(inner.size, 0)), 1)


def _reached(homes: torch.Tensor, ranks: int) -> torch.Tensor:
    """Which ranks have experts of which tokens, [n, ranks]. homes: [n, k], the rank of each expert, or `ranks` or more."""
    found = homes.new_zeros(len(homes), ranks + 1, dtype=torch.bool)
    return found.scatter_(1, homes.clamp_max(ranks), True)[:, :-1]
