# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a rank's part of the logits: the statistics of a row, then its gradient, one pass over the row each.

A program has a row and reads it in blocks, up to the last real row of the vocabulary. The padding after it adds no exp(0)
to the sum and gets no gradient.
"""

import torch
import triton
import triton.language as tl

from megatron.fused_kernels.reference import VocabularyPart

BLOCK, WARPS = 2048, 8


@triton.jit
def _capped(value, softcap, CAPPED: tl.constexpr):
    """softcap x tanh(value / softcap); its derivative is 1 - tanh^2."""
    if CAPPED:
        value = (2.0 * tl.sigmoid(2.0 * value / softcap) - 1.0) * softcap
    return value


@triton.jit
def kernel(
    logits,
    labels,
    scale,
    gradient,
    log_sums,
    targets,
    stride,
    out_stride,
    columns,
    first,
    real,
    own,
    everywhere,
    softcap,
    z_loss,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    SCALED: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """STATISTICS: write log sum exp of the row and its mean under the target. GRADIENT: write that of the loss, from the
    log sum exp over the whole vocabulary, which is loaded unless it was just computed.
    """
    row = tl.program_id(0).to(tl.int64)
    source, target = logits + row * stride, gradient + row * out_stride
    label = (tl.load(labels + row) - first).to(tl.int32)
    if STATISTICS:
        here = (label >= 0) & (label < real)
        logit = _capped(tl.load(source + tl.where(here, label, 0), here, 0.0).to(tl.float32), softcap, CAPPED)
        largest, total, everything = -float("inf"), 0.0, 0.0
        for start in range(0, real, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = _capped(tl.load(source + column, column < real, 0.0).to(tl.float32), softcap, CAPPED)
            if SMOOTHED:
                everything += tl.sum(tl.where(column < real, value, 0.0), 0)
            value = tl.where(column < real, value, -float("inf"))
            before, largest = largest, tl.maximum(largest, tl.max(value, 0))
            total = total * tl.exp(before - largest) + tl.sum(tl.exp(value - largest), 0)
        log_sum = largest + tl.log(total)
        tl.store(log_sums + row, log_sum)
        tl.store(targets + row, tl.where(here, logit * own, 0.0) + everything * everywhere)
    else:
        log_sum = tl.load(log_sums + row)
    if GRADIENT:
        factor = 1.0 + 2.0 * z_loss * log_sum
        weight = tl.load(scale + row) if SCALED else 1.0
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = _capped(tl.load(source + column, column < real, 0.0).to(tl.float32), softcap, CAPPED)
            slope = tl.exp(value - log_sum) * factor - everywhere - tl.where(column == label, own, 0.0)
            if CAPPED:
                slope *= 1.0 - (value / softcap) * (value / softcap)
            slope = tl.where(column < real, slope * weight, 0.0)
            tl.store(target + column, slope.to(gradient.dtype.element_ty), column < columns)


def _launch(logits, labels, part: VocabularyPart, scale, out, log_sum, target, statistics: bool) -> None:
    rows, columns = logits.shape
    kernel[rows,](
        logits,
        labels,
        log_sum if scale is None else scale,
        logits if out is None else out,
        log_sum,
        target,
        logits.stride(0),
        logits.stride(0) if out is None else out.stride(0),
        columns,
        part.first,
        part.real,
        part.label,
        part.everywhere,
        1.0 if part.softcap is None else part.softcap,
        part.z_loss,
        CAPPED=part.softcap is not None,
        SMOOTHED=part.everywhere != 0.0,
        SCALED=scale is not None,
        STATISTICS=statistics,
        GRADIENT=out is not None,
        BLOCK=min(BLOCK, triton.next_power_of_2(columns)),
        num_warps=WARPS,
    )


def cross_entropy(logits, labels, part: VocabularyPart, join=None, scale=None, out=None):
    """See `reference.cross_entropy`; `out` may be the logits themselves."""
    log_sum, target = torch.empty((2, len(logits), 1), dtype=torch.float32, device=logits.device)
    scale = None if scale is None else scale.float().contiguous()
    _launch(logits, labels, part, scale, None if join else out, log_sum, target, True)
    if join:
        log_sum, target = join(log_sum, target)
        if out is not None:
            _launch(logits, labels, part, scale, out, log_sum.contiguous(), target, False)
    return (log_sum - target).squeeze(1), log_sum.squeeze(1)
