# SPDX-License-Identifier: Apache-2.0
"""Sums whose order no layout changes, against a recursive sum over halves and against exact arithmetic."""

import random
from fractions import Fraction

import pytest
import torch

from megatron.model.ordered import TokenBlocks
from megatron.mpu.collectives import all_reduce, reduce_scatter
from megatron.mpu.mesh import Mesh
from megatron.mpu.ordered_sums import Blocks, Tree, exact_parts, tree_sum


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
    assert torch.equal(tree_sum([leaf.clone() for leaf in leaves]), expected)


@pytest.mark.parametrize("count", [4, 12])
def test_leaves_that_ranks_have_added_make_the_same_tree(count):
    leaves = list(torch.randn(count, 3, generator=torch.Generator().manual_seed(1)))
    expected = plain_tree(leaves)
    for ranks in (2, 4):
        tree = Tree()
        for number in range(count // ranks):
            tree.add(number, tree_sum(torch.stack(leaves[number * ranks : (number + 1) * ranks])))
        assert torch.equal(tree.total(), expected)


@pytest.mark.parametrize("size", [6, 1 << 20])
def test_sums_over_ranks_are_a_tree(run_ranks, size):
    values = torch.randn(4, 2, size, generator=torch.Generator().manual_seed(2))

    def body(rank):
        axis = Mesh(rank, tp=4, ordered=True).tp
        return all_reduce(values[rank, :, 1:].clone(), axis), reduce_scatter(values[rank].flatten(), axis)

    expected = plain_tree(list(values))
    for rank, (whole, piece) in enumerate(run_ranks(4, body)):
        assert torch.equal(whole, expected[:, 1:])
        assert torch.equal(piece, expected.flatten().chunk(4)[rank])


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


@pytest.mark.parametrize("parts", [1, 2])
def test_products_in_blocks_are_those_of_ranks(parts):
    """Numbers of few bits, whose products and sums are exact: any order gives the plain product."""
    draw = torch.Generator().manual_seed(4)
    a, b = (torch.randint(-4, 5, (rows, 16 * parts), generator=draw).float() for rows in (3, 16))
    asked = []

    def multiply(x, y, bias):
        assert x.is_contiguous() and (y.is_contiguous() or y.t().is_contiguous())
        asked.append((tuple(x.shape), tuple(y.shape)))
        return x @ y.t() if bias is None else x @ y.t() + bias

    for number in (1, 2, 8):
        blocks, bias = Blocks(number, parts), torch.arange(16.0)
        for second in (b, b.t().contiguous().t()):
            assert torch.equal(blocks.sum(multiply, a, second), a @ b.t())
            assert torch.equal(blocks.product(multiply, a, second, bias), a @ b.t() + bias)
            assert torch.equal(blocks.product(multiply, b, a, dim=0), b @ a.t())
        assert asked[-1] == ((16 // number, 16 * parts), (3, 16 * parts))
    assert Blocks(8).narrow(8 * 63) and not Blocks(8).narrow(8 * 64)
    odd = a[:, :15].contiguous(), b[:, :15].contiguous()
    assert torch.equal(Blocks(4).sum(multiply, *odd), odd[0] @ odd[1].t())  # 15 is not divided


def test_sums_over_tokens_are_exact_sums_rounded_once():
    rows = torch.randn(64, 24, generator=torch.Generator().manual_seed(5)).bfloat16()
    total = TokenBlocks(Mesh().tp, Mesh().cp).total(rows)
    assert total.dtype == torch.bfloat16
    assert (total.double() - rows.double().sum(0)).abs().max() <= rows.double().sum(0).abs().max() * 2**-8


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_parts_of_zeros_and_of_numbers_that_are_not_finite(value):
    roots = torch.tensor([value, 0.0])
    total = exact_parts(roots.double().square(), roots[0]).sum().item()
    assert total == 0 if value == 0 else not total - total == 0
