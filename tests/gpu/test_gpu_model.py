# SPDX-License-Identifier: Apache-2.0
"""On a GPU: attention kernels equal the reference, and the model gives the losses and gradients that the CPU gives."""

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.fused_kernels import TABLE, explicit_attention, reference
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import Dropout, init_parameter
from megatron.settings.schema import Model, Recompute

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["flash-attn", "sdpa (CUDA)"])
@pytest.mark.parametrize("q", [1, 2])
def test_attention(name, q):
    entry = next(entry for entry in TABLE["attention"] if entry.name == name)
    if entry.lacking:
        pytest.skip(entry.lacking)
    shapes = [(128, 2, 2, q, 64), (128, 2, 2, 64), (128, 2, 2, 64)]
    inputs = [torch.randn(x, device="cuda", dtype=torch.bfloat16, requires_grad=True) for x in shapes]
    want, got = (run(*inputs, scale=0.125, causal=True) for run in (reference.attention, entry.run))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("q", [1, 2])
def test_attention_with_dropout(q):
    """The block-causal kernel, drawn words included, against the reference."""
    inputs = [torch.randn(x, device="cuda", requires_grad=True) for x in ((300, 2, 2, q, 64), *[(300, 2, 2, 64)] * 2)]
    dropout = Dropout(0.1, "attention", 0, seed=1, batch_dim=0)
    keep = dropout.keep((2, 2 * q, 300, 300), torch.tensor([3, 8]), inputs[0].device)
    assert keep.mask().float().mean().item() == pytest.approx(0.9, abs=0.01)
    more = dict(scale=0.125, causal=True, dropout=keep)
    want, got = reference.attention(*inputs, **more), explicit_attention.in_blocks(*inputs, **more)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    upstream = torch.randn_like(want)
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("granularity", ["core_attn", "full_attn", "full"])
def test_recomputation_draws_the_same_masks(granularity):
    settings = Model(num_layers=2, hidden_size=128, num_attention_heads=2, seq_length=64)
    tokens = torch.randint(0, 500, (65, 2))
    batch = MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(2)).to("cuda")
    found = []
    for recompute in (Recompute(), Recompute(granularity)):
        model = GPT(settings, Mesh(), 500, dtype=torch.bfloat16, device="cuda", recompute=recompute)
        for name, (parameter, placement) in placements(model).items():
            init_parameter(name, parameter, placement, Mesh().coordinates, seed=1)
        loss, count = model(None, batch)[1].values()
        (loss / count).backward()
        found.append([loss, *(p.grad.float() for p in model.parameters())])
    for theirs, mine in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-3 * theirs.norm()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_model_equals_cpu(dtype, tolerance):
    settings = Model(
        num_layers=2, hidden_size=128, num_attention_heads=2, seq_length=64, hidden_dropout=0.0, attention_dropout=0.0
    )
    tokens = torch.randint(0, 500, (65, 2))
    batch = MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(2))
    found = []
    for device, format_ in (("cpu", torch.float32), ("cuda", dtype)):
        model = GPT(settings, Mesh(), 500, dtype=format_, device=device)
        for name, (parameter, placement) in placements(model).items():
            init_parameter(name, parameter, placement, Mesh().coordinates, seed=1)
        loss, count = model(None, batch.to(device))[1].values()
        (loss / count).backward()
        found.append([loss.cpu(), *(p.grad.float().cpu() for p in model.parameters())])
    for theirs, mine in zip(*found, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm() + 1e-6
