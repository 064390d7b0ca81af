# SPDX-License-Identifier: Apache-2.0
"""Muon (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982): orthogonalised updates of linear layers' matrices.

The update of a matrix has the singular vectors of its momentum and singular values near 1. It is computed for the whole
matrix, however ranks shard it. Momentum is updated in shards; then, unit by unit,

    shard -- gathered over shards --> unit -- gathered over tp --> tensors -- boxes --> q | k | v | ...
    each orthogonalised by one of these ranks -- reduce-scattered over tp, then over shards --> directions

Directions replace gradients, and the update is again one of flat ranges. AdamW updates all other weights (tables, output
layer, vectors).
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Placement
from megatron.optimizer.kinds import COEFFICIENTS
from megatron.optimizer.units import OwnedRange, Slot
from megatron.settings.schema import Optimizer

EPSILON = 1e-7  # lower bound of the norm by which a matrix is divided

Coefficients = Sequence[tuple[float, float, float]]


class Directions:
    """Replaces momenta by update directions. settings: --muon-*."""

    def __init__(self, settings: Optimizer):
        self.settings = settings
        steps, series = settings.muon_num_ns_steps, COEFFICIENTS[settings.muon_coefficient_type]
        self.coefficients = series * (steps // len(series))

    def replace(self, own: OwnedRange, reduced: torch.Tensor, mesh: Mesh) -> None:
        """Replace the momenta of a unit's matrices in `reduced`, the rank's shard, by update directions.

        Collective over all ranks that shard the unit or its tensors.
        """
        if not any(slot.placement.matrices for slot in own.unit.slots):
            return
        shards, tp = getattr(mesh, own.unit.sharded), mesh.tp
        whole = collectives.all_gather(collectives.all_gather(reduced[own.shard_slice], shards), tp)
        result = torch.zeros_like(whole)
        workers = divide_work([slot.placement for slot in own.unit.slots], shards.size * tp.size)
        me = shards.rank * tp.size + tp.rank
        for number, slot in enumerate(own.unit.slots):
            if mine := {box for box, worker in enumerate(workers[number]) if worker == me}:
                given, taken = (x.view(tp.size, -1)[:, slot.start : slot.stop] for x in (whole, result))
                self._directions(slot, given, taken, mesh.coordinates, mine)
        result = collectives.reduce_scatter(collectives.reduce_scatter(result, tp), shards)
        for slot, where in own.slots():
            if slot.placement.matrices:
                reduced[where] = result[where.start - own.at : where.stop - own.at]

    def _directions(self, slot: Slot, given: torch.Tensor, taken: torch.Tensor, place: dict, mine: set[int]) -> None:
        """Compute the directions of some matrices of a tensor. given, taken: [tp, elements], the part of each tp rank."""
        tensor, result = (given.new_zeros(slot.placement.shape) for _ in range(2))
        for local, where in _locals(slot, given, place):
            tensor[where] = local
        dim, sizes = slot.placement.matrices
        pairs = zip(tensor.split(sizes, dim), result.split(sizes, dim))
        for matrix, direction in (pair for box, pair in enumerate(pairs) if box in mine):
            flat = matrix.reshape(-1, matrix.shape[-1])
            direction.copy_(self.direction(flat).view(matrix.shape))
        for local, where in _locals(slot, taken, place):
            local.copy_(result[where])

    def direction(self, matrix: torch.Tensor) -> torch.Tensor:
        """The scaled update direction of a matrix, fp32 [rows, columns]."""
        s = self.settings
        with products_in(s.muon_fp32_matmul_prec) as dtype:
            result = orthogonal(matrix, self.coefficients, dtype)
        return result.mul_(s.muon_extra_scale_factor * SCALES[s.muon_scale_mode](*matrix.shape))


SCALES = {  # rows, columns -> scale of a matrix with singular values near 1
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


def orthogonal(matrix: torch.Tensor, coefficients: Coefficients, dtype=torch.float32) -> torch.Tensor:
    """Orthogonalise an fp32 matrix by Newton-Schulz: same singular vectors, singular values near 1.

    Each step applies the odd polynomial a x + b x^3 + c x^5 to the singular values. Products are computed in `dtype`.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=EPSILON)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).float()


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[torch.dtype]:
    """Set the precision of products as in `--muon-fp32-matmul-prec`. Yields the number format of their operands."""
    if precision == "medium":
        yield torch.bfloat16
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield torch.float32
    finally:
        torch.set_float32_matmul_precision(before)


def divide_work(placements: Sequence[Placement], workers: int) -> list[list[int]]:
    """Assign the matrices of each tensor to workers: the costliest first, each to the worker with the least load."""
    loads, given = [0] * workers, [[0] * len(placed.matrix_shapes()) for placed in placements]
    todo = [
        (rows * columns * min(rows, columns), tensor, box)
        for tensor, placed in enumerate(placements)
        for box, (rows, columns) in enumerate(placed.matrix_shapes())
    ]
    for cost, tensor, box in sorted(todo, key=lambda one: -one[0]):
        given[tensor][box] = worker = loads.index(min(loads))
        loads[worker] += cost
    return given


def _locals(slot: Slot, held: torch.Tensor, place: dict[str, int]) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
    """(part without padding, its position in the logical tensor) for each tensor parallel rank."""
    shape = tuple(slot.parameter.shape)
    for rank, flat in enumerate(held):
        offset, extent = slot.placement.box(shape, place | {"tp": rank})
        yield flat.view(shape)[tuple(map(slice, extent))], tuple(slice(at, at + n) for at, n in zip(offset, extent))
