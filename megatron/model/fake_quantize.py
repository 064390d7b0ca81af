# SPDX-License-Identifier: Apache-2.0
"""The products of a linear layer in quantization aware training (`model/quantization.py`).

Rounding is straight-through: the gradient of a rounded value is that of the value itself, and 0 where it was clipped.
Weights are rounded by the abs-max of whole channels, which are divided over tensor parallel ranks in a row-parallel layer:
one small message for each layer and step. The weight itself is rounded again in every pass, so no second weight is kept.

Legend: n tokens, i inputs, o outputs of this rank.
"""

import torch

from megatron.model.quantization import OF_TOKENS
from megatron.mpu import collectives
from megatron.mpu.linear_product import LinearProduct, Operand

DECAY = 0.9  # of the moving average
SMALLEST = 1e-12  # abs-max of a channel of zeros


class FakeQuantizeProduct(LinearProduct):
    """Rounded weights, and rounded inputs once their scale is known."""

    together = True

    def __init__(self, layer, name, settings):
        super().__init__(layer, name, settings)
        self.rounds_inputs = settings.activation_quantize_type != "none"
        self.of_tokens = settings.activation_quantize_type == OF_TOKENS
        self.observes = self.rounds_inputs and not self.of_tokens
        # Without sequence parallelism each rank has the whole input, except of a row-parallel layer.
        self.copies = 1 if has_part(layer) or getattr(layer, "row_axis", None) is not None else layer.tp.size
        self.weight_levels, self.input_levels = levels(settings.weight_bits), levels(settings.activation_bits)
        self.token_levels = 2**settings.activation_bits - 1
        self._largest: torch.Tensor | None = None

    # ---- weights ------------------------------------------------------------------------------------------------------

    def prepare_weight(self, weight: torch.Tensor) -> Operand:
        if self._largest is None:
            whole = self.settings.weight_quantize_type == "abs_max"
            self._largest = rows_absmax(self.layer, weight, whole)
        return (rounded_rows(weight, self._largest, self.weight_levels),)

    def after_update(self) -> None:
        super().after_update()
        self._largest = None

    def after_transform_changed(self) -> None:
        super().after_transform_changed()
        self._largest = None

    # ---- inputs -------------------------------------------------------------------------------------------------------

    def transform_input(self, x: torch.Tensor) -> torch.Tensor:
        x = super().transform_input(x)
        if not self.rounds_inputs:
            return x
        if "pact_alpha" in self.layer.placements:
            x = self.clip(x)
        if self.of_tokens:
            return _RoundTokens.apply(x, *token_grid(self.layer, x, self.token_levels), self.token_levels)
        if self.layer.training and x.numel():  # the experts of a rank may have no token
            with torch.no_grad():
                now = self.layer.input_absmax
                now.copy_(torch.maximum(now, x.detach().abs().amax().float()))
        total, count = self.layer.input_average
        return _RoundInput.apply(x, total / count, count > 0, self.input_levels)

    def clip(self, x: torch.Tensor) -> torch.Tensor:
        """Clip to PACT's bound. Ranks with the same input each add their share of its gradient."""
        alpha = self.layer.pact_alpha.to(x.dtype)
        if self.copies > 1:
            alpha = alpha.detach() + (alpha - alpha.detach()) / self.copies
        return x.clamp(-alpha, alpha)

    def update_buffers(self) -> None:
        """Once a step, when `input_absmax` is that of all ranks."""
        super().update_buffers()
        if not self.observes:
            return
        largest, average = self.layer.input_absmax, self.layer.input_average
        new = DECAY * average + torch.stack([largest, torch.ones_like(largest)])
        average.copy_(torch.where(largest > 0, new, average))  # a layer that no token has reached keeps its scale
        largest.zero_()


def has_part(layer) -> bool:
    """Whether each rank of `layer.tp` has a part of the layer's input channels."""
    weight = layer.placements["weight"]
    return weight.cut.get(layer.tp.name) == len(weight.shape) - 1


def rows_absmax(layer, weight: torch.Tensor, whole: bool = False) -> torch.Tensor:
    """The abs-max of each output channel of a layer's weight [o, i] on all ranks, [o] in fp32; of experts [E, o].

    whole: that of the whole matrix instead, as [o] equal numbers
    """
    largest = weight.detach().abs().amax(-1).float()
    if whole:
        largest = largest.amax(-1, keepdim=True).expand_as(largest).contiguous()
    if (whole or has_part(layer)) and not weight.is_meta:
        collectives.all_reduce(largest, layer.tp, "max")
    return largest


def token_grid(layer, x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, zero) of each token of a layer's input x [..., i], both [..., 1] in fp32.

    The whole numbers 0 to `levels` stand for the values from its least to its largest channel on all ranks, `zero` for 0.
    """
    with torch.no_grad():
        ends = torch.stack([-x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)]).float().clamp_min(0)
        if has_part(layer) and not x.is_meta:
            collectives.all_reduce(ends, layer.tp, "max")
        step = ends.sum(0).clamp_min(SMALLEST) / levels
        return step, (ends[0] / step).round()


def rounded_tokens(x: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    """x [..., i] with the values of the grid of each token."""
    return ((token_codes(x, step, zero, levels) - zero) * step).to(x.dtype)


def token_codes(x: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    """x [..., i] as whole numbers from 0 to `levels`, in fp32."""
    return ((x.float() / step).round() + zero).clamp(0, levels)


def levels(bits: int) -> int:
    """The largest whole number of a symmetric format: 127 for 8 bits, 7 for 4."""
    return 2 ** (bits - 1) - 1


def rounded_rows(weight: torch.Tensor, largest: torch.Tensor, levels: int) -> torch.Tensor:
    """Each row of weight [o, i], rounded to multiples of its largest [o] / levels; of experts [E, o, i] and [E, o]."""
    if weight.is_meta:
        return torch.empty_like(weight)
    if weight.ndim == 3:
        return rounded_rows(weight.flatten(0, 1), largest.flatten(), levels).view(weight.shape)
    step = largest.clamp_min(SMALLEST) / levels
    zeros = torch.zeros_like(step)  # of whole numbers torch would read the least one on the host
    return torch.fake_quantize_per_channel_affine(weight, step, zeros, 0, -levels, levels)


class _RoundInput(torch.autograd.Function):
    """x rounded to multiples of scale / levels and clipped to the scale; x itself if it is not `known`.

    scale, known: tensors on the device, which the host does not read.
    """

    @staticmethod
    def forward(ctx, x, scale, known, levels):
        if x.is_meta:
            ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
            return torch.empty_like(x)
        step = torch.where(known, scale, 1.0).clamp_min(SMALLEST) / levels
        if torch.compiler.is_exporting():  # torch cannot record its own op
            whole = (x.float() * (1 / step)).round().clamp(-levels, levels)
            return torch.where(known, (whole * step).to(x.dtype), x)
        zero = torch.zeros((), dtype=torch.int32, device=x.device)
        y = torch.where(known, torch.fake_quantize_per_tensor_affine(x, step, zero, -levels, levels), x)
        ctx.save_for_backward((x.abs() <= step * (levels + 0.5)) | ~known)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None


class _RoundTokens(torch.autograd.Function):
    """x rounded by the grid of each token, which reaches from its least to its largest value: nothing is clipped."""

    @staticmethod
    def forward(ctx, x, step, zero, levels):
        return rounded_tokens(x, step, zero, levels)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None, None
