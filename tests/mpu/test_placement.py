# SPDX-License-Identifier: Apache-2.0
"""Pieces of weights that two axes cut, against numpy's cuts of the whole tensor, for every rank."""

import itertools
import math

import numpy as np
import pytest
import torch

from megatron.errors import SettingsError
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.mpu.random import init_parameter

CUTS = [
    {"ep": 0},
    {"etp": 1},
    {"ep": 0, "etp": 1},
    {"ep": 0, "etp": 2},
    {"ep": 2, "etp": 0},
    {"ep": 0, "etp": 0},
    {"etp": 1, "ep": 1},
]
GRIDS = [(1, 1), (2, 1), (1, 3), (2, 2), (4, 2), (3, 4)]  # ep, etp
SHAPES = [(8, 12, 4), (7, 5, 6), (3, 2, 1)]  # the second and third do not divide


def meshes(ep, etp):
    """All ranks of a job in which two ranks have each piece."""
    world = 2 * ep * etp
    return [Mesh(rank, replicate=world, ep=ep, etp=etp, create_groups=False) for rank in range(world)]


def pieces(whole: np.ndarray, dim: int, parts: int) -> list[np.ndarray]:
    """Equal parts of a dim, of which the last may be shorter or empty."""
    length = whole.shape[dim]
    size = -(-length // parts)
    return [whole.take(range(min(n * size, length), min((n + 1) * size, length)), dim) for n in range(parts)]


def expected(whole: np.ndarray, cut: dict[str, int], ep: tuple[int, int], etp: tuple[int, int]) -> np.ndarray:
    """What the rank at these (place, size) of ep and etp holds of a tensor."""
    if len(cut) == 2 and cut["ep"] == cut["etp"]:  # pieces in the order of ep, and of etp within each
        order = list(itertools.product(range(ep[1]), range(etp[1])))
        return pieces(whole, cut["ep"], len(order))[order.index((ep[0], etp[0]))]
    for dim, (place, size) in ((cut[axis], at) for axis, at in (("ep", ep), ("etp", etp)) if axis in cut):
        whole = pieces(whole, dim, size)[place]
    return whole


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_boxes_of_weights_that_two_axes_cut(cut):
    for shape, (ep, etp) in itertools.product(SHAPES, GRIDS):
        whole, counted = np.arange(math.prod(shape)).reshape(shape), np.zeros(math.prod(shape), int)
        placed = Placement(shape, Normal(0.02), cut=cut)
        for mesh in meshes(ep, etp):
            sizes = {"ep": ep, "etp": etp}
            local = placed.local_shape(sizes)
            offset, extent = placed.box(local, mesh.coordinates)
            held = whole[tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))]
            wanted = expected(whole, cut, (mesh.ep.rank, ep), (mesh.etp.rank, etp))
            assert held.shape == wanted.shape and np.array_equal(held, wanted), (shape, sizes, mesh.rank)
            assert all(n <= m for n, m in zip(extent, local, strict=True))
            if placed.is_primary(mesh.coordinates) and mesh.expert_dp.rank == 0:
                counted[held] += 1
        assert (counted == 1).all(), (shape, ep, etp)  # every element on one rank that counts it


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_initial_values_do_not_depend_on_the_cut(cut):
    placed, whole = Placement((7, 5, 6), Normal(0.02), cut=cut), torch.empty(7, 5, 6)
    init_parameter("experts", whole, Placement((7, 5, 6), Normal(0.02)), {}, 5)
    for mesh in meshes(3, 2):
        local = torch.empty(placed.local_shape({"ep": 3, "etp": 2}))
        init_parameter("experts", local, placed, mesh.coordinates, 5)
        wanted = torch.zeros_like(local)
        held = torch.from_numpy(expected(whole.numpy(), cut, (mesh.ep.rank, 3), (mesh.etp.rank, 2)))
        wanted[tuple(map(slice, held.shape))] = held
        assert torch.equal(local, wanted)


def test_who_counts_copies():
    """Copies of an expert's bias lie along etp, which may be other ranks than tp's; those of dense weights along tp."""
    mesh = [Mesh(rank, tp=2, replicate=2, ep=2, etp=1, create_groups=False) for rank in range(4)]
    bias = Placement((4, 6), Constant(0.0), cut={"ep": 0}, decay=False)
    assert [bias.is_primary(each.coordinates) for each in mesh] == [True] * 4  # ep: [0 1] [2 3], no copies along tp
    assert [Placement((6,), Constant(0.0)).is_primary(each.coordinates) for each in mesh] == [True, False] * 2
    divided = [Mesh(rank, replicate=4, ep=2, etp=2, create_groups=False) for rank in range(4)]
    assert [bias.is_primary(each.coordinates) for each in divided] == [True, False] * 2
    summed = Placement((6,), Constant(0.0), partial=("ep", "etp"))
    assert [summed.is_primary(each.coordinates) for each in divided] == [True, False, False, False]


@pytest.mark.parametrize(
    "more", [dict(cut={"ep": 0, "tp": 1}), dict(cut={"tpp": 0}), dict(cut={"tp": 0}, partial=("ep",))]
)
def test_axes_that_do_not_go_together_are_refused(more):
    with pytest.raises(SettingsError, match=r"axes of a weight of shape \[4, 6\] cannot be combined"):
        Placement((4, 6), Normal(0.02), **more)
