# SPDX-License-Identifier: Apache-2.0
"""On a GPU: experts compute what the CPU computes in fp32, with Triton's kernels and grouped products."""

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.fused_kernels import TABLE, reference
from megatron.fused_kernels.gpu import probe
from megatron.model.gpt.module import GPT
from megatron.model.kinds.experts import grouped, replay
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import init_parameter
from megatron.settings.schema import Model

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # of the norm of a tensor: one rounding
EXPERTS = dict(
    num_layers=2, hidden_size=128, num_attention_heads=2, seq_length=64, swiglu=True, disable_bias_linear=True
)
EXPERTS |= dict(hidden_dropout=0.0, attention_dropout=0.0, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=96)
DROPS = dict(moe_expert_capacity_factor=1.0, moe_token_drop_policy="position")  # the same ones in every format


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found, wanted, tolerance: float) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape
        assert (x.cpu().double() - y.double()).norm() <= tolerance * y.double().norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "n, k, h, rows, dropped",
    [
        (3000, 8, 2048, 0, 0),
        (3000, 2, 100, 7000, 500),
        (300, 1, 12288, 0, 0),
        (257, 6, 5120, 1500, 100),
        (0, 2, 64, 0, 0),
    ],
)
def test_kernels(n, k, h, rows, dropped, dtype, device):
    """Against the formula in fp64 on the CPU, and twice the same bits."""
    if lacking := TABLE["permute"][0].lacking:
        pytest.skip(lacking)
    order, place = probe.experts_order(n, k, rows or n * k, dropped, "cpu")
    whole = not (rows or dropped)
    inputs = [drawn(n, h).to(dtype), drawn(len(order), h, seed=1).to(dtype)]
    upstream = [drawn(len(order), h, seed=3).to(dtype), drawn(n, h, seed=4).to(dtype)]

    def run(of, on: str, exactly: bool) -> list[torch.Tensor]:
        there = lambda value: value.to(on, torch.float64 if exactly and value.is_floating_point() else value.dtype)
        x, y = (there(value).requires_grad_() for value in inputs)
        where = there(order), there(place)
        results = of("permute")(x, *where, k, whole), of("unpermute")(y, *where, k, whole)
        return [*results, *torch.autograd.grad(results, (x, y), [there(value) for value in upstream])]

    found, again = (run(probe.kernel, device, False) for _ in range(2))
    assert all(x.equal(y) for x, y in zip(found, again, strict=True))
    assert_near(found, run(lambda op: getattr(reference, op), "cpu", True), TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [[300, 0, 1, 700], [0, 0, 0, 0], [256, 256, 256, 256]])
def test_grouped_products_are_one_product_for_each_expert(lengths, device):
    if torch.cuda.get_device_capability()[0] in (9, 10):  # for which torch has a kernel
        assert grouped.lacking_grouped("cuda", torch.bfloat16) == ""
    elif lacking := grouped.lacking_grouped("cuda", torch.bfloat16):
        pytest.skip(lacking)
    m, (a, b) = sum(lengths), (256, 192)
    x, matrices, g = (drawn(*shape).to(device, torch.bfloat16) for shape in ((m, a), (len(lengths), a, b), (m, b)))
    rows = grouped.Rows(torch.tensor(lengths, device=device), m)
    found = grouped.times(x, matrices, rows), grouped.outer(x, g, rows)
    x, matrices, g = (value.cpu().float() for value in (x, matrices, g))
    assert_near(found, (grouped.times_in_a_loop(x, matrices, lengths), grouped.outer_in_a_loop(x, g, lengths)), 6e-3)
    assert not found[1][[length == 0 for length in lengths]].any()


@pytest.mark.parametrize(
    "more", [{}, DROPS, DROPS | dict(moe_pad_expert_input_to_capacity=True)], ids=["dropless", "drops", "padded"]
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
def test_a_model_equals_the_cpu(dtype, tolerance, more, device):
    """Loss and gradients; tokens go to the experts that they chose on the CPU."""
    settings = Model(**EXPERTS, **more)
    tokens = torch.randint(0, 500, (65, 2), generator=torch.Generator().manual_seed(1))
    batch = MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(2))
    choices, found = None, []
    for where, format_ in (("cpu", torch.float32), (device, dtype)):
        model = GPT(settings, Mesh(), 500, dtype=format_, device=where)
        for name, (parameter, placement) in placements(model).items():
            init_parameter(name, parameter, placement, Mesh().coordinates, seed=1)
        record = replay.RoutingRecord(choices)
        replay.attach([model], record)
        loss = model(None, batch.to(where))[1]["lm loss"]
        loss.backward()
        choices = record.choices
        found.append([loss.detach().cpu(), *(p.grad.float().cpu() for p in model.parameters())])
    assert record.changed <= 0.05 * record.seen
    for mine, theirs in zip(*reversed(found), strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm() + 1e-6
