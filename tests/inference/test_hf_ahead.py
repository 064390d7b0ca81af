# SPDX-License-Identifier: Apache-2.0
"""Depths of multi-token prediction in the files of Hugging Face, against their definition (arXiv:2412.19437, section 2.2):
norms of the next token's embedding and of the network's states, a matrix from both, a layer, a norm, the output layer.

transformers leaves these tensors out; here its own layers compute them, as a model of one depth's layers alone.
"""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.reader import Reader
from megatron.convert.hf_files import TensorFiles
from megatron.errors import CheckpointError
from megatron.inference.load import load_model
from megatron.tools import checkpoint as tool
from tests.inference.make_megatron_kinds import S, tokens
from tests.inference.test_convert import assert_same, loaded
from tests.inference.test_families import CASES as DECODERS
from tests.inference.test_families import COMMON as OF_DECODERS
from tests.inference.test_mamba_families import CASES as SCANS
from tests.inference.test_mamba_families import COMMON as OF_SCANS
from tests.inference.test_megatron_kinds import logits_of_depths

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.sampled(10)

L = OF_DECODERS["num_hidden_layers"]
KINDS = {  # kind -> (its config, that of the layers of a depth alone, names of what is before the layers, and after them)
    "deepseek_v3": (
        OF_DECODERS | DECODERS["deepseek_v3"] | dict(num_nextn_predict_layers=1),
        dict(num_hidden_layers=1, first_k_dense_replace=0),
        [f"model.layers.{L}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")],
    ),
    "qwen3_next": (
        OF_DECODERS | DECODERS["qwen3_next"] | dict(layer_types=["linear_attention", "full_attention"] * (L // 2)),
        dict(num_hidden_layers=1, layer_types=["full_attention"]),
        [f"mtp.{name}" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")],
    ),
    "nemotron_h": (
        OF_SCANS | SCANS["nemotron_h"] | dict(num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "mlp"]),
        dict(layers_block_type=["full_attention", "mlp"], num_nextn_predict_layers=0),
        [f"mtp.layers.{name}" for name in ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm")],
    ),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, seed: int, **config):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = transformers.AutoConfig.for_model(kind, **config)
        model = transformers.AutoModelForCausalLM.from_config(given, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(0.1 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model


def files_of(model, folder) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def their_layers(kind: str, name: str) -> str:
    """The name in the files of a tensor of a model of a depth's layers alone."""
    if kind == "deepseek_v3":
        return name.replace("model.layers.0.", f"model.layers.{L}.")
    return name.replace("model.layers.", "mtp.layers.").replace("backbone.layers.", "mtp.layers.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`folder(kind)`: (folder of files with a depth, their network's logits and that depth's)."""
    found = {}

    def make(kind):
        if kind not in found:
            place, (config, alone, names) = tmp_path_factory.mktemp(kind), KINDS[kind]
            network, depth = made(kind, 3, **config), made(kind, 4, **config | alone)
            files, of_depth = files_of(network, place / "theirs"), files_of(depth, place / "depth")
            layers = {one: x for one, x in of_depth.items() if ".layers." in one}
            files |= {their_layers(kind, one): x for one, x in layers.items()}
            found[kind] = place / "theirs", with_depth(kind, network, depth, files, names)
            save_file(files, place / "theirs" / "model.safetensors", metadata=dict(format="pt"))
        return found[kind]

    return make


@torch.no_grad()
def with_depth(kind: str, network, depth, files: dict, names: list[str]) -> list[torch.Tensor]:
    """Add the tensors around the layers of a depth, and compute as the definition says: logits [b, s, v] of both."""
    h, generator = network.config.hidden_size, torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.2
    enorm, hnorm, last = draw(h) + 1, draw(h) + 1, draw(h) + 1
    matrix, table = draw(h, 2 * h), network.get_input_embeddings().weight
    centred = kind == "qwen3_next"
    stored = [x - 1 if centred and x.dim() == 1 else x for x in (enorm, hnorm, matrix, last)]
    files |= {f"{name}.weight": x.contiguous() for name, x in zip(names, stored, strict=True)}
    if kind == "deepseek_v3":
        files[f"model.layers.{L}.embed_tokens.weight"] = table.clone()
        files[f"model.layers.{L}.shared_head.head.weight"] = network.lm_head.weight.clone()
    depth.lm_head.weight.copy_(network.lm_head.weight)
    norm = next(module for name, module in depth.named_modules() if name in ("model.norm", "model.norm_f"))
    norm.weight.copy_(stored[-1])
    epsilon = getattr(network.config, "rms_norm_eps", None) or network.config.layer_norm_epsilon
    rms = lambda x, weight: x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
    out = network(tokens(), output_hidden_states=True)
    states = out.hidden_states[-1]  # after the final norm
    ahead = table[tokens().roll(-1, 1)]
    both = torch.cat((rms(ahead, enorm), rms(states, hnorm)), -1)
    return [out.logits, depth(inputs_embeds=both @ matrix.t()).logits]


@EVERY
def test_a_depth_computes_what_the_definition_says(kind, folder, tmp_path):
    theirs, want = folder(kind)
    tool.main(["from-hf", str(theirs), str(tmp_path / "ours"), "--mtp-num-layers", "1"])
    model = load_model(str(tmp_path / "ours")).model
    for depth, (got, logits) in enumerate(zip(logits_of_depths(model), want, strict=True)):
        assert (got - logits)[:, : S - depth].abs().max() < 2e-5 * logits.abs().max()


@EVERY
def test_depths_come_back_as_they_were(kind, folder, tmp_path):
    theirs, _ = folder(kind)
    tool.main(["from-hf", str(theirs), str(tmp_path / "ours"), "--mtp-num-layers", "1"])
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "out"), "--dtype", "fp32"])
    before, after = TensorFiles(theirs), TensorFiles(tmp_path / "out")
    assert set(before.shapes) == set(after.shapes)
    for name in before.shapes:
        torch.testing.assert_close(after.get(name), before.get(name), rtol=0, atol=3e-7, msg=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    tool.main(["from-hf", str(tmp_path / "out"), str(tmp_path / "back"), "--mtp-num-layers", "1"])
    assert_same(loaded(tmp_path / "back"), loaded(tmp_path / "ours"))


@EVERY
def test_without_the_flag_they_are_left_out(kind, folder, tmp_path, capsys):
    tool.main(["from-hf", str(folder(kind)[0]), str(tmp_path / "ours"), "--unchecked"])
    assert "from-hf --mtp-num-layers 1 imports depths" in capsys.readouterr().out
    assert not any(name.startswith("mtp.") for name in loaded(tmp_path / "ours"))
    with Reader(tmp_path / "ours" / "iter_0000000") as reader:
        assert not reader.state["config"]["model"]["mtp_num_layers"]


def test_what_is_not_there_is_named(folder, tmp_path):
    theirs, _ = folder("qwen3_next")
    words = ["from-hf", str(theirs), str(tmp_path / "ours"), "--mtp-num-layers"]
    with pytest.raises(CheckpointError, match="--mtp-num-layers 2 of a qwen3_next: its family has at most 1"):
        tool.main([*words, "2"])
    theirs, _ = folder("deepseek_v3")
    with pytest.raises(CheckpointError, match=f"model.layers.{L + 1}.enorm.weight: missing"):
        tool.main(["from-hf", str(theirs), str(tmp_path / "ours"), "--mtp-num-layers", "2"])
    files, head = load_file(theirs / "model.safetensors"), f"model.layers.{L}.shared_head.head.weight"
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((theirs / "config.json").read_text())
    save_file(files | {head: files[head] + 1}, other / "model.safetensors", metadata=dict(format="pt"))
    with pytest.raises(CheckpointError, match="shared_head.head.weight in .* differs from lm_head.weight"):
        tool.main(["from-hf", str(other), str(tmp_path / "ours"), "--mtp-num-layers", "1"])
