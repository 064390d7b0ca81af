# SPDX-License-Identifier: Apache-2.0
"""Exports in parts, damaged or incomplete in twenty ways: an import names the tensor or the file and writes nothing, or its
model computes what transformers does with the files as they were. No tensor is lost in silence.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.convert.given_model import load_one_model
from megatron.convert.huggingface import from_hf
from megatron.errors import Failure
from megatron.inference.load import load_model
from megatron.tools import checkpoint as tool
from megatron.training.conversion_commands import fresh_state

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
INDEX = "model.safetensors.index.json"
QUERIES, LAST, HEAD = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """What `to-hf` writes of a tiny Llama, saved again by transformers in several files; and its logits."""
    root = tmp_path_factory.mktemp("exports")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = transformers.LlamaConfig(**sizes, **ends, num_key_value_heads=2, max_position_embeddings=16)
    transformers.LlamaForCausalLM(config).save_pretrained(root / "theirs")
    from_hf(root / "theirs", root / "ours", fresh_state(), check=False)
    tool.main(["to-hf", str(root / "ours"), str(root / "whole"), "--dtype", "fp32"])
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "whole", dtype=torch.float32)
    model.save_pretrained(root / "parts", max_shard_size="20KB")
    assert len(list((root / "parts").glob("*.safetensors"))) > 3
    with torch.no_grad():
        return root / "parts", model(IDS).logits


class Parts:
    """The files of an export, and changes to them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = json.loads((folder / INDEX).read_text())
        self.map = self.index["weight_map"]

    def file(self, name: str) -> Path:
        return self.folder / self.map[name]

    def write_index(self) -> None:
        (self.folder / INDEX).write_text(json.dumps(self.index))

    def rewrite(self, name: str, change) -> None:
        """`change` gets the tensors of the file with this one."""
        file = self.file(name)
        tensors = load_file(file)
        change(tensors)
        save_file({key: x.contiguous() for key, x in tensors.items()}, file, metadata=dict(format="pt"))

    def configure(self, **more) -> None:
        file = self.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))


def without_an_entry(parts: Parts) -> None:
    del parts.map[LAST]
    parts.write_index()


def in_a_wrong_file(parts: Parts) -> None:
    parts.map[LAST] = parts.map[EMBEDDING]
    parts.write_index()


def in_a_file_that_is_not_there(parts: Parts) -> None:
    parts.map[LAST] = "model-00099-of-00099.safetensors"
    parts.write_index()


def renamed(parts: Parts) -> None:
    parts.rewrite(QUERIES, lambda tensors: tensors.update({QUERIES + "_": tensors.pop(QUERIES)}))
    parts.map[QUERIES + "_"] = parts.map.pop(QUERIES)
    parts.write_index()


def copied(name: str, beside: str, change=lambda x: x):
    """A tensor in a file more, which the index names for another one; as of an older export, if it changed."""

    def harm(parts: Parts) -> None:
        copy = change(load_file(parts.file(name))[name])
        parts.rewrite(beside, lambda tensors: tensors.update({name: copy}))

    return harm


def one_more(parts: Parts) -> None:
    name = "model.layers.0.self_attn.q_proj.gate"
    parts.rewrite(QUERIES, lambda tensors: tensors.update({name: torch.ones(3)}))
    parts.map[name] = parts.map[QUERIES]
    parts.write_index()


def no_head(parts: Parts) -> None:
    parts.rewrite(HEAD, lambda tensors: tensors.pop(HEAD))
    del parts.map[HEAD]
    parts.write_index()


def cut_behind_the_header(parts: Parts) -> None:
    content = parts.file(LAST).read_bytes()
    parts.file(LAST).write_bytes(content[: len(content) - 64])


def an_overlap(parts: Parts) -> None:
    """A header by which two tensors lie in the same bytes."""
    file = parts.file(QUERIES)
    content = file.read_bytes()
    [size] = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    first, second, *_ = (name for name in header if name != "__metadata__")
    header[second] = header[first]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def other(name: str, change):
    return lambda parts: parts.rewrite(name, lambda tensors: tensors.update({name: change(tensors[name])}))


def stale(parts: Parts) -> None:
    """A whole file of another model beside the parts."""
    tensors = {name: torch.zeros_like(load_file(parts.file(name))[name]) for name in parts.map}
    save_file(tensors, parts.folder / "model.safetensors", metadata=dict(format="pt"))


DAMAGES = {  # what happened -> (how, what the message names; None: the model is whole)
    "a file is missing": (lambda parts: parts.file(LAST).unlink(), "model-0"),
    "a file is empty": (lambda parts: parts.file(LAST).write_bytes(b""), "model-0"),
    "a file is cut in its header": (
        lambda parts: parts.file(LAST).write_bytes(parts.file(LAST).read_bytes()[:60]),
        "model-0",
    ),
    "a file is cut in its data": (cut_behind_the_header, "model-0"),
    "two tensors in the same bytes": (an_overlap, "model-0"),
    "the index is missing": (lambda parts: (parts.folder / INDEX).unlink(), "safetensors"),
    "the index is cut": (lambda parts: (parts.folder / INDEX).write_text(json.dumps(parts.index)[:99]), INDEX),
    "the index lacks a tensor": (without_an_entry, None),
    "the index names another file": (in_a_wrong_file, None),
    "the index names a file that is not there": (in_a_file_that_is_not_there, "model-00099-of-00099"),
    "a file lacks a tensor of the index": (
        lambda parts: parts.rewrite(QUERIES, lambda tensors: tensors.pop(QUERIES)),
        QUERIES,
    ),
    "a tensor has another name": (renamed, QUERIES),
    "a tensor more": (one_more, "q_proj.gate"),
    "a copy in another file": (copied(LAST, EMBEDDING), None),
    "an old tensor in an earlier file": (copied(LAST, EMBEDDING, lambda x: x + 1), LAST),
    "an old tensor in a later file": (copied(EMBEDDING, LAST, lambda x: x + 1), EMBEDDING),
    "no output layer": (no_head, HEAD),
    "a transposed tensor": (other(LAST, torch.t), LAST),
    "a tensor with a row less": (other(EMBEDDING, lambda x: x[:-1]), EMBEDDING),
    "a tensor without rows": (other(QUERIES, lambda x: x[:0]), QUERIES),
    "whole numbers without scales": (other(QUERIES, lambda x: x.to(torch.int8)), QUERIES),
    "not a number": (other(QUERIES, lambda x: x.fill_(float("nan"))), QUERIES),
    "a layer less in config.json": (lambda parts: parts.configure(num_hidden_layers=1), "model.layers.1."),
    "a layer more in config.json": (lambda parts: parts.configure(num_hidden_layers=3), "model.layers.2."),
    "other heads in config.json": (lambda parts: parts.configure(num_key_value_heads=4), "k_proj"),
    "a stale whole file": (stale, "model.safetensors"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_tensor_is_lost_in_silence(damage, export, tmp_path):
    folder, want = export
    folder = shutil.copytree(folder, tmp_path / "copy")
    harm, named = DAMAGES[damage]
    harm(Parts(folder))
    if named is None:
        from_hf(folder, tmp_path / "out", fresh_state(), check=False)
        with torch.no_grad():
            found = load_model(tmp_path / "out", precision="fp32").model.logits(IDS.t()).transpose(0, 1)
        torch.testing.assert_close(found[..., : want.shape[-1]], want, atol=1e-5, rtol=0)
        return
    with pytest.raises(Failure) as raised:
        tool.main(["from-hf", str(folder), str(tmp_path / "out")])
    assert raised.value.code in (4, 5) and named in str(raised.value) and raised.value.do, raised.value
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["export", "checkpoint"])
def test_weights_that_are_not_finite_are_not_used(kind, export, tmp_path):
    """From an export, and from a checkpoint that was written unchecked: no loss of nan, and no empty text."""
    folder = shutil.copytree(export[0], tmp_path / "copy")
    DAMAGES["not a number"][0](Parts(folder))
    if kind == "checkpoint":
        from_hf(folder, tmp_path / "out", fresh_state(), check=False)
    with pytest.raises(Failure, match="NaN or infinity in blocks.0.attention.qkv.weight: the model cannot") as raised:
        load_one_model(str(tmp_path / "out") if kind == "checkpoint" else str(folder), None)
    assert raised.value.code == 5 and raised.value.do
