# SPDX-License-Identifier: Apache-2.0
"""Quantization after training: models with rounded weights against the same models whose weights were rounded by hand, and
the search for the layers that it harms.
"""

import json

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import QUANTIZED
from megatron.errors import SettingsError, StorageError, UsageError
from megatron.inference import quantized
from megatron.inference.load import load_model
from megatron.inference.quantize import free_weights, linear_layers
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.mesh import Mesh
from megatron.tools import benchmark_inference, sensitivity
from tests.models.test_quantization import LINE
from tests.training.plain_loop import EOD, LENGTH

GROUP = 8
FORMATS = ["int8", "int8-dynamic", "int4"]
TOKENS = torch.randint(EOD, (LENGTH, 2), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose logits depend on every layer: a few large steps."""
    path = tmp_path_factory.mktemp("trained")
    pretrain_gpt.main(f"{LINE} --lr 3e-2 --adam-eps 1e-8 --save {path / 'plain'}".split())
    pretrain_gpt.main(
        f"{LINE} --lr 3e-2 --adam-eps 1e-8 --quantization --activation-preprocess-type PACT --save {path / 'qat'}".split()
    )
    return path


def options(how: str, **more) -> QuantizeOptions:
    return QuantizeOptions(quantize=how, quantize_group_size=GROUP, **more)


def logits(path, how=None, **more) -> torch.Tensor:
    quantize = options(how, **more) if how else QuantizeOptions()
    return load_model(str(path), quantize=quantize).model.logits(TOKENS)


def by_hand(weight: torch.Tensor, how: str) -> torch.Tensor:
    """Each row to 255 values around 0, or each group of a row to 16 values from its least to its largest, one of them 0."""
    flat = weight.double().reshape(-1, weight.shape[-1])
    if how == "int4":
        groups = flat.reshape(len(flat), -1, GROUP)
        least, largest = (
            groups.min(2, keepdim=True).values.clamp(max=0),
            groups.max(2, keepdim=True).values.clamp(min=0),
        )
        step = (largest - least) / 15
        zero = torch.round(-least / step)
        values = torch.clamp(torch.round(groups / step + zero), 0, 15)
        return ((values - zero) * step).reshape(weight.shape).float()
    step = flat.abs().max(1, keepdim=True).values / 127
    return (torch.round(flat / step) * step).reshape(weight.shape).float()


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_weights_are_those_rounded_by_hand(how, folder):
    model = load_model(str(folder / "plain")).model
    plain = model.logits(TOKENS)
    for _, layer in linear_layers([model]):
        layer.weight.data = by_hand(layer.weight.data, how)
    found = logits(folder / "plain", how)
    torch.testing.assert_close(found, model.logits(TOKENS), atol=2e-5, rtol=1e-4)
    assert (found - plain).abs().max() > (1e-3 if how == "int8" else 1e-2)


def test_inputs_are_rounded_by_token(folder):
    """Of one layer, in whole numbers."""
    model = load_model(str(folder / "plain"), quantize=options("int8-dynamic")).model
    base = load_model(str(folder / "plain")).model
    layer, plain = model.blocks["1"].mlp.down, base.blocks["1"].mlp.down
    x = torch.randn(LENGTH, 2, 96, generator=torch.Generator().manual_seed(2))
    step = x.double().abs().amax(-1, keepdim=True) / 127
    wanted = (torch.round(x / step) * step) @ by_hand(plain.weight.data, "int8").double().T + plain.bias
    torch.testing.assert_close(layer(x).double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    assert layer.weight.numel() == 0


TOKEN_WISE = "--activation-quantize-type token_wise_min_max --activation-bits 5"


@pytest.mark.parametrize("scales", ["", "--weight-quantize-type abs_max", TOKEN_WISE])
def test_integers_give_what_training_has_rounded(scales, folder, tmp_path):
    """int8 of a model of --quantization: the logits of its training, by products of integers."""
    path = folder / "qat"
    if scales:
        path = tmp_path
        pretrain_gpt.main(f"{LINE} --lr 3e-2 --quantization {scales} --save {path}".split())
    torch.testing.assert_close(logits(path, "int8"), logits(path), atol=1e-4, rtol=1e-4)
    with pytest.raises(SettingsError, match="--quantize int4: blocks.0.attention.qkv was trained with --quantization"):
        logits(path, "int4")


def logits_on(rank: int, path: str, how: str):
    quantize = options(how) if how != "none" else QuantizeOptions()
    mesh = Mesh(rank, tp=3)
    return load_model(path, mesh=mesh, quantize=quantize).model.logits(TOKENS)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "how, name",
    [*((how, "plain") for how in FORMATS), *((how, name) for name in ("qat", "tokens") for how in ("int8", "none"))],
)
def test_tensor_parallel_ranks_round_as_one_does(how, name, folder, run_ranks):
    path = folder / name
    if name == "tokens" and not path.exists():
        pretrain_gpt.main(f"{LINE} --lr 3e-2 --quantization {TOKEN_WISE} --save {path}".split())
    found = run_ranks(3, logits_on, str(path), how)
    wanted = logits(path, how if how != "none" else None)
    for one in found:
        torch.testing.assert_close(one[..., : wanted.shape[-1]], wanted, atol=2e-4, rtol=1e-3)


def test_layers_that_are_skipped_keep_their_weights(folder):
    model = load_model(str(folder / "plain"), quantize=options("int4", quantize_skip="blocks.0.*,mlp.up")).model
    kept = [name for name, layer in linear_layers([model]) if layer.weight.numel()]
    assert kept == [*(f"blocks.0.{name}" for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down"))] + [
        "blocks.1.mlp.up"
    ]
    with pytest.raises(SettingsError, match="'gate' is no linear layer of this model"):
        logits(folder / "plain", "int4", quantize_skip="gate")


def weights_on(rank: int, path: str) -> list[int]:
    quantize = options("int4", quantize_skip="blocks.1.*")
    loaded = load_model(path, mesh=Mesh(rank, pp=2), quantize=quantize)
    return [layer.weight.numel() for _, layer in linear_layers(loaded.model.chunks)]


def test_a_stage_may_have_none_of_the_skipped_layers(folder, run_ranks):
    first, second = run_ranks(2, weights_on, str(folder / "plain"))
    assert first == [0] * 4 and all(second)


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_quantized_checkpoint_is_read_as_it_was_written(how, symmetric, folder):
    """Its record has each word of how it was made, and the names and shapes are those that a reader looks for."""
    asked = options(how, quantize_symmetric=symmetric, quantize_skip="blocks.0.mlp.*, blocks.1.attention.qkv")
    loaded = load_model(str(folder / "plain"), quantize=asked)
    made = quantized.quantized(loaded, asked)
    again = quantized.stored_options(made.state[QUANTIZED])
    words = "quantize quantize_group_size quantize_symmetric".split()
    assert [getattr(again, name) for name in words] == [how, GROUP, symmetric] and made.state[QUANTIZED][
        "scale"
    ] == "float32"
    assert set(again.quantize_skip.split(",")) == {"blocks.0.mlp.*", "blocks.1.attention.qkv"}
    plain = {f"{name}.weight": layer for name, layer in linear_layers([load_model(str(folder / "plain")).model])}
    parts = {"values": 2 if how == "int4" else 1, "scale": GROUP, "zero": GROUP}
    for name, layer in plain.items():
        if name.startswith("blocks.0.mlp.") or name == "blocks.1.attention.qkv.weight":
            assert tuple(made.tensors[name].shape) == tuple(layer.weight.shape) and f"{name}.scale" not in made.tensors
            continue
        *rows, inputs = layer.weight.shape
        for part, each in parts.items():
            if part == "zero" and how != "int4":
                assert f"{name}.zero" not in made.tensors
                continue
            last = inputs // each if part == "values" or how == "int4" else 1
            assert tuple(made.tensors[f"{name}.{part}"].shape) == (*rows, last)
            assert tuple(made.compute(f"{name}.{part}").shape) == (*rows, last)


def test_groups_have_to_divide_the_inputs(folder):
    with pytest.raises(
        SettingsError, match="--quantize-group-size 128 does not divide the 24 inputs of blocks.0.attention"
    ):
        load_model(str(folder / "plain"), quantize=QuantizeOptions(quantize="int4"))


def test_memory_is_that_of_the_format(folder):
    """No weight of the format before is held by anything."""
    model = load_model(str(folder / "plain"), quantize=options("int4")).model
    layer = model.blocks["0"].mlp.up
    packed, scale, zero = layer.product.weight_operand(layer.weight)
    assert packed.numel() * 2 == 96 * 24 and packed.dtype == zero.dtype == torch.uint8
    assert scale.numel() == zero.numel() == 96 * 24 // GROUP
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() <= parameter.nbytes


def test_weights_that_two_parts_share_stay_shared():
    """Two stages of one rank with the same table: its memory alone is left of that of all weights."""
    memory, first, second = torch.arange(10.0), torch.nn.Module(), torch.nn.Module()
    first.table, second.table = (torch.nn.Parameter(memory[:4].view(2, 2)) for _ in range(2))
    second.weight = torch.nn.Parameter(memory[4:].view(3, 2))
    free_weights([first, second], {"weight": second})
    assert first.table.data_ptr() == second.table.data_ptr() and first.table.tolist() == [[0, 1], [2, 3]]
    assert first.table.untyped_storage().nbytes() == 16 and second.weight.shape == (0, 2)


def test_its_speed_and_memory_are_measured(capsys):
    """With random weights; 12 h^2 weights of a layer take a byte instead of four, and a scale for each output."""
    shape = (
        "--num-layers 2 --hidden-size 24 --num-attention-heads 3 --vocab-size 100 --prompt-length 4 --output-length 2"
    )
    found = []
    for more in ("", "--quantize int8"):
        benchmark_inference.main(f"{shape} --batch-size 1 --iterations 1 --warmup 0 --device cpu --json {more}".split())
        found.append(json.loads(capsys.readouterr().out))
    linear, outputs = 2 * 12 * 24**2, 2 * 24 * 9
    assert [one["precision"] for one in found] == ["fp32", "fp32 int8"]
    assert found[0]["weights"] - found[1]["weights"] == pytest.approx((3 * linear - 4 * outputs) / 1e6)


def test_torchao_rounds_no_better(folder):
    """The relative error of a layer's output, with torchao's int8 weights as a peer."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = load_model(str(folder / "plain")).model.blocks["0"].mlp.up
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(3))
    peer = torch.nn.Sequential(torch.nn.Linear(24, 96, bias=False))
    peer[0].weight.data = layer.weight.data.reshape(96, 24).clone()
    wanted = peer(x)
    quantization.quantize_(peer, quantization.Int8WeightOnlyConfig())
    own = x @ by_hand(layer.weight.data, "int8").reshape(96, 24).T
    error = lambda y: ((y - wanted).norm() / wanted.norm()).item()
    assert error(own) == pytest.approx(error(peer(x)), rel=0.1)


@pytest.mark.parametrize(
    "flags, kind, said",
    [
        ("", UsageError, "missing: --quantize"),
        ("--quantize int8 --drop-layers", UsageError, "int8 and --drop-layers: one of them is measured"),
        ("--prune-ratio 1.5", SettingsError, "--prune-ratio 1.5 has to be above 0"),
        ("--sparsity 3:2", SettingsError, "--sparsity 3:2 has to keep some weights"),
        ("--quantize int8 --output gone/x.json", StorageError, "--output gone/x.json: there is no folder gone"),
        ("--quantize int8 --output .", StorageError, "--output .: is a folder"),
        ("--quantize int8 --picture gone/x.svg", StorageError, "--picture gone/x.svg: there is no folder gone"),
    ],
)
def test_sensitivity_refuses_what_cannot_work_before_it_measures(flags, kind, said):
    with pytest.raises(kind, match=said):
        sensitivity.main(f"--load gone --data-path x {flags}".split())


def test_a_sensitive_layer_is_found_and_left_out(folder, tmp_path, capsys, monkeypatch):
    """The layers are quantized one at a time; the one whose loss grows is recommended, drawn and printed."""
    bad = "blocks.1.mlp.up"

    def evaluate(work):
        layers = dict(linear_layers([work.loaded.model]))
        loss = 3.0 + sum(0.5 if name == bad else 0.001 for name, layer in layers.items() if layer.product)
        return [dict(loss=loss, tokens=10)]

    from megatron.tasks import zeroshot

    monkeypatch.setattr(zeroshot, "evaluate", evaluate)
    monkeypatch.setattr(zeroshot, "prepare", lambda options, loaded, *_: (type("Work", (), dict(loaded=loaded)), []))
    sensitivity.main(
        f"--load {folder / 'plain'} --data-path x --quantize int4 --quantize-group-size 8 --device cpu "
        f"--output {tmp_path / 'found.json'} --picture {tmp_path / 'found.svg'}".split()
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["skip"] == [bad] and found["increase"][bad] == pytest.approx(0.5)
    assert found["kinds"]["attention.qkv"] == pytest.approx(0.002)
    assert f"to skip for at most +0.01: {bad}" in capsys.readouterr().out
    assert "blocks.1.mlp.up *" in (tmp_path / "found.svg").read_text()
