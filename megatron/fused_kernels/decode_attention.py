# SPDX-License-Identifier: Apache-2.0
"""Attention of the newest token of each of n texts, in one call, over keys and values in a common cache.

Legend: n texts, t tokens of one text, g key-value groups, q queries per group, d channels per head. query is [n, g, q, d],
keys and values are [places, g, d], results [n, g q d]. A text's result does not depend on the others.
"""

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F

from megatron.fused_kernels.explicit_attention import scale_weights

FEW = 4  # queries that share a key, up to which it is best to read the key for each of them


class Places:
    """The places of texts' tokens in a cache, whose blocks have `block_size` places each.

    of_texts: for each text slices of the cache, in the order of its tokens; each but the last one ends with its block, each
              begins with one

    >>> places = Places([(slice(8, 16), slice(0, 3)), (slice(4, 6),)], 4, torch.device("cpu"))
    >>> places.lengths.tolist(), places.blocks.tolist()
    ([11, 2], [[2, 3, 0], [1, 0, 0]])
    >>> places.last(4).of_texts
    [(slice(15, 16, None), slice(0, 3, None)), (slice(4, 6, None),)]
    """

    def __init__(self, of_texts: Sequence[tuple[slice, ...]], block_size: int, device: torch.device):
        self.of_texts, self.block_size, self.device = of_texts, block_size, device
        self._last: dict[int, Places] = {}
        self._pairs: dict[tuple[int, int, int], Pairs] = {}

    def __len__(self) -> int:
        return len(self.of_texts)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(map(_length, self.of_texts))

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[n] int32, tokens of each text."""
        return torch.tensor([*map(_length, self.of_texts)], dtype=torch.int32, device=self.device)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """[n, blocks of the longest text] int32, the blocks of each text, then zeros."""
        size = self.block_size
        table = np.zeros((len(self), -(-self.longest // size)), np.int32)
        for row, slices in zip(table, self.of_texts, strict=True):
            own = [block for one in slices for block in range(one.start // size, -(-one.stop // size))]
            row[: len(own)] = own
        return torch.from_numpy(table).to(self.device)

    def last(self, count: Optional[int]) -> "Places":
        """Those of the last `count` tokens of each text, or of all."""
        if count is None:
            return self
        if count not in self._last:
            of_texts = [last_places(slices, count) for slices in self.of_texts]
            self._last[count] = Places(of_texts, self.block_size, self.device)
        return self._last[count]

    def pairs(self, g: int, q: int, rows: int) -> "Pairs":
        """All pairs of a query and a key; the cache has that many rows [d]. Layers share them, one after the other."""
        if (g, q, rows) not in self._pairs:
            self._pairs[g, q, rows] = _pairs(self.of_texts, g, q, rows)
        return self._pairs[g, q, rows]


class Pairs(NamedTuple):
    """Pairs of a query and a key, ordered by text, group, query and token.

    scores:  [n g q, rows of the cache], a sparse matrix (CSR)
    columns: the key of each pair, as a row of the cache
    starts:  the first pair of each query
    softmax: for each text (scores [g q, t], weights [g q, t]), parts of `scores` and of `weights`
    """

    scores: torch.Tensor
    columns: torch.Tensor
    starts: torch.Tensor
    softmax: list[tuple[torch.Tensor, torch.Tensor]]
    weights: torch.Tensor


def _pairs(of_texts: Sequence[tuple[slice, ...]], g: int, q: int, rows: int) -> Pairs:
    columns, sizes, heads = [], [], np.arange(g)[:, None, None]
    for slices in of_texts:
        own = np.concatenate([np.arange(one.start, one.stop) for one in slices])
        columns.append(np.broadcast_to(own * g + heads, (g, q, len(own))).ravel())
        sizes.append(len(own))
    starts = np.concatenate(([0], np.repeat(sizes, g * q).cumsum()))
    starts, columns = torch.from_numpy(starts), torch.from_numpy(np.concatenate(columns))
    scores, weights = torch.zeros(2, len(columns)).unbind()
    parts = [x.split([g * q * size for size in sizes]) for x in (scores, weights)]
    softmax = [tuple(x.view(g * q, -1) for x in pair) for pair in zip(*parts, strict=True)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        shape = (len(starts) - 1, rows)
        scores = torch.sparse_csr_tensor(starts, columns, scores, shape, check_invariants=False)
    return Pairs(scores, columns, starts[:-1], softmax, weights)


def on_cpu(
    query,
    keys,
    values,
    places: Places,
    *,
    scale: float,
    softcap: Optional[float] = None,
    window: Optional[int] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """`reference.decode_attention` on a CPU, in fp32."""
    places = places.last(None if window is None else window + 1)
    if query.shape[2] > FEW and softcap is None:
        return by_text(query, keys, values, places, scale, sinks)
    return by_pairs(query, keys, values, places, scale, softcap, sinks)


def by_pairs(
    query,
    keys,
    values,
    places: Places,
    scale: float,
    softcap: Optional[float] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """One product of all queries with their keys (torch's sampled product of dense matrices), and one sum of values. Both
    read a row of the cache where it lies, so blocks need no order, and threads share all texts.
    """
    n, g, q, d = query.shape
    pairs = places.pairs(g, q, len(keys) * g)
    rows = query.reshape(-1, d)
    torch.sparse.sampled_addmm(pairs.scores, rows, keys.view(-1, d).t(), beta=0.0, alpha=scale, out=pairs.scores)
    if softcap is not None:
        pairs.scores.values().div_(softcap).tanh_().mul_(softcap)
    for scores, weights in pairs.softmax:
        torch.softmax(scores, -1, out=weights)
        if sinks is not None:
            scale_weights(weights, scores, sinks.flatten())
    stored = values.view(-1, values.shape[-1])
    # Mode 0: sum
    attended, *_ = torch.embedding_bag(stored, pairs.columns, pairs.starts, False, 0, False, pairs.weights, False)
    return attended.view(n, -1)


def by_text(query, keys, values, places: Places, scale: float, sinks: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Text by text, with the queries of a group as rows of one product, which reads a key once for all of them.

    If a text's places are several slices, the results of each are merged by the log-sum-exp of scores, which costs less
    than a copy of the keys.
    """
    keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))  # [1, g, places, d]
    attended = []
    for row, own in zip(query.split(1), places.of_texts, strict=True):
        parts = [[x.narrow(2, one.start, one.stop - one.start) for x in (keys, values)] for one in own]
        if len(parts) == 1 and sinks is None:
            attended.append(F.scaled_dot_product_attention(row, *parts[0], scale=scale))
        else:
            attended.append(_merged(row, parts, scale, sinks))
    return torch.cat(attended).flatten(1)


def _merged(query, parts, scale: float, sinks: Optional[torch.Tensor]) -> torch.Tensor:
    """[1, g, q, d] over all parts, [1, g, any, d] each; sinks are a part without values."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended, lse = (torch.stack(each) for each in zip(*(run(query, *part, scale=scale) for part in parts)))
    more = lse if sinks is None else torch.cat((lse, sinks.float().expand_as(lse[:1])))
    return (attended * more.softmax(0)[: len(lse)].unsqueeze(-1)).sum(0)


def last_places(slices: tuple[slice, ...], count: int) -> tuple[slice, ...]:
    """The last `count` of some places."""
    kept = []
    for one in reversed(slices):
        length = min(count, one.stop - one.start)
        if length:
            kept.append(slice(one.stop - length, one.stop))
        count -= length
    return tuple(reversed(kept))


def _length(slices: tuple[slice, ...]) -> int:
    return sum(one.stop - one.start for one in slices)
