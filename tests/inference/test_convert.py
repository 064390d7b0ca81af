# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face and of Megatron-LM, in and out: the same numbers, or nothing at all."""

import argparse
import json
import os
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, share
from megatron.errors import CheckpointError, SettingsError, UsageError
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placed_buffers, placements
from megatron.settings import schema
from megatron.tools import checkpoint as tool

pytestmark = pytest.mark.sampled(10)

V, H, HEADS, LAYERS, S = 50, 32, 4, 4, 16
GPT2 = dict(num_layers=LAYERS, hidden_size=H, num_attention_heads=HEADS, seq_length=S, max_position_embeddings=S)
LLAMA = dict(
    GPT2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    num_query_groups=2,
    group_query_attention=True,
    ffn_hidden_size=48,
    kv_channels=16,
    rotary_base=5e4,
    norm_epsilon=1e-6,
)


def weights_of(model: dict, seed=0) -> dict[str, torch.Tensor]:
    """Logical tensors of a model, drawn so that every one of them matters."""
    generator, whole = torch.Generator().manual_seed(seed), GPT(schema.Model(**model), Mesh(), V, device="meta")
    drawn = {n: torch.randn(p.shape, generator=generator) * 0.3 for n, (_, p) in placements(whole).items()}
    for name, buffer in placed_buffers(whole).items():  # biases of experts; counts, which are 0 between steps
        shape, bias = buffer.placement.shape, buffer.placement.buffer.combine == "same"
        drawn[name] = torch.randn(shape, generator=generator) if bias else torch.zeros(shape, dtype=torch.int64)
    return drawn


def save(folder: Path, model: dict, more=(), writers=3, **settings) -> dict[str, torch.Tensor]:
    weights = weights_of(model) | dict(more)
    pieces = [Piece(name, tuple(x.shape), Box.whole(x.shape), x) for name, x in weights.items()]
    record = asdict(schema.from_record(dict(model=model, **settings)))
    with Saver(folder) as saver:
        saver.write(7, [share(pieces, n, writers) for n in range(writers)], dict(config=record, vocab_size=V))
    return weights


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    [path] = checkpoints(folder).values()
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


def assert_same(a: dict, b: dict):
    assert set(a) == set(b)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# ---------------------------------------------------------------------------------------------------- Hugging Face


UNTIED, TIED = dict(untie_embeddings_and_output_weights=True), dict(untie_embeddings_and_output_weights=False)


@pytest.mark.parametrize(
    "model", [GPT2, dict(GPT2, bias_gelu_fusion=False, **UNTIED), dict(GPT2, squared_relu=True), LLAMA, LLAMA | TIED]
)
def test_there_and_back_keeps_every_bit(tmp_path, model, capsys):
    pytest.importorskip("transformers")
    weights = save(tmp_path / "ours", model)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--dtype", "fp32"])
    assert "both models agree" in capsys.readouterr().out
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    assert_same(loaded(tmp_path / "back"), weights)
    with Reader(tmp_path / "back" / "iter_0000000") as reader:
        saved = schema.from_record(reader.state["config"]).model
        assert reader.state["vocab_size"] == V
    for name in (
        "num_layers",
        "query_groups",
        "head_dim",
        "ffn_size",
        "norm_epsilon",
        "rotary_base",
        "bias_gelu_fusion",
        "squared_relu",
    ):
        assert getattr(saved, name) == getattr(schema.Model(**model), name), name


def test_the_export_carries_the_tokenizer(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("megatron.convert.huggingface.PROBES", ("abc cab", "bb aab"))
    characters = ["a", "b", "c", "\u0120", "ab", "<|endoftext|>"]
    (tmp_path / "v.json").write_text(json.dumps({token: n for n, token in enumerate(characters)}))
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n")
    tokenizer = dict(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(tmp_path / "v.json"), merge_file=str(tmp_path / "m.txt")
    )
    save(tmp_path / "ours", GPT2, tokenizer=tokenizer)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--dtype", "bf16"])
    assert "gives the same ids" in capsys.readouterr().out
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs("abc")["input_ids"] == [4, 2] and theirs.eos_token_id == 5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert model.dtype == torch.bfloat16 and model.config.eos_token_id == 5
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    with Reader(tmp_path / "back" / "iter_0000000") as reader:
        assert reader.state["config"]["tokenizer"]["vocab_file"] == str(tmp_path / "back" / "tokenizer" / "vocab.json")


def test_nothing_is_written_when_the_models_differ(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from megatron.model.gpt import hf_settings

    save(tmp_path / "ours", GPT2)
    right = hf_settings.their_settings
    monkeypatch.setattr(
        "megatron.model.gpt.hf_settings.their_settings", lambda *args: right(*args) | dict(activation_function="gelu")
    )
    with pytest.raises(CheckpointError, match="computes something else: logits of transformers differ by"):
        tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    monkeypatch.undo()
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--unchecked"])
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | dict(layer_norm_epsilon=0.1)))
    read = hf_settings.OURS["gpt2"]
    monkeypatch.setitem(hf_settings.OURS, "gpt2", lambda c: read(c | dict(layer_norm_epsilon=1e-5)))
    with pytest.raises(CheckpointError, match="computes something else"):
        tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".tmp*"))


def test_without_transformers_the_message_is_clear(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    save(tmp_path / "ours", GPT2)
    with pytest.raises(SettingsError, match="needs transformers"):
        tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    assert not (tmp_path / "theirs").exists()
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--unchecked"])
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back"), "--unchecked"])


@pytest.mark.sampled(1)
def test_large_models_come_in_several_files(tmp_path):
    weights = save(tmp_path / "ours", LLAMA)
    sizes = "--unchecked --dtype fp32 --max-shard-size 20KB".split()
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), *sizes])
    with pytest.raises(UsageError, match="--max-shard-size 5 apples is not a size"):
        tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "b"), "--max-shard-size", "5 apples"])
    files = sorted((tmp_path / "theirs").glob("*.safetensors"))
    assert len(files) > 3 and all(path.stat().st_size < 22_000 for path in files)
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back"), "--unchecked"])
    assert_same(loaded(tmp_path / "back"), weights)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(model_type="bart"), "model_type 'bart'"),
        (dict(rope_scaling=dict(type="linear")), "not complete"),
        (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type 'dynamic' in config.json cannot be expressed"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "not complete: KeyError\\('low_freq_factor'"),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=2.0, long_factor=[1.0])),
            "long_factor in the rope_parameters",
        ),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (dict(attention_bias=True), "attention_bias True"),
        (dict(hidden_act="relu"), "hidden_act 'relu'"),
        (dict(num_hidden_layers=3), "9 tensors are unknown"),
        (dict(num_hidden_layers=5), "9 tensors are missing"),
        (dict(hidden_size=16), "config.json says"),
        (dict(vocab_size=51), "config.json says"),
        (dict(num_attention_heads=None), "not complete"),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused(tmp_path, change, text):
    save(tmp_path / "ours", LLAMA)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--unchecked"])
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=text):
        tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back"), "--unchecked"])
    assert not (tmp_path / "back").exists()


def test_hostile_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json"):
        tool.main(["from-hf", str(tmp_path), str(tmp_path / "out")])
    save(tmp_path / "ours", GPT2)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--unchecked"])
    shard = tmp_path / "theirs" / "model.safetensors"
    raw = shard.read_bytes()
    for damaged in (raw[:-4], (1 << 63).to_bytes(8, "little") + raw[8:], b"", b"\x80\x04" + raw):
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back"), "--unchecked"])
    index = dict(weight_map={"transformer.wte.weight": "../ours/secret.safetensors"})
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    shard = shard.rename(shard.with_name("model-00001.safetensors"))
    with pytest.raises(CheckpointError, match="no file of its folder"):
        tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back"), "--unchecked"])
    (tmp_path / "theirs" / "model.safetensors.index.json").unlink()
    shard.rename(shard.with_name("pytorch_model.bin"))
    with pytest.raises(CheckpointError, match="no model.safetensors"):
        tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back"), "--unchecked"])


def test_models_that_neither_has_are_named(tmp_path):
    save(tmp_path / "ours", dict(GPT2, swiglu=True))
    with pytest.raises(SettingsError, match="no model of this shape") as caught:
        tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    assert "not GPT-2: --swiglu" in str(caught.value) and "--normalization LayerNorm" in str(caught.value)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    save(tmp_path / "gpt2", GPT2)
    with pytest.raises(SettingsError, match="is there already"):
        tool.main(["to-hf", str(tmp_path / "gpt2"), str(tmp_path / "full")])
    with pytest.raises(UsageError, match="to-hf takes PATH and OUT"):
        tool.main(["to-hf", str(tmp_path / "gpt2")])


@pytest.mark.parametrize("more", [[], ["--unchecked"]])
def test_weights_that_their_model_lacks_are_named(tmp_path, more):
    """Whether or not both models would be compared: a head beside the output layer does not show in what it gives."""
    own = {"value.weight": torch.ones(1, H), "value.bias": torch.ones(1), "optimizer.exp_avg.value.bias": torch.ones(1)}
    save(tmp_path / "ours", GPT2, own)
    with pytest.raises(SettingsError, match="gpt2 of Hugging Face has no value.bias, value.weight\n") as caught:
        tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), *more])
    assert "optimizer" not in str(caught.value) and [path.name for path in tmp_path.iterdir()] == ["ours"]


# ---------------------------------------------------------------------------------------------------- Megatron-LM


def megatron_files(folder: Path, model: dict, tp: int, pp: int, chunks=1, version=3.0, core=False, padded=56, **more):
    """Write logical tensors as Megatron-LM lays them out; slow loops that share nothing with the converter."""
    weights, shape = weights_of(model), schema.Model(**model)
    a_stage = shape.num_layers // (pp * chunks)
    args = argparse.Namespace(
        **{
            **model,
            "padded_vocab_size": padded,
            "iteration": 300,
            "model_type": sys.modules["megatron.core.enums"].ModelType(1),  # made by `their_modules`
            "add_bias_linear": not shape.disable_bias_linear,
            "params_dtype": torch.float32,
            "swiglu": shape.swiglu,
            **more,
        }
    )
    for t in range(tp):
        for p in range(pp):
            content = dict(
                args=args,
                checkpoint_version=version,
                iteration=300,
                rng_state=[dict(np_rng_state=np.random.get_state())],
            )
            for c in range(chunks):
                stage = c * pp + p
                layers = range(stage * a_stage, (stage + 1) * a_stage)
                flat = megatron_stage(
                    weights, shape, layers, t, tp, stage == 0, stage == pp * chunks - 1, version, padded
                )
                key = "model" if chunks == 1 else f"model{c}"
                content[key] = in_core_names(flat) if core else nested(flat)
            name = f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            path = folder / "iter_0000300" / name
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("300")
    return weights


def megatron_stage(weights, shape, layers, t, tp, first, last, version, padded):  # noqa: C901 (one branch for each kind of weight)
    part = lambda x, dim: x.chunk(tp, dim)[t].clone()
    words = torch.cat([weights["embedding.word.weight"], torch.ones(padded - V, H)])
    out = {}
    if first:
        out["embedding.word_embeddings.weight"] = part(words, 0)
        if "embedding.position.weight" in weights:
            out["embedding.position_embeddings.weight"] = weights["embedding.position.weight"]
    for n, layer in enumerate(layers):
        for name, x in weights.items():
            if not name.startswith(f"blocks.{layer}."):
                continue
            module, kind = name.split(".", 2)[2].rsplit(".", 1)
            to = f"encoder.layers.{n}."
            if module == "attention.qkv":
                mine = part(x, 0)  # groups of this rank: [g/tp, q + 2, d, ...]
                if version < 1:
                    mine = mine.transpose(0, 1)
                elif version < 2:
                    mine = mine.transpose(1, 2)
                out[f"{to}self_attention.query_key_value.{kind}"] = mine.reshape(-1, *x.shape[3:]).clone()
            elif module == "mlp.up":
                mine = torch.cat([part(half, 0) for half in x]) if shape.swiglu else part(x, 0)
                out[f"{to}mlp.dense_h_to_4h.{kind}"] = mine
            elif module in ("attention.output", "mlp.down"):
                theirs = "self_attention.dense" if module == "attention.output" else "mlp.dense_4h_to_h"
                out[f"{to}{theirs}.{kind}"] = part(x, 1) if kind == "weight" else x
            else:
                theirs = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}[module]
                out[f"{to}{theirs}.{kind}"] = x
    if last:
        for kind in ("weight", "bias"):
            if f"final_norm.{kind}" in weights:
                out[f"encoder.final_layernorm.{kind}"] = weights[f"final_norm.{kind}"]
        if "output.weight" in weights:
            out["output_layer.weight"] = part(torch.cat([weights["output.weight"], torch.ones(padded - V, H)]), 0)
        elif not first:
            out["word_embeddings_for_head"] = {"weight": part(words, 0)}
    return out


def nested(flat):
    """The early models' dictionaries in dictionaries."""
    head = flat.pop("word_embeddings_for_head", None)
    language = {}
    for name, x in flat.items():
        group, _, rest = name.partition(".")
        if group == "embedding":
            module, _, kind = rest.rpartition(".")
            language.setdefault("embedding", {}).setdefault(module, {})[kind] = x
        elif group == "output_layer":
            language["output_layer"] = {rest: x}
        else:
            language.setdefault("encoder", {})[rest] = x
    return {"language_model": language, **({"word_embeddings_for_head": head} if head else {})}


def in_core_names(flat):
    names = {
        "self_attention.query_key_value": "self_attention.linear_qkv",
        "self_attention.dense": "self_attention.linear_proj",
        "mlp.dense_h_to_4h": "mlp.linear_fc1",
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
        "encoder.": "decoder.",
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    renamed = {}
    for name, x in flat.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if name == "word_embeddings_for_head":
            name, x = "output_layer.weight", x["weight"]
        renamed[name] = x
    return {**renamed, "decoder.layers.0.self_attention._extra_state": None}


@pytest.mark.parametrize("core", [False, True])
def test_an_output_layer_that_the_arguments_do_not_know_is_named(tmp_path, core):
    megatron_files(tmp_path / "theirs", LLAMA, tp=1, pp=1, core=core, untie_embeddings_and_output_weights=False)
    with pytest.raises(CheckpointError, match="output_layer.weight differs from the embedding"):
        tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--vocab-size", str(V)])


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "model, layout",
    [
        (GPT2, dict(tp=1, pp=1)),
        (GPT2, dict(tp=2, pp=2)),
        (GPT2, dict(tp=2, pp=1, version=0)),
        (GPT2, dict(tp=2, pp=1, version=1.0)),
        (GPT2, dict(tp=1, pp=2, chunks=2, core=True)),
        (LLAMA, dict(tp=2, pp=2, core=True)),
        (LLAMA, dict(tp=2, pp=1)),
        (LLAMA | dict(add_qkv_bias=True), dict(tp=2, pp=2, core=True)),
    ],
)
def test_megatron_checkpoints_of_any_layout(tmp_path, model, layout, capsys):
    weights = megatron_files(tmp_path / "theirs", model, **layout)
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--vocab-size", str(V)])
    assert_same(loaded(tmp_path / "ours"), weights)
    with Reader(tmp_path / "ours" / "iter_0000000") as reader:
        saved = schema.from_record(reader.state["config"]).model
    for name in (
        "num_layers",
        "query_groups",
        "head_dim",
        "ffn_size",
        "swiglu",
        "position_embedding_type",
        "rotary_base",
    ):
        assert getattr(saved, name) == getattr(schema.Model(**model), name), name
    assert "weights of iteration 300" in capsys.readouterr().out


def test_megatron_padding_is_told(tmp_path, capsys):
    megatron_files(tmp_path / "theirs", GPT2, 1, 1)
    tool.main(["from-megatron", str(tmp_path / "theirs" / "iter_0000300"), str(tmp_path / "ours")])
    assert "all 56 rows of the embedding were taken" in capsys.readouterr().out
    assert loaded(tmp_path / "ours")["embedding.word.weight"].shape == (56, H)


class Runs:
    """A pickle that runs a program when it is opened."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("kind", ["zip", "bare pickle", "no dictionary", "text"])
def test_pickles_are_not_run(tmp_path, kind):
    megatron_files(tmp_path / "theirs", GPT2, 1, 1)
    path = tmp_path / "theirs" / "iter_0000300" / "mp_rank_00" / "model_optim_rng.pt"
    if kind == "zip":
        torch.save(dict(args=Runs(tmp_path / "ran"), model={}), path)
    elif kind == "bare pickle":
        path.write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    elif kind == "no dictionary":
        torch.save([torch.ones(2)], path)
    else:
        path.write_text("hello")
    with pytest.raises(CheckpointError, match="was refused"):
        tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ours").exists()


def test_megatron_checkpoints_that_are_not_whole(tmp_path):
    folder, out = tmp_path / "theirs", str(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="no mp_rank"):
        tool.main(["from-megatron", str(tmp_path), out])
    megatron_files(folder, GPT2, 2, 2)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        tool.main(["from-megatron", str(folder), out, "--ckpt-step", "5"])
    with pytest.raises(SettingsError, match="--vocab-size 99 does not fit"):
        tool.main(["from-megatron", str(folder), out, "--vocab-size", "99"])
    path = folder / "iter_0000300" / "mp_rank_01_001"
    content = torch.load(path / "model_optim_rng.pt", weights_only=False)
    del content["model"]["language_model"]["encoder"]["layers.0.mlp.dense_4h_to_h.weight"]
    torch.save(content, path / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="blocks.2.mlp.down.weight: 2,048 of 4,096 elements"):
        tool.main(["from-megatron", str(folder), out, "--vocab-size", str(V)])
    content["model"]["language_model"]["encoder"]["layers.0.mlp.router.weight"] = torch.ones(2)
    torch.save(content, path / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="mlp.router.weight is not known: blocks.2 is attention, mlp"):
        tool.main(["from-megatron", str(folder), out, "--vocab-size", str(V)])
    (path / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="is not understood"):
        tool.main(["from-megatron", str(folder), out])
    path.rmdir()
    with pytest.raises(CheckpointError, match="missing .tensor, pipeline rank.: ..1, 1.."):
        tool.main(["from-megatron", str(folder), out])
    assert not Path(out).exists()


def test_megatron_settings_that_change_the_arithmetic_are_refused(tmp_path):
    megatron_files(tmp_path / "theirs", GPT2, 1, 1, rotary_interleaved=True)
    with pytest.raises(CheckpointError, match="uses rotary_interleaved"):
        tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")])
