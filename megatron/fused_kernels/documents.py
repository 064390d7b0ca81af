# SPDX-License-Identifier: Apache-2.0
"""Documents packed into samples, in the form for attention kernels: their start positions, instead of a mask of all
pairs of query and key. Memory is linear in the sequence.

Legend: s queries, which are the last of t keys, b samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Optional

import numpy as np
import torch

from megatron.settings.kernel_sizes import JOINED


class Part(NamedTuple):
    """Consecutive keys of a sample; the last `queries` of them are also queries. documents: how many begin among them."""

    queries: int
    keys: int
    documents: int = 1


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one attention call: a query sees the keys of its own document, up to its own.

    starts       [b, s] int32: the first key of each query's document, counted among the t keys
    query_edges  [n + 1] int32: the start of each document among all b s queries, sample after sample, and their number
    key_edges    [n + 1] int32: the same among all b t keys; cu_seqlens of flash attention. Keys that no query
                 can see, because their documents ended before, are a document without queries
    longest      largest number of queries and of keys of a document
    on_host      `starts` in CPU memory: a kernel that skips blocks needs them before its launch
    parts        the documents of each sample, in order
    past         [b] int32, of parts of longer samples (`of_parts`): tokens of a part's first document before it; else None

    Built on the host by `of` and copied to the device asynchronously, once for all layers of a pass.
    """

    starts: torch.Tensor
    query_edges: torch.Tensor
    key_edges: torch.Tensor
    longest: tuple[int, int]
    on_host: np.ndarray
    parts: tuple[tuple[Part, ...], ...]
    past: Optional[torch.Tensor] = None

    @classmethod
    def of(cls, starts: np.ndarray, device, *, rows: Optional[tuple[int, int]] = None, first: int = 0) -> "Documents":
        """Build for whole samples, or for the queries of some rows over the keys from `first` to the last of these rows.

        starts: [b, whole s] int32, the first position of each token's document; rows: [start, stop) of the queries

        >>> tail = Documents.of(np.array([[0, 0, 2, 2, 2, 5]]), "cpu", rows=(3, 6))
        >>> tail.starts.tolist(), tail.query_edges.tolist(), tail.key_edges.tolist(), tail.longest
        ([[2, 2, 5]], [0, 0, 2, 3], [0, 2, 5, 6], (2, 3))
        """
        start, stop = rows or (0, starts.shape[1])
        own = np.maximum(starts[:, start:stop] - first, 0).astype(np.int32)
        parts = tuple(_parts(sample[first:stop] - first, start - first) for sample in starts)
        every = [part for sample in parts for part in sample]
        edges = np.zeros((2, len(every) + 1), np.int32)
        np.cumsum([part.queries for part in every], out=edges[0, 1:])
        np.cumsum([part.keys for part in every], out=edges[1, 1:])
        longest = max(part.queries for part in every), max(part.keys for part in every)
        packed = _sent(np.concatenate((edges.ravel(), own.ravel())), device)  # one copy for the three
        query_edges, key_edges, places = packed.split((edges.shape[1], edges.shape[1], own.size))
        return cls(places.view(own.shape), query_edges, key_edges, longest, own, parts)

    @classmethod
    def of_parts(cls, starts: np.ndarray, parts: Sequence[tuple[int, int]], device) -> "Documents":
        """Build for samples that are equally long parts, [start, stop), of b samples: the first of each, then the second.

        >>> halves = Documents.of_parts(np.array([[0, 0, 2, 2, 2, 5]]), ((0, 3), (3, 6)), "cpu")
        >>> halves.starts.tolist(), halves.past.tolist()
        ([[0, 0, 2], [0, 0, 2]], [0, 1])
        """
        own = np.concatenate([starts[:, start:stop] - start for start, stop in parts]).astype(np.int32)
        past = np.maximum(-own[:, 0], 0)
        return replace(cls.of(np.maximum(own, 0), device), past=_sent(past, device))

    @cached_property
    def bounds(self) -> tuple[list[int], list[int]]:
        """For each query the minimum and maximum over samples of its first key."""
        return self.on_host.min(0).tolist(), self.on_host.max(0).tolist()

    @cached_property
    def edges_on_host(self) -> torch.Tensor:
        """`key_edges` in CPU memory, [n + 1] int64."""
        lengths = [part.keys for sample in self.parts for part in sample]
        return torch.tensor([0, *lengths]).cumsum(0)

    @cached_property
    def runs(self) -> tuple[tuple[Part, ...], ...]:
        """`parts`, with neighbours joined while they have at most `JOINED` keys together."""
        return tuple(_joined(sample) for sample in self.parts)

    def allowed(self, t: int) -> torch.Tensor:
        """[b, s, t] bool: the key is in the query's document, or after the query. For kernels that only support masks."""
        return torch.arange(t, device=self.starts.device) >= self.starts.unsqueeze(-1)

    def together(self) -> torch.Tensor:
        """[b, t, t] bool: both are in the same document. For whole sequences and non-causal attention."""
        return self.starts.unsqueeze(-1) == self.starts.unsqueeze(-2)

    def places(self) -> torch.Tensor:
        """[b, t] int64: the position of each token in its document."""
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts


def _sent(numbers: np.ndarray, device) -> torch.Tensor:
    """Numbers on the device, for which the host does not wait."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


def starts_of(document_ids: torch.Tensor) -> np.ndarray:
    """Start positions [b, s] int32 from ids [s, b], equal within a document. On a GPU this synchronizes."""
    ids = document_ids.t().cpu().numpy()
    places = np.zeros(ids.shape, np.int32)
    places[:, 1:] = np.where(ids[:, 1:] != ids[:, :-1], np.arange(1, ids.shape[1], dtype=np.int32), 0)
    return np.maximum.accumulate(places, axis=1)


def _parts(starts: np.ndarray, past: int) -> tuple[Part, ...]:
    """The documents of a sample. starts: [t], for each key, may be negative; past: keys before the first query."""
    t = len(starts)
    begins = np.flatnonzero(starts == np.arange(t))
    seen = begins[begins > max(int(starts[past]), 0)]  # documents after that of the first query
    edges = np.unique(np.concatenate(([0, max(int(starts[past]), 0)], seen, [t])))
    queries = np.diff(np.maximum(edges, past))
    return tuple(Part(*sizes) for sizes in zip(queries.tolist(), np.diff(edges).tolist()))


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last and last.queries and last.keys + part.keys <= JOINED:
            result[-1] = Part(*(mine + other for mine, other in zip(last, part)))
        else:
            result.append(part)
    return tuple(result)
