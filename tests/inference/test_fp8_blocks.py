# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 as it is published: matrices in fp8 with a scale of each block, and a layer that predicts a second token.
Kimi K2, whose model_type is its own.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.errors import CheckpointError
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import assert_same, loaded, save
from tests.inference.test_hf_settings import BASES

BLOCK = (16, 12)  # a matrix ends within a block
QUANTIZED = dict(quantization_config=dict(quant_method="fp8", weight_block_size=list(BLOCK)))


@pytest.fixture
def theirs(tmp_path):
    """A DeepSeek-V3 of ours as a folder of Hugging Face, in fp32."""
    save(tmp_path / "ours", BASES["deepseek_v3"])
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--dtype", "fp32", "--unchecked"])
    return tmp_path / "theirs"


def change(folder, config: dict, files: dict) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    save_file(files, folder / "model.safetensors", dict(format="pt"))


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values in fp8, scales of blocks, the numbers that they stand for), block by block."""
    rows, columns = (-(-size // block) for size, block in zip(matrix.shape, BLOCK, strict=True))
    values, scales, numbers = torch.zeros_like(matrix), torch.zeros(rows, columns), torch.zeros_like(matrix)
    for r in range(rows):
        for c in range(columns):
            at = tuple(slice(n * block, (n + 1) * block) for n, block in zip((r, c), BLOCK, strict=True))
            scales[r, c] = matrix[at].abs().max() / 448
            values[at] = (matrix[at] / scales[r, c]).to(torch.float8_e4m3fn).float()
            numbers[at] = values[at] * scales[r, c]
    return values.to(torch.float8_e4m3fn), scales, numbers


def test_matrices_in_fp8(theirs, tmp_path):
    files = load_file(theirs / "model.safetensors")
    names = [name for name in files if name.endswith("proj.weight") or name.endswith("with_mqa.weight")]
    assert len(names) > 20 and any(
        n % block for name in names for n, block in zip(files[name].shape, BLOCK, strict=True)
    )
    plain = dict(files)
    for name in names:
        files[name], files[f"{name}_scale_inv"], plain[name] = rounded(files[name])
    change(theirs, QUANTIZED, files)
    tool.main(["from-hf", str(theirs), str(tmp_path / "fp8"), "--unchecked"])
    change(theirs, dict(quantization_config=None), plain)
    tool.main(["from-hf", str(theirs), str(tmp_path / "plain"), "--unchecked"])
    assert_same(loaded(tmp_path / "fp8"), loaded(tmp_path / "plain"))


def test_scales_of_other_blocks_are_refused(theirs, tmp_path):
    files = load_file(theirs / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    change(theirs, QUANTIZED, files | {f"{name}_scale_inv": torch.ones(2, 9)})
    with pytest.raises(CheckpointError, match=f"{name}_scale_inv is .*: no scales of its blocks"):
        tool.main(["from-hf", str(theirs), str(tmp_path / "back"), "--unchecked"])
    change(theirs, dict(quantization_config=dict(quant_method="fp8")), files)
    with pytest.raises(CheckpointError, match="has no weight_block_size"):
        tool.main(["from-hf", str(theirs), str(tmp_path / "back"), "--unchecked"])


def test_the_layer_that_predicts_a_second_token_is_left_out(theirs, tmp_path, capsys):
    files = load_file(theirs / "model.safetensors")
    layers = json.loads((theirs / "config.json").read_text())["num_hidden_layers"]
    more = {f"model.layers.{layers}.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    change(theirs, {}, files | more)
    tool.main(["from-hf", str(theirs), str(tmp_path / "back"), "--unchecked"])
    assert f"left out as in transformers: model.layers.{layers}.enorm.weight" in capsys.readouterr().out
    assert_same(loaded(tmp_path / "back"), loaded(tmp_path / "ours"))
    change(theirs, {}, files | {f"model.layers.{layers + 1}.enorm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match="enorm.weight: unknown"):
        tool.main(["from-hf", str(theirs), str(tmp_path / "again"), "--unchecked"])


def test_kimi_k2_is_a_deepseek_v3(theirs, tmp_path, capsys):
    change(theirs, dict(model_type="kimi_k2"), load_file(theirs / "model.safetensors"))
    tool.main(["from-hf", str(theirs), str(tmp_path / "back")])
    assert "transformers has no" in capsys.readouterr().out
    assert_same(loaded(tmp_path / "back"), loaded(tmp_path / "ours"))
