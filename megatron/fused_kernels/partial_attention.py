# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the keys, whose result can be merged with those over other parts (ring attention).

A part's result is normalized by its own keys, and comes with their log-sum-exp of scores. From both, `merge` computes the
result over all keys. The backward pass of a part takes the result and the log-sum-exp over *all* keys, as that of flash
attention does: it recomputes the weights exp(score - log-sum-exp), so nothing of a part is saved.

Legend: n queries, m keys, b samples, h heads, g key-value heads, d channels. query is [n, b, h, d], key and value are
[m, b, g, d], a log-sum-exp is [n, b, h] in fp32.
"""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.cpu_ops import bmm, widens
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import numbers
from megatron.settings.kernel_sizes import RING_ROWS

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of query, key and value


class Rectangle(NamedTuple):
    """Pairs of query and key that one kernel call covers: some rows of queries, and some of keys.

    rows, keys: rows of the queries and of the keys, each counted on its rank
    causal:     query i sees the keys up to i. As many queries as keys
    window:     a query sees its own key and at most this many before it; the queries are the last of the keys
    documents:  of a causal rectangle: a query sees only keys of its own document
    samples:    of the micro-batch
    """

    rows: slice
    keys: slice
    causal: bool
    window: Optional[int] = None
    documents: Optional[Documents] = None
    samples: slice = slice(None)


class Scores(NamedTuple):
    """From products of query and key to weights.

    divisor: keeps scores in the range of fp16: they are divided by it, and multiplied again in fp32
    softcap: scores become softcap x tanh(score / softcap)
    factor:  of the weights that dropout keeps
    """

    scale: float
    divisor: float = 1.0
    softcap: Optional[float] = None
    factor: float = 1.0


def merge(total: torch.Tensor, total_lse: torch.Tensor, part: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge the result of a part into that of the keys so far, in place, in fp32. Both totals begin as 0 and -inf."""
    both = torch.logaddexp(total_lse, lse)
    total.mul_((total_lse - both).exp_().unsqueeze(-1)).addcmul_(part.float(), (lse - both).exp_().unsqueeze(-1))
    total_lse.copy_(both)


def visible_pairs(
    rectangle: Rectangle, n: int, m: int, device, first: int = 0, start: int = 0
) -> Optional[torch.Tensor]:
    """[1 or b, n, m] bool: the query sees the key. None: every pair.

    For a block of a rectangle: its n queries from `first` on, and its m keys from `start` on.
    """
    shift = rectangle.rows.stop - rectangle.rows.start - (rectangle.keys.stop - rectangle.keys.start)
    queries = torch.arange(first, first + n, device=device).unsqueeze(-1) - shift  # places among the keys
    keys = torch.arange(start, start + m, device=device)
    seen = None
    if rectangle.causal:
        seen = keys <= queries
    if rectangle.window is not None:
        near = keys >= queries - rectangle.window
        seen = near if seen is None else seen & near
    if rectangle.documents is not None:
        return seen & (keys >= rectangle.documents.starts[:, first : first + n].unsqueeze(-1))
    return None if seen is None else seen.unsqueeze(0)


class Explicit:
    """Scores of a block of queries at a time. Covers everything."""

    @staticmethod
    def forward(
        query, key, value, rectangle: Rectangle, scores: Scores, kept=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(result [n, b, h, d], log-sum-exp [n, b, h]). kept: [b, h, n, m] bool, the weights that dropout keeps."""
        n, b, h, d = query.shape
        out, lse = query.new_empty(n, b, h, d), query.new_empty(n, b, h, dtype=torch.float32)
        for block in _blocks(query, key, value, rectangle, scores):
            logits, _ = block.logits()
            of_block = logits.logsumexp(-1, keepdim=True)
            weights = logits.sub_(of_block).exp_().to(query.dtype)
            if kept is not None:
                weights *= block.kept(kept, query.dtype)
            part = bmm(weights, block.values)
            out[block.rows] = block.to_rows(part if kept is None else part.mul_(scores.factor))
            lse[block.rows] = block.to_rows(of_block).squeeze(-1)
        return out, lse

    @staticmethod
    def backward(gradient, query, key, value, out, lse, rectangle: Rectangle, scores: Scores, kept=None) -> Gradients:
        """The gradients of this part. out, lse: over all keys."""
        d_query = torch.empty_like(query)
        (m, b, g, d), wide = key.shape, dict(dtype=torch.float32)
        d_key, d_value = (query.new_zeros(b * g, m, d, **wide) for _ in range(2))
        of_rows = (gradient.float() * out.float()).sum(-1, keepdim=True)  # [n, b, h, 1]
        for block in _blocks(query, key, value, rectangle, scores):
            logits, tanh = block.logits()
            weights = logits.sub_(block.of_queries(lse.unsqueeze(-1))).exp_()
            own = block.of_queries(gradient)
            dropped = weights.to(query.dtype)
            d_weights = bmm(own, block.values.transpose(1, 2)).float()
            if kept is not None:
                mask = block.kept(kept, query.dtype)
                d_weights.mul_(mask).mul_(scores.factor)
                dropped = (dropped * mask).mul_(scores.factor)
            d_scores = d_weights.sub_(block.of_queries(of_rows)).mul_(weights)
            if tanh is not None:
                d_scores.addcmul_(d_scores, tanh.square_(), value=-1)
            d_scores = d_scores.mul_(scores.scale).to(query.dtype)
            d_query[block.rows] = block.to_rows(bmm(d_scores, block.keys))
            d_key[:, block.seen] += bmm(d_scores.transpose(1, 2), block.queries)
            d_value[:, block.seen] += bmm(dropped.transpose(1, 2), own)
        return d_query, *(x.view(b, g, m, d).permute(2, 0, 1, 3) for x in (d_key, d_value))


class _Block(NamedTuple):
    """Some queries of a rectangle, and the keys that any of them sees. Rows of matrices are (heads of a group, queries)."""

    rows: slice
    seen: slice
    queries: torch.Tensor  # [b g, q rows, d]
    keys: torch.Tensor  # [b g, seen, d]
    values: torch.Tensor
    shape: tuple[int, int, int]  # b, g, q
    rectangle: Rectangle
    scores: Scores

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        """[n, b, h, ...] -> [b g, q rows, ...]"""
        b, g, q = self.shape
        return x[self.rows].unflatten(2, (g, q)).permute(1, 2, 3, 0, 4).reshape(b * g, -1, x.shape[-1])

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[b g, q rows, ...] -> [rows, b, h, ...]"""
        b, g, q = self.shape
        return x.view(b, g, q, -1, x.shape[-1]).permute(3, 0, 1, 2, 4).flatten(2, 3)

    def kept(self, kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[b, h, n, m] -> [b g, q rows, seen], as 0 and 1"""
        b, g, _ = self.shape
        return numbers(kept[:, :, self.rows, self.seen].contiguous(), dtype).view(b * g, -1, self.keys.shape[1])

    def logits(self) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """(scores [b g, q rows, seen] in fp32, -inf for pairs that do not see each other; the cap's tanh)"""
        (b, g, q), scores, tanh = self.shape, self.scores, None
        products = bmm(self.queries * (scores.scale / scores.divisor), self.keys.transpose(1, 2)).float()
        products = products.mul_(scores.divisor) if scores.divisor != 1.0 else products
        if scores.softcap is not None:
            tanh = products.div_(scores.softcap).tanh_()
            products = tanh * scores.softcap
        n, m = self.rows.stop - self.rows.start, self.keys.shape[1]
        seen = visible_pairs(self.rectangle, n, m, products.device, self.rows.start, self.seen.start)
        if seen is not None:
            products.view(b, g, q, n, m).masked_fill_(~seen[:, None, None], float("-inf"))
        return products, tanh


def _blocks(query, key, value, rectangle: Rectangle, scores: Scores):
    """The blocks of a rectangle, one after the other."""
    (n, b, h, d), (m, _, g, _) = query.shape, key.shape
    keys, values = (x.permute(1, 2, 0, 3).reshape(b * g, m, d) for x in (key, value))
    size = RING_ROWS * g // h or 1
    for start in range(0, n, size):
        rows, past = slice(start, min(start + size, n)), m - n
        first = 0 if rectangle.window is None else max(0, past + start - rectangle.window)
        seen = slice(first, rows.stop if rectangle.causal else m)
        block = _Block(rows, seen, None, keys[:, seen], values[:, seen], (b, g, h // g), rectangle, scores)
        yield block._replace(queries=block.of_queries(query))


class FlashOnCPU:
    """torch's flash attention on CPUs. Windows and documents are masks."""

    @staticmethod
    def forward(
        query, key, value, rectangle: Rectangle, scores: Scores, kept=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Explicit`."""
        operands, order = FlashOnCPU._prepared(query, key, value, rectangle)
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(*operands, 0.0, order.pop("is_causal"), scale=scores.scale, **order)
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)

    @staticmethod
    def backward(gradient, query, key, value, out, lse, rectangle: Rectangle, scores: Scores, kept=None) -> Gradients:
        """See `Explicit`."""
        dtype = query.dtype
        if widens(query.device.type, dtype):
            gradient, query, key, value, out = (x.float() for x in (gradient, query, key, value, out))
        operands, order = FlashOnCPU._prepared(query, key, value, rectangle)
        gradient, out = (x.permute(1, 2, 0, 3) for x in (gradient, out))
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        more = (out, lse.permute(1, 2, 0), 0.0, order.pop("is_causal"))
        gradients = run(gradient, *operands, *more, scale=scores.scale, **order)
        return tuple(x.permute(2, 0, 1, 3).to(dtype) for x in gradients)

    @staticmethod
    def _prepared(query, key, value, rectangle: Rectangle):
        """Operands as [b, h, n, d], and the arguments for the order of queries and keys."""
        operands = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        if rectangle.window is None and rectangle.documents is None:
            return operands, dict(is_causal=rectangle.causal)
        seen = visible_pairs(rectangle, len(query), len(key), query.device)
        mask = query.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        return operands, dict(is_causal=False, attn_mask=mask.unsqueeze(1).expand(query.shape[1], -1, -1, -1))


class FlashOnCUDA:
    """torch's flash attention on CUDA (arXiv:2307.08691), in half precision."""

    @staticmethod
    def forward(
        query, key, value, rectangle: Rectangle, scores: Scores, kept=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Explicit`."""
        operands, sizes, order = FlashOnCUDA._prepared((query, key, value), rectangle)
        run = torch.ops.aten._flash_attention_forward
        out, lse, *_ = run(*operands, *sizes, 0.0, rectangle.causal, False, scale=scores.scale, **order)
        n, b, h, d = query.shape
        if rectangle.documents is not None:  # [b n, h, d] and [h, b n]
            out, lse = out.view(b, n, h, -1), lse.view(h, b, n).transpose(0, 1)
        return out[..., :d].transpose(0, 1), lse.permute(2, 0, 1)

    @staticmethod
    def backward(gradient, query, key, value, out, lse, rectangle: Rectangle, scores: Scores, kept=None) -> Gradients:
        """See `Explicit`."""
        (n, b, h, d), m = query.shape, len(key)
        operands, sizes, order = FlashOnCUDA._prepared((gradient, query, key, value, out), rectangle)
        lse = lse.permute(1, 2, 0)  # [b, h, n]
        lse = (lse if rectangle.documents is None else lse.transpose(0, 1).reshape(h, b * n)).contiguous()
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)  # random state of dropout
        run = torch.ops.aten._flash_attention_backward
        gradients = run(*operands, lse, *sizes, 0.0, rectangle.causal, unused, unused, scale=scores.scale, **order)
        sized = (x.reshape(b, rows, -1, x.shape[-1]) for x, rows in zip(gradients, (n, m, m)))
        return tuple(x[..., :d].transpose(0, 1) for x in sized)

    @staticmethod
    def _prepared(tensors, rectangle: Rectangle):
        """Tensors as [b, n, h, d], or [b n, h, d] for documents; the edges of documents and the largest sizes; windows."""
        d = tensors[0].shape[-1]
        tensors = [x.transpose(0, 1) for x in tensors]
        tensors = [F.pad(x, (0, -d % 8)) for x in tensors] if d % 8 else tensors  # the kernel reads 16 bytes at a time
        sizes = None, None, rectangle.rows.stop - rectangle.rows.start, rectangle.keys.stop - rectangle.keys.start
        if (documents := rectangle.documents) is not None:
            tensors = [x.reshape(-1, *x.shape[2:]) for x in tensors]
            sizes = documents.query_edges, documents.key_edges, *documents.longest
        order = {} if rectangle.window is None else dict(window_size_left=rectangle.window)
        order |= dict(window_size_right=0) if order and rectangle.causal else {}
        return tensors, sizes, order
