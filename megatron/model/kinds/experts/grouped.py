# SPDX-License-Identifier: Apache-2.0
"""Products of rows with the matrices of their experts: rows are in the order of experts, and each expert has its number.

`torch.nn.functional.grouped_mm` computes all of them at once, in the backward pass as well. On CPUs it is bitwise equal to
one product for each expert (`in_a_loop`), and was never slower (docs/experts.md). On GPUs it computes bf16.

Legend: m rows, E experts of this rank.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels import Case, choose_kernel, reference
from megatron.fused_kernels.cpu_ops import bmm
from megatron.fused_kernels.explicit_attention import SAME_ROWS
from megatron.model.recompute import recompute
from megatron.model.weights import Table
from megatron.mpu.layers import LinearOptions, create_parameters, linear
from megatron.mpu.linear_product import LinearProduct
from megatron.mpu.mesh import Axis
from megatron.mpu.ordered_sums import tree_sum


@dataclass(frozen=True)
class Rows:
    """How many rows each expert of this rank has, as [E] on the device.

    host: the same on the host, if it knows them. even: the number of rows of each, if all have equally many
    sources: those of each expert from each sample, which are in this order; known in --batch-invariant-mode
    """

    counts: torch.Tensor
    total: int
    host: Optional[list[int]] = None
    even: Optional[int] = None
    sources: Optional[list[list[int]]] = None

    @cached_property
    def lengths(self) -> list[int]:
        """The counts on the host, which waits for the device unless it knows them."""
        return self.counts.tolist() if self.host is None else self.host

    @cached_property
    def ends(self) -> torch.Tensor:
        """The row after each expert's last, [E] int32."""
        return self.counts.cumsum(0).to(torch.int32)

    def each(self, values: torch.Tensor) -> torch.Tensor:
        """Values of experts [E, ...] for each row, [m, ...]."""
        if self.even is not None:
            return values.unsqueeze(1).expand(-1, self.even, *values.shape[1:]).flatten(0, 1)
        return values.repeat_interleave(self.counts.to(values.device), 0, output_size=self.total)


def row_unit(rows: Rows, device: str) -> int:
    """The number of which the rows of each expert should be a multiple, for which rows of zeros are added.

    On CPUs, oneDNN compiles a kernel for each number of rows, in half a millisecond to one, and keeps the last 1024. Loads
    differ from step to step, so most products would wait for a new kernel. With multiples of a sixteenth of the mean load,
    up to 64, few numbers occur. For means below 32 they are few anyway.
    """
    if device != "cpu" or rows.even is not None:
        return 1
    return min(64, 2 ** max(0, (rows.total // len(rows.counts) // 16).bit_length() - 1))


class GroupedLinear(nn.Module):
    """Rows [m, inputs] -> [m, outputs], each times the matrix of its expert, [E, outputs..., inputs].

    with_bias: whether this rank adds the bias, of which ranks of etp have copies.
    """

    weight_grad_store = accumulate = None  # set for pipelines with W passes, and where products add to fp32 gradients
    product: Optional[LinearProduct] = None  # set by `linear_product.attach_products`
    ordered = False  # sums have one order; set by `ordered.attach_ordered`

    def __init__(self, weights: Table, axes: tuple[Axis, Axis], *, with_bias: bool = True, **factory_kwargs):
        super().__init__()
        self.axes, self.tp, self.with_bias = axes, axes[1], with_bias
        create_parameters(self, weights, axes, **factory_kwargs)

    @property
    def sums_over_ranks(self) -> bool:
        """Whether gradients of the weight are fp32 sums over samples of several ranks (`OrderedByExpert`), which neither
        autograd nor pass W keeps in fp32: they go to the optimizer's gradients immediately.
        """
        return self.ordered and self.axes[0].size > 1

    def forward(self, x: torch.Tensor, rows: Rows, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        """weights: [m, 1], of which x is a multiple, and the bias, too; None: 1."""
        x = x if self.product is None else self.product.transform_input(x)
        options = LinearOptions(
            deferred=None if self.sums_over_ranks else self.weight_grad_store,
            accumulate=self.accumulate,
            product=self.product,
            multiply=(OrderedByExpert if self.ordered else MultiplyByExpert)(rows),
        )
        y = linear(x, self.weight, None, options)
        if self.bias is None:
            return y
        if weights is None:
            return y + rows.each(self.bias.flatten(1)) * self.with_bias
        added = lambda bias, weights: (rows.each(bias) * weights * self.with_bias).to(y.dtype)
        return y + recompute(added, self.bias.flatten(1), weights, draws=False)  # the bias of each row is not kept


class MultiplyByExpert(NamedTuple):
    """The kernel of products with experts' matrices, as `LinearProduct` calls it."""

    rows: Rows
    by_expert = True

    def __call__(self, a: torch.Tensor, b: torch.Tensor, bias: None) -> torch.Tensor:
        """Rows a [m, k] times the matrix of their expert, b [E, n, k] -> [m, n]; or for each expert the product of its rows
        a [n, m] and b [k, m], which are transposed -> [E, n, k]. That of an expert without tokens is 0.
        """
        assert bias is None, "the layer adds it"
        if b.ndim == 3:
            return times(a.contiguous(), b.mT, self.rows)
        return outer(a.t().contiguous(), b.t(), self.rows)


class OrderedByExpert(MultiplyByExpert):
    """The same with --batch-invariant-mode. A row of a product does not depend on the rows of other samples, which ranks of
    ep may add. The sum over the tokens of an expert is one product for each sample, and the tree over the ranks of ep, in
    fp32 if there are several: the next samples of the global batch are those of the next ranks.
    """

    def __call__(self, a: torch.Tensor, b: torch.Tensor, bias: None) -> torch.Tensor:
        product = choose_kernel("matmul", Case(a.device.type, a.dtype)).run
        if b.ndim == 3:
            pairs = zip(a.contiguous().split(self.rows.lengths), b, strict=True)
            return torch.cat([_many_rows(product, own, matrix) for own, matrix in pairs])
        sources = self.rows.sources or [[length] for length in self.rows.lengths]
        lengths = [length for of_expert in sources for length in of_expert]
        pairs = zip(a.t().contiguous().split(lengths), b.t().split(lengths), strict=True)
        products = (product(own.t(), other.t()) for own, other in pairs)
        if len(sources[0]) == 1:
            return torch.stack([*products])
        return torch.stack([tree_sum([next(products).float() for _ in of_expert]) for of_expert in sources])


def _many_rows(product: Callable, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Rows [m, k] times a matrix [n, k]: with few rows kernels add up in another order."""
    m = len(rows)
    if not 0 < m < SAME_ROWS:
        return product(rows, matrix)
    return product(F.pad(rows, (0, 0, 0, SAME_ROWS - m)), matrix)[:m]


# ---- the products ----------------------------------------------------------------------------------------------------


def times(x: torch.Tensor, matrices: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Rows [m, a] times the matrix of their expert, [E, a, b] -> [m, b]."""
    if rows.even is not None:
        return bmm(x.view(len(matrices), rows.even, x.shape[1]), matrices).flatten(0, 1)
    if _grouped(x, matrices):
        return F.grouped_mm(x, matrices, offs=rows.ends)
    return times_in_a_loop(x, matrices, rows.lengths)


def outer(a: torch.Tensor, b: torch.Tensor, rows: Rows) -> torch.Tensor:
    """For each expert the product of its rows, [m, a] and [m, b] -> [E, a, b]."""
    if rows.even is not None:
        shape = len(rows.counts), rows.even
        return bmm(a.view(*shape, a.shape[1]).transpose(1, 2), b.view(*shape, b.shape[1]))
    if _grouped(a, b):
        return F.grouped_mm(a.t(), b, offs=rows.ends)
    return outer_in_a_loop(a, b, rows.lengths)


def times_in_a_loop(x: torch.Tensor, matrices: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """`times`, one product for each expert."""
    product = choose_kernel("matmul", Case(x.device.type, x.dtype)).run
    return torch.cat([product(own, matrix.t()) for own, matrix in zip(x.split(lengths), matrices, strict=True)])


def outer_in_a_loop(a: torch.Tensor, b: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """`outer`, one product for each expert."""
    product = choose_kernel("matmul", Case(a.device.type, a.dtype)).run
    pairs = zip(a.split(lengths), b.split(lengths), strict=True)
    return torch.stack([product(own.t(), other.t()) for own, other in pairs])


def _grouped(*operands: torch.Tensor) -> bool:
    """Whether grouped_mm takes these operands: format and device, and rows that begin at multiples of 16 bytes."""
    one, size = operands[0], operands[0].element_size()
    if any(operand.dtype != one.dtype for operand in operands) or lacking_grouped(one.device.type, one.dtype):
        return False
    starts = ((*(stride for stride in operand.stride() if stride != 1), 0) for operand in operands)
    return not any(operand.data_ptr() % 16 for operand in operands) and not any(
        stride * size % 16 for strides in starts for stride in strides
    )


@cache
def lacking_grouped(device: str, dtype: torch.dtype) -> str:
    """Why grouped_mm does not compute products of this format on this device; "": it does. From a trial run."""
    if choose_kernel("matmul", Case(device, dtype)).run is not reference.matmul:
        return "one product for each expert is faster"
    if device not in ("cpu", "cuda") or device == "cuda" and dtype != torch.bfloat16:
        return f"one product for each expert in {dtype} on {device}"
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    lengths, k = [3, 0, 5], 16
    counts = torch.tensor(lengths, device=device)
    rows = Rows(counts, sum(lengths))
    x, w = (torch.arange(math.prod(s), device=device).remainder(7).to(dtype).view(s) for s in ((8, k), (3, k, k)))
    try:
        got = F.grouped_mm(x, w, offs=rows.ends), F.grouped_mm(x.t(), x, offs=rows.ends)
        none = F.grouped_mm(x[:0], w, offs=torch.zeros_like(rows.ends))
        with _refusing_waits(device):
            F.grouped_mm(x, w, offs=rows.ends)
    except RuntimeError as error:
        return f"grouped_mm: {str(error).splitlines()[0]}"
    expected = times_in_a_loop(x, w, lengths), outer_in_a_loop(x, x, lengths)
    right = none.shape == (0, k) and all(map(torch.equal, got, expected))
    return "" if right else "grouped_mm returned other values than one product for each expert"


@contextmanager
def _refusing_waits(device: str) -> Iterator[None]:
    """On CUDA: RuntimeError for an op for which the host waits. On GPUs for which torch has no grouped kernel, grouped_mm
    reads the numbers of rows in each call, and computes one product for each expert; here they are read once a layer.
    """
    if device != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
