# SPDX-License-Identifier: Apache-2.0
"""gpt-oss as it is published: experts in MXFP4. transformers' own conversion of random blocks is the oracle."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.convert.export.load_exported import load_exported
from megatron.convert.hf_blocks import dequantized
from megatron.errors import CheckpointError
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import loaded
from tests.inference.test_families import COMMON, GPT_OSS

transformers = pytest.importorskip("transformers")
E, H, F = 4, 32, 64  # experts, hidden size, width of an expert


def test_numbers_of_four_bits():
    """E2M1 with the sign in the top bit: subnormal 0.5, then (1 + m / 2) 2^(e - 1); the first number in the low bits."""
    blocks = torch.arange(16, dtype=torch.uint8).view(1, 1, 16) + 16 * (15 - torch.arange(16, dtype=torch.uint8))

    def value(code: int) -> float:
        sign, e, m = (-1) ** (code >> 3), code >> 1 & 3, code & 1
        return sign * (0.5 * m if e == 0 else (1 + m / 2) * 2.0 ** (e - 1))

    for scale in (127, 120, 130):
        wanted = [[value(code), value(15 - code)] for code in range(16)]
        wanted = torch.tensor(wanted).flatten() * 2.0 ** (scale - 127)
        found = dequantized(blocks, torch.tensor([[scale]], dtype=torch.uint8))
        assert torch.equal(found[0], wanted)


@pytest.fixture
def published(tmp_path):
    """A folder with blocks and scales, and the experts' weights that transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    settings = COMMON | GPT_OSS | dict(intermediate_size=F, num_local_experts=E, num_experts_per_tok=2)
    config = transformers.AutoConfig.for_model("gpt_oss", **settings)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    files, wanted = load_file(tmp_path / "theirs" / "model.safetensors"), {}
    for name, rows, inputs in (("gate_up_proj", 2 * F, H), ("down_proj", H, F)):
        for layer in range(settings["num_hidden_layers"]):
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = torch.randint(256, (E, rows, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 126, (E, rows, inputs // 32), dtype=torch.uint8)
            files |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
            assert files.pop(whole).shape == (E, inputs, rows)
            wanted[whole] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(files, tmp_path / "theirs" / "model.safetensors", dict(format="pt"))
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=dict(quant_method="mxfp4"))))
    return tmp_path / "theirs", wanted


@pytest.mark.sampled(5)
def test_published_weights_are_dequantized(published, tmp_path, capsys):
    folder, wanted = published
    tool.main(["from-hf", str(folder), str(tmp_path / "ours")])
    said = capsys.readouterr().out
    assert "both models agree" in said and "quantization_config" not in said
    ours = loaded(tmp_path / "ours")
    for layer in range(COMMON["num_hidden_layers"]):
        experts, own = f"model.layers.{layer}.mlp.experts.", f"blocks.{layer}.mlp.experts."
        up = wanted[f"{experts}gate_up_proj"]
        for half in (0, 1):  # gates and values in turns
            assert torch.equal(ours[f"{own}up.weight"][:, half], up[:, :, half::2].transpose(1, 2))
        assert torch.equal(ours[f"{own}down.weight"], wanted[f"{experts}down_proj"].transpose(1, 2))
    opened = dict(load_exported(str(folder)).model.named_parameters())
    assert all(torch.equal(x[: len(ours[name])], ours[name]) for name, x in opened.items())


@pytest.mark.sampled(10)
def test_blocks_that_do_not_fit_are_named(published, tmp_path):
    folder, _ = published
    files = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    files[name] = files[name][:, :, :1].contiguous()
    save_file(files, folder / "model.safetensors", dict(format="pt"))
    with pytest.raises(CheckpointError, match="down_proj_blocks is .* no MXFP4"):
        tool.main(["from-hf", str(folder), str(tmp_path / "ours")])
    del files[name]
    save_file(files, folder / "model.safetensors", dict(format="pt"))
    with pytest.raises(CheckpointError, match="layers.1.mlp.experts.down_proj: missing"):
        tool.main(["from-hf", str(folder), str(tmp_path / "ours")])
