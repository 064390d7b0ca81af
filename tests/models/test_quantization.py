# SPDX-License-Identifier: Apache-2.0
"""Quantization aware training. Whole trainings are compared with the same network in plain torch, which rounds as
PaddleSlim's formulas say; the rounding itself with torch's own observers and fake quantization.
"""

from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import DataError, SettingsError
from megatron.inference.load import load_model
from megatron.model import quantization
from megatron.model.command_line import parse_any
from megatron.model.fake_quantize import FakeQuantizeProduct
from megatron.model.linear_kinds import chosen
from megatron.model.recipe import facts_of
from megatron.model.weights import column
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mesh import Mesh
from megatron.planner.preflight.ranks import Design, check_ranks
from megatron.training.rules import check, resolve
from tests.ranks import on_ranks
from tests.training.plain_loop import EOD, LAYERS, LENGTH, Job, logits, plain_linear, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare, records

# Rounding makes steps of small differences, and Adam large ones of small gradients: a large epsilon keeps them apart.
LINE = f"{FLAGS} {SIX} {ADAM}".replace("--adam-eps 1e-4", "--adam-eps 1e-1")
PLAIN_ROUNDED = PLAIN | dict(eps=1e-1)
TP3, PP2 = "--tensor-model-parallel-size 3", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one process": (1, ""),
    "tp3 with sequence parallelism, recomputation, fusion": (
        3,
        f"{TP3} --sequence-parallel --recompute-granularity full_attn --gradient-accumulation-fusion",
    ),
    "pp2 zb-h1, zero3": (2, f"{PP2} --pipeline-schedule zb-h1 --sharding-stage 3"),
    "zero3, recomputation": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
    "dp2": (2, ""),
    "zero2, recomputation of parts": (
        2,
        "--sharding-stage 2 --recompute-granularity selective --recompute-modules layernorm mlp_act",
    ),
    "pp2 dp2 zb-h1, zero2, fusion": (
        4,
        f"{PP2} --pipeline-schedule zb-h1 --sharding-stage 2 --gradient-accumulation-fusion",
    ),
    "cp2": (2, "--context-parallel-size 2"),
    "tp3 pp2, zero2": (6, f"{TP3} {PP2} --sharding-stage 2"),
}
MICRO_BATCHES = 4  # of a step


class Round(torch.autograd.Function):
    """Straight-through, and 0 where x is clipped."""

    @staticmethod
    def forward(ctx, x, scale, levels):
        whole = torch.round(x / scale * levels)
        ctx.save_for_backward(whole.abs() <= levels)
        return whole.clamp(-levels, levels) * scale / levels

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


class RoundTokens(torch.autograd.Function):
    """Straight-through: from the least to the largest channel of each token, 0 included, in 2^bits values."""

    @staticmethod
    def forward(ctx, x, bits):
        least, largest = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        step = (largest - least) / (2**bits - 1)
        zero = torch.round(-least / step)
        return (torch.clamp(torch.round(x / step) + zero, 0, 2**bits - 1) - zero) * step

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Quantized:
    """A linear layer in plain torch: its weight by the abs-max of channels, its input by the moving average of steps, or by
    the ends of each token.
    """

    def __init__(self, bits: int, per_tensor=False, pact=False, tokens=False, picks=lambda name: True):
        self.levels, self.per_tensor, self.pact, self.picks = 2 ** (bits - 1) - 1, per_tensor, pact, picks
        self.token_bits = bits if tokens else None
        self.average, self.now, self.calls = {}, {}, {}

    def __call__(self, weights, name: str, x: torch.Tensor) -> torch.Tensor:
        if not self.picks(name):
            return plain_linear(weights, name, x)
        if self.pact:
            alpha = weights[f"{name}.pact_alpha"]
            x = x - torch.relu(x - alpha) + torch.relu(-alpha - x)
        if self.token_bits:
            return self._product(weights, name, RoundTokens.apply(x, self.token_bits))
        self.now[name] = max(self.now.get(name, 0.0), x.detach().abs().max().item())
        total, count = self.average.get(name, (0.0, 0.0))
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] % MICRO_BATCHES == 0:
            self.average[name] = 0.9 * total + self.now.pop(name), 0.9 * count + 1
        if count:
            x = Round.apply(x, total / count, self.levels)
        return self._product(weights, name, x)

    def _product(self, weights, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = weights[f"{name}.weight"]
        largest = weight.detach().abs()
        largest = largest.max() if self.per_tensor else largest.amax(-1, keepdim=True)
        return plain_linear({**weights, f"{name}.weight": Round.apply(weight, largest, self.levels)}, name, x)


LINEAR = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
ALPHA = 1.5  # clips some of the inputs of most layers
ALPHAS = {f"blocks.{n}.{name}.pact_alpha": torch.full((1,), ALPHA).double() for n in range(LAYERS) for name in LINEAR}
WAYS = {
    "5 bits": ("--weight-bits 5 --activation-bits 5", dict(bits=5)),
    "pact, 4 bits": ("--activation-preprocess-type PACT --weight-bits 4 --activation-bits 4", dict(bits=4, pact=True)),
    "4 bits, tokens": (
        "--weight-bits 4 --activation-bits 4 --activation-quantize-type token_wise_min_max",
        dict(bits=4, tokens=True),
    ),
    "8 bits, a scale for a whole weight": (
        "--weight-quantize-type abs_max --quantization-skip blocks.0.*,attention.output",
        dict(bits=8, per_tensor=True, picks=lambda name: "blocks.0" not in name and "attention.output" not in name),
    ),
}


SOME = list(LAYOUTS)[:3] + ["dp2", "pp2 dp2 zb-h1, zero2, fusion"]
CASES = [(way, layout) for way in WAYS for layout in (LAYOUTS if "PACT" in WAYS[way][0] else SOME)]


@cache
def plain(way: str):
    own = Quantized(**WAYS[way][1])
    outcome = train(Job(**PLAIN_ROUNDED, linear=own, more=lambda seed: ALPHAS if own.pact else {}))
    outcome.tensors |= scales_of(own)
    return outcome


def scales_of(quantized: Quantized) -> dict[str, torch.Tensor]:
    """Its buffers in a checkpoint."""
    averages = {f"{name}.input_average": torch.tensor(average) for name, average in quantized.average.items()}
    return averages | {f"{name}.input_absmax": torch.tensor(0.0) for name in quantized.average}


def pretrain(rank: int, way: str, flags: str) -> None:
    pretrain_gpt.main(f"{LINE} --quantization {WAYS[way][0]} {flags}".split())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way, layout", CASES)
def test_any_layout_is_the_plain_loop(way, layout, tmp_path, monkeypatch):
    """Losses, norms, weights, scales of inputs, bounds."""
    monkeypatch.setattr(quantization, "ALPHA", ALPHA)
    world, words = LAYOUTS[layout]
    line = f"{words} --save {tmp_path}"
    on_ranks(world, pretrain, way, line)
    compare(tmp_path, plain(way), rel=1e-6)


def test_weights_alone(tmp_path):
    """Weights of chosen layers, with inputs as they are."""
    flags = "--activation-quantize-type none --quantization-layers mlp.*"
    pretrain_gpt.main(f"{LINE} --quantization {flags} --weight-bits 4 --save {tmp_path}".split())

    def linear(weights, name, x):
        if ".mlp." in name:
            weight = weights[f"{name}.weight"]
            largest = weight.detach().abs().amax(-1, keepdim=True)
            weights = {**weights, f"{name}.weight": Round.apply(weight, largest, 7)}
        return plain_linear(weights, name, x)

    compare(tmp_path, train(Job(**PLAIN_ROUNDED, linear=linear)), rel=1e-6)


def tensors(folder) -> dict[str, torch.Tensor]:
    with Reader(folder / "iter_0000006") as reader:
        return {name: reader.read(name) for name in reader.tensors}


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    pretrain(0, "5 bits", f"--save {tmp_path / 'whole'}")
    part = f"--save {tmp_path / 'part'}"
    pretrain(0, "5 bits", f"{part} --exit-interval 3")
    pretrain(0, "5 bits", f"{part} --load {tmp_path / 'part'}")
    whole, resumed = (tensors(tmp_path / name) for name in ("whole", "part"))
    assert whole.keys() == resumed.keys()
    assert [name for name, values in whole.items() if not torch.equal(values, resumed[name])] == []
    with pytest.raises(SettingsError, match="--weight-bits: 5 in the checkpoint, 6 now"):
        pretrain(0, "5 bits", f"--load {tmp_path / 'part'} --weight-bits 6")


@pytest.mark.sampled(10)
def test_a_run_goes_on_in_another_layout(run_ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "ALPHA", ALPHA)
    way, line = "pact, 4 bits", f"--save {tmp_path}"
    run_ranks(2, pretrain, way, f"{PP2} --sharding-stage 3 {line} --exit-interval 3")
    run_ranks(3, pretrain, way, f"{TP3} --sequence-parallel {line} --load {tmp_path}")
    compare(tmp_path, plain(way), rel=1e-6)


def test_a_plain_run_goes_on_with_it_and_is_evaluated(tmp_path, capsys):
    """--finetune takes the weights; the first step rounds them; logits of the result are those of rounded inputs."""
    base = tmp_path / "base"
    pretrain_gpt.main(f"{LINE} --save {base} --train-iters 2".split())
    pretrain(0, "5 bits", f"--finetune --load {base} --save {tmp_path / 'own'} --use-checkpoint-args")
    assert "new, and not out of the checkpoint: blocks.0.attention.output.input_absmax" in capsys.readouterr().out
    with Reader(base / "iter_0000002") as reader:
        start = {name: reader.read(name).double() for name in reader.tensors}
    own = Quantized(5)
    outcome = train(Job(**PLAIN_ROUNDED, linear=own, start=start))
    [first, *_] = records(tmp_path / "own", "step")
    assert first["lm loss"] == pytest.approx(outcome.steps[0]["lm loss"], rel=1e-6)
    tokens = torch.randint(EOD, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    wanted = logits(outcome.tensors, tokens, Job(**PLAIN_ROUNDED, linear=own))
    pretrain_gpt.main(f"{LINE} --train-iters 1 --finetune --load {tmp_path / 'own'}".split())
    assert "was trained with --linear *=fake_quantize; this run has plain layers" in capsys.readouterr().out
    model = load_model(str(tmp_path / "own")).model
    assert (model.logits(tokens.T).transpose(0, 1).double() - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--quantization --weight-bits 9", "--weight-bits 9 must be at least 2 and at most 8"),
        (
            "--quantization --quantization-layers gate",
            "'gate' is no linear layer of this model; each block has attention",
        ),
        (
            "--quantization --quantization-skip blocks.7.*",
            "--quantization-skip blocks.7.*: the model has no blocks.7.*",
        ),
    ],
)
def test_what_cannot_be_is_said(flags, said):
    [problem] = check(parse_any(f"{LINE} {flags}".split()), 1)
    assert said in problem


def test_layers_that_the_sensitivity_tool_recommends_to_skip(tmp_path):
    (tmp_path / "found.json").write_text('{"skip": ["blocks.1.mlp.down", "blocks.0.*"]}')
    config = parse_any(f"{LINE} --quantization --quantization-skip {tmp_path / 'found.json'}".split())
    assert config.model.quantization_skip == "blocks.1.mlp.down,blocks.0.*"
    assert chosen(config.model.linear, 0, LINEAR) == ()
    assert [name for name, _ in chosen(config.model.linear, 1, LINEAR)] == list(LINEAR[:3])
    with pytest.raises(DataError, match="gone.json: cannot be read"):
        parse_any(f"{LINE} --quantization --quantization-skip {tmp_path / 'gone.json'}".split())


@pytest.mark.parametrize("tp, sp", [(1, ""), (3, "--sequence-parallel")])
def test_shapes_are_checked_and_memory_is_counted(tp, sp):
    """A preflight, in which nothing has memory; buffers are in the planner's bytes."""
    config = parse_any(f"{LINE} --quantization --tensor-model-parallel-size {tp} {sp}".split())
    config = resolve(config, tp)
    facts = facts_of(config, 101)
    checks = check_ranks(Design(config, tp, facts, pretrain_gpt.recipe().build_model))
    assert [check.fault for check in checks if check.name == "shapes"] == [""]
    assert facts.parameters == 17208  # buffers are none


def test_a_layer_is_torchs_own_fake_quantization():
    """Output and gradients of a layer whose input is clipped, with observers of torch.ao for the scales."""
    from torch.ao.quantization import FakeQuantize, MinMaxObserver, PerChannelMinMaxObserver

    common = dict(quant_min=-127, quant_max=127, dtype=torch.qint8)
    of_weight = FakeQuantize(PerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric, ch_axis=0, **common)
    of_input = FakeQuantize(MinMaxObserver, qscheme=torch.per_tensor_symmetric, **common)
    settings = parse_any(f"{LINE} --quantization".split()).model
    table = column(6, (5,), 1.0)
    layer = ColumnParallelLinear({**table, **quantization.own_weights(settings, table["weight"])}, Mesh().tp)
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    with torch.no_grad():
        layer.weight.copy_(draw(5, 6))
        layer.bias.copy_(draw(5))
        layer.input_absmax.zero_()
        layer.input_average.zero_()
    layer.product = FakeQuantizeProduct(layer, "blocks.0.mlp.up", settings)
    first, x, upstream = draw(4, 2, 6), 3 * draw(4, 2, 6).requires_grad_(), draw(4, 2, 5)
    x = x.detach().requires_grad_()
    layer(first)
    layer.product.update_buffers()
    of_input(first)
    of_input.disable_observer()
    y = layer(x)
    y.backward(upstream)
    found = [y, x.grad, layer.weight.grad]
    weight, x = layer.weight.detach().requires_grad_(), x.detach().requires_grad_()
    y = torch.nn.functional.linear(of_input(x), of_weight(weight), layer.bias)
    y.backward(upstream)
    assert (x.grad == 0).any() and (x.grad != 0).any()
    for one, wanted in zip(found, [y, x.grad, weight.grad], strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("flags", ["--bf16", "--bf16 --amp-level O1", "--fp16 --initial-loss-scale 1024"])
def test_half_precision_is_near_to_it(flags, tmp_path):
    pretrain(0, "5 bits", f"{flags} --save {tmp_path}")
    for found, wanted in zip(records(tmp_path, "step"), plain("5 bits").steps, strict=True):
        assert found["lm loss"] == pytest.approx(wanted["lm loss"], rel=2e-2)
