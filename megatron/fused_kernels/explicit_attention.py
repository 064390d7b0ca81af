# SPDX-License-Identifier: Apache-2.0
"""Explicit attention over rectangles of query and key, and its gradients: scores, softmax, product with the values.

A rectangle is computed a block of queries at a time, over the keys that any of these queries sees: of causal order half of
the scores or more are never computed. `in_blocks` stores the weights for its backward pass. `Explicit` computes a part of
the keys for a ring, and computes its weights again from the log-sum-exp over all keys. `largest_scores` keeps only the
largest score of each head, beside a kernel that does not return scores.

Operands are first copied to [c g, n q, d] and [c g, m, d]: batched products of contiguous matrices are 1.4 x as fast. The
rows of a group's queries are in the order (n, q), so that a block of positions is one slice of rows.

Legend: s queries, t keys, b micro-batch; of a rectangle n queries, m keys, c samples; g key-value groups, q queries per
group, h = g q heads, d channels per head, v of its values, often d. query is [s, b, g, q, d], key [t, b, g, d], value
[t, b, g, v].
"""

from collections.abc import Iterable
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.cpu_ops import baddbmm, bmm
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import numbers
from megatron.settings.kernel_sizes import (
    NONCAUSAL_ROWS,
    RING_ROWS,
    SAME_ROWS,
    SAME_SIZE,
    SCORE_BYTES,
    causal_blocks,
    even_blocks,
    first_key,
)

ALIGNED = 64  # a block's first key is a multiple of this, in tokens: fewer shapes of products to prepare
FEW_SAMPLES = 16  # a bias gradient of up to so many may be summed in bf16: over 64 the error is that of four roundings


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of query, key and value


class Rectangle(NamedTuple):
    """Pairs of query and key that one kernel call covers: some rows of queries, and some of keys.

    rows, keys: rows of the queries and of the keys, each counted on its rank
    causal:     query i sees the keys up to i; the queries are the last of the keys
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

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


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


class ScoreBlock(NamedTuple):
    """Some queries of a rectangle, and the keys that any of them sees; both are counted in the rectangle.

    masked: some of the queries do not see some of the last `masked` keys
    apart:  some of the keys belong to an earlier document than one of the queries
    """

    queries: slice
    keys: slice
    masked: int
    apart: bool


def blocks_of(rectangle: Rectangle, spans: list[tuple[int, int]]) -> list[ScoreBlock]:
    """The blocks of a rectangle for these [start, stop) of its queries, in the order of the backward pass: of causal order
    the last one is first, because it has most keys. With torch.compile documents only change masks, because different
    blocks would trigger recompilation for every sample.
    """
    (n, m), documents, window = rectangle.shape, rectangle.documents, rectangle.window
    least = most = None
    if documents is not None and not torch.compiler.is_compiling():
        least, most = documents.bounds
    blocks = []
    for start, stop in spans:
        first, end = first_key(m - n + start, window), m - n + stop if rectangle.causal else m
        if least is not None:
            first = max(first, least[start] // ALIGNED * ALIGNED)
        apart = documents is not None and (most is None or most[stop - 1] > first)
        masked = end - first if apart or window is not None else (stop - start if rectangle.causal else 0)
        blocks.append(ScoreBlock(slice(start, stop), slice(first, end), masked, apart))
    return blocks[::-1] if rectangle.causal else blocks


def visible_pairs(
    rectangle: Rectangle, rows: slice, keys: slice, device, starts: Optional[torch.Tensor]
) -> Optional[torch.Tensor]:
    """[1 or b, n, m] bool: the query sees the key, for these rows and keys of a rectangle. None: every pair.

    starts: [b, n] of the rectangle's documents, or None
    """
    n, m = rectangle.shape
    queries = torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1) + (m - n)  # places among the keys
    places, seen = torch.arange(keys.start, keys.stop, device=device), None
    if rectangle.causal:
        seen = places <= queries
    if rectangle.window is not None:
        near = places >= queries - rectangle.window
        seen = near if seen is None else seen & near
    if starts is not None:
        return seen & (places >= starts[:, rows].unsqueeze(-1))
    return None if seen is None else seen.unsqueeze(0)


# ---- attention over all keys -----------------------------------------------------------------------------------------


def in_blocks(
    query,
    key,
    value,
    *,
    scale: float,
    causal: bool,
    allowed=None,
    documents=None,
    dropout=None,
    softcap=None,
    window=None,
    bias=None,
    padding=None,
    sinks=None,
    **_,
) -> torch.Tensor:
    """`reference.attention`. In causal cases the queries are the last s of the t tokens."""
    (s, _, _, q, _), t, visible, blind = query.shape, len(key), None, None
    if allowed is not None:
        visible, blind = visible_keys(allowed, causal, window)
    spans_of = lambda n: causal_blocks(n, q) if causal else even_blocks(n, NONCAUSAL_ROWS // q)
    parts = [(one, spans_of(one.shape[0])) for one in rectangles_of(s, t, causal, window, documents, allowed)]
    parts = [(one._replace(documents=None), blocks_of(one, spans)) for one, spans in parts]
    starts = documents.starts if causal and documents is not None and allowed is None else None
    how = Scores(scale, softcap=softcap, factor=1.0 if dropout is None else dropout.factor)
    masks = visible, starts, padding
    attended = _InBlocks.apply(query, key, value, bias, sinks, *masks, dropout, how, parts)
    return attended if blind is None else attended.masked_fill(blind, 0.0)


def visible_keys(
    allowed: torch.Tensor, causal: bool, window: Optional[int] = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask for a softmax, [b, s, t] bool, and the queries whose results must be zero, [s, b, 1] bool.

    Those are the queries that see no key. In the mask they see all keys: a softmax over nothing is NaN, and so are
    all gradients after it.
    """
    s, t = allowed.shape[1:]
    if causal:
        allowed = allowed.tril(t - s)
    if window is not None:
        allowed = allowed.triu(t - s - window)
    blind = ~allowed.any(-1, keepdim=True)  # [b, s, 1]
    return allowed | blind, blind.transpose(0, 1)


def rectangles_of(s: int, t: int, causal: bool, window: Optional[int], documents, allowed) -> list[Rectangle]:
    """The rectangles of attention of s queries over t keys: one; of non-causal attention that of each sample of a row that
    has several. allowed: a mask of all pairs, which includes documents.
    """
    if causal:
        assert s <= t, "of causal order the queries are the last of the keys"
        return [Rectangle(slice(0, s), slice(0, t), True, window, documents if allowed is None else None)]
    if documents is None:
        return [Rectangle(slice(0, s), slice(0, t), False)]
    found, first = [], 0
    for sample in documents.parts[0]:
        own = slice(first, first + sample.keys)
        found.append(Rectangle(own, own, False))
        first = own.stop
    return found


class _InBlocks(torch.autograd.Function):
    """Attention over the blocks of some rectangles, without a pair in common.

    bias: [h, n, m], added to scores after a cap. sinks: [g, q]. visible: [b, s, t] bool. starts: [b, s], of the documents
    of a causal rectangle. padding: [b, t] bool, True at tokens
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, sinks, visible, starts, padding, dropout, how, parts):
        s, b, g, q, _ = query.shape
        attended = query.new_empty((s, b, g, q, value.shape[-1]))
        saved = []  # of each rectangle: rows, keys and values; of each of its blocks: weights [c g, n q, m], and a mask
        for rectangle, blocks in parts:
            at = rectangle.rows, rectangle.samples
            rows, keys, values = operands = _operands(query, key, value, rectangle)
            saved += operands
            masks = visible, starts, None if padding is None else padding[rectangle.samples, rectangle.keys]
            words = None if dropout is None else dropout.words[at[1], :, at[0], rectangle.keys]
            for block in blocks:
                mine, own = rows[:, _rows(block, q)], keys[:, block.keys]
                shape = len(rows) // g, g, block.queries.stop - block.queries.start, q, own.shape[1]
                scores = _biased_scores(mine, own, rectangle, block, how, bias, shape)
                _hide(scores, shape[0], rectangle, block, masks)
                weights = torch.softmax(scores, -1)
                if sinks is not None:
                    scale_weights(weights.view(shape), scores.view(shape), sinks.unsqueeze(1))
                saved.append(weights)
                if dropout is not None:
                    saved.append(_matrix(_of_block(words, block, g) >= dropout.threshold))
                    weights = weights * numbers(saved[-1], weights.dtype)
                result = bmm(weights, values[:, block.keys])
                _put(attended[at][block.queries], result, how.factor)
        ctx.save_for_backward(*saved)
        ctx.shapes, ctx.how, ctx.parts, ctx.drops = (
            (query.shape, key.shape, value.shape),
            how,
            parts,
            dropout is not None,
        )
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.sinks_dtype = None if sinks is None else sinks.dtype
        return attended.flatten(2)

    @staticmethod
    def backward(ctx, gradient):
        saved, (_, b, g, q, _) = iter(ctx.saved_tensors), ctx.shapes[0]
        gradient = gradient.unflatten(2, (g, q, -1))
        d_query, d_key, d_value = map(gradient.new_empty, ctx.shapes)
        # For few samples, sum in the format of the terms: adding bf16 to fp32 converts each time.
        few = not ctx.parts[0][0].causal and b * len(ctx.parts) <= FEW_SAMPLES
        exact = gradient.dtype if few else torch.float32
        d_bias = gradient.new_zeros(ctx.bias_shape, dtype=exact) if ctx.needs_input_grad[3] else None
        d_sinks = gradient.new_zeros(g, q, dtype=torch.float32) if ctx.needs_input_grad[4] else None
        for rectangle, blocks in ctx.parts:
            rows, keys, values = (next(saved) for _ in range(3))
            d_keys = d_values = None
            at = rectangle.rows, rectangle.samples
            above = _above(gradient[at], ctx.how)
            for block in blocks:
                weights, mask = next(saved), next(saved) if ctx.drops else None
                mine = _rows(block, q)
                own = rows[:, mine], keys[:, block.keys], values[:, block.keys]
                d_scores, dropped = _through_weights(above[:, mine], own[2], weights, mask)
                d_scores = torch._softmax_backward_data(d_scores, weights, -1, weights.dtype)
                if d_bias is not None:
                    total = _by_position(d_bias[:, block.queries, block.keys], q)
                    add_samples(total, d_scores.view(-1, *total.shape))
                if d_sinks is not None:  # gradients of a softmax add up to 0: that of the sink is minus the others' sum
                    d_sinks -= d_scores.sum(-1, dtype=torch.float32).view(-1, g, d_scores.shape[1] // q, q).sum((0, 2))
                d_scores = _through_cap(d_scores, *own[:2], ctx.how)
                _put(d_query[at][block.queries], bmm(d_scores, own[1]), ctx.how.scale)
                d_keys = _plus(d_keys, bmm(d_scores.transpose(1, 2), own[0]), block.keys, keys)
                d_values = _plus(d_values, bmm(dropped.transpose(1, 2), above[:, mine]), block.keys, values)
            _put(d_key[rectangle.keys, rectangle.samples].unsqueeze(3), d_keys, ctx.how.scale)
            _put(d_value[rectangle.keys, rectangle.samples].unsqueeze(3), d_values)
        d_bias = None if d_bias is None else d_bias.to(gradient.dtype)
        d_sinks = None if d_sinks is None else d_sinks.to(ctx.sinks_dtype)
        return d_query, d_key, d_value, d_bias, d_sinks, *[None] * 6


@torch.no_grad()
def of_sample(
    query,
    key,
    value,
    *,
    first: int,
    s: int,
    scale: float,
    softcap: Optional[float] = None,
    window: Optional[int] = None,
    sinks: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Causal attention of n queries [n, 1, g, q, d], those from number `first` on of a sample of s tokens, over the keys
    and values of the tokens so far, [first + n, 1, g, d or v] -> [n, 1, g q v]: the bits that `in_blocks` computes for them
    from all s tokens (--batch-invariant-mode).

    Its products have the same keys as those of the sample: tokens that are not there yet are zeros, which no query sees.
    They have fewer rows, and at least `SAME_ROWS` and `SAME_SIZE`: the smallest products are sums in another order.
    """
    (n, _, g, q, _), whole = query.shape, Rectangle(slice(0, s), slice(0, s), True, window)
    rows, keys, values = map(_heads_first, (query, key, value))
    attended, how = query.new_empty((n, 1, g, q, value.shape[-1])), Scores(scale, softcap=softcap)
    for block in blocks_of(whole, causal_blocks(s, q)):
        start, stop = max(block.queries.start, first), min(block.queries.stop, first + n)
        if start >= stop:
            continue
        mine, m = rows[:, (start - first) * q : (stop - first) * q], block.keys.stop - block.keys.start
        own, theirs = (_filled(x[:, block.keys], m) for x in (keys, values))
        count = -(-max(mine.shape[1], SAME_SIZE // (m * query.shape[-1])) // SAME_ROWS) * SAME_ROWS
        scores = _capped(_uncapped(_filled(mine, count), own, how, rows.dtype), how)
        of_mine = lambda x, own=mine: x[:, : own.shape[1]].unflatten(1, (-1, q))  # [g, n, q, m]
        seen = visible_pairs(whole, slice(start, stop), block.keys, query.device, None)
        of_mine(scores).masked_fill_(~seen.unsqueeze(2), float("-inf"))
        weights = torch.softmax(scores, -1)
        if sinks is not None:
            scale_weights(of_mine(weights), of_mine(scores), sinks.unsqueeze(1))
        _put(attended[start - first : stop - first], bmm(weights, theirs)[:, : mine.shape[1]])
    return attended.flatten(2)


def _filled(x: torch.Tensor, length: int) -> torch.Tensor:
    """[g, any, d] with zeros after its rows, up to `length` of them."""
    return F.pad(x, (0, 0, 0, length - x.shape[1])) if x.shape[1] < length else x


# ---- attention over a part of the keys -------------------------------------------------------------------------------


class Explicit:
    """The passes of a part of the keys (`partial_attention`). Covers everything."""

    @staticmethod
    def forward(
        query, key, value, rectangle: Rectangle, scores: Scores, kept=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(result [n, b, h, v], log-sum-exp [n, b, h]). kept: [b, h, n, m] bool, the weights that dropout keeps."""
        by_group = lambda x: x.unflatten(2, (key.shape[2], -1))
        q, rectangle, blocks = _part(query, key, rectangle)
        rows, keys, values = _operands(by_group(query), key, value, rectangle)
        out = query.new_empty((*query.shape[:3], value.shape[-1]))
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        for block in blocks:
            logits = _logits(rows[:, _rows(block, q)], keys[:, block.keys], query.shape[1], rectangle, block, scores)
            of_block = logits.logsumexp(-1, keepdim=True)
            weights = logits.sub_(of_block).exp_().to(query.dtype)
            if kept is not None:
                weights *= numbers(_matrix(_of_block(kept, block, key.shape[2])), query.dtype)
            _put(by_group(out[block.queries]), bmm(weights, values[:, block.keys]), scores.factor)
            _put(by_group(lse[block.queries].unsqueeze(-1)), of_block)
        return out, lse

    @staticmethod
    def backward(gradient, query, key, value, out, lse, rectangle: Rectangle, scores: Scores, kept=None) -> Gradients:
        """The gradients of this part. out, lse: over all keys."""
        by_group = lambda x: x.unflatten(2, (key.shape[2], -1))
        q, rectangle, blocks = _part(query, key, rectangle)
        rows, keys, values = _operands(by_group(query), key, value, rectangle)
        of_rows = _heads_first(by_group((gradient.float() * out.float()).sum(-1, keepdim=True)))  # [c g, n q, 1]
        sums, above = _heads_first(by_group(lse.unsqueeze(-1))), _above(by_group(gradient), scores)
        d_query = torch.empty_like(query)
        d_keys, d_values = (x.new_zeros(x.shape, dtype=torch.float32) for x in (keys, values))
        for block in blocks:
            mine = _rows(block, q)
            own = rows[:, mine], keys[:, block.keys], values[:, block.keys]
            weights = _logits(*own[:2], query.shape[1], rectangle, block, scores).sub_(sums[:, mine]).exp_()
            mask = None if kept is None else _matrix(_of_block(kept, block, key.shape[2]))
            d_scores, dropped = _through_weights(above[:, mine], own[2], weights.to(query.dtype), mask)
            d_scores = d_scores.float().sub_(of_rows[:, mine]).mul_(weights)
            d_scores = _through_cap(d_scores, *own[:2], scores).mul_(scores.scale).to(query.dtype)
            _put(by_group(d_query[block.queries]), bmm(d_scores, own[1]))
            d_keys[:, block.keys] += bmm(d_scores.transpose(1, 2), own[0])
            d_values[:, block.keys] += bmm(dropped.transpose(1, 2), above[:, mine])
        b, g = key.shape[1:3]
        return d_query, *(x.unflatten(0, (b, g)).permute(2, 0, 1, 3) for x in (d_keys, d_values))


def _part(query, key, rectangle: Rectangle) -> tuple[int, Rectangle, list[ScoreBlock]]:
    """(queries per group, the rectangle of these operands alone, its blocks)."""
    q = query.shape[2] // key.shape[2]
    own = rectangle._replace(rows=slice(0, len(query)), keys=slice(0, len(key)), samples=slice(None))
    return q, own, blocks_of(own, even_blocks(len(query), RING_ROWS // q))


def _logits(rows, keys, c: int, rectangle: Rectangle, block: ScoreBlock, scores: Scores) -> torch.Tensor:
    """Scores [c g, n q, m] in fp32, -inf for pairs that do not see each other."""
    logits = _capped(_uncapped(rows, keys, scores, torch.float32), scores)
    _hide(logits, c, rectangle, block, (None, rectangle.documents and rectangle.documents.starts, None))
    return logits


# ---- the largest scores ----------------------------------------------------------------------------------------------


@torch.no_grad()
def largest_scores(
    query, key, *, scale: float, causal: bool, window=None, allowed=None, documents=None, padding=None
) -> torch.Tensor:
    """[g, q] fp32: the largest scaled product of a query [s, b, g, q, d] of each head and a key [t, b, g, d] that it sees,
    before a cap and a bias; -inf if it sees none. The other arguments are those of `reference.attention`.
    """
    visible = None
    if allowed is not None:
        visible, blind = visible_keys(allowed, causal, window)
        visible = visible & ~blind.transpose(0, 1)
    parts = rectangles_of(len(query), len(key), causal, window, documents, allowed)
    return largest_in(query, key, parts, scale, (visible, padding))


@torch.no_grad()
def largest_in(query, key, rectangles: Iterable[Rectangle], scale: float, masks: tuple = (None, None)) -> torch.Tensor:
    """`largest_scores` of the pairs in rectangles. masks: (visible, padding)

    A block of scores has at most `SCORE_BYTES`, or one position.
    """
    _, _, g, q, _ = query.shape
    result = query.new_full((g, q), float("-inf"), dtype=torch.float32)
    visible, padding = masks
    for one in rectangles:
        rows = _heads_first(query[one.rows, one.samples])  # [c g, n q, d]
        keys = _heads_first(key[one.keys, one.samples])  # [c g, m, d]
        n, m = one.shape
        starts = None if one.documents is None else one.documents.starts
        own = visible, starts, None if padding is None else padding[one.samples, one.keys]
        size = SCORE_BYTES[query.device.type] // (4 * len(rows) * q * m)
        for block in blocks_of(one, even_blocks(n, size)):
            scores = _product(rows[:, _rows(block, q)], keys[:, block.keys])
            _hide(scores, len(rows) // g, one, block, own)
            largest = scores.view(len(rows) // g, g, -1, q, scores.shape[-1]).amax((0, 2, 4))
            torch.maximum(result, largest, out=result)
    return result.mul_(scale)


def _product(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """rows [c g, n q, d] times keys [c g, m, d] -> [c g, n q, m] fp32: a rounded maximum would clip too much or too little,
    and one of fp16 may be infinite.
    """
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.bmm(rows, keys.transpose(1, 2), out_dtype=torch.float32)
    return bmm(rows.float(), keys.float().transpose(1, 2))


# ---- what all share --------------------------------------------------------------------------------------------------


def _operands(query, key, value, rectangle: Rectangle) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[c g, n q, d], [c g, m, d] and [c g, m, v]."""
    at = rectangle.keys, rectangle.samples
    return tuple(map(_heads_first, (query[rectangle.rows, rectangle.samples], key[at], value[at])))


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[n, c, g, d] or [n, c, g, q, d] -> [c g, n, d] or [c g, n q, d], contiguous."""
    return _matrix(x.permute(1, 2, 0, *range(3, x.ndim)))


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """[c, g, ..., d] -> [c g, any, d], contiguous."""
    return x.contiguous().view(x.shape[0] * x.shape[1], -1, x.shape[-1])


def _rows(block: ScoreBlock, q: int) -> slice:
    """The rows of a block's queries in [c g, n q, d]."""
    return slice(block.queries.start * q, block.queries.stop * q)


def _of_block(x: torch.Tensor, block: ScoreBlock, g: int) -> torch.Tensor:
    """The pairs of a block, [c, g, n, q, m], of a rectangle's, [c, h, n, m]."""
    return x.unflatten(1, (g, -1))[:, :, :, block.queries, block.keys].transpose(2, 3)


def _uncapped(rows: torch.Tensor, keys: torch.Tensor, scores: Scores, dtype: torch.dtype) -> torch.Tensor:
    """Scores before the cap, [c g, n q, m]."""
    scale = scores.scale / scores.divisor
    x = baddbmm(rows.new_empty(1), rows, keys.transpose(1, 2), beta=0, alpha=scale).to(dtype)
    return x if scores.divisor == 1.0 else x.mul_(scores.divisor)


def _capped(x: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Scores after the cap, in place."""
    return x if scores.softcap is None else x.div_(scores.softcap).tanh_().mul_(scores.softcap)


def _biased_scores(rows, keys, rectangle: Rectangle, block: ScoreBlock, scores: Scores, bias, shape) -> torch.Tensor:
    """Scores [c g, n q, m] after the cap, and the bias. shape: (c, g, n, q, m)"""
    if bias is None:
        return _capped(_uncapped(rows, keys, scores, rows.dtype), scores)
    own = _by_position(bias[:, block.queries, block.keys], shape[3])  # [g, n, q, m]
    if scores.softcap is None and not rectangle.causal:  # the product adds to it, in fp32
        total = own.expand(shape).reshape(-1, *rows.shape[1:2], shape[4]).to(rows.dtype)
        return baddbmm(total, rows, keys.transpose(1, 2), alpha=scores.scale)
    total = _capped(_uncapped(rows, keys, scores, rows.dtype), scores)
    return total.view(shape).add_(own).view(total.shape)


def _by_position(bias: torch.Tensor, q: int) -> torch.Tensor:
    """[g q, n, m] -> [g, n, q, m], the order of a block's rows."""
    return bias.unflatten(0, (-1, q)).transpose(1, 2)


def _hide(scores: torch.Tensor, c: int, rectangle: Rectangle, block: ScoreBlock, masks) -> None:
    """Set scores [c g, n q, m] of pairs that do not see each other to -inf. masks: (visible, starts, padding)."""
    visible, starts, padding = masks
    if visible is not None:
        seen = visible[:, block.queries, block.keys]
    else:
        keys = slice(block.keys.stop - block.masked, block.keys.stop)
        apart = starts if block.apart else None
        seen = visible_pairs(rectangle, block.queries, keys, scores.device, apart) if block.masked else None
    if seen is not None:
        n, masked = seen.shape[1:]
        mask = scores.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        scores.view(c, -1, n, scores.shape[1] // n, scores.shape[2])[..., -masked:].add_(mask[:, None, :, None])
    if padding is not None:
        mask_padding(scores, padding[:, block.keys])


def scale_weights(weights: torch.Tensor, scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Weights [..., keys], the softmax of scores over the keys, become those with sinks [...] in the softmax, in place. The
    log-sum-exp is that of the largest score and its weight.
    """
    lse = scores.amax(-1).float() - weights.amax(-1).float().log_()
    return weights.mul_(torch.sigmoid(lse - sinks.float()).to(weights.dtype).unsqueeze(-1))


def mask_padding(scores: torch.Tensor, padding: torch.Tensor) -> None:
    """Set scores [b g, n, t] of padding keys to -inf. padding: [b, t] bool, True at tokens. On a CPU, the leading keys
    without padding are skipped.
    """
    b, t = padding.shape
    first = 0
    if padding.device.type == "cpu" and not torch.compiler.is_compiling():
        tokens = padding.all(0)
        first = t if tokens.all() else int(tokens.int().argmin())
    if first < t:
        padding = padding[:, first:].unsqueeze(1)
        mask = scores.new_zeros(padding.shape).masked_fill_(~padding, float("-inf"))  # [b, 1, t - first]
        scores.view(b, -1, t)[:, :, first:].add_(mask)


def _through_weights(above, values, weights, mask) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the weights before dropout, weights after it), [c g, n q, m]. above: gradient of the result"""
    d_weights = bmm(above, values.transpose(1, 2))
    if mask is None:
        return d_weights, weights
    kept = numbers(mask, weights.dtype)
    return d_weights.mul_(kept), kept.mul_(weights)


def _through_cap(d_scores: torch.Tensor, rows, keys, scores: Scores) -> torch.Tensor:
    """The gradient before the cap. Scores are recomputed: saved, they would be as large as the weights."""
    if scores.softcap is None:
        return d_scores
    tanh = _uncapped(rows, keys, scores, d_scores.dtype).div_(scores.softcap).tanh_()
    return d_scores.addcmul_(d_scores, tanh.square_(), value=-1)


def _above(gradient: torch.Tensor, scores: Scores) -> torch.Tensor:
    """The gradient of the result before the factor of dropout, [c g, n q, d], from [n, c, g, q, d]."""
    rows = _heads_first(gradient)
    return rows if scores.factor == 1.0 else rows * scores.factor


def _put(place: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
    """place [n, c, g, q, d] = scale x of [c g, n q, d]."""
    n, c, g, q, d = place.shape
    x = x if scale == 1.0 else x.mul_(scale)
    place.copy_(x.view(c, g, n, q, d).permute(2, 0, 1, 3, 4))


def _plus(total: Optional[torch.Tensor], part: torch.Tensor, seen: slice, like: torch.Tensor) -> torch.Tensor:
    """total [c g, m, d] and a part of it, at the keys `seen`. total: None at first. like: for the shape"""
    if total is None:
        if part.shape == like.shape:
            return part
        total = torch.zeros_like(like)
    total[:, seen] += part
    return total


def add_samples(total: torch.Tensor, x: torch.Tensor) -> None:
    """total [...] += the sum of x [b, ...]. On a CPU one sample at a time, in a third of the time of torch's sum."""
    for sample in x if x.device.type == "cpu" else (x.sum(0),):
        total.add_(sample)
