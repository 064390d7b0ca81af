# SPDX-License-Identifier: Apache-2.0
"""A router, a dispatcher and a way to balance from outside the suite (`own_mixture.py`)."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron.entry import start
from megatron.errors import SettingsError, UsageError
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.experts.layer import MoELayer
from megatron.model.kinds.experts.parts import ExpertParts
from megatron.model.kinds.experts.weights import experts
from megatron.mpu.mesh import Mesh
from megatron.settings.own_choices import model_group
from tests.models import own_mixture
from tests.models.in_layouts import check_layout

H, E, K, WIDTH = 16, 4, 2, 8
FLAGS = """--model-type tests.models.own_mixture --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-2 --mock-data --vocab-size 100
    --device cpu --precision fp32 --num-experts 4 --moe-ffn-hidden-size 16
    --moe-router-load-balancing-type crowded aux_loss --moe-aux-loss-coeff 0.3 0.01"""


def test_a_layer_computes_its_formula():
    settings = model_group({}, own_mixture.PARTS)(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        num_experts=E,
        moe_router_topk=K,
        moe_ffn_hidden_size=WIDTH,
        moe_router_load_balancing_type=["crowded"],
        disable_bias_linear=True,
    )
    layer = MoELayer(experts(settings, False), LayerSetup(GPTFacts(settings, 1), 0, Mesh()))
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(seed))
    layer.router.load.zero_()
    layer.router.sharpness.data.fill_(3.0)
    x = torch.randn(5, 2, H, generator=torch.Generator().manual_seed(7))
    y, sums = layer(x, ForwardContext())
    logits = 3 * F.cosine_similarity(x.unsqueeze(-2), layer.router.weight, dim=-1)  # [s, b, E]
    best = logits.topk(K, -1)
    weights = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1))
    wanted = sum(
        weights[..., e : e + 1] * F.gelu(x @ up.T, approximate="tanh") @ down.T
        for e, (up, down) in enumerate(zip(layer.experts.up.weight, layer.experts.down.weight, strict=True))
    )
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    loads = (weights > 0).sum((0, 1))
    assert layer.router.load.tolist() == loads.tolist()
    noisy = replace(settings, router_noise=0.5)
    layer.router.model = noisy
    noise = layer.router.uniform("router noise", logits, torch.tensor([3, 4]))
    assert noise.abs().max() < 1 and noise.unique().numel() > 0.9 * noise.numel()
    chosen = layer.router(x, samples=torch.tensor([3, 4])).experts
    assert torch.equal(chosen, (logits + 0.5 * noise).topk(K, -1).indices.flatten(0, 1))
    assert not torch.equal(chosen, best.indices.flatten(0, 1))
    assert torch.equal(layer.eval().router(x, samples=torch.tensor([3, 4])).experts, best.indices.flatten(0, 1))
    layer.train().router.model = settings
    crowded = logits.softmax(-1)[..., loads > 10 * K / E].sum()
    torch.testing.assert_close(sums["crowded experts"], crowded)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["ep2", "tp2sp", "tp2-ep2", "ep2-zero3", "pp2-zbh1", "cp2"])
@pytest.mark.parametrize("again", ["--router-noise 0.5", "--recompute-granularity full --recompute-method uniform"])
def test_any_layout_is_one_process(layout, again):
    check_layout(layout, f"{FLAGS} {again}")


def test_it_trains_and_logs_its_loss(capsys):
    lasts = []
    for weight in (0.0, 1.0):  # with a weight, fewer scores are those of crowded experts
        line = f"{FLAGS} --train-iters 8 --lr-decay-iters 8 --log-interval 1 --moe-aux-loss-coeff {weight} 0"
        start(line.split(), own_mixture.recipe())
        found = re.findall(r"crowded experts: (\S+)", capsys.readouterr().out)
        assert len(found) == 8
        lasts.append(sum(map(float, found[4:])))
    assert lasts[1] < lasts[0]


def test_refusals():
    with pytest.raises(SettingsError, match="'aux_loss' is a built-in name"):
        model_group({}, ExpertParts(balancing={"aux_loss": own_mixture.Crowded()}))
    with pytest.raises(SettingsError, match="give a megatron.model.kinds.experts.parts.Balancing"):
        model_group({}, ExpertParts(balancing={"own": print}))
    own = replace(own_mixture.recipe(), experts=None)
    with pytest.raises(UsageError, match="'crowded' is none of aux_loss"):
        start(FLAGS.split(), own)
