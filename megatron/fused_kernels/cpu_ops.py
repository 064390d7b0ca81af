# SPDX-License-Identifier: Apache-2.0
"""Fast matrix products and gated activations on CPUs. Legend: f width of a gate."""

from collections.abc import Callable
from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F

PART = 1 << 18  # elements of a GELU that are computed at a time
ROWS = 16  # of products that the order of packed weights suits best: a few texts with one new token each
WIDENED = 1 << 20  # elements of a weight that are in fp32 at a time
FEW = 4  # rows that torch multiplies by itself as fast in any format


def formats() -> frozenset[torch.dtype]:
    """The formats in which oneDNN multiplies on this CPU; none in a build of torch without it. Its ops raise in others,
    torch's own take 4 to 70 times as long as in fp32, and 8-bit ones may overflow.
    """
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_linear_pointwise"):
        return frozenset()
    bf16 = ops._is_mkldnn_bf16_supported()
    # CPUs with VNNI have what bf16 needs. Without bf16, ONEDNN_MAX_CPU_ISA forbids both, and sums of int8 overflow.
    int8 = bf16 and torch.cpu._is_vnni_supported()
    found = {torch.bfloat16: bf16, torch.float16: ops._is_mkldnn_fp16_supported(), torch.int8: int8}
    return frozenset({torch.float32, *(dtype for dtype, supported in found.items() if supported)})


FORMATS = formats()


def widens(device: str, dtype: torch.dtype) -> bool:
    """Whether products in this half format are computed in fp32, because this CPU has no instructions for them."""
    return device == "cpu" and dtype in (torch.bfloat16, torch.float16) and dtype not in FORMATS


def onednn(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """x [m, k] @ weight [n, k].T + bias [n] -> [m, n] by oneDNN; torch itself uses MKL for fp32.

    MKL keeps AMD CPUs on AVX2: measured on one Zen 5 core, 1024 x 768 x 3072: MKL 108 GFLOP/s, oneDNN 240.
    """
    if not x.numel():  # as of an expert without tokens
        return F.linear(x, weight, bias)
    # The op copies a transposed first operand (as for a weight gradient), but not a transposed second one. If that
    # copy is the larger part, compute the transposed product instead.
    if bias is None and not x.is_contiguous() and x.numel() > weight.numel() + x.shape[0] * weight.shape[0]:
        return _linear(weight, x, None).t()
    return _linear(x, weight, bias)


def _linear(x, weight, bias) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def widened(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """`reference.matmul` in fp32, rounded once, for a format that `widens`."""
    if len(x) <= FEW and x.is_contiguous() and weight.is_contiguous():
        return F.linear(x, weight, bias)
    # A part of the weight at a time stays in the cache. A compiler would unroll the loop.
    rows = len(weight) if torch.compiler.is_compiling() else max(1, WIDENED // max(1, weight.shape[1]))
    wide, y = x.float(), x.new_empty(len(x), len(weight))
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        y[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return y


def _multiply(product: Callable, *operands: torch.Tensor, **factors: float) -> torch.Tensor:
    """product(*operands, **factors), a function of torch; in fp32 and rounded once for a format that `widens`."""
    like = operands[-1]
    if widens(like.device.type, like.dtype):
        return product(*(x.float() for x in operands), **factors).to(like.dtype)
    return product(*operands, **factors)


mm, addmm, bmm, baddbmm = (partial(_multiply, name) for name in (torch.mm, torch.addmm, torch.bmm, torch.baddbmm))


def packs(weight: torch.Tensor) -> bool:
    """Whether `packed` supports a weight."""
    return weight.device.type == "cpu" and weight.dtype in FORMATS


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight [n, k] for `onednn`, in the order in which it is read. Otherwise each product of few rows reorders it, in
    bf16, or reads it in strides.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)


def onednn_gelu(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], approximate: str) -> torch.Tensor:
    """GELU of `onednn`, computed before the product is written to memory."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], approximate)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """`reference.gelu`, whose tanh form is x sigmoid(2 u): torch's tanh takes four times as long as its sigmoid."""
    if approximate != "tanh":
        return F.gelu(x, approximate=approximate)
    return _TanhGELU.apply(x)


class _TanhGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _tanh_gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.aten.gelu_backward(gradient, *ctx.saved_tensors, approximate="tanh")


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) in fp32, a part at a time that stays in the cache."""
    x = x.contiguous()
    y = torch.empty_like(x)
    whole = min(PART, x.numel())
    exact, cube = torch.empty(whole), torch.empty(whole)
    for part, out in zip(x.view(-1).split(PART), y.view(-1).split(PART)):
        value, into = exact[: len(part)].copy_(part), cube[: len(part)]
        torch.addcmul(value, value, torch.mul(value, value, out=into), value=0.044715, out=into)
        out.copy_(into.mul_(1.5957691216057308).sigmoid_().mul_(value))
    return y


def geglu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """`reference.geglu`, but the gradients of gates and values are written into the halves of one tensor."""
    return _GeGLU.apply(x, approximate)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, approximate):
        gate, value = x.chunk(2, -1)
        activated = _tanh_gelu(gate) if approximate == "tanh" else F.gelu(gate, approximate=approximate)
        ctx.save_for_backward(x, activated)
        ctx.approximate = approximate
        return activated * value

    @staticmethod
    def backward(ctx, gradient):
        x, activated = ctx.saved_tensors
        gate, value = x.chunk(2, -1)
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_gate, d_value = d_x.chunk(2, -1)
        torch.mul(gradient, activated, out=d_value)
        torch.mul(gradient, value, out=d_gate)
        torch.ops.aten.gelu_backward.grad_input(d_gate, gate, approximate=ctx.approximate, grad_input=d_gate)
        return d_x, None


# ---- rows of experts ---------------------------------------------------------------------------------------------------


def permute(x: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """`reference.permute`, whose gradient is one sum of bags of k rows."""
    return _Permute.apply(x, order, place, k)


def unpermute(y: torch.Tensor, order: torch.Tensor, place: torch.Tensor, k: int, whole: bool) -> torch.Tensor:
    """`reference.unpermute`, as one sum of bags of k rows."""
    return _Unpermute.apply(y, order, place, k)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, place, k):
        ctx.save_for_backward(place)
        ctx.k = k
        return _rows_of(x, order // k if k > 1 else order)

    @staticmethod
    def backward(ctx, gradient):
        return _sums_of(gradient, *ctx.saved_tensors, ctx.k), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, order, place, k):
        ctx.order, ctx.k = order, k  # see `expert_rows`
        return _sums_of(y, place, k)

    @staticmethod
    def backward(ctx, gradient):
        return _rows_of(gradient, ctx.order // ctx.k), None, None, None


def _rows_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index], in a seventh of the time; rows of index len(x) are 0."""
    lacking = (index >= len(x)).nonzero().flatten()
    if not len(lacking):
        return x.index_select(0, index)
    if not len(x):
        return x.new_zeros(len(index), x.shape[1])
    return x.index_select(0, index.clamp_max(len(x) - 1)).index_fill_(0, lacking, 0)


def _sums_of(y: torch.Tensor, place: torch.Tensor, k: int) -> torch.Tensor:
    """The sums of each k rows of y by their places, rounded once; rows of index len(y) are 0."""
    if k == 1:
        return _rows_of(y, place)
    return F.embedding_bag(place.view(-1, k), _with_zeros(y, place), mode="sum")


def _with_zeros(y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """y, with a row of zeros if `index` names the row after its last."""
    return torch.cat((y, y.new_zeros(1, y.shape[1]))) if not len(y) or index.max() >= len(y) else y
