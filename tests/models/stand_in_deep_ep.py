# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the package `deep_ep`: `Buffer` as DeepEP 2.1.0 documents it, and `HybridEPBuffer` of its branch
hybrid-ep, for tensors of CPUs. What every rank sends is gathered on all of them, and each takes its part.

It refuses what the libraries assert: formats, shapes, whole numbers of another width, tensors with gaps. With
`async_finish` what arrives is NaN until the event has been waited for. `calls` counts, by name, and `sent` bytes of tokens.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

topk_idx_t = torch.int64
FORMATS, WIDTH = {torch.bfloat16}, 16  # of tokens
calls, sent = Counter(), Counter()


def gathered(group: Any, value: Any) -> list:
    """The values of all ranks of a group. A group of threads has a method for it."""
    if hasattr(group, "gathered"):
        return group.gathered(value)
    values = [None] * group.size()
    dist.all_gather_object(values, value, group)
    return values


def check(x: torch.Tensor, *shape: int, of: set = frozenset({torch.float32})) -> None:
    assert x.dtype in of and x.is_contiguous() and x.dim() == len(shape)
    assert all(size in (-1, found) for size, found in zip(shape, x.shape, strict=True)), (shape, x.shape)


class Event:
    def __init__(self, late: dict[int, tuple[torch.Tensor, torch.Tensor]]):
        self.late = late

    def current_stream_wait(self) -> None:
        for x, values in self.late.values():
            x.copy_(values)


def arriving(*values: Any) -> tuple:
    """Tensors that are NaN until an event, and the event."""
    empty = [None if one is None else torch.full_like(one, torch.nan) for one in values]
    late = {at: (x, value) for at, (x, value) in enumerate(zip(empty, values, strict=True)) if x is not None}
    return *empty, Event(late)


class Config(NamedTuple):
    sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 1000 * hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0 if ranks <= 8 else 1000 * hidden_bytes


class Handle(NamedTuple):
    sources: list[tuple[int, int]]  # (rank, token) of each token that has arrived
    n: int  # tokens of this rank


class Buffer:
    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0):
        self.group, self.sizes = group, (num_nvl_bytes, num_rdma_bytes)
        self.rank, self.ranks = group.rank(), group.size()
        calls["Buffer"] += 1

    @staticmethod
    def set_num_sms(number: int) -> None:
        assert number % 2 == 0
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        assert ranks in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple:
        check(topk_idx, -1, -1, of={torch.int64})
        assert topk_idx.max() < num_experts
        homes = topk_idx.div(num_experts // self.ranks, rounding_mode="floor")
        reached = torch.stack([(homes == rank).any(1) for rank in range(self.ranks)], 1)
        of_experts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return reached.sum(0).int(), None, of_experts, reached, None

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        async_finish: bool = False,
    ) -> tuple:
        check(x, -1, -1, of=FORMATS)
        assert x.shape[1] * x.element_size() % 16 == 0 and async_finish
        if handle is not None:
            assert topk_idx is None and topk_weights is None and len(x) == handle.n
            calls["dispatch, again"] += 1
            tokens = gathered(self.group, x.detach())
            rows, event = arriving(self._stacked([tokens[rank][at] for rank, at in handle.sources], x))
            return rows, None, None, None, None, event
        calls["dispatch"] += 1
        n, k = topk_idx.shape
        check(topk_weights, n, k)
        check(is_token_in_rank, n, self.ranks, of={torch.bool})
        check(num_tokens_per_rank, self.ranks, of={torch.int32})
        sent["tokens"] += int(num_tokens_per_rank.sum())
        own = len(num_tokens_per_expert) // self.ranks
        value = x.detach(), topk_idx, topk_weights.detach(), is_token_in_rank
        of_all, sources = gathered(self.group, value), []
        for rank, (*_, reached) in enumerate(of_all):
            sources += [(rank, at) for at in reached[:, self.rank].nonzero().flatten().tolist()]
        take = lambda which, like: self._stacked([of_all[rank][which][at] for rank, at in sources], like)
        chosen = take(1, topk_idx) - self.rank * own
        mine = (chosen >= 0) & (chosen < own)
        chosen = chosen.masked_fill(~mine, -1)
        lengths = torch.bincount(chosen[mine], minlength=own).tolist()
        rows, weights, event = arriving(take(0, x), take(2, topk_weights) * mine)
        return rows, chosen, weights, lengths, Handle(sources, n), event

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: Any = None, async_finish: bool = False) -> tuple:
        check(x, len(handle.sources), -1, of=FORMATS)
        calls["combine"] += 1
        assert async_finish
        if topk_weights is not None:
            check(topk_weights, len(x), -1)
        weights = None if topk_weights is None else topk_weights.detach()
        sums = torch.zeros(handle.n, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
        own = None if weights is None else torch.zeros(handle.n, weights.shape[1])
        for rows, factors, sources in gathered(self.group, (x.detach(), weights, handle.sources)):
            for at, (rank, token) in enumerate(sources):
                if rank == self.rank:
                    sums[token] += rows[at]
                    if own is not None:
                        own[token] += factors[at]
        return arriving(sums.to(x.dtype), own)

    @staticmethod
    def _stacked(rows: list, like: torch.Tensor) -> torch.Tensor:
        return torch.stack(rows) if rows else like.new_empty(0, *like.shape[1:]).detach()


class Permuted(NamedTuple):
    sources: list[tuple[int, int, int]]  # (rank, token, expert) of each row
    n: int
    experts: int


class HybridEPBuffer:
    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: Any = None,
        num_sms_combine_api: Any = None,
    ):
        assert hidden_dim % WIDTH == 0 and not use_fp8
        assert (num_local_experts * group.size()) % 4 == 0
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.hidden, self.own = hidden_dim, num_local_experts
        self.sms = num_sms_dispatch_api, num_sms_combine_api
        calls["HybridEPBuffer"] += 1

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        num_of_experts_per_rank: Any = None,
        routing_map: Any = None,
        probs: Any = None,
        num_permuted_tokens: Any = None,
        handle: Any = None,
    ) -> tuple:
        check(hidden, -1, self.hidden, of=FORMATS)
        if handle is not None:
            assert num_permuted_tokens == len(handle.sources) and len(hidden) == handle.n
            calls["dispatch, again"] += 1
            tokens = gathered(self.group, hidden.detach())
            rows = [tokens[rank][at] for rank, at, _ in handle.sources]
            return Buffer._stacked(rows, hidden), None, None, None, handle
        calls["dispatch"] += 1
        check(routing_map, len(hidden), self.own * self.ranks, of={torch.bool})
        check(probs, *routing_map.shape)
        assert num_of_experts_per_rank == self.own
        of_all, sources = gathered(self.group, (hidden.detach(), routing_map, probs.detach())), []
        assert len({len(tokens) for tokens, *_ in of_all}) == 1  # equally many on all ranks
        for expert in range(self.rank * self.own, (self.rank + 1) * self.own):
            for rank, (_, chosen, _) in enumerate(of_all):
                sources += [(rank, at, expert) for at in chosen[:, expert].nonzero().flatten().tolist()]
        lengths = torch.zeros(self.own, dtype=torch.int32)
        for _, _, expert in sources:
            lengths[expert - self.rank * self.own] += 1
        rows = Buffer._stacked([of_all[rank][0][at] for rank, at, _ in sources], hidden)
        weights = torch.tensor([float(of_all[rank][2][at, expert]) for rank, at, expert in sources])
        return rows, weights, None, lengths, Permuted(sources, len(hidden), self.own * self.ranks)

    def combine_with_unpermute(self, *, hidden: torch.Tensor, probs: Any = None, handle: Any) -> tuple:
        check(hidden, len(handle.sources), self.hidden, of=FORMATS)
        if probs is not None:
            check(probs, len(hidden))
        calls["combine"] += 1
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums, own = torch.zeros(handle.n, self.hidden, dtype=wide), torch.zeros(handle.n, handle.experts)
        value = hidden.detach(), None if probs is None else probs.detach(), handle.sources
        for rows, factors, sources in gathered(self.group, value):
            part = torch.zeros_like(sums)
            for at, (rank, token, expert) in enumerate(sources):
                if rank == self.rank:
                    part[token] += rows[at]
                    if factors is not None:
                        own[token, expert] += factors[at]
            sums += part.to(hidden.dtype)  # a rank sends its sums in the format of tokens
        return sums.to(hidden.dtype), None if probs is None else own
