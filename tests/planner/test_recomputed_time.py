# SPDX-License-Identifier: Apache-2.0
"""The time of recomputed modules in a plan: the FLOPs and bytes that their sizes say, on devices with one finite speed."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.data.loader import MicroBatch
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.planner import speed
from megatron.planner.cluster import Cluster
from megatron.planner.device import Device
from megatron.planner.layout import Job, Layout
from megatron.settings.schema import Model, Recompute
from tests.models.test_made_up_layers import ONEDNN

S, B, H, FFN = 32, 2, 16, 48
ROWS = S * B
SHAPES = {
    "gpt2": dict(),
    "llama": dict(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", disable_bias_linear=True),
}
NOTHING = dict(hidden_dropout=0.0, attention_dropout=0.0)


def model_of(shape) -> Model:
    return Model(2, H, 4, S, ffn_hidden_size=FFN, **NOTHING, **SHAPES[shape])


def more(shape, modules, **finite) -> float:
    """Seconds of a layer with these modules recomputed, in addition to those without."""
    infinite = dict(flops={"fp32": math.inf}, attention={"fp32": math.inf}, bandwidth=math.inf, inner=math.inf)
    cluster = Cluster(Device("one", "cpu", rows=0.0, launch=0, latency=0, **{**infinite, **finite}), 1, 1)
    job = Job(GPTFacts(model_of(shape), 40), 1, "fp32", "cpu")
    costs = lambda again: speed.layer_costs(job, Layout(micro_batch_size=B, recompute=again), cluster)[0]
    return costs(Recompute("core_attn", recompute_modules=modules.split())) - costs(Recompute())


@pytest.mark.parametrize("shape, up", [("gpt2", 1), ("llama", 2)])
def test_time_of_products_and_of_moved_bytes(shape, up):
    products = 2 * ROWS * H * FFN * (up + 1)
    norms, activation = 2 * 2 * ROWS * H, ROWS * FFN * (5 if up == 2 else 2)  # elements read and written
    flops, bandwidth = dict(flops={"fp32": 1.0}), dict(bandwidth=1.0, unfused=1.0)
    for modules, work, moved in (
        ("mlp", products, activation),
        ("layernorm", 0, norms),
        ("mlp_act", 0, activation),
        ("layernorm mlp_act", 0, norms + activation),
        ("layernorm mlp mlp_act", products, norms + activation),
    ):
        assert more(shape, modules, **flops) == pytest.approx(work)
        assert more(shape, modules, **bandwidth) == pytest.approx(4 * moved)


@pytest.mark.parametrize("shape, up", [("gpt2", 1), ("llama", 2)])
def test_a_backward_pass_has_these_products_more(shape, up):
    """As torch's own counter sees them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (S, B), generator=generator)

    def flops(modules) -> int:
        again = Recompute("core_attn", recompute_modules=modules.split()) if modules else None
        model = GPT(model_of(shape), Mesh(), 40, recompute=again, device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02, generator=generator)
        loss = model(None, MicroBatch(tokens, tokens, torch.arange(B)))[1]["lm loss"]
        with FlopCounterMode(display=False, custom_mapping=ONEDNN) as counted:
            loss.backward()
        return counted.get_total_flops()

    plain = flops("")
    assert flops("layernorm mlp_act") == plain
    assert flops("layernorm mlp") - plain == 2 * 2 * ROWS * H * FFN * (up + 1)


def test_depths_recompute_what_the_last_layer_does():
    """One layer in two is recomputed, and a depth of multi-token prediction only after the second."""
    infinite = dict(attention={"fp32": math.inf}, bandwidth=math.inf, inner=math.inf)
    cluster = Cluster(Device("one", "cpu", flops={"fp32": 1.0}, rows=0.0, launch=0, latency=0, **infinite), 1, 1)

    def took(depths, again=None, left_out=None) -> float:
        model = replace(model_of("gpt2"), mtp_num_layers=depths)
        layout = Layout(micro_batch_size=B, recompute=Recompute(again, no_recompute_layers=left_out))
        return speed.step(Job(GPTFacts(model, 40), B, "fp32", "cpu"), layout, cluster).seconds

    layer = took(None, "full", "1") - took(None)
    assert layer > 0
    assert took(2, "full", "1") - took(2) == pytest.approx(layer)
    assert took(2, "full", "0") - took(2) == pytest.approx(3 * layer)
