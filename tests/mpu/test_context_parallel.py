# SPDX-License-Identifier: Apache-2.0
"""Rows of shared sequences, and the mappings between ranks that have them, against places that are counted by hand."""

import contextlib

import pytest
import torch

from megatron.mpu import collectives, context_parallel
from megatron.mpu.chunks import row_numbers
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.random import Dropout

ROWS = {  # of 24 tokens in chunks of s / (2 cp)
    2: [[*range(0, 6), *range(18, 24)], [*range(6, 12), *range(12, 18)]],
    3: [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19], [8, 9, 10, 11, 12, 13, 14, 15]],
}


@pytest.mark.parametrize("cp", ROWS)
def test_rows_of_each_rank(cp):
    whole = torch.arange(48.0).view(24, 2)
    for rank, rows in enumerate(ROWS[cp]):
        axis = Axis("cp", tuple(range(cp)), rank)
        assert row_numbers(24, rank, cp) == rows
        assert context_parallel.own_rows(whole, axis).equal(whole[rows])
        assert context_parallel.own_rows(whole.t(), axis, 1).equal(whole.t()[:, rows])
    by_rank = whole[sum(ROWS[cp], [])]
    assert context_parallel.in_order(by_rank, cp).equal(whole) and context_parallel.by_rank(whole, cp).equal(by_rank)


def test_rows_have_as_many_pairs_on_each_rank():
    """Of query and key in causal order."""
    for cp, ranks in ROWS.items():
        assert {sum(row + 1 for row in rows) for rows in ranks} == {24 * 25 // 2 // cp}


def _random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("cp", ROWS)
def test_mappings_and_their_gradients(cp, run_ranks):
    """Against matrices: what a mapping makes of all ranks' inputs is a permutation, or one for each rank, and the gradient
    of an input is the sum of those of all places that it went to.
    """
    x, up = _random(0, 24, 2, 6), [_random(rank + 1, 24, 2, 6) for rank in range(cp)]
    heads = [slice(6 // cp * rank, 6 // cp * (rank + 1)) for rank in range(cp)]

    def body(rank):
        axis, rows = Mesh(rank, cp=cp).cp, ROWS[cp][rank]
        found = []
        for mapping, given, upstream in (
            (context_parallel.gather_from_context_parallel_region, x[rows], up[rank]),
            (context_parallel.rows_to_heads, x[rows], up[rank][:, :, heads[rank]]),
            (context_parallel.heads_to_rows, x[:, :, heads[rank]], up[rank][rows]),
        ):
            given = given.clone().requires_grad_()
            value = mapping(given, axis)
            value.backward(upstream)
            found.append((value.detach(), given.grad))
        return found

    by_heads = torch.cat([up[rank][:, :, heads[rank]] for rank in range(cp)], 2)
    by_rows = torch.stack([up[next(n for n in range(cp) if row in ROWS[cp][n])][row] for row in range(24)])
    for rank, (gathered, exchanged, back) in enumerate(run_ranks(cp, body)):
        rows = ROWS[cp][rank]
        wanted = (x, sum(up)[rows]), (x[:, :, heads[rank]], by_heads[rows]), (x[rows], by_rows[:, :, heads[rank]])
        for pair, want in zip((gathered, exchanged, back), wanted, strict=True):
            torch.testing.assert_close(pair, want)


def test_what_is_gathered_is_not_kept_and_comes_again(run_ranks):
    """Once for each backward pass, whatever is kept of it; gradients are those that come without."""
    x = _random(0, 24, 2, 6)

    def body(rank, again):
        axis, gathers = Mesh(rank, cp=2).cp, []
        real = collectives.all_gather
        collectives.all_gather = lambda *args: gathers.append(1) or real(*args)
        own = x[ROWS[2][rank]].clone().requires_grad_()
        whole = context_parallel.gather_from_context_parallel_region(own, axis)
        hooks = context_parallel.gathered_again(whole, own, axis)
        with hooks if again else contextlib.nullcontext():
            value = (whole[:13] * whole[3:16]).sum() + (
                whole[5:].transpose(0, 1) * whole[5:].exp().transpose(0, 1)
            ).sum()
        first = torch.autograd.grad(value, own, retain_graph=True)[0]
        return first, torch.autograd.grad(value, own)[0], len(gathers)

    for (plain, _, once), (first, second, thrice) in zip(
        run_ranks(2, body, False), run_ranks(2, body, True), strict=True
    ):
        assert first.equal(plain) and second.equal(plain) and (once, thrice) == (1, 3)


@pytest.mark.parametrize("tp", [1, 2])
def test_dropout_goes_by_the_place_in_the_sequence(tp):
    """Of hidden states whose rows cp divides, and what a rank has of them tp again."""
    x, samples, cp = torch.ones(24, 2, 5), torch.tensor([7, 3]), 2
    whole = Dropout(0.5, "mlp", 1, seed=9)(x, samples)
    for rank, rows in enumerate(ROWS[cp]):
        pieces = [
            Dropout(0.5, "mlp", 1, seed=9, axis=Axis("tp", tuple(range(tp)), n), cp=Axis("cp", (0, 1), rank))
            for n in range(tp)
        ]
        own = torch.cat([piece(x[: 12 // tp], samples) for piece in pieces])
        assert own.equal(whole[rows])


def test_ranks_of_a_sequence_share_weights():
    """Copies and shards of weights lie along dp and cp together, and each rank's element is counted once."""
    sizes = dict(tp=2, cp=2, replicate=2, create_groups=False)
    mesh = Mesh(3, **sizes)
    assert mesh.cp.ranks == (1, 3) and mesh.dp.ranks == (3, 7)
    assert mesh.replicate.ranks == mesh.dp_cp.ranks == (1, 3, 5, 7) and mesh.shard.ranks == (3,)
    sharded = Mesh(3, tp=2, cp=2, shard=2, shard_over_cp=True, create_groups=False)
    assert sharded.shard.ranks == (1, 3, 5, 7) and sharded.replicate.ranks == (3,)
    halves = Mesh(3, tp=2, cp=2, replicate=2, shard=1, shard_over_cp=True, create_groups=False)
    assert halves.shard.ranks == (1, 3) and halves.replicate.ranks == (3, 7)
    assert mesh.expert_dp.ranks == (1, 3, 5, 7)
    assert "dp_cp: [0,2,4,6] [1,3,5,7]" in mesh.topology()
