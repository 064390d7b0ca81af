# SPDX-License-Identifier: Apache-2.0
"""Permute and unpermute of experts' rows in torch's ops. The backward pass of each is the other one's forward pass, so
both are gathers: the sums of a token are in the order of its experts, not in that of atomic additions.

See `reference.permute` for the arguments.
"""

import torch


def permute(x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """See `reference.permute`."""
    return _Permute.apply(x, order, place, k, whole)


def unpermute(y: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """See `reference.unpermute`."""
    return _Unpermute.apply(y, order, place, k, whole)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, place, k, whole):
        ctx.save_for_backward(place)
        ctx.k, ctx.whole = k, whole
        return _rows_of(x, order // k if k > 1 else order, whole)

    @staticmethod
    def backward(ctx, gradient):
        return _sums_of(gradient, *ctx.saved_tensors, ctx.k, ctx.whole), *(None,) * 4


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, order, place, k, whole):
        # Not `save_for_backward`: recomputation would send rows again only to have this.
        ctx.order, ctx.k, ctx.whole = order, k, whole
        return _sums_of(y, place, k, whole)

    @staticmethod
    def backward(ctx, gradient):
        return _rows_of(gradient, ctx.order // ctx.k, ctx.whole), *(None,) * 4


def _rows_of(x: torch.Tensor, index: torch.Tensor, whole: bool) -> torch.Tensor:
    """Rows of x by index. If not `whole`, those of index len(x) are 0."""
    return (x if whole else torch.cat((x, x.new_zeros(1, x.shape[1]))))[index]


def _sums_of(y: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """The sums of each k rows of y by their places, in fp32, one after the other."""
    if k == 1:
        return _rows_of(y, place, whole)
    wide, total = torch.promote_types(y.dtype, torch.float32), 0
    for rows in place.view(-1, k).unbind(1):
        total = total + _rows_of(y, rows, whole).to(wide)
    return total.to(y.dtype)
