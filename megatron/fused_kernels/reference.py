# SPDX-License-Identifier: Apache-2.0
"""Definitions in plain PyTorch of every op that has fast implementations.

Legend: s new tokens, t all tokens, b micro-batch, g key-value groups, q queries per group, d channels per head, v of its
values, often d.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.decode_attention import Places
from megatron.fused_kernels.delta_rule import delta_rule as delta_rule
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import DropoutMask, drop
from megatron.fused_kernels.explicit_attention import Explicit, visible_keys
from megatron.fused_kernels.fp8 import fp8_blockwise as fp8_blockwise
from megatron.fused_kernels.fp8 import fp8_blockwise_square as fp8_blockwise_square
from megatron.fused_kernels.fp8 import fp8_cast as fp8_cast
from megatron.fused_kernels.fp8 import fp8_grouped as fp8_grouped
from megatron.fused_kernels.fp8 import fp8_mxfp8 as fp8_mxfp8
from megatron.fused_kernels.fp8 import fp8_tensorwise as fp8_tensorwise
from megatron.fused_kernels.fp8 import fp8_turn as fp8_turn


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    allowed: torch.Tensor | None = None,
    documents: Documents | None = None,
    score_divisor: float = 1.0,
    softmax_in_fp32: bool = False,
    dropout: DropoutMask | None = None,
    softcap: float | None = None,
    window: int | None = None,
    bias: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of query [s, b, g, q, d] over key [t, b, g, d] and value [t, b, g, v] -> [s, b, g q v].

    causal:    no query sees a later key; the queries are the last s <= t of the tokens. Otherwise every query
               sees every key, and s and t are independent: bidirectional self-attention, or cross-attention
    allowed:   [b, s, t] bool, an additional mask of pairs; a query without visible keys gets zeros, and
               no gradient
    documents: a query sees only keys of its own document, here by a mask of all pairs. In a non-causal case b is 1, these
               are the samples of a micro-batch, and bias is [g q, positions, positions] within one of them
    dropout:   mask of weights, [b, g q, s, t]
    score_divisor: keeps scores in the range of fp16: they are divided by it and multiplied again in the fp32 softmax
    softcap:   scores become softcap x tanh(score / softcap)
    window:    in a causal case: a query sees its own key and at most this many before it
    bias:      [g q, s, t], added to scaled scores, after a cap
    padding:   [b, t] bool, True at tokens; at least one per sample, and in a causal case up to each of its queries
    sinks:     [g, q], a logit of each head that takes part in the softmax, and has no value
    """
    s, b, g, q, d = query.shape
    t = key.shape[0]
    rows = query.permute(1, 2, 3, 0, 4).reshape(b * g, q * s, d)  # the queries of a group share its keys
    keys, values = (x.reshape(t, b * g, x.shape[-1]).transpose(0, 1) for x in (key, value))  # [b g, t, d or v]
    scores = torch.bmm(rows * (scale / score_divisor), keys.transpose(1, 2)).view(b, g * q, s, t)
    if softmax_in_fp32 or score_divisor != 1.0:
        scores = scores.float() * score_divisor
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    packed = documents is not None and not causal
    if bias is not None:
        if packed:
            [places] = documents.places()
            bias = bias[:, places.unsqueeze(1), places]
        scores = scores + bias.to(scores.dtype)
    if padding is not None:
        scores = scores.masked_fill(~padding[:, None, None, :], float("-inf"))
    blind = None
    if documents is not None:
        allowed = documents.together() if packed else documents.allowed(t)
    if allowed is not None:
        visible, blind = visible_keys(allowed, causal, window)
        scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    elif window is not None:
        scores = scores.masked_fill(~in_window(s, t, window, scores.device), float("-inf"))
    elif causal and s > 1:
        scores = scores + torch.full((s, t), float("-inf"), dtype=scores.dtype, device=scores.device).triu(t - s + 1)
    if sinks is not None:
        of_sinks = sinks.to(scores.dtype).view(1, g * q, 1, 1).expand(b, -1, s, -1)
        scores = torch.cat((scores, of_sinks), -1)
    weights = scores.softmax(-1)[..., :t].to(value.dtype)
    if dropout is not None:
        weights = weights * dropout.mask() * dropout.factor
    attended = torch.bmm(weights.reshape(b * g, q * s, t), values)  # [b g, q s, v]
    attended = attended.view(b, g, q, s, -1).permute(3, 0, 1, 2, 4).reshape(s, b, -1)
    return attended if blind is None else attended.masked_fill(blind, 0.0)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: Places,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` of the newest token of each of n texts over all of its tokens: query [n, g, q, d], keys [places, g, d]
    and values [places, g, v], of which each text has some -> [n, g q v].
    """
    attended = []
    for row, own in zip(query, places.of_texts, strict=True):
        key, value = (torch.cat([stored[one] for one in own]).unsqueeze(1) for stored in (keys, values))
        more = dict(scale=scale, causal=True, softcap=softcap, window=window, sinks=sinks)
        attended.append(attention(row[None, None], key, value, **more)[0])
    return torch.cat(attended)


partial_attention = Explicit  # its forward and its backward pass


def in_window(s: int, t: int, window: int, device) -> torch.Tensor:
    """[s, t] bool: the key is the query's own, or one of `window` before it; the queries are the last s of t tokens."""
    return torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s).triu(t - s - window)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] -> [m, n]."""
    return F.linear(x, weight, bias)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim, in fp32 inside."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim, in fp32 inside."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def add_layer_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    norm: Callable = layer_norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + branch, its LayerNorm): the end of one branch of the residual stream and the start of the next."""
    total = x + branch
    return total, norm(total, weight, bias, epsilon)


def add_rms_norm(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, epsilon: float, norm: Callable = rms_norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + branch, its RMSNorm)."""
    total = x + branch
    return total, norm(total, weight, epsilon)


def dropout_add(x: torch.Tensor, keep: DropoutMask, residual: torch.Tensor) -> torch.Tensor:
    """residual + x after dropout, [s, b, h]."""
    return residual + drop(x, keep)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """torch's GELU. Its tanh form is x sigmoid(2 u), which compiled code computes in a third of the time of tanh."""
    if approximate == "tanh" and torch.compiler.is_compiling():
        return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return F.gelu(x, approximate=approximate)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU (tanh form) of x [..., f] + bias [f]."""
    return gelu(x + bias, "tanh")


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) x value of x [..., 2 f] = (gate, value) (arXiv:2002.05202) -> [..., f]."""
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def geglu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """gelu(gate) x value of x [..., 2 f] = (gate, value) -> [..., f]. approximate: none, or tanh."""
    gate, value = x.chunk(2, -1)
    return gelu(gate, approximate) * value


def sigmoid_glu(x: torch.Tensor, alpha: float, limit: Optional[float] = None, offset: float = 0.0) -> torch.Tensor:
    """gate sigmoid(alpha gate) x (value + offset) of x [..., 2 f] = (gate, value) -> [..., f].

    limit: gates become at most this, and values from -limit to limit, before anything else
    """
    gate, value = x.chunk(2, -1)
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (value + offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + n/2) of the first n channels of x [s, b, g, q, d]; cos, sin: [s, b or 1, 1, 1, n], with
    equal halves.
    """
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, -1)
    turned = turning * cos + torch.cat((-second, first), -1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)


def permute(x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """The rows of experts, [m, h], from tokens x [n, h]: row i belongs to pair order[i]. Pair number t k + j is token t and
    its j-th expert.

    place: [n k], the row of each pair: the inverse of `order` [m]
    whole: each pair has a row, and each row a pair. Otherwise the place of a pair without a row is m; the order of a row
           without a pair is n k, and the row is 0
    """
    return _with_zeros(x, whole)[order // k]


def unpermute(y: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """The sums of each token's rows, [n, h], from rows of experts y [m, h]; in fp32 inside. See `permute`."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return _with_zeros(y, whole)[place.view(-1, k)].to(wide).sum(1).to(y.dtype)


def _with_zeros(x: torch.Tensor, whole: bool) -> torch.Tensor:
    return x if whole else torch.cat((x, x.new_zeros(1, x.shape[1])))


class VocabularyPart(NamedTuple):
    """The rows of the vocabulary that logits belong to, and the terms of a token's loss.

    first:      index of the first row
    real:       number of rows without padding; they come first
    label:      share of the target at the label; everywhere: share at each real row of the vocabulary
    softcap:    logits become softcap x tanh(logit / softcap)
    z_loss:     weight of the square of log sum exp in the gradients
    blocks:     join gets log sum exp of so many parts of the part, [c, blocks]; 0: of all of it
    """

    first: int
    real: int
    label: float = 1.0
    everywhere: float = 0.0
    softcap: Optional[float] = None
    z_loss: float = 0.0
    blocks: int = 0


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    part: VocabularyPart,
    join: Optional[Callable] = None,
    scale: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [c] and log sum exp [c] of logits [c, v/tp] of any format, which are overwritten, and int64 labels [c].

    join:  (log sum exp of the part, mean of its logits under the target), [c, 1] each -> those of the whole vocabulary;
           None: the part is the whole. In blocks with `everywhere` the second is [c, 2]: of the label, and of all rows
    scale: [c], factor of gradients
    out:   [c, v/tp] for the gradients of losses and weighted z-losses: (softmax - target) x scale without these and caps;
           None: no gradients
    """
    logits, slope = logits.float(), None
    if part.softcap is not None:
        tanh = logits.div_(part.softcap).tanh_()
        slope = 1.0 - tanh.square() if out is not None else None
        logits = tanh.mul_(part.softcap)
    logits[:, part.real :] = float("-inf")
    local = labels - part.first
    elsewhere = (local < 0) | (local >= part.real)
    local = local.masked_fill(elsewhere, 0).unsqueeze(1)
    target = logits.gather(1, local).masked_fill(elsewhere.unsqueeze(1), 0.0).mul_(part.label)  # [c, 1]
    if part.everywhere and part.blocks:  # apart: the label's logit is in one part; a factor would round each part's sum
        target = torch.cat((target, _sum_of_blocks(logits, part)), 1)
    elif part.everywhere:
        target += logits[:, : part.real].sum(1, keepdim=True) * part.everywhere
    if part.blocks:
        log_sum, target, probabilities = _softmax_of_blocks(logits, target, part.blocks, join, out is not None)
        target = target[:, :1] + target[:, 1:] * part.everywhere if part.everywhere else target
    elif out is None or join:
        log_sum = torch.logsumexp(logits, 1, keepdim=True)
        log_sum, target = join(log_sum, target) if join else (log_sum, target)
        probabilities = None if out is None else logits.sub_(log_sum).exp_()
    else:  # one pass; the sum follows from the largest probability, which is far from underflow
        largest = logits.amax(1, keepdim=True)
        probabilities = torch.softmax(logits, 1)
        log_sum = largest - probabilities.amax(1, keepdim=True).log()
    if out is None:
        return (log_sum - target).squeeze(1), log_sum.squeeze(1)
    if part.z_loss:
        probabilities.mul_(1.0 + 2.0 * part.z_loss * log_sum)
    if part.everywhere:
        probabilities[:, : part.real] -= part.everywhere
    probabilities.scatter_add_(1, local, (elsewhere.float().unsqueeze(1) - 1.0) * part.label)
    if slope is not None:
        probabilities.mul_(slope)
    if scale is not None:
        probabilities.mul_(scale.unsqueeze(1))
    out.copy_(probabilities)
    return (log_sum - target).squeeze(1), log_sum.squeeze(1)


def _sum_of_blocks(logits: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """The sum of real logits [c, v/tp], in blocks and the tree over them (`mpu/ordered_sums.py`), [c, 1]."""
    sums = F.pad(logits[:, : part.real], (0, logits.shape[1] - part.real)).unflatten(1, (part.blocks, -1)).sum(2)
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums


def _softmax_of_blocks(logits: torch.Tensor, target: torch.Tensor, number: int, join: Callable, wanted: bool) -> tuple:
    """What `join` returns, and, if wanted, softmax of fp32 logits [c, v/tp], overwritten, by sums of `number` blocks.

    The first is `torch.logsumexp` to the bit. A block's numbers above its largest are used for both, as exp takes long.
    """
    blocks = logits.unflatten(1, (number, -1))
    largest = blocks.amax(2, keepdim=True)
    largest.masked_fill_(largest == float("-inf"), 0.0)  # of a block of padding
    powers = blocks.sub_(largest).exp_()
    log_sum, target = join(powers.sum(2).log_().add_(largest.squeeze(2)), target)
    if wanted:  # in fp64: kernels round the last elements of a tensor, that fill no vector register, otherwise
        powers.mul_((largest - log_sum.unsqueeze(2)).double().exp_().float())
    return log_sum, target, logits
