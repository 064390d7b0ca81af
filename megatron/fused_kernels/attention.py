# SPDX-License-Identifier: Apache-2.0
"""Fast implementations of `reference.attention`; the table in `__init__.py` specifies the cases that each covers.

Legend: s new tokens, t all tokens, b micro-batch, g key-value groups, q queries per group, d channels per head.
query is [s, b, g, q, d], key and value are [t, b, g, d], results [s, b, g q d].
"""

import inspect
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.cpu_ops import baddbmm, bmm
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import DropoutMask, numbers
from megatron.fused_kernels.reference import in_window, visible_keys
from megatron.fused_kernels.sinks import scale_weights
from megatron.settings.kernel_sizes import causal_blocks, first_key

ALIGNED = 64  # a block's first key is a multiple of this, in tokens: fewer shapes of products to prepare


def block_causal(
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
    """Explicit causal attention in blocks of queries, each against the keys that any of them can see: half of the scores or
    more are never computed. The queries are the last s of the t tokens.
    """
    assert causal and query.shape[0] <= key.shape[0], "block_causal skips keys after a block of queries"
    blocks = _blocks(query, key, window, documents)
    starts = None if documents is None else documents.starts
    more = (bias, padding, sinks)
    if allowed is None:
        return _BlockAttention.apply(query, key, value, None, starts, blocks, dropout, scale, softcap, window, *more)
    visible, blind = visible_keys(allowed, causal, window)
    attended = _BlockAttention.apply(query, key, value, visible, None, blocks, dropout, scale, softcap, window, *more)
    return attended.masked_fill(blind, 0.0)


class QueryBlock(NamedTuple):
    """The queries from start to stop, and the keys from first to end that any of them sees.

    apart: some of these keys belong to an earlier document than one of the queries
    """

    start: int
    stop: int
    first: int
    end: int
    apart: bool


def _blocks(query, key, window: Optional[int], documents: Optional[Documents]) -> list[QueryBlock]:
    """The blocks of block-causal attention. With torch.compile documents only change masks, because different blocks would
    trigger recompilation for every sample.
    """
    (s, _, _, q, _), past = query.shape, key.shape[0] - query.shape[0]
    least = most = None
    if documents is not None and not torch.compiler.is_compiling():
        least, most = documents.bounds
    blocks = []
    for start, stop in causal_blocks(s, q):
        first = first_key(past + start, window)
        if least is not None:
            first = max(first, least[start] // ALIGNED * ALIGNED)
        apart = documents is not None and (most is None or most[stop - 1] > first)
        blocks.append(QueryBlock(start, stop, first, past + stop, apart))
    return blocks


class _BlockAttention(torch.autograd.Function):
    """Operands are first copied to [b g, s (q), d]: batched products of contiguous matrices are 1.4 x as fast.

    Rows of a group's queries are in the order (s, q), so that a block of positions is one slice of rows. A block sees a
    slice of the keys: from the first one in the window and document of its first query to its own last one.
    """

    @staticmethod
    def forward(ctx, query, key, value, visible, starts, blocks, dropout, scale, softcap, window, bias, padding, sinks):
        (s, b, g, q, d), t = query.shape, key.shape[0]
        past = t - s  # keys before the first query
        rows = query.permute(1, 2, 0, 3, 4).reshape(b * g, s * q, d)
        keys, values = (x.reshape(t, b * g, d).transpose(0, 1).contiguous() for x in (key, value))
        attended = torch.empty_like(rows)
        weights, masks = [], []  # of each block: [b g, block q, keys]
        for start, stop, first, end, apart in blocks:
            block = scaled_scores(rows[:, start * q : stop * q], keys[:, first:end], scale)
            if softcap is not None:
                block = block.div_(softcap).tanh_().mul_(softcap)
            if visible is not None:
                block.view(b, g, -1, q, end - first).add_(mask_bias(visible[:, start:stop, first:end], block))
            elif apart:
                seen = _in_document(starts[:, start:stop], past + start, first, window)
                block.view(b, g, -1, q, end - first).add_(mask_bias(seen, block))
            elif window is not None:
                block += _window_bias(stop - start, end - first, window, q, block)
            else:
                block[:, :, past + start - first :] += _causal_bias(stop - start, q, block)
            if bias is not None:
                block.view(b, g, -1, q, end - first).add_(by_position(bias[:, start:stop, first:end], q))
            if padding is not None:
                mask_padding(block, padding[:, first:end])
            weights.append(torch.softmax(block, -1))
            if sinks is not None:
                shape = (b, g, stop - start, q, end - first)
                scale_weights(weights[-1].view(shape), block.view(shape), sinks.unsqueeze(1))
            if dropout is not None:
                masks.append(kept_weights(dropout, query.shape, slice(start, stop), slice(first, end)))
            dropped = weights[-1] if dropout is None else weights[-1] * numbers(masks[-1], rows.dtype)
            attended[:, start * q : stop * q] = bmm(dropped, values[:, first:end])
        ctx.save_for_backward(rows, keys, values, *weights, *masks)
        ctx.shape, ctx.scale, ctx.factor = query.shape, scale, None if dropout is None else dropout.factor
        ctx.softcap, ctx.blocks, ctx.bias_shape = softcap, blocks, None if bias is None else bias.shape
        ctx.sinks_dtype = None if sinks is None else sinks.dtype
        if dropout is not None:  # the factor of the weights, applied to their sum
            attended.mul_(ctx.factor)
        return _to_sequence_first(attended, query.shape).reshape(s, b, g * q * d)

    @staticmethod
    def backward(ctx, gradient):
        rows, keys, values, *weights = ctx.saved_tensors
        (s, b, g, q, d), t, blocks = ctx.shape, keys.shape[1], ctx.blocks
        weights, masks = weights[: len(blocks)], weights[len(blocks) :] or [None] * len(blocks)
        gradient = gradient.view(ctx.shape).permute(1, 2, 0, 3, 4).reshape(b * g, s * q, d)
        gradient = gradient if ctx.factor is None else gradient * ctx.factor
        # If the last block covers every key, it comes first and writes; the other blocks add.
        empty = torch.empty_like if blocks[-1].first == 0 else torch.zeros_like
        d_rows, d_keys, d_values = torch.empty_like(rows), empty(keys), empty(values)
        d_bias = rows.new_zeros(ctx.bias_shape, dtype=torch.float32) if ctx.needs_input_grad[10] else None
        d_sinks = rows.new_zeros(g, q, dtype=torch.float32) if ctx.needs_input_grad[12] else None
        for block, weight, mask in zip(reversed(blocks), reversed(weights), reversed(masks), strict=True):
            mine, dropped, seen = slice(block.start * q, block.stop * q), weight, slice(block.first, block.end)
            d_scores = bmm(gradient[:, mine], values[:, seen].transpose(1, 2))
            if mask is not None:
                kept = numbers(mask, weight.dtype)
                d_scores, dropped = d_scores.mul_(kept), kept.mul_(weight)
            d_scores = torch._softmax_backward_data(d_scores, weight, -1, weight.dtype)
            if d_bias is not None:
                own = by_position(d_bias[:, block.start : block.stop, seen], q)
                add_samples(own, d_scores.view(b, g, -1, q, block.end - block.first))
            if d_sinks is not None:  # gradients of a softmax add up to 0: that of the sink is minus the others' sum
                d_sinks -= d_scores.sum(-1, dtype=torch.float32).view(b, g, -1, q).sum((0, 2))
            if ctx.softcap is not None:  # scores are recomputed: saved, they would be as large as the weights
                tanh = scaled_scores(rows[:, mine], keys[:, seen], ctx.scale).div_(ctx.softcap).tanh_()
                d_scores = d_scores.addcmul_(d_scores, tanh.square_(), value=-1)
            d_rows[:, mine] = bmm(d_scores, keys[:, seen])
            for total, left, right in ((d_keys, d_scores, rows), (d_values, dropped, gradient)):
                part = bmm(left.transpose(1, 2), right[:, mine])
                total[:, seen] = part if block.stop == s else part.add_(total[:, seen])
        d_query = _to_sequence_first(d_rows.mul_(ctx.scale), ctx.shape)
        d_keys.mul_(ctx.scale)
        d_key, d_value = (x.view(b, g, t, d).permute(2, 0, 1, 3) for x in (d_keys, d_values))
        d_bias = None if d_bias is None else d_bias.to(rows.dtype)
        d_sinks = None if d_sinks is None else d_sinks.to(ctx.sinks_dtype)
        return d_query, d_key, d_value, *[None] * 7, d_bias, None, d_sinks


def scaled_scores(rows: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """rows [b g, n, d] and keys [b g, t, d] -> scale x their products [b g, n, t]."""
    return baddbmm(rows.new_empty(1), rows, keys.transpose(1, 2), beta=0, alpha=scale)


def _causal_bias(size: int, q: int, like: torch.Tensor) -> torch.Tensor:
    """[size q, size]: 0 where the key is not after the query, else -inf; q rows per position."""
    return like.new_full((size, size), float("-inf")).triu(1).repeat_interleave(q, 0)


def _window_bias(n: int, keys: int, window: int, q: int, like: torch.Tensor) -> torch.Tensor:
    """[n q, keys] for n queries, whose positions are the last of the keys: 0 if a query sees the key, else -inf."""
    return (
        like.new_zeros(n, keys)
        .masked_fill_(~in_window(n, keys, window, like.device), float("-inf"))
        .repeat_interleave(q, 0)
    )


def _in_document(starts: torch.Tensor, place: int, first: int, window: Optional[int]) -> torch.Tensor:
    """[b, n, keys] bool: the key is in the query's document, not after it, and in its window. For the n queries from
    position `place` and the keys from `first` to the last query. starts: [b, n].
    """
    n = starts.shape[1]
    keys = torch.arange(first, place + n, device=starts.device)
    queries = keys[place - first :].unsqueeze(-1)  # [n, 1]
    after = starts if window is None else torch.maximum(starts, queries.squeeze(-1) - window)
    return (keys >= after.unsqueeze(-1)) & (keys <= queries)


def mask_bias(visible: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b, n, t] bool -> [b, 1, n, 1, t]: 0 where visible, else -inf."""
    b, n, t = visible.shape
    return like.new_zeros(b, 1, n, 1, t).masked_fill_(~visible.view(b, 1, n, 1, t), float("-inf"))


def by_position(bias: torch.Tensor, q: int) -> torch.Tensor:
    """[g q, n, t] -> [g, n, q, t], the order of a block's rows."""
    return bias.unflatten(0, (-1, q)).transpose(1, 2)


def add_samples(total: torch.Tensor, x: torch.Tensor) -> None:
    """total [...] += the sum of x [b, ...]. On a CPU one sample at a time, in a third of the time of torch's sum."""
    for sample in x if x.device.type == "cpu" else (x.sum(0),):
        total.add_(sample)


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


def kept_weights(dropout: DropoutMask, shape, queries: slice, keys: slice) -> torch.Tensor:
    """The dropout mask of weights [b g, n q, keys] of these n positions, bool, for these keys."""
    _, b, g, q, _ = shape
    words = dropout.words.unflatten(1, (g, q))[:, :, :, queries, keys].transpose(2, 3)  # [b, g, n, q, keys]
    return (words >= dropout.threshold).contiguous().view(b * g, -1, keys.stop - keys.start)


def _to_sequence_first(x: torch.Tensor, shape) -> torch.Tensor:
    s, b, g, q, d = shape
    return x.view(b, g, s, q, d).permute(2, 0, 1, 3, 4)


def sdpa(
    query,
    key,
    value,
    *,
    scale: float,
    causal: bool,
    allowed=None,
    documents=None,
    window=None,
    bias=None,
    padding=None,
    **_,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention: flash, cuDNN or memory-efficient kernels on CUDA, flash on CPUs. Windows are
    masks. Each document has its own call; with torch.compile, to avoid recompilation for every sample, documents are a
    mask.
    """
    s, b, g, q, d = query.shape
    t, heads = key.shape[0], g * q
    if documents is not None:
        if not torch.compiler.is_compiling():
            return _sdpa_of_documents(query, key, value, documents, scale, window)
        allowed = documents.allowed(t)
    mask = blind = None
    lower = False  # whether the kernel has the causal order built in
    if bias is not None or padding is not None:
        mask, blind = _joined_masks(query, t, causal, allowed, window, bias, padding)
    elif allowed is not None:
        visible, blind = visible_keys(allowed, causal, window)
        mask = visible.unsqueeze(1)
    elif window is not None:
        mask = _shared_bias(s, t, window, query.dtype, query.device)
    elif causal and 1 < s != t:  # torch's own causal order puts the queries first among the tokens; one sees all keys
        lower = query.is_cuda and query.dtype != torch.float32
        mask = _lower_right(s, t) if lower else _shared_bias(s, t, t, query.dtype, query.device)
    query = query.permute(1, 2, 3, 0, 4).reshape(b, heads, s, d)
    key, value = (x.permute(1, 2, 0, 3) for x in (key, value))  # [b, g, t, d]
    if q > 1 and query.is_cuda and mask is not None and not lower:  # no kernel supports both a mask and groups
        key, value = (x.repeat_interleave(q, 1) for x in (key, value))
        q = 1
    order = dict(attn_mask=mask) if mask is not None else dict(is_causal=causal and s > 1)
    attended = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=q > 1, **order)
    attended = attended.permute(2, 0, 1, 3).reshape(s, b, heads * d)
    return attended if blind is None else attended.masked_fill(blind, 0.0)


def _joined_masks(query, t: int, causal: bool, allowed, window, bias, padding):
    """(bias or mask of scores [b or 1, heads or 1, s, t], queries with zero results or None)."""
    s, added, blind = query.shape[0], None if bias is None else bias.unsqueeze(0).to(query.dtype), None
    if allowed is not None:
        visible, blind = visible_keys(allowed, causal, window)
        visible = visible.unsqueeze(1)
        visible = visible if padding is None else visible & padding[:, None, None, :]
    else:
        visible = None if padding is None else padding[:, None, None, :]
        if causal and s > 1 or window is not None:
            order = in_window(s, t, t if window is None else window, query.device)
            visible = order if visible is None else visible & order
    if added is None:
        return visible, blind
    return (added if visible is None else added.masked_fill(~visible, float("-inf"))), blind


def _sdpa_of_documents(query, key, value, documents: Documents, scale: float, window: Optional[int]) -> torch.Tensor:
    """`sdpa` of each document, and of short neighbours together, with a mask of their pairs."""
    of_samples, samples = [], (query.unbind(1), key.unbind(1), value.unbind(1), documents.starts.unbind(0))
    for runs, queries, keys, values, starts in zip(documents.runs, *samples, strict=True):
        queries, starts = (x.split([run.queries for run in runs]) for x in (queries, starts))
        keys, values = (x.split([run.keys for run in runs]) for x in (keys, values))
        attended, first = [], 0
        for run, *parts, own in zip(runs, queries, keys, values, starts, strict=True):
            if run.queries:
                places = torch.arange(first, first + run.keys, device=own.device)
                allowed = None if run.documents == 1 else (places >= own.unsqueeze(-1)).unsqueeze(0)
                reach = None if window is None or run.keys <= window + 1 else window
                parts = (part.unsqueeze(1) for part in parts)
                attended.append(sdpa(*parts, scale=scale, causal=True, allowed=allowed, window=reach))
            first += run.keys
        of_samples.append(_joined(attended, 0))
    return _joined(of_samples, 1)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate, without a copy if there is one part."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _lower_right(s: int, t: int):
    """Causal order of the last s of t tokens, in torch's form."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo, which takes a second

    return causal_lower_right(s, t)


@lru_cache(maxsize=2)  # one length, or both chunks of one: the backward pass of every layer needs it
def _shared_bias(s: int, t: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[s, t]: 0 where the query sees the key, else -inf."""
    with torch.inference_mode(False):
        bias = torch.zeros(s, t, dtype=dtype, device=device)
        return bias.masked_fill_(~in_window(s, t, window, device), float("-inf"))


def one_query(query, key, value, *, scale: float, window: Optional[int] = None, **_) -> torch.Tensor:
    """Attention of the last token: the queries of a group are rows of one product."""
    _, b, g, q, d = query.shape
    first = 0 if window is None else max(0, len(key) - 1 - window)
    key, value = (x[first:].permute(1, 2, 0, 3) for x in (key, value))  # [b, g, t, d]
    attended = F.scaled_dot_product_attention(query.squeeze(0), key, value, scale=scale)
    return attended.reshape(1, b, g * q * d)


def flash_attn(query, key, value, *, scale: float, causal: bool, softcap=None, window=None, **_) -> torch.Tensor:
    """The flash-attn package (arXiv:2307.08691)."""
    from flash_attn import flash_attn_func

    more = {} if window is None else dict(window_size=(window, 0))
    more |= {} if softcap is None else dict(softcap=softcap)

    s, b, g, q, d = query.shape
    query, key, value = (x.transpose(0, 1) for x in (query.reshape(s, b, g * q, d), key, value))
    attended = flash_attn_func(query, key, value, softmax_scale=scale, causal=causal, **more)  # [b, s, heads, d]
    return attended.transpose(0, 1).reshape(s, b, g * q * d)


def varlen(query, key, value, *, scale: float, documents: Documents, window=None, **_) -> torch.Tensor:
    """torch's flash attention of packed documents."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo, which takes a second

    more = dict(window_size=(-1 if window is None else window, 0))  # -1: causal order without a window
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # after 2.11; before, groups needed no argument
        more["enable_gqa"] = query.shape[3] > 1
    d, packed = query.shape[-1], _packed(query, key, value)
    if d % 8:  # the kernel reads 16 bytes at a time
        packed = [F.pad(x, (0, -d % 8)) for x in packed]
    edges = documents.query_edges, documents.key_edges, *documents.longest
    return _unpacked(varlen_attn(*packed, *edges, scale=scale, **more)[..., :d], query)


def flash_attn_varlen(
    query, key, value, *, scale: float, documents: Documents, softcap=None, window=None, **_
) -> torch.Tensor:
    """The flash-attn package, for packed documents."""
    from flash_attn import flash_attn_varlen_func

    more = {} if window is None else dict(window_size=(window, 0))
    more |= {} if softcap is None else dict(softcap=softcap)
    edges = documents.query_edges, documents.key_edges, *documents.longest
    packed = _packed(query, key, value)
    return _unpacked(flash_attn_varlen_func(*packed, *edges, softmax_scale=scale, causal=True, **more), query)


def _packed(query, key, value) -> list[torch.Tensor]:
    """[b s, g q, d] and twice [b t, g, d]: the tokens of all samples, one sample after the other."""
    b, d = query.shape[1], query.shape[-1]
    return [x.transpose(0, 1).reshape(b * len(x), -1, d) for x in (query, key, value)]


def _unpacked(attended: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[b s, g q, d] -> [s, b, g q d]."""
    s, b = query.shape[:2]
    return attended.reshape(b, s, -1).transpose(0, 1)
