# SPDX-License-Identifier: Apache-2.0
"""Dropout with a given mask of random words."""

from typing import NamedTuple

import torch


class DropoutMask(NamedTuple):
    """The elements that dropout keeps: those with a word [shape of the tensor, int16] of at least `threshold`; they are
    multiplied by `factor`.
    """

    words: torch.Tensor
    threshold: int
    factor: float

    def mask(self) -> torch.Tensor:
        """The kept elements, bool."""
        return self.words >= self.threshold


def drop(x: torch.Tensor, keep: DropoutMask) -> torch.Tensor:
    """x after dropout; only the mask is saved for the backward pass."""
    return _Masked.apply(x, keep.mask(), keep.factor)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, factor):
        ctx.save_for_backward(mask)
        ctx.factor = factor
        return _masked(x, mask, factor)

    @staticmethod
    def backward(ctx, gradient):
        return _masked(gradient, *ctx.saved_tensors, ctx.factor), None, None


def _masked(x: torch.Tensor, mask: torch.Tensor, factor: float) -> torch.Tensor:
    if x.device.type == "cpu":
        product = (x * numbers(mask, x.dtype)).mul_(factor)
        return product.view_as(product)  # see `norms._RMSNorm.forward`
    return torch.ops.aten.native_dropout_backward(x, mask, factor)  # despite its name, this product in one kernel


def numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask as 0 and 1: on CPUs torch converts int8 to floats 3 to 8 times as fast as bool."""
    if torch.compiler.is_compiling():  # compiled code converts bool as fast; torch 2.11 cannot compile the view
        return mask.to(dtype)
    return mask.view(torch.int8).to(dtype)
