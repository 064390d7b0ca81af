# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron.mpu import collectives, mappings
from megatron.mpu.mesh import Mesh

# mapping -> what it makes of the ranks' inputs [x0, x1], for rank r
FORWARD = {
    "copy_to_tensor_model_parallel_region": lambda xs, r: xs[r],
    "reduce_from_tensor_model_parallel_region": lambda xs, r: xs[0] + xs[1],
    "gather_from_sequence_parallel_region": lambda xs, r: torch.cat(xs),
    "reduce_scatter_to_sequence_parallel_region": lambda xs, r: (xs[0] + xs[1]).chunk(2)[r],
    "gather_from_tensor_model_parallel_region": lambda xs, r: torch.cat(xs, -1),
}
# mapping -> gradient of rank r's input, given the gradients [g0, g1] that the ranks' outputs receive
BACKWARD = {
    "copy_to_tensor_model_parallel_region": lambda gs, r: gs[0] + gs[1],
    "reduce_from_tensor_model_parallel_region": lambda gs, r: gs[r],
    "gather_from_sequence_parallel_region": lambda gs, r: (gs[0] + gs[1]).chunk(2)[r],
    "reduce_scatter_to_sequence_parallel_region": lambda gs, r: torch.cat(gs),
    "gather_from_tensor_model_parallel_region": lambda gs, r: gs[r].chunk(2, -1)[r],
}


def _random(rank, shape, salt):
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(10 * salt + rank))


@pytest.mark.parametrize("name", FORWARD)
def test_mapping_and_its_conjugate(name, run_ranks):
    def body(rank):
        axis = Mesh(rank, tp=2).tp
        x = _random(rank, (4, 2, 6), 1).requires_grad_()
        y = getattr(mappings, name)(x, axis)
        y.backward(_random(rank, y.shape, 2))
        return y.detach(), x.grad

    xs = [_random(rank, (4, 2, 6), 1) for rank in range(2)]
    outputs = run_ranks(2, body)
    gs = [_random(rank, y.shape, 2) for rank, (y, _) in enumerate(outputs)]
    for rank, (y, gradient) in enumerate(outputs):
        torch.testing.assert_close(y, FORWARD[name](xs, rank))
        torch.testing.assert_close(gradient, BACKWARD[name](gs, rank))


def test_mappings_over_an_axis_of_one_are_the_identity():
    x = torch.ones(4, 2)
    for name in FORWARD:
        assert getattr(mappings, name)(x, Mesh().tp) is x


def test_collectives(run_ranks):
    def body(rank):
        axis = Mesh(rank, tp=2).tp
        x = torch.arange(4.0).view(2, 2) + 10 * rank
        return dict(
            total=collectives.all_reduce(x.clone(), axis),
            largest=collectives.all_reduce(x.clone(), axis, "max"),
            gathered=collectives.all_gather(x, axis, 1),
            scattered=collectives.reduce_scatter(x, axis, 1),
            sent=collectives.broadcast(x.clone(), axis, source=1),
            said=collectives.broadcast_object(dict(rank=rank), axis, source=1),
        )

    x = [torch.arange(4.0).view(2, 2) + 10 * rank for rank in range(2)]
    for rank, got in enumerate(run_ranks(2, body)):
        assert torch.equal(got["total"], x[0] + x[1])
        assert torch.equal(got["largest"], x[1])
        assert torch.equal(got["gathered"], torch.cat(x, 1))
        assert torch.equal(got["scattered"], (x[0] + x[1])[:, rank : rank + 1])
        assert torch.equal(got["sent"], x[1])
        assert got["said"] == dict(rank=1)


@pytest.mark.parametrize("large", [0, 1 << 40], ids=["messages", "collectives of gloo"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_gathered_and_scattered_several_at_once(ranks, large, run_ranks):
    """Both ways of a CPU; sums in the order of ranks, so that they are the same bits."""
    whole = [torch.randn(ranks * 5, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]

    def body(rank):
        collectives.LARGE = large
        axis = Mesh(rank, shard=ranks).shard
        piece, gathered = torch.full((5, 2), torch.nan), torch.full((ranks * 5, 2), torch.nan)
        works = [
            collectives.start_reduce_scatter(piece, whole[rank].clone(), axis),
            collectives.start_all_gather(gathered, whole[rank][:5].clone(), axis),
        ]
        for work in works:
            work.wait()
        return piece, gathered

    for rank, (piece, gathered) in enumerate(run_ranks(ranks, body)):
        parts = [each.chunk(ranks)[rank] for each in whole]
        assert torch.equal(piece, sum(parts[1:], parts[0]))
        assert torch.equal(gathered, torch.cat([each[:5] for each in whole]))
