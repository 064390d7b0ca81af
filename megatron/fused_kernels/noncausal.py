# SPDX-License-Identifier: Apache-2.0
"""Explicit non-causal attention: every query sees every key of its sample, of the same or of another sequence.

Operands are made contiguous, because batched products on a CPU copy other operands each time.

Legend: s queries, t keys, b micro-batch, c of its samples, g key-value groups, q queries per group, d channels per head.
"""

from typing import NamedTuple

import torch

from megatron.fused_kernels.attention import (
    add_samples,
    by_position,
    kept_weights,
    mask_bias,
    mask_padding,
    scaled_scores,
)
from megatron.fused_kernels.cpu_ops import baddbmm, bmm
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import numbers
from megatron.fused_kernels.reference import visible_keys
from megatron.settings.kernel_sizes import NONCAUSAL_ROWS

FEW_SAMPLES = (
    16  # up to here a bias gradient may be summed in bf16: over 64 the error is four times that of one rounding
)


def block_full(
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
    bias=None,
    padding=None,
    **_,
) -> torch.Tensor:
    """`reference.attention` in non-causal cases."""
    assert not causal, "every query sees all keys"
    parts = _groups(query, key, documents)
    if allowed is None:
        return _NonCausalAttention.apply(query, key, value, None, parts, dropout, scale, softcap, bias, padding)
    visible, blind = visible_keys(allowed, causal)
    attended = _NonCausalAttention.apply(query, key, value, visible, parts, dropout, scale, softcap, bias, padding)
    return attended.masked_fill(blind, 0.0)


class QueryGroup(NamedTuple):
    """Some samples, the positions of their keys, and blocks of positions of the queries that see these keys.

    first: the position of the samples' first query, where bias begins
    """

    samples: slice
    keys: slice
    queries: list[slice]
    first: int = 0


def _groups(query: torch.Tensor, key: torch.Tensor, documents: Documents | None) -> list[QueryGroup]:
    s, b, _, q, _ = query.shape
    if documents is None:
        return [QueryGroup(slice(0, b), slice(0, len(key)), _blocks(0, s, q))]
    groups, first = [], 0
    for sample in documents.parts[0]:
        end = first + sample.keys
        groups.append(QueryGroup(slice(0, 1), slice(first, end), _blocks(first, end, q), first))
        first = end
    return groups


def _blocks(start: int, stop: int, q: int) -> list[slice]:
    step = max(1, NONCAUSAL_ROWS // q)
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


class _NonCausalAttention(torch.autograd.Function):
    """Rows of a group's queries are in the order (s, q), so that a block of positions is one slice of rows."""

    @staticmethod
    def forward(ctx, query, key, value, visible, parts, dropout, scale, softcap, bias, padding):
        s, b, g, q, d = query.shape
        attended = query.new_empty(query.shape)
        saved = []  # per part: keys and values [c g, t, d]; per block: rows [c g, n q, d] and weights [c g, n q, t]
        for samples, seen, queries, first in parts:
            keys, values = (_heads_first(x[seen, samples]) for x in (key, value))
            saved += [keys, values]
            c, t = samples.stop - samples.start, keys.shape[1]
            for mine in queries:
                rows = _heads_first(query[mine, samples])
                shape = (c, g, mine.stop - mine.start, q)
                own = None if bias is None else by_position(_of_part(bias, mine, t, first), q)  # [g, n, q, t]
                if own is not None and softcap is None:  # the product adds to it, in fp32
                    block = own.expand(c, *own.shape).reshape(-1, rows.shape[1], t).to(rows.dtype)
                    block = baddbmm(block, rows, keys.transpose(1, 2), alpha=scale)
                else:
                    block = scaled_scores(rows, keys, scale)
                if softcap is not None:
                    block = block.div_(softcap).tanh_().mul_(softcap)
                    block = block if own is None else block.view(*shape, t).add_(own).view(block.shape)
                if visible is not None:
                    block.view(*shape, t).add_(mask_bias(visible[samples, mine, seen], block))
                if padding is not None:
                    mask_padding(block, padding[samples, seen])
                weights = torch.softmax(block, -1)
                saved += [rows, weights]
                if dropout is not None:
                    kept = dropout._replace(words=dropout.words[samples])
                    saved.append(kept_weights(kept, (s, c, g, q, d), mine, seen))
                    weights = weights * numbers(saved[-1], rows.dtype)
                result = bmm(weights, values)
                if dropout is not None:
                    result.mul_(dropout.factor)  # of the weights, applied to their sum
                _put(attended[mine, samples], result)
        ctx.save_for_backward(*saved)
        ctx.shape, ctx.key_shape, ctx.parts, ctx.scale, ctx.softcap = query.shape, key.shape, parts, scale, softcap
        ctx.factor, ctx.bias_shape = None if dropout is None else dropout.factor, None if bias is None else bias.shape
        return attended.view(s, b, g * q * d)

    @staticmethod
    def backward(ctx, gradient):
        saved, q, gradient = iter(ctx.saved_tensors), ctx.shape[3], gradient.view(ctx.shape)
        d_query, d_key, d_value = (gradient.new_empty(shape) for shape in (ctx.shape, *[ctx.key_shape] * 2))
        # For few samples, sum in the format of the terms: adding bf16 to fp32 converts each time.
        few = sum(part.samples.stop - part.samples.start for part in ctx.parts) <= FEW_SAMPLES
        exact = gradient.dtype if few else torch.float32
        d_bias = gradient.new_zeros(ctx.bias_shape, dtype=exact) if ctx.needs_input_grad[8] else None
        for samples, seen, queries, first in ctx.parts:
            keys, values = next(saved), next(saved)
            d_keys = d_values = None
            for mine in queries:
                rows, weights = next(saved), next(saved)
                above, dropped = _heads_first(gradient[mine, samples]), weights
                above = above if ctx.factor is None else above * ctx.factor
                d_scores = bmm(above, values.transpose(1, 2))
                if ctx.factor is not None:
                    kept = numbers(next(saved), weights.dtype)
                    d_scores, dropped = d_scores.mul_(kept), kept.mul_(weights)
                d_scores = torch._softmax_backward_data(d_scores, weights, -1, weights.dtype)
                if d_bias is not None:
                    own = by_position(_of_part(d_bias, mine, keys.shape[1], first), q)
                    add_samples(own, d_scores.view(-1, *own.shape))
                if ctx.softcap is not None:  # scores are recomputed: saved, they would be as large as the weights
                    tanh = scaled_scores(rows, keys, ctx.scale).div_(ctx.softcap).tanh_()
                    d_scores = d_scores.addcmul_(d_scores, tanh.square_(), value=-1)
                _put(d_query[mine, samples], bmm(d_scores, keys), ctx.scale)
                d_keys = _plus(d_keys, bmm(d_scores.transpose(1, 2), rows))
                d_values = _plus(d_values, bmm(dropped.transpose(1, 2), above))
            _put(d_key[seen, samples].unsqueeze(3), d_keys, ctx.scale)
            _put(d_value[seen, samples].unsqueeze(3), d_values)
        d_bias = None if d_bias is None else d_bias.to(gradient.dtype)
        return d_query, d_key, d_value, *[None] * 5, d_bias, None


def _of_part(bias: torch.Tensor, queries: slice, keys: int, first: int) -> torch.Tensor:
    """The rows of these queries in bias [g q, s, t], which begins at position `first`, over the first keys."""
    return bias[:, queries.start - first : queries.stop - first, :keys]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[n, c, g, d] or [n, c, g, q, d] -> [c g, n, d] or [c g, n q, d], a contiguous copy."""
    order = (1, 2, 0, *range(3, x.ndim))
    return x.permute(order).contiguous().view(x.shape[1] * x.shape[2], -1, x.shape[-1])


def _put(place: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
    """place [n, c, g, q, d] = scale x of [c g, n q, d]."""
    n, c, g, q, d = place.shape
    x = x if scale == 1.0 else x.mul_(scale)
    place.copy_(x.view(c, g, n, q, d).permute(2, 0, 1, 3, 4))


def _plus(total: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if total is None else total.add_(x)
