# SPDX-License-Identifier: Apache-2.0
"""Sums whose order no layout changes, against a recursive sum over halves and against exact arithmetic."""

import random
from fractions import Fraction

import pytest
import torch

from megatron.mpu.mesh import Mesh
from megatron.mpu.ordered_sums import SumOverRanks, Tree, exact_parts, tree_sum


def plain_tree(leaves):
    """The sum of the largest power of two of leaves, by halves, and of the rest."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return plain_tree(leaves[:half]) + plain_tree(leaves[half:])


@pytest.mark.parametrize("count", [1, 2, 3, 6, 8, 13])
def test_a_tree_of_leaves_in_any_order(count):
    leaves = list(torch.randn(count, 5, generator=torch.Generator().manual_seed(count)))
    expected = plain_tree(leaves)
    for seed in range(4):
        tree, order = Tree(), random.Random(seed).sample(range(count), count)
        for number in order:
            tree.add(number, leaves[number].clone())
        assert torch.equal(tree.total(), expected)
    assert not tree.nbytes
    assert torch.equal(tree_sum(torch.stack(leaves)), expected)


@pytest.mark.parametrize("count", [4, 12])
def test_leaves_that_ranks_have_added_make_the_same_tree(count):
    leaves = list(torch.randn(count, 3, generator=torch.Generator().manual_seed(1)))
    expected = plain_tree(leaves)
    for ranks in (2, 4):
        tree = Tree()
        for number in range(count // ranks):
            tree.add(number, tree_sum(torch.stack(leaves[number * ranks : (number + 1) * ranks])))
        assert torch.equal(tree.total(), expected)


@pytest.mark.parametrize("sizes", [dict(shard=4), dict(replicate=4), dict(replicate=2, shard=2)], ids=str)
def test_ranks_are_the_lowest_levels_of_a_tree(run_ranks, sizes):
    values = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    inner = sizes.get("shard", 1)

    def body(rank):
        mesh = Mesh(rank, **sizes)
        return SumOverRanks(values[rank].clone(), mesh.shard, mesh.replicate).wait()

    pieces = plain_tree(list(values)).chunk(inner)
    for rank, got in enumerate(run_ranks(4, body)):
        assert torch.equal(got, pieces[rank % inner])


def test_parts_add_up_exactly_wherever_they_are_cut():
    draw = torch.Generator().manual_seed(3)
    roots = torch.randn(5000, generator=draw) * 10.0 ** torch.randint(-6, 3, (5000,), generator=draw)
    values, largest = roots.double().square(), roots.abs().max()
    whole = exact_parts(values, largest)
    for cuts in ([1], [17, 4000], [2500]):
        pieces = torch.tensor_split(values[torch.randperm(5000, generator=draw)], cuts)
        assert torch.equal(sum(exact_parts(piece, largest) for piece in pieces), whole)
    exact = float(sum(map(Fraction, values.tolist())))
    assert abs(whole.sum().item() / exact - 1) < 1e-13


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_parts_of_zeros_and_of_numbers_that_are_not_finite(value):
    roots = torch.tensor([value, 0.0])
    total = exact_parts(roots.double().square(), roots[0]).sum().item()
    assert total == 0 if value == 0 else not total - total == 0
