# SPDX-License-Identifier: Apache-2.0
"""Fast implementations of the norms. n: tokens, h: width."""

import torch
import torch.nn.functional as F


def apex_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """LayerNorm of NVIDIA's apex."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, weight.shape, epsilon)


def exact_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> torch.Tensor:
    """LayerNorm on CPUs in half precision, with exact gradients of weight and bias. torch's own kernel sums these in half
    precision: 7 % is lost over 4096 tokens. Here they are matrix products, which sum in fp32.
    """
    if not torch.is_grad_enabled():
        return torch.layer_norm(x, weight.shape, weight, bias, epsilon)
    return _LayerNorm.apply(x, weight, bias, epsilon)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):
        y, mean, inverse = torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)
        ctx.save_for_backward(x, weight, mean, inverse)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, weight, mean, inverse = ctx.saved_tensors
        only_x = (True, False, False)
        d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, x, weight.shape, mean, inverse, weight, None, only_x
        )
        gradient, x = gradient.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1])  # [n, h]
        inverse, mean = inverse.flatten(), mean.flatten()
        sums = torch.stack((inverse * mean, torch.ones_like(mean))).to(x.dtype) @ gradient  # [2, h]
        return d_x, inverse.to(x.dtype) @ (gradient * x) - sums[0], sums[1], None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm on CPUs, where torch has no kernel for its backward pass: few passes over memory, sums as products."""
    return _RMSNorm.apply(x, weight, epsilon) if torch.is_grad_enabled() else _rms_norm(x, weight, epsilon)[0]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, 1 / sqrt(mean(x^2) + epsilon) [..., 1])"""
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_().div_(x.shape[-1])
    inverse = mean_square.add_(epsilon).rsqrt_()
    # Not `x * inverse`: a product of two formats takes longer than the conversion and a product of one.
    return x.to(torch.float32, copy=True).mul_(inverse).mul_(weight.float()).to(x.dtype), inverse


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        y, inverse = _rms_norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        # A view: torch 2.11 compiles a wrong backward pass if forward returns a tensor that it changed in place
        # (pytorch/pytorch#180642).
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        """With r = inverse: d_x = r (g w - x r^2 mean(g w x)), d_weight = sum over tokens of r g x."""
        x, weight, inverse = ctx.saved_tensors
        shape, h = x.shape, x.shape[-1]
        gradient, x, inverse = gradient.reshape(-1, h), x.reshape(-1, h), inverse.view(-1, 1)  # [n, h], [n, 1]
        both = gradient * x
        mean = (both @ weight).unsqueeze(1).float().mul_(inverse.square()).div_(h)
        inverse = inverse.to(x.dtype)
        d_x = (gradient * weight).addcmul_(x, mean.to(x.dtype), value=-1).mul_(inverse)
        return d_x.view(shape), inverse.view(-1) @ both, None


def gated_rms_norm(
    y: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float, gate_first: bool = True
) -> torch.Tensor:
    """RMSNorm of y silu(gate) over the last dim (arXiv:2405.21060, section 7.1), in fp32, in the format of y. Keeps its
    inputs. y, gate: [s, b, G, ..., d]; weight: [d], or [G, d] of each of G groups

    gate_first: otherwise the norm of y, times silu(gate), as in gated delta nets
    """
    return _GatedRMSNorm.apply(y, gate, weight, epsilon, gate_first)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, gate, weight, epsilon, gate_first):
        ctx.save_for_backward(y, gate, weight)
        ctx.epsilon, ctx.gate_first = epsilon, gate_first
        wide, passed = y.float(), F.silu(gate.float())
        gated = wide * passed if gate_first else wide
        result = gated * _inverse(gated, epsilon) * weight.float()
        return (result if gate_first else result * passed).to(y.dtype)

    @staticmethod
    def backward(ctx, gradient):
        """With r = inverse, n = r x, of the norm's input x: d_x = r (g w - n mean(g w n)), d_weight = sum over tokens of
        g n, for the gradient g of its output.
        """
        y, gate, weight = ctx.saved_tensors
        wide, z, gradient = y.float(), gate.float(), gradient.float()
        share = z.sigmoid()
        passed, of_gate = z * share, share * (1 + z * (1 - share))  # SiLU, SiLU'
        x = wide * passed if ctx.gate_first else wide
        inverse = _inverse(x, ctx.epsilon)
        normal = x * inverse
        given = gradient if ctx.gate_first else gradient * passed
        d_weight = (given * normal).sum(tuple(range(y.dim() - weight.dim())))
        scaled = given * weight.float()
        d_x = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * inverse
        d_y, d_gate = (d_x * passed, d_x * wide) if ctx.gate_first else (d_x, gradient * normal * weight.float())
        return d_y.to(y.dtype), (d_gate * of_gate).to(gate.dtype), d_weight.to(weight.dtype), None, None


def gated(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y silu(gate), in fp32, in the format of y. Keeps its inputs."""
    return _Gated.apply(y, gate)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, gate):
        ctx.save_for_backward(y, gate)
        return (y.float() * F.silu(gate.float())).to(y.dtype)

    @staticmethod
    def backward(ctx, gradient):
        y, gate = ctx.saved_tensors
        z, gradient = gate.float(), gradient.float()
        share = z.sigmoid()
        d_gate = gradient * y.float() * share * (1 + z * (1 - share))  # SiLU'
        return (gradient * z * share).to(y.dtype), d_gate.to(gate.dtype)


def _inverse(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
