# SPDX-License-Identifier: Apache-2.0
"""Sums over the tokens of samples that context parallel ranks divide, against plain torch and against one rank."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model.ordered import TokenBlocks
from megatron.mpu.context_parallel import own_rows
from megatron.mpu.layers import matmul
from megatron.mpu.mesh import Mesh
from megatron.mpu.ordered_sums import Blocks
from megatron.mpu.ordered_tokens import SampleSums

S, O, I = 128, 32, 48  # tokens, outputs, inputs
ALONE = Mesh().cp


def drawn(dtype, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_parts_of_ranks_are_the_sum_of_one(run_ranks, cp, dtype):
    gradient, x = drawn(dtype, S, O), drawn(dtype, S, I, seed=1)
    tokens, above, table = torch.arange(S).mul(7).remainder(11), drawn(dtype, S, 1, I, seed=2), drawn(dtype, 12, I)
    losses = drawn(torch.float32, S, seed=3)

    def sums(axis):
        """Gradients of a weight whose outputs and whose inputs are divided, of a table and of a norm; a sum of losses."""
        own, one = (lambda whole: own_rows(whole, axis)), SampleSums(axis)
        found = [
            one.product(blocks, matmul(x), own(gradient), own(x), dim)
            for blocks, dim in ((Blocks(8, 2), 0), (Blocks(8), 0), (Blocks(8), 1))
        ]
        weight = table.clone().requires_grad_()
        one.lookup(own(tokens).unsqueeze(1), weight).backward(own(above))
        return [*found, weight.grad, TokenBlocks(ALONE, axis).total(own(gradient)), one.of_scalars(own(losses))]

    expected = sums(ALONE)
    parts = run_ranks(cp, lambda rank: sums(Mesh(rank, replicate=1, cp=cp, ordered=True).cp))
    for whole, *of_ranks in zip(expected, *parts, strict=True):
        assert sum((part != 0).int() for part in of_ranks).max() <= 1  # adding them rounds nothing
        assert sum(of_ranks).equal(whole)

    weight = table.double().requires_grad_()
    F.embedding(tokens, weight).backward(above.squeeze(1).double())
    product = gradient.double().t() @ x.double()
    plain = [product, product, product, weight.grad, gradient.double().sum(0), losses.double().sum()]
    for whole, other in zip(expected, plain, strict=True):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[whole.dtype] * other.abs().max()
        torch.testing.assert_close(whole.double(), other, atol=tolerance.item(), rtol=0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tp, cp", [(2, 2), (4, 1), (2, 4)])
def test_tokens_of_tensor_and_context_parallel_ranks_are_one_sum(run_ranks, tp, cp):
    """With sequence parallelism a rank has a part of its context parallel rank's rows."""
    x = drawn(torch.float32, S, O)

    def total(rank):
        mesh = Mesh(rank, tp=tp, cp=cp, ordered=True)
        return TokenBlocks(mesh.tp, mesh.cp).total(own_rows(x, mesh.cp).chunk(tp)[mesh.tp.rank])

    first, *others = run_ranks(tp * cp, total)
    assert first.equal(TokenBlocks(ALONE, ALONE).total(x)) and not any(other.any() for other in others)
    torch.testing.assert_close(first.double(), x.double().sum(0), atol=1e-4, rtol=0)
