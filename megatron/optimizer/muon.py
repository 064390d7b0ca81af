# SPDX-License-Identifier: Apache-2.0
"""Muon (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982): orthogonalised updates of linear layers' matrices.

The update of a matrix has the singular vectors of its momentum and singular values near 1. It is computed for the whole
matrix, however ranks shard it. Momentum is updated in shards; then, unit by unit,

    shard -- gathered over shards --> unit -- gathered over tp --> tensors -- boxes --> q | k | v | ...
    each orthogonalised by one of these ranks -- reduce-scattered over tp, then over shards --> directions

For experts, `etp` replaces tp, and a rank only orthogonalises matrices of experts with its own `ep` coordinate.
Directions replace gradients, and the update is again one of flat ranges. AdamW updates all other weights (tables, output
layer, vectors).
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron.checkpoint.boxes import Box
from megatron.errors import SettingsError
from megatron.fused_kernels.cpu_ops import addmm, mm
from megatron.mpu import collectives
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.placement import Placement
from megatron.optimizer.kinds import COEFFICIENTS
from megatron.optimizer.units import FlatUnit, OwnedRange, Slot
from megatron.settings.schema import Optimizer

EPSILON = 1e-7  # lower bound of the norm by which a matrix is divided

Coefficients = Sequence[tuple[float, float, float]]


class Share(NamedTuple):
    """The part of a parameter that the ranks of an axis hold together: all, or the experts of one `ep` rank.

    placed: the placement of this part as a tensor of its own, with the matrices in it
    boxes:  the part of each rank of the axis, without padding
    """

    placed: Placement
    boxes: list[tuple[slice, ...]]

    @classmethod
    def of(cls, slot: Slot, places: Sequence[dict[str, int]]) -> "Share":
        """The share of ranks with the coordinates `places`. Raises SettingsError if others hold a part of a matrix."""
        shape, placed = tuple(slot.parameter.shape), slot.placement
        if not placed.matrices:
            return cls(placed, [])
        boxes = [Box(*placed.box(shape, place)) for place in places]
        low = [min(box.offset[dim] for box in boxes) for dim in range(len(shape))]
        held = [max(box.offset[dim] + box.extent[dim] for box in boxes) - low[dim] for dim in range(len(shape))]
        dim, sizes = placed.matrices
        inside = range(low[dim], low[dim] + held[dim])
        own = tuple(size for number, size in enumerate(sizes) if sum(sizes[:number]) in inside)
        if held != [sum(own) if d == dim else n for d, n in enumerate(placed.shape)]:
            raise SettingsError(
                f"--optimizer muon: ranks of ep divide the matrices of {slot.name}, each of which it needs whole",
                f"shape {list(placed.shape)}, cut {placed.cut}, matrices along dim {dim}",
                "let ep cut the dim along which matrices lie, into pieces of whole matrices",
            )
        outer = Box(tuple(low), tuple(held))
        alone = replace(placed, shape=outer.extent, cut={}, partial=(), matrices=(dim, own))
        return cls(alone, [box.relative_to(outer).slices() for box in boxes])


class UnitWork(NamedTuple):
    """The assignment of a unit's matrices to ranks.

    parts:  the axis whose ranks hold parts of each matrix: `tp`, or `etp` for experts
    shares: the `Share` of each slot
    mine:   for each slot, the numbers of the matrices that this rank orthogonalises
    """

    parts: Axis
    shares: list[Share]
    mine: list[set[int]]

    @classmethod
    def of(cls, unit: FlatUnit, mesh: Mesh) -> "UnitWork":
        parts, shards = getattr(mesh, unit.slots[0].placement.model_axes[-1]), getattr(mesh, unit.sharded)
        first = mesh.ep.rank * mesh.etp.size
        places = [mesh.coordinates | {parts.name: n, "ep_etp": first + n} for n in range(parts.size)]
        shares = [Share.of(slot, places) for slot in unit.slots]
        workers = divide_work([share.placed for share in shares], shards.size * parts.size)
        me = shards.rank * parts.size + parts.rank
        return cls(parts, shares, [{box for box, worker in enumerate(given) if worker == me} for given in workers])


class Directions:
    """Replaces momenta by update directions. settings: --muon-*."""

    def __init__(self, settings: Optimizer):
        self.settings = settings
        self.plans: dict[str, UnitWork] = {}
        steps, series = settings.muon_num_ns_steps, COEFFICIENTS[settings.muon_coefficient_type]
        self.coefficients = series * (steps // len(series))

    def replace(self, own: OwnedRange, reduced: torch.Tensor, mesh: Mesh) -> None:
        """Replace the momenta of a unit's matrices in `reduced`, the rank's shard, by update directions.

        Collective over all ranks that shard the unit or its tensors.
        """
        unit = own.unit
        if not any(slot.placement.matrices for slot in unit.slots):
            return
        shards, plan = getattr(mesh, unit.sharded), self.plans.get(unit.name) or UnitWork.of(unit, mesh)
        self.plans[unit.name], parts = plan, plan.parts
        whole = collectives.all_gather(collectives.all_gather(reduced[own.shard_slice], shards), parts)
        result = torch.zeros_like(whole)
        for slot, share, mine in zip(unit.slots, plan.shares, plan.mine):
            if mine:
                self._directions(slot, share, mine, *(x.view(parts.size, -1) for x in (whole, result)))
        result = collectives.reduce_scatter(collectives.reduce_scatter(result, parts), shards)
        for slot, where in own.slots():
            if slot.placement.matrices:
                reduced[where] = result[where.start - own.at : where.stop - own.at]

    def _directions(self, slot: Slot, share: Share, mine: set[int], given: torch.Tensor, taken: torch.Tensor) -> None:
        """Compute the directions of some matrices of a tensor. given, taken: [ranks, elements of the unit]."""
        tensor, result = (given.new_zeros(share.placed.shape) for _ in range(2))
        for local, where in _locals(slot, share, given):
            tensor[where] = local
        (dim, sizes), fused = share.placed.matrices, share.placed.fused
        parts = lambda x: [one for part in x.split(sizes, dim) for one in part.chunk(fused, min(dim + 1, x.dim() - 2))]
        pairs = zip(parts(tensor), parts(result))
        for matrix, direction in (pair for box, pair in enumerate(pairs) if box in mine):
            flat = matrix.reshape(-1, matrix.shape[-1])
            direction.copy_(self.direction(flat).view(matrix.shape))
        for local, where in _locals(slot, share, taken):
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
        gram = mm(x, x.T)
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
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


def _locals(slot: Slot, share: Share, held: torch.Tensor) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
    """(part without padding, its position in the share) for each rank that holds a part."""
    for flat, where in zip(held[:, slot.start : slot.stop], share.boxes):
        yield flat.view(slot.parameter.shape)[tuple(slice(one.stop - one.start) for one in where)], where
