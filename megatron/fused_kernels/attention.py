# SPDX-License-Identifier: Apache-2.0
"""Fast implementations of `reference.attention`; the table in `__init__.py` specifies the cases that each covers.

Legend: s new tokens, t all tokens, b micro-batch, g key-value groups, q queries per group, d channels per head.
query is [s, b, g, q, d], key and value are [t, b, g, d], results [s, b, g q d]. If values have v < d channels, results have
them, too: kernels for one width get values with zeros after them (`same_width`).
"""

import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.explicit_attention import visible_keys
from megatron.fused_kernels.reference import in_window


def same_width(kernel: Callable) -> Callable:
    """A kernel for values as wide as keys, for narrower ones."""

    @wraps(kernel)
    def run(query, key, value, **more):
        narrow, wide = value.shape[-1], key.shape[-1]
        if narrow == wide:
            return kernel(query, key, value, **more)
        attended = kernel(query, key, F.pad(value, (0, wide - narrow)), **more)
        return attended.unflatten(2, (-1, wide))[..., :narrow].flatten(2)

    return run


@same_width
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
    b = query.shape[1]
    first = 0 if window is None else max(0, len(key) - 1 - window)
    key, value = (x[first:].permute(1, 2, 0, 3) for x in (key, value))  # [b, g, t, d]
    attended = F.scaled_dot_product_attention(query.squeeze(0), key, value, scale=scale)
    return attended.reshape(1, b, -1)


@same_width
def flash_attn(query, key, value, *, scale: float, causal: bool, softcap=None, window=None, **_) -> torch.Tensor:
    """The flash-attn package (arXiv:2307.08691)."""
    from flash_attn import flash_attn_func

    more = {} if window is None else dict(window_size=(window, 0))
    more |= {} if softcap is None else dict(softcap=softcap)

    s, b, g, q, d = query.shape
    query, key, value = (x.transpose(0, 1) for x in (query.reshape(s, b, g * q, d), key, value))
    attended = flash_attn_func(query, key, value, softmax_scale=scale, causal=causal, **more)  # [b, s, heads, d]
    return attended.transpose(0, 1).reshape(s, b, g * q * d)


@same_width
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


@same_width
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
