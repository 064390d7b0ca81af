# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the keys, whose result can be merged with those over other parts (ring attention).

A part's result is normalized by its own keys, and comes with their log-sum-exp of scores. From both, `merge` computes the
result over all keys. The backward pass of a part takes the result and the log-sum-exp over *all* keys, as that of flash
attention does: it recomputes the weights exp(score - log-sum-exp), so nothing of a part is saved.

Legend: n queries, m keys, b samples, h heads, g key-value heads, d channels, v of values, often d. query is [n, b, h, d],
key [m, b, g, d], value [m, b, g, v], a log-sum-exp is [n, b, h] in fp32. Flash kernels are for one width: narrower values
get zeros after them.
"""

from typing import Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.cpu_ops import widens
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.explicit_attention import Gradients, Rectangle, Scores, visible_pairs


def merge(total: torch.Tensor, total_lse: torch.Tensor, part: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge the result of a part into that of the keys so far, in place, in fp32. Both totals begin as 0 and -inf."""
    both = torch.logaddexp(total_lse, lse)
    total.mul_((total_lse - both).exp_().unsqueeze(-1)).addcmul_(part.float(), (lse - both).exp_().unsqueeze(-1))
    total_lse.copy_(both)


class FlashOnCPU:
    """torch's flash attention on CPUs. Windows and documents are masks."""

    @staticmethod
    def forward(
        query, key, value, rectangle: Rectangle, scores: Scores, kept=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Explicit`."""
        operands, order = FlashOnCPU._prepared((query, key, value), rectangle)
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(*operands, 0.0, order.pop("is_causal"), scale=scores.scale, **order)
        return out.permute(2, 0, 1, 3)[..., : value.shape[-1]], lse.permute(2, 0, 1)

    @staticmethod
    def backward(gradient, query, key, value, out, lse, rectangle: Rectangle, scores: Scores, kept=None) -> Gradients:
        """See `Explicit`."""
        dtype, widths = query.dtype, (query.shape[-1], key.shape[-1], value.shape[-1])
        tensors = (query, key, value, gradient, out)
        if widens(query.device.type, dtype):
            tensors = [x.float() for x in tensors]
        (*operands, gradient, out), order = FlashOnCPU._prepared(tensors, rectangle)
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        more = (out, lse.permute(1, 2, 0), 0.0, order.pop("is_causal"))
        gradients = run(gradient, *operands, *more, scale=scores.scale, **order)
        return tuple(x.permute(2, 0, 1, 3)[..., :width].to(dtype) for x, width in zip(gradients, widths))

    @staticmethod
    def _prepared(tensors, rectangle: Rectangle):
        """Queries, keys and other tensors as [b, h, n, d], and the arguments for the order of queries and keys."""
        query, key, *_ = tensors
        operands = [x.permute(1, 2, 0, 3) for x in _same_width(tensors)]
        if rectangle.window is None and rectangle.documents is None:
            return operands, dict(is_causal=rectangle.causal)
        documents = rectangle.documents
        places = slice(0, len(query)), slice(0, len(key))
        seen = visible_pairs(rectangle, *places, query.device, documents and documents.starts)
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
        n, b, h, _ = query.shape
        if rectangle.documents is not None:  # [b n, h, d] and [h, b n]
            out, lse = out.view(b, n, h, -1), lse.view(h, b, n).transpose(0, 1)
        return out[..., : value.shape[-1]].transpose(0, 1), lse.permute(2, 0, 1)

    @staticmethod
    def backward(gradient, query, key, value, out, lse, rectangle: Rectangle, scores: Scores, kept=None) -> Gradients:
        """See `Explicit`."""
        (n, b, h, d), m, v = query.shape, len(key), value.shape[-1]
        operands, sizes, order = FlashOnCUDA._prepared((gradient, query, key, value, out), rectangle)
        lse = lse.permute(1, 2, 0)  # [b, h, n]
        lse = (lse if rectangle.documents is None else lse.transpose(0, 1).reshape(h, b * n)).contiguous()
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)  # random state of dropout
        run = torch.ops.aten._flash_attention_backward
        gradients = run(*operands, lse, *sizes, 0.0, rectangle.causal, unused, unused, scale=scores.scale, **order)
        sized = (x.reshape(b, rows, -1, x.shape[-1]) for x, rows in zip(gradients, (n, m, m)))
        return tuple(x[..., :width].transpose(0, 1) for x, width in zip(sized, (d, d, v)))

    @staticmethod
    def _prepared(tensors, rectangle: Rectangle):
        """Tensors as [b, n, h, d], or [b n, h, d] for documents; the edges of documents and the largest sizes; windows."""
        tensors = [x.transpose(0, 1) for x in _same_width(tensors)]
        d = tensors[0].shape[-1]
        tensors = [F.pad(x, (0, -d % 8)) for x in tensors] if d % 8 else tensors  # the kernel reads 16 bytes at a time
        sizes = None, None, rectangle.rows.stop - rectangle.rows.start, rectangle.keys.stop - rectangle.keys.start
        if (documents := rectangle.documents) is not None:
            tensors = [x.reshape(-1, *x.shape[2:]) for x in tensors]
            sizes = documents.query_edges, documents.key_edges, *documents.longest
        order = {} if rectangle.window is None else dict(window_size_left=rectangle.window)
        order |= dict(window_size_right=0) if order and rectangle.causal else {}
        return tensors, sizes, order


def _same_width(tensors) -> list[torch.Tensor]:
    """The tensors with as many channels as the widest."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def flash_with_sinks(
    query,
    key,
    value,
    *,
    scale: float,
    sinks: torch.Tensor,
    documents: Optional[Documents] = None,
    window: Optional[int] = None,
    **_,
) -> torch.Tensor:
    """`reference.attention` of causal cases with sinks, by torch's flash attention.

    A sink, of a key without a value (arXiv:2309.17453), changes only the sum that weights are divided by. So a result over
    the keys alone becomes that with the sink if it is multiplied by the share of the keys in the softmax, sigmoid(log sum
    exp of scores - sink). The backward pass takes the log-sum-exp that includes the sink.
    """
    s, b, g, q, d = query.shape
    t = len(key)
    if s < t and documents is None and window is None:
        window = t  # all keys: kernels count a window from the end of the keys
    whole = Rectangle(slice(0, s), slice(0, t), True, window, documents)
    attended = _FlashWithSinks.apply(query.reshape(s, b, g * q, d), key, value, sinks, whole, Scores(scale))
    return attended.reshape(s, b, -1)


class _FlashWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, whole, scores):
        kernel = FlashOnCUDA if query.is_cuda else FlashOnCPU
        attended, lse = kernel.forward(query, key, value, whole, scores)
        with_sink = torch.logaddexp(lse, sinks.detach().float().flatten())  # [s, b, h]
        scaled = torch.empty_like(attended, memory_format=torch.contiguous_format)
        attended = torch.mul(attended, (lse - with_sink).exp_().to(attended.dtype).unsqueeze(-1), out=scaled)
        ctx.save_for_backward(query, key, value, sinks, attended, with_sink)
        ctx.of = kernel, whole, scores
        return attended

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, sinks, attended, lse = ctx.saved_tensors
        kernel, whole, scores = ctx.of
        gradient = gradient.contiguous()
        gradients = kernel.backward(gradient, query, key, value, attended, lse, whole, scores)
        return *gradients, gradient_of_sinks(gradient, attended, lse, sinks), None, None


def gradient_of_sinks(gradient, attended, lse, sinks: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks, from results [s, b, h, d], their gradient, and the log-sum-exp [s, b, h] with the sinks."""
    of_rows = (gradient.float() * attended.float()).sum(-1)  # [s, b, h]
    weights = (sinks.float().flatten() - lse).exp_()
    return -(weights * of_rows).sum((0, 1)).view_as(sinks).to(sinks.dtype)
