# SPDX-License-Identifier: Apache-2.0
"""GPTQ: against a plain implementation that inverts H again for each column, and models on several ranks against one.
Checkpoints of quantized models, in any layout.
"""

import json
import re

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.data.indexed import write_index
from megatron.errors import CheckpointError, DataError, SettingsError, UsageError
from megatron.inference import gptq
from megatron.inference.load import load_model
from megatron.inference.quantize import KINDS, linear_layers
from megatron.inference.scoring import score
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.mesh import Mesh
from megatron.tools import benchmark_inference, checkpoint, prune, sensitivity
from tests.models.test_quantization import LINE
from tests.training.plain_loop import EOD, LENGTH

GROUP = 8
TOKENS = torch.randint(EOD, (LENGTH, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(checkpoint, prefix of a calibration text)."""
    path = tmp_path_factory.mktemp("trained")
    pretrain_gpt.main(f"{LINE} --lr 3e-2 --adam-eps 1e-8 --save {path / 'model'}".split())
    tokens, prefix = TOKENS.t().numpy().astype(np.int32), path / "text"
    tokens.tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.int32, np.full(len(tokens), LENGTH), np.arange(len(tokens) + 1))
    return path / "model", str(prefix)


def options(how: str, prefix: str, **more) -> QuantizeOptions:
    own = dict(quantize=how, quantize_group_size=GROUP, quantize_method="gptq", calibration_data=[prefix])
    return QuantizeOptions(**own | dict(calibration_samples=16) | more)


def plain_grid(rows: torch.Tensor, how: str):
    """(step, zero) of rows in fp64."""
    if how == "int8":
        return rows.abs().amax(1, keepdim=True) / 127, torch.zeros(len(rows), 1, dtype=rows.dtype)
    least, largest = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    step = (largest - least) / 15
    return step, torch.round(-least / step)


def plain_gptq(weight: torch.Tensor, hessian: torch.Tensor, how: str) -> torch.Tensor:
    """Optimal brain quantization in order (arXiv:2210.17323, equations 2 and 3): the rounded weight. Zeros stay."""
    mask = (weight != 0).double()
    weight, result = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    hessian = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    least, largest = (-127, 127) if how == "int8" else (0, 15)
    step, zero = plain_grid(weight, how)
    for column in range(weight.shape[1]):
        if how == "int4" and column % GROUP == 0:
            step, zero = plain_grid((weight * mask)[:, column : column + GROUP], how)
        now = weight[:, column : column + 1]
        rounded = (torch.clamp(torch.round(now / step + zero), least, largest) - zero) * step * mask[:, column, None]
        result[:, column] = rounded[:, 0]
        inverse = torch.linalg.inv(hessian[column:, column:])
        weight[:, column:] -= (now - rounded) / inverse[0, 0] * inverse[0]
    return result


@pytest.mark.parametrize("how, masked", [("int8", False), ("int4", False), ("int4", True)])
def test_columns_are_rounded_as_a_plain_implementation_does(how, masked, monkeypatch):
    """Over several products of corrections, with correlated inputs. An input that is always 0 does no harm."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(200, 48, generator=generator) @ torch.randn(48, 48, generator=generator)
    weight = torch.randn(20, 48, generator=generator)
    weight[torch.randn(20, 48, generator=generator) < 0 if masked else slice(0)] = 0.0
    hessian, kind = inputs.t() @ inputs, KINDS[how]
    monkeypatch.setattr(gptq, "COLUMNS", 16)
    grid = kind.grid.__get__(kind.__new__(kind))
    found = gptq.gptq(weight, hessian, grid, kind.least, kind.largest, GROUP if how == "int4" else None).weight()
    torch.testing.assert_close(found.double(), plain_gptq(weight, hessian, how), atol=1e-4, rtol=1e-4)
    error = lambda rounded: (inputs @ (rounded - weight).t()).norm().item()
    nearest = plain_gptq(weight, torch.eye(48), how).float()
    assert error(found) < (1.0 if masked else 0.85) * error(nearest)
    assert (found[weight == 0] == 0).all()
    hessian[5] = hessian[:, 5] = 0
    assert gptq.gptq(weight, hessian, grid, kind.least, kind.largest, None).weight().isfinite().all()


def test_layers_are_calibrated_on_the_inputs_that_quantized_blocks_give(trained):
    """The second block's `up`, by hand: with the first block's weights rounded, and the second block's own."""
    path, prefix = trained
    found = load_model(str(path), quantize=options("int4", prefix)).model
    model, inputs = load_model(str(path)).model, []
    for name, layer in linear_layers([model]):
        if name.startswith("blocks.0."):
            product = found.blocks["0"].get_submodule(name.split(".", 2)[2]).product
            layer.weight.data = product.codes().weight().view_as(layer.weight)
    layer = model.blocks["1"].mlp.up
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().flatten(0, 1)))
    model.logits(TOKENS)
    [x] = inputs
    wanted = plain_gptq(layer.weight.data.reshape(-1, 24), x.t() @ x, "int4")
    rounded = found.blocks["1"].mlp.up.product.codes().weight()
    assert ((rounded - wanted).abs() < 1e-4).float().mean() > 0.995  # a rare tie falls to the other side
    assert found.blocks["1"].mlp.up.weight.numel() == 0


def logits_on(rank: int, path: str, how: QuantizeOptions):
    return load_model(path, mesh=Mesh(rank, tp=3), quantize=how).model.logits(TOKENS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_tensor_parallel_ranks_round_as_one_does(how, trained, run_ranks):
    path, prefix = trained
    own = options(how, prefix)
    loaded = load_model(str(path), quantize=own)
    assert loaded.notices[-1] == f"calibrated on 16 windows of {LENGTH} tokens"
    wanted, plain = loaded.model.logits(TOKENS), load_model(str(path)).model.logits(TOKENS)
    nearest = load_model(str(path), quantize=QuantizeOptions(how, GROUP)).model.logits(TOKENS)
    error = lambda logits: (logits - plain).norm().item()
    assert error(wanted) < 0.95 * error(nearest)
    for one in run_ranks(3, logits_on, str(path), own):
        assert (one[..., :EOD] - wanted[..., :EOD]).norm() < 0.02 * error(wanted)


@pytest.fixture(scope="module")
def stored(trained, tmp_path_factory):
    """Format -> checkpoint of the quantized model."""
    path, prefix = trained
    made = {how: tmp_path_factory.mktemp("stored") / how for how in KINDS}
    for how, folder in made.items():
        flags = f"--quantize {how} --quantize-group-size {GROUP} --quantize-skip blocks.0.mlp.up"
        checkpoint.main(["quantize", str(path), str(folder), *flags.split()])
    return made


def stored_on(rank: int, path: str, sizes: dict):
    loaded = load_model(path, mesh=Mesh(rank, **sizes))
    layers = dict(linear_layers(getattr(loaded.model, "chunks", [loaded.model])))
    empty = [name for name, layer in layers.items() if layer.weight.numel() == 0]
    assert empty and "blocks.0.mlp.up" not in empty
    return score(loaded.model, TOKENS.t().flatten().numpy(), length=LENGTH, stride=LENGTH, batch_size=4).loss


@pytest.mark.sampled(10)
@pytest.mark.parametrize("how", list(KINDS))
def test_a_quantized_checkpoint_is_loaded_by_any_layout(how, trained, stored, run_ranks):
    own = QuantizeOptions(how, GROUP, "blocks.0.mlp.up")
    wanted = load_model(str(trained[0]), quantize=own).model
    found = load_model(str(stored[how])).model
    torch.testing.assert_close(found.logits(TOKENS), wanted.logits(TOKENS), rtol=0, atol=0)
    of_one = score(wanted, TOKENS.t().flatten().numpy(), length=LENGTH, stride=LENGTH, batch_size=4).loss
    for sizes in (dict(tp=3), dict(pp=2)):
        of_ranks = run_ranks(max(sizes.values()), stored_on, str(stored[how]), sizes)
        assert of_ranks[0] == pytest.approx(of_one, rel=1e-5)


def test_a_quantized_checkpoint_says_itself_which_layers_are_not(trained, tmp_path):
    """Also where a file has named them, which is gone."""
    skip, file = ["blocks.0.mlp.up", "blocks.1.attention.*"], tmp_path / "found.json"
    file.write_text(json.dumps(dict(skip=skip)))
    flags = f"--quantize int8 --quantize-skip {file}"
    checkpoint.main(["quantize", str(trained[0]), str(tmp_path / "out"), *flags.split()])
    file.unlink()
    layers = linear_layers([load_model(str(tmp_path / "out")).model])
    whole = {"blocks.0.mlp.up", "blocks.1.attention.qkv", "blocks.1.attention.output"}
    assert {name for name, layer in layers if layer.weight.numel()} == whole


def test_commands_that_need_plain_weights_name_what_a_quantized_checkpoint_is(stored, trained, tmp_path):
    path = str(stored["int4"])
    with pytest.raises(SettingsError, match="--quantize int8: .* is quantized already, as int4"):
        load_model(path, quantize=QuantizeOptions("int8"))
    with pytest.raises(CheckpointError) as error:
        pretrain_gpt.main(f"{LINE} --load {path} --finetune".split())
    assert "it is quantized: generate, evaluate, lm_eval, serve and export read it" in str(error.value)
    for command in ("to-hf", "to-megatron"):
        with pytest.raises(SettingsError, match="is quantized"):
            checkpoint.main([command, path, str(tmp_path / "out")])
    with pytest.raises(UsageError, match="missing: --quantize"):
        checkpoint.main(["quantize", path, str(tmp_path / "out")])
    with pytest.raises(SettingsError, match="is quantized, and pruning needs the weights themselves"):
        prune.main(["--load", path, "--save", str(tmp_path / "out"), "--target-num-layers", "1"])


@pytest.mark.parametrize(
    "more, kind, said",
    [
        (dict(calibration_data=None), UsageError, "the inputs of layers are not known without a text"),
        (dict(calibration_samples=0), SettingsError, "--calibration-samples 0: has to be at least 1"),
        (dict(calibration_samples=500), None, "calibrated on 16 windows of 12 tokens .*500: there are no more"),
        (dict(calibration_data=["gone"]), DataError, "gone"),
    ],
)
def test_what_cannot_be_calibrated_is_said(more, kind, said, trained):
    path, prefix = trained
    if kind is None:
        assert re.match(said, load_model(str(path), quantize=options("int8", prefix, **more)).notices[-1])
        return
    with pytest.raises(kind, match=said):
        load_model(str(path), quantize=options("int8", prefix, **more))


def test_commands_that_cannot_calibrate_say_so():
    gptq_flags = "--quantize int4 --quantize-method gptq --calibration-data x"
    with pytest.raises(UsageError, match="--quantize-method gptq: layers are rounded one at a time here"):
        sensitivity.main(f"--load gone --data-path x {gptq_flags}".split())
    shape = (
        "--num-layers 1 --hidden-size 24 --num-attention-heads 3 --vocab-size 100 --prompt-length 2 --output-length 2"
    )
    with pytest.raises(SettingsError, match="random weights are not calibrated"):
        benchmark_inference.main(f"{shape} --batch-size 1 --device cpu {gptq_flags}".split())
