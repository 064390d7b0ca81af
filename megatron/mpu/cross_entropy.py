# SPDX-License-Identifier: Apache-2.0
"""Fused output layer and cross-entropy, a chunk of tokens at a time, over a vocabulary that is split along the tp axis.

The fp32 logits of a whole micro-batch never exist: each chunk's logits become its losses and, if gradients are needed,
immediately its gradients, since d loss / d logits = softmax - onehot. The backward pass computes the weight's gradient,
which may be deferred (`deferred_wgrad.py`), and multiplies by the incoming gradient.
Padding rows of the vocabulary are excluded from the softmax: no probability, no gradient.

A soft cap replaces logits by cap x tanh(logit / cap), and its slope multiplies their gradient.

The z-loss of a token is the square of its log sum exp (arXiv:2204.02311, section 5). Its gradient, softmax x
2 log sum exp, is added to the same gradients, so it costs no second pass.

With label smoothing e the target of a token is 1 - e for its label plus e / vocabulary for every real row
(arXiv:1512.00567), so its loss is log sum exp(logits) - (1 - e) logit of the label - e x mean of the logits: each rank
sums its own logits, and one all-reduce sums both the label's logit and the mean.

With a teacher, the loss to minimize is a sum of this one and of a loss on the teacher's logits (`distillation_loss.py`).

fp16 has no number below 6e-8, and gradients of logits are probabilities. So they are stored times `FP16_SCALE`, and the
weight's gradient, a sum over tokens, divided by their number; the incoming gradient (loss scale / tokens) is corrected
for both. So nothing underflows before the loss scale is applied.

Legend: n tokens (s x b), h hidden, v padded vocabulary, tp size of the axis.
"""

from collections.abc import Callable
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F

from megatron.errors import SettingsError
from megatron.fused_kernels import Case, choose_kernel, cpu_ops
from megatron.fused_kernels.autocast import op
from megatron.fused_kernels.reference import VocabularyPart
from megatron.mpu import collectives
from megatron.mpu.deferred_wgrad import WeightGradStore, wgrad_defer_function
from megatron.mpu.distillation_loss import DistillationLoss
from megatron.mpu.layers import WgradGemm, matmul, start_input_reduction
from megatron.mpu.mesh import Axis
from megatron.mpu.ordered_sums import Blocks
from megatron.mpu.ordered_tokens import SampleSums
from megatron.settings.groups.kernels import BLOCKS
from megatron.settings.kernel_sizes import LossChunks

FP16_SCALE = 2.0**12  # of softmax - onehot: keeps probabilities from 1e-11, and leaves room for weights up to 8
FP16_TEACHER_SCALE = 2.0**6  # with a teacher: log ratios of probabilities and the temperature are factors


@op
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    mask: Optional[torch.Tensor] = None,
    label_smoothing: float = 0.0,
    softcap: Optional[float] = None,
    z_loss: float = 0.0,
    chunk: Optional[int] = None,
    deferred: Optional[WeightGradStore] = None,
    unfused: bool = False,
    gather: Optional[Axis] = None,
    reduce: Optional[Axis] = None,
    bias: Optional[torch.Tensor] = None,
    teacher: Optional[DistillationLoss] = None,
    ordered: Optional[SampleSums] = None,
) -> tuple[torch.Tensor, ...]:
    """Masked sums over tokens of cross-entropy (`hidden @ weight.T` against `labels`) and of z-loss, as fp32 scalars.

    Only the first has a gradient, which is that of the first + `z_loss` x the second, the loss to minimize.

    hidden [n, h], equal on all ranks of `tp`. Its gradient is this rank's part of a sum over them. The mapping before
    (`copy_to_tensor_model_parallel_region` or `gather_from_sequence_parallel_region`) reduces it, or this function does,
    overlapped with the weight's gradient: with `reduce`, or with `gather`, where hidden is this rank's piece [n/tp, h]
    (`layers.LinearOptions`).
    weight [v/tp, h]: rows tp.rank * v/tp onwards of the padded vocabulary;
    labels [n] int64 below `vocab_size`; mask [n] or None for all ones;
    label_smoothing: target probability spread over the vocabulary; softcap: logits become softcap x tanh(logit / softcap);
    chunk: rows of logits that exist at a time;
    deferred: defers the weight's gradient while it collects, as in `layers.linear`;
    unfused: softmax and gradients by torch's ops; bias: [v/tp], added to logits before a cap;
    teacher: adds a third sum, of the loss on a teacher's logits. It alone has a gradient then: that of the loss to minimize
    divided by `teacher.alpha`, its weight there;
    ordered: sums over the vocabulary are those of blocks, whatever its parts are (`mpu/ordered_sums.py`), and sums over
    tokens those of whole samples, whatever rows ranks have.
    Raises SettingsError if hidden states and labels differ in number.
    """
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    part = _part(weight, vocab_size, tp, label_smoothing, softcap, z_loss)
    if ordered:
        part = part._replace(blocks=BLOCKS // tp.size)
    whole = hidden.detach() if gather is None else collectives.all_gather(hidden.detach(), gather)
    own_bias = None if bias is None else bias.detach()
    losses, log_sums, gradients = _chunks(
        whole,
        weight.detach(),
        labels,
        mask,
        part,
        _join_blocks(tp) if ordered else _join(tp),
        chunk,
        wanted,
        unfused,
        own_bias,
        weight.requires_grad,
        teacher,
        ordered,
    )
    sums = [losses, log_sums.square_(), *([] if teacher is None else [teacher.losses])]
    total = torch.sum if ordered is None else ordered.of_scalars
    sums = [total(x if mask is None else x * mask) for x in sums]
    if not wanted:
        return tuple(sums)
    defer = wgrad_defer_function(deferred, hidden, weight)
    reduction = partial(start_input_reduction, shape=hidden.shape, gather=gather, reduce=reduce)
    carries = 0 if teacher is None else 2  # the sum that has the gradient
    if teacher is not None:
        gradients = [(give, scale * teacher.alpha) for give, scale in gradients]
    sums[carries] = _Precomputed.apply(
        sums[carries], hidden, weight.detach() if defer else weight, gradients, defer, reduction, bias
    )
    return tuple(sums)


@op
@torch.no_grad()
def token_losses(
    hidden,
    weight,
    labels,
    *,
    vocab_size: int,
    tp: Axis,
    softcap: Optional[float] = None,
    chunk: Optional[int] = None,
    unfused: bool = False,
    bias: Optional[torch.Tensor] = None,
    ordered: Optional[SampleSums] = None,
) -> torch.Tensor:
    """Cross-entropy of each token, [n] fp32, without gradients. Arguments as in `linear_cross_entropy`."""
    part = _part(weight, vocab_size, tp, softcap=softcap)
    if ordered:
        part = part._replace(blocks=BLOCKS // tp.size)
    join = _join_blocks(tp) if ordered else _join(tp)
    return _chunks(hidden, weight, labels, None, part, join, chunk, False, unfused, bias)[0]


def ordered_logits(
    hidden: torch.Tensor, weight: torch.Tensor, tp: Axis, packed: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """[n, h] -> [n, v/tp]: the logits of a loss that is `ordered`, before a cap. packed: as of `LinearOptions`"""
    blocks = Blocks(BLOCKS // tp.size)
    if packed is not None and torch.is_inference_mode_enabled() and not blocks.narrow(len(weight)):
        return cpu_ops.onednn(hidden.contiguous(), packed)
    return blocks.product(matmul(hidden), hidden, weight)


def ordered_log_sum(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """The log sum exp of whole logits, [n, 1] of [n, vocabulary] fp32, as a loss that is `ordered` has it. rows: v"""
    whole = F.pad(logits, (0, rows - logits.shape[1]), value=float("-inf"))
    return torch.logsumexp(torch.logsumexp(whole.unflatten(1, (BLOCKS, -1)), 2), 1, keepdim=True)


class _Precomputed(torch.autograd.Function):
    """A scalar with known gradients, each as (function that returns it, its scale); the backward pass scales them.

    defer: receives the function for the weight's gradient, instead of autograd.
    reduction: starts to sum the gradient of hidden over ranks, and returns a function that waits for it.
    """

    @staticmethod
    def forward(ctx, loss, hidden, weight, gradients, defer, reduction, bias):
        ctx.gradients, ctx.defer, ctx.reduction = gradients, defer, reduction
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        of_hidden, of_weight, of_bias = (partial(_scaled, *gradient, upstream) for gradient in ctx.gradients)
        del ctx.gradients  # they are scaled in place, so a second backward would be wrong
        needed = ctx.needs_input_grad
        hidden = ctx.reduction(of_hidden()) if needed[1] else None  # reduced while the weight's is computed
        weight = of_weight() if needed[2] else None
        if ctx.defer:
            ctx.defer(of_weight)
        bias = of_bias() if needed[6] else None
        return None, hidden and hidden(), weight, None, None, None, bias


def _scaled(give: Callable[[], torch.Tensor], scale: float, upstream: torch.Tensor) -> torch.Tensor:
    """A gradient, scaled by the incoming one. Reading `upstream` on a GPU would synchronize, so it is only read on CPUs."""
    gradient = give()
    if scale != 1.0 or upstream.device.type != "cpu" or upstream != 1.0:
        gradient.mul_(upstream / scale)
    return gradient


def _part(weight, vocab_size: int, tp: Axis, label_smoothing=0.0, softcap=None, z_loss=0.0) -> VocabularyPart:
    """This rank's part of the vocabulary, with the targets of the label's row and of other rows."""
    rows = weight.shape[0]
    first = tp.rank * rows
    real = max(0, min(rows, vocab_size - first))
    return VocabularyPart(first, real, 1.0 - label_smoothing, label_smoothing / vocab_size, softcap, z_loss)


def _chunks(
    hidden,
    weight,
    labels,
    mask,
    part: VocabularyPart,
    join,
    chunk,
    wanted: bool,
    unfused: bool,
    bias=None,
    learns: bool = True,
    teacher: Optional[DistillationLoss] = None,
    ordered: Optional[SampleSums] = None,
):
    """Losses [n] and log sum exp of each token's logits [n], and, if `wanted`, gradients of their masked sum.

    Gradients (of hidden [n, h], weight [v/tp, h] and bias [v/tp], with z-losses) are pairs of a function and its scale.
    learns: whether there is one of the weight; a frozen weight's is not computed, and its factors are not kept.
    There are two levels. One product computes the logits of a `block` of rows. Their gradients overwrite them, in the
    format of the weights. Most micro-batches are one block: one large product of each kind, no sum over blocks, and the
    weight's gradient is computed on request. Within a block, `chunk` rows at a time are in fp32, to stay in the cache.
    """
    n, (product, of_hidden, of_weight) = hidden.shape[0], _products(matmul(hidden), part.blocks, ordered)
    if n != labels.shape[0]:
        raise SettingsError(
            f"the output layer has {n} tokens, and there are {labels.shape[0]} labels",
            "the loss is a sum over labels, each with the hidden state of its token",
            "keep every token on its way through the model: docs/extending.md#a-model",
        )
    chunk, block = _sizes(n, weight, part.blocks, chunk)
    losses, log_sums = torch.empty((2, n), dtype=torch.float32, device=hidden.device)
    compare, up = _comparison(hidden, labels, part, join, unfused, teacher, block)
    half = hidden.dtype == torch.float16
    up, down = (up, 0.5 ** n.bit_length()) if half else (1.0, 1.0)
    scale = mask
    if half:
        scale = torch.full_like(losses, up) if mask is None else mask * up
    hidden_gradient, total, of_bias = torch.empty_like(hidden) if wanted else None, None, None
    for whole in _slices(0, n, block):
        inputs = hidden[whole]
        logits = product(inputs, weight, bias)
        for rows in _slices(whole.start, whole.stop, chunk):
            own = logits[rows.start - whole.start : rows.stop - whole.start]
            gradient = (None if scale is None else scale[rows], own) if wanted else ()
            losses[rows], log_sums[rows] = compare(rows, own, *gradient)
        if not wanted:
            continue
        if bias is not None:
            own = logits.sum(0, dtype=torch.float32)
            of_bias = own if of_bias is None else of_bias.add_(own)
        hidden_gradient[whole] = of_hidden(logits, weight.t())
        if not learns:
            continue
        give = WgradGemm(logits, partial(_columns, inputs, down), of_weight)
        if n > block:  # blocks are summed in fp32, to avoid rounding to bf16 after each
            total = _add_block(total, give, weight)
    if not wanted:
        return losses, log_sums, None
    if not learns:
        give = None
    if total is not None:
        del logits, own, gradient, give  # the last block's, before the gradient is copied
        total = total.to(weight.dtype)
        give = lambda: total
    return losses, log_sums, ((lambda: hidden_gradient, up), (give, up * down), (lambda: of_bias, up))


def _sizes(n: int, weight: torch.Tensor, blocks: int, chunk: Optional[int]) -> LossChunks:
    """The numbers of tokens in a chunk and in a block. chunk: --cross-entropy-chunk"""
    sizes = weight.element_size(), "cpu" if weight.device.type == "cpu" else "cuda", chunk
    return (
        LossChunks.ordered(n, len(weight), BLOCKS // blocks, *sizes) if blocks else LossChunks.of(len(weight), *sizes)
    )


def _comparison(hidden, labels, part, join, unfused: bool, teacher, block: int) -> tuple[Callable, float]:
    """A function of a chunk, its logits and `out` of `reference.cross_entropy`, and the scale of its gradients in fp16."""
    if teacher is not None:
        teacher.begin(len(labels), block, hidden.device)
        return lambda rows, own, *out: teacher.compare(rows, own, labels[rows], part, *out), FP16_TEACHER_SCALE
    softmax_loss = choose_kernel("cross_entropy", Case(hidden.device.type, hidden.dtype, unfused=unfused)).run
    return lambda rows, own, *out: softmax_loss(own, labels[rows], part, join, *out), FP16_SCALE


def _columns(inputs: torch.Tensor, down: float) -> torch.Tensor:
    """The hidden states x `down` as an operand of the weight's gradient, [h, n]."""
    return (inputs if down == 1.0 else inputs * down).t()


def _add_block(total: Optional[torch.Tensor], block: WgradGemm, weight: torch.Tensor) -> torch.Tensor:
    """The sum of `total` and a block's gradient of the weight [v/tp, h], in fp32; None: no sum yet."""
    if weight.device.type == "cpu":  # the kernel of products there is faster than one that adds
        return block() if total is None else total.float().add_(block())
    first = total is None
    total = torch.empty(weight.shape, dtype=torch.float32, device=weight.device) if first else total
    block.add_to(total, overwrite=first)
    return total


def _slices(start: int, stop: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


def _products(multiply: Callable, blocks: int, ordered: Optional[SampleSums]) -> tuple[Callable, Callable, Callable]:
    """The products for logits, and for gradients of hidden states and weight. blocks: of the vocabulary's part; 0: none."""
    if not blocks:
        return multiply, multiply, multiply
    rows = Blocks(blocks)
    return partial(rows.product, multiply), partial(rows.sum, multiply), partial(_over_tokens, rows, multiply, ordered)


def _over_tokens(
    blocks: Blocks, multiply: Callable, ordered: SampleSums, a: torch.Tensor, b: torch.Tensor, bias: None
) -> torch.Tensor:
    return ordered.product(blocks, multiply, a.t(), b.t())


def _join_blocks(tp: Axis) -> Callable:
    """As `_join`, of the statistics of each block of a part: log sum exp [c, blocks]."""

    def joined(log_sum, target):
        blocks = collectives.all_gather(log_sum, tp, dim=1).contiguous()  # [c, BLOCKS]
        return torch.logsumexp(blocks, 1, keepdim=True), collectives.all_reduce(target, tp)

    return joined


def _join(tp: Axis) -> Optional[Callable]:
    """A function that combines the statistics of the ranks' parts of the vocabulary, [c, 1] each; None on one rank."""
    if tp.size == 1:
        return None

    def joined(log_sum, target):
        log_sum = torch.logsumexp(collectives.all_gather(log_sum.unsqueeze(0), tp), 0)
        return log_sum, collectives.all_reduce(target, tp)

    return joined
