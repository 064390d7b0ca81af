# SPDX-License-Identifier: Apache-2.0
"""Permute and unpermute of experts' rows in torch's ops, with backward passes that are gathers, too: the sums of a token
are in the order of its experts, not in that of atomic additions.

See `reference.permute` for the arguments.
"""

import torch


def permute(x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """See `reference.permute`."""
    return _Permute.apply(x, order, place, k, whole)


def unpermute(
    y: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, place: torch.Tensor, whole: bool
) -> torch.Tensor:
    """See `reference.unpermute`."""
    return _Unpermute.apply(y, weights, order, place, whole)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, place, k, whole):
        ctx.save_for_backward(place)
        ctx.k, ctx.whole = k, whole
        return _rows_of(x, order // k if k > 1 else order, whole)

    @staticmethod
    def backward(ctx, gradient):
        (place,) = ctx.saved_tensors
        pairs = _rows_of(gradient, place, ctx.whole)
        return pairs.view(-1, ctx.k, pairs.shape[1]).sum(1) if ctx.k > 1 else pairs, *(None,) * 4


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, weights, order, place, whole):
        ctx.save_for_backward(y, weights, order, place)
        ctx.whole, ctx.wide = whole, torch.promote_types(y.dtype, torch.float32)
        total = 0
        for factors, rows in zip(weights.to(ctx.wide).unbind(1), place.view(weights.shape).unbind(1)):
            total = total + _rows_of(y, rows, whole).to(ctx.wide) * factors.unsqueeze(1)
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx, gradient):
        y, weights, order, place = ctx.saved_tensors
        of_rows = _rows_of(gradient.to(ctx.wide), order // weights.shape[1], ctx.whole)  # [m, h]
        factors = _rows_of(weights.to(ctx.wide).reshape(-1, 1), order, ctx.whole)
        d_weights = _rows_of((of_rows * y.to(ctx.wide)).sum(1, keepdim=True), place, ctx.whole)
        return (of_rows * factors).to(y.dtype), d_weights.view(weights.shape).to(weights.dtype), None, None, None


def _rows_of(x: torch.Tensor, index: torch.Tensor, whole: bool) -> torch.Tensor:
    """Rows of x by index. If not `whole`, those of index len(x) are 0."""
    return (x if whole else torch.cat((x, x.new_zeros(1, x.shape[1]))))[index]
