# SPDX-License-Identifier: Apache-2.0
"""Export to Megatron-LM's classic checkpoints: what Megatron-LM itself would have saved, or nothing at all."""

import argparse
import math
import tarfile
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.convert import megatron_arguments, megatron_export
from megatron.errors import CheckpointError, SettingsError, UsageError
from megatron.settings import schema
from megatron.tools import checkpoint as tool
from tests.inference import test_convert
from tests.inference.test_convert import (
    GPT2,
    LAYERS,
    LLAMA,
    TIED,
    H,
    V,
    assert_same,
    loaded,
    megatron_files,
    save,
    weights_of,
)

pytestmark = pytest.mark.sampled(10)

PADDED_TO = dict(make_vocab_size_divisible_by=8)


def export(folder, model, tp=1, pp=1, *words):
    """The export of a checkpoint of `model`, file by file: (tensor rank, pipeline rank) -> content."""
    weights = save(folder / "ours", model)
    sizes = ["--target-tensor-parallel-size", str(tp), "--target-pipeline-parallel-size", str(pp)]
    tool.main(["to-megatron", str(folder / "ours"), str(folder / "out"), *sizes, *words])
    return weights, {
        (t, p): torch.load(path_of(folder / "out" / "release", t, p, pp), weights_only=False)
        for t in range(tp)
        for p in range(pp)
    }


def path_of(folder, t, p, pp):
    return folder / (f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}") / "model_optim_rng.pt"


def leaves(content, prefix=""):
    """Dotted name -> tensor of nested dictionaries."""
    for name, x in content.items():
        yield from leaves(x, f"{prefix}{name}.") if isinstance(x, dict) else [(f"{prefix}{name}", x)]


@pytest.mark.parametrize(
    "model, tp, pp, core",
    [
        (GPT2, 1, 1, True),
        (GPT2, 2, 2, True),
        (GPT2, 2, 2, False),
        (GPT2, 1, 2, False),
        (LLAMA, 1, 1, False),
        (LLAMA, 2, 2, True),
        (LLAMA | dict(add_qkv_bias=True), 2, 1, True),
        (LLAMA | TIED, 1, 2, True),
    ],
)
def test_each_file_is_what_megatron_saves(tmp_path, model, tp, pp, core):
    """Every tensor of every rank against the layout written out in slow loops (`megatron_files`)."""
    _, ours = export(tmp_path, model | PADDED_TO, tp, pp, *([] if core else ["--use-legacy-models"]))
    padded = 8 * tp * math.ceil(V / (8 * tp))
    megatron_files(tmp_path / "theirs", model, tp, pp, core=core, padded=padded)
    for (t, p), content in ours.items():
        theirs = torch.load(path_of(tmp_path / "theirs" / "iter_0000300", t, p, pp), weights_only=False)["model"]
        theirs = {name: x for name, x in leaves(theirs) if x is not None}
        mine = {name: x for name, x in leaves(content["model"]) if x is not None}
        assert {n: x.shape for n, x in mine.items()} == {n: x.shape for n, x in theirs.items()}
        rows = max(0, min(padded // tp, V - t * (padded // tp)))  # that are no padding
        for name, x in theirs.items():
            cut = rows if "word_embeddings" in name or "output_layer" in name else None
            assert torch.equal(mine[name][:cut], x[:cut]), name


@pytest.mark.sampled(10)
@pytest.mark.parametrize("tp, pp", [(1, 1), (1, 2), (2, 1), (2, 2)])
# The names of a layer do not depend on the shape of the model
@pytest.mark.parametrize("model, names", [(GPT2, "transformer_engine"), (LLAMA, "legacy")], ids=["gpt", "llama"])
def test_read_back_it_is_the_same_to_the_bit(tmp_path, model, tp, pp, names, capsys):
    weights, _ = export(tmp_path, model, tp, pp, "--transformer-impl", names)
    assert f"{len(weights)} tensors equal to the bit" in capsys.readouterr().out
    tool.main(["from-megatron", str(tmp_path / "out"), str(tmp_path / "back")])
    assert_same(loaded(tmp_path / "back"), weights)
    with Reader(tmp_path / "back" / "iter_0000000") as reader:
        saved = schema.from_record(reader.state["config"]).model
        assert reader.state["vocab_size"] == V
    sizes = ["query_groups", "head_dim", "ffn_size", "position_table", "swiglu", "normalization", "norm_epsilon"]
    for name in [*sizes, "rotary_base", "position_embedding_type", "untie_embeddings_and_output_weights"]:
        assert getattr(saved, name) == getattr(schema.Model(**model), name), name


def test_long_contexts_and_activations_go_out_and_come_back(tmp_path):
    """Under Megatron-LM's own names, as its arguments have them."""
    asked = dict(
        squared_relu=True, use_rope_scaling=True, rope_scaling_factor=4.0, window_size="(7, 0)", z_loss_coeff=0.1
    )
    model = GPT2 | dict(position_embedding_type="rope", window_attn_skip_freq=2, max_position_embeddings=None) | asked
    _, ours = export(tmp_path, model, 1, 1)
    args = vars(next(iter(ours.values()))["args"])
    assert args["window_size"] == (7, 0) and {name: args[name] for name in ("squared_relu", "use_rope_scaling")} == {
        "squared_relu": True,
        "use_rope_scaling": True,
    }
    tool.main(["from-megatron", str(tmp_path / "out"), str(tmp_path / "back")])
    with Reader(tmp_path / "back" / "iter_0000000") as reader:
        saved = schema.from_record(reader.state["config"]).model
    for name in ("squared_relu", "use_rope_scaling", "rope_scaling_factor", "window", "window_attn_skip_freq"):
        assert getattr(saved, name) == getattr(schema.Model(**model), name), name


# Names and shapes in `GPTModel(...).state_dict()` of megatron-core 0.16.1, local layer spec, of a model of these sizes.
RECORDED = {
    "embedding.word_embeddings.weight": (56, H),
    "embedding.position_embeddings.weight": (16, H),
    "decoder.layers.0.input_layernorm.weight": (H,),
    "decoder.layers.0.input_layernorm.bias": (H,),
    "decoder.layers.0.self_attention.linear_proj.weight": (H, H),
    "decoder.layers.0.self_attention.linear_proj.bias": (H,),
    "decoder.layers.0.self_attention.linear_proj._extra_state": None,
    "decoder.layers.0.self_attention.linear_qkv.weight": (3 * H, H),
    "decoder.layers.0.self_attention.linear_qkv.bias": (3 * H,),
    "decoder.layers.0.self_attention.linear_qkv._extra_state": None,
    "decoder.layers.0.pre_mlp_layernorm.weight": (H,),
    "decoder.layers.0.pre_mlp_layernorm.bias": (H,),
    "decoder.layers.0.mlp.linear_fc1.weight": (4 * H, H),
    "decoder.layers.0.mlp.linear_fc1.bias": (4 * H,),
    "decoder.layers.0.mlp.linear_fc1._extra_state": None,
    "decoder.layers.0.mlp.linear_fc2.weight": (H, 4 * H),
    "decoder.layers.0.mlp.linear_fc2.bias": (H,),
    "decoder.layers.0.mlp.linear_fc2._extra_state": None,
    "decoder.final_layernorm.weight": (H,),
    "decoder.final_layernorm.bias": (H,),
}


def test_names_and_shapes_are_those_that_megatron_core_asks_for(tmp_path):
    _, files = export(tmp_path, GPT2 | PADDED_TO, 1, 1, "--transformer-impl", "local")
    found = {name: None if x is None else tuple(x.shape) for name, x in files[0, 0]["model"].items()}
    first = lambda name: ".layers." not in name or ".layers.0." in name
    assert {name: shape for name, shape in found.items() if first(name)} == RECORDED
    assert len(found) == sum(LAYERS if ".layers." in name else 1 for name in RECORDED)


def test_arguments_are_those_of_a_run_that_would_have_saved_it(tmp_path):
    _, files = export(tmp_path, LLAMA | PADDED_TO, 2, 2, "--dtype", "bf16")
    for content in files.values():
        args = content["args"]
        assert isinstance(args, argparse.Namespace) and content["checkpoint_version"] == 3.0
        assert args.padded_vocab_size == 64 and args.vocab_size == V and args.make_vocab_size_divisible_by == 8
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
        assert args.group_query_attention and args.num_query_groups == 2 and args.ffn_hidden_size == 48
        assert args.position_embedding_type == "rope" and args.rotary_base == 50000 and not args.add_bias_linear
        assert args.bf16 and args.params_dtype == torch.bfloat16 and args.no_save_optim
        tensors = [x for x in content["model"].values() if x is not None]
        assert tensors and all(x.dtype == torch.bfloat16 for x in tensors)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_tanh_gelu_without_a_bias_is_named_as_megatron_names_it(tmp_path):
    """Its fused GeLU, which is the tanh one, needs a bias; without one it is `--openai-gelu`."""
    _, files = export(tmp_path, GPT2 | dict(disable_bias_linear=True))
    assert files[0, 0]["args"].openai_gelu and not files[0, 0]["args"].bias_gelu_fusion


def test_padding_rows_hardly_change_the_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(test_convert, "weights_of", lambda model: {n: w + 1 for n, w in weights_of(model).items()})
    weights, files = export(tmp_path, LLAMA | PADDED_TO, 2, 1)
    whole = torch.cat([files[t, 0]["model"]["output_layer.weight"] for t in range(2)])
    x = torch.randn(200, H, generator=torch.Generator().manual_seed(0)) - 3  # logits far below 0: zeros would win
    with_padding, without = x @ whole.T, x @ weights["output.weight"].T
    added = with_padding.logsumexp(1) - without.logsumexp(1)
    assert len(whole) == 64 and 0 < added.max() <= math.log(1 + 14 / V) + 1e-5
    assert torch.equal(with_padding.argmax(1), without.argmax(1))


def test_nothing_is_written_when_it_reads_back_otherwise(tmp_path, monkeypatch):
    save(tmp_path / "ours", LLAMA)
    words = ["to-megatron", str(tmp_path / "ours"), str(tmp_path / "out"), "--tp", "2"]
    right, local = megatron_export.arguments, megatron_export.local_part
    for name, planted, told in (
        ("arguments", lambda *a: argparse.Namespace(**vars(right(*a)) | dict(norm_epsilon=0.1)), "norm_epsilon 0.1"),
        ("arguments", lambda *a: argparse.Namespace(**vars(right(*a)) | dict(vocab_size=49)), "vocabulary 49"),
        (
            "local_part",
            lambda *a: local(*a).flip(0) if a[3] == "blocks.2.mlp.up.weight" else local(*a),
            "blocks.2.mlp.up",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(megatron_export, name, planted)
            with pytest.raises(CheckpointError, match=f"another model(.|\n)*{told}"):
                tool.main(words)
            assert [path.name for path in tmp_path.iterdir()] == ["ours"]
            if name == "local_part":
                tool.main([*words, "--unchecked"])
    assert (tmp_path / "out" / "release" / "mp_rank_01" / "model_optim_rng.pt").exists()


@pytest.mark.sampled(1)
def test_what_cannot_be_expressed_is_named(tmp_path, monkeypatch):
    save(tmp_path / "ours", LLAMA | dict(qk_layernorm=True))
    words = ["to-megatron", str(tmp_path / "ours"), str(tmp_path / "out")]
    for more, told in (
        (["--use-legacy-models"], "qk_layernorm"),
        (["--pp", "3"], "4 layers cannot be divided"),
        (["--tp", "4"], "2 .* cannot be divided by --target-tensor-parallel-size 4"),
    ):
        with pytest.raises(SettingsError, match=told):
            tool.main([*words, *more])
    with pytest.raises(UsageError, match="0 x 1 x 1 files"):
        tool.main([*words, "--tp", "0"])
    with pytest.raises(UsageError, match="OUT must be a folder"):
        tool.main(["to-megatron", str(tmp_path / "ours"), "memory://out"])
    save(tmp_path / "capped", LLAMA | dict(final_logit_softcapping=30.0))
    with pytest.raises(SettingsError, match="a model with final_logit_softcapping is not exported"):
        tool.main(["to-megatron", str(tmp_path / "capped"), str(tmp_path / "out")])
    monkeypatch.setattr(
        megatron_arguments, "COMPARED", [name for name in megatron_arguments.COMPARED if name != "swiglu"]
    )
    # A setting that this export is new to
    with pytest.raises(SettingsError, match="a model with swiglu is not exported"):
        tool.main(words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["capped", "ours"]


# ---------------------------------------------------------------------------------------------------- whole runs


def content_of(folder):
    """(name -> tensor, common.pt) of a distributed checkpoint, by torch's own reader."""
    tensors: dict = {}
    reader, planner = dcp.FileSystemReader(folder), _EmptyStateDictLoadPlanner()
    _load_state_dict(tensors, storage_reader=reader, planner=planner, no_dist=True)
    flat, _ = flatten_state_dict(tensors)
    return flat, torch.load(folder / "common.pt", weights_only=False)


@pytest.mark.sampled(5)
def test_a_run_is_what_megatron_core_saved(tmp_path):
    """`megatron_core.tar.xz` has what megatron-core 0.16.1 wrote of a run, with its distributed optimizer."""
    with tarfile.open(Path(__file__).with_name("megatron_core.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / "dp2" / "fully_reshardable"
    tool.main(["from-megatron", str(source), str(tmp_path / "ours")])
    [path] = checkpoints(tmp_path / "ours").values()
    lengths = dict(warmup=0, decay=400, anneal=None, total=400)
    change = lambda state: (
        state["config"]["optimizer"].update(lr_decay_style="constant") or state.update(lengths=lengths)
    )
    with Reader(path) as reader:
        pieces = [Piece(name, x.shape, Box.whole(x.shape), reader.read(name)) for name, x in reader.tensors.items()]
        state = reader.state
    state["config"]["model"]["make_vocab_size_divisible_by"] = 16
    change(state)
    with Saver(tmp_path / "changed") as saver:
        saver.write(3, [pieces], state)
    words = ["to-megatron", str(tmp_path / "changed"), str(tmp_path / "out"), "--with-optimizer", "--dtype", "bf16"]
    tool.main(words)
    (theirs, their_common), (mine, common) = map(
        content_of, (source / "iter_0000003", tmp_path / "out" / "iter_0000003")
    )
    assert set(mine) == set(theirs)
    for name, x in theirs.items():
        cut = 15 if "word_embeddings" in name else None  # the last row is padding
        same = torch.equal(mine[name][:cut], x[:cut]) if isinstance(x, torch.Tensor) else mine[name] == x
        assert same and getattr(mine[name], "dtype", None) == getattr(x, "dtype", None), name
    for name in ("opt_param_scheduler", "iteration", "checkpoint_version", "content_metadata"):
        assert common[name] == their_common[name], name
    assert common["optimizer"]["param_state_sharding_type"] == their_common["optimizer"]["param_state_sharding_type"]
    both = [one["optimizer"]["optimizer"]["param_groups"] for one in (common, their_common)]
    for mine, theirs in zip(*both, strict=True):
        assert {name: mine[name] for name in theirs if name in mine} == {n: x for n, x in theirs.items() if n in mine}
        assert set(mine) - set(theirs) == {"bias_correction"}
    ours, theirs = vars(common["args"]), vars(their_common["args"])
    for (
        name
    ) in "consumed_train_samples num_layers padded_vocab_size use_distributed_optimizer adam_beta2 lr seed".split():
        assert ours[name] == theirs[name], name
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_runs_that_are_not_exported_are_named(tmp_path):
    save(tmp_path / "ours", LLAMA)
    words = ["to-megatron", str(tmp_path / "ours"), str(tmp_path / "out"), "--with-optimizer"]
    for more, told in (
        ([], "the state of no optimizer, not of Adam"),
        (["--tp", "2"], "a distributed checkpoint, which has no layout"),
        (["--use-legacy-models"], "a distributed checkpoint, which has no layout"),
    ):
        with pytest.raises(SettingsError, match=told):
            tool.main([*words, *more])
    save(tmp_path / "lion", LLAMA, {"optimizer.momentum.final_norm.weight": torch.ones(H)})
    save(tmp_path / "experts", dict(LLAMA, num_experts=2))
    with pytest.raises(SettingsError, match="the state of another optimizer .optimizer.exp_avg."):
        tool.main(["to-megatron", str(tmp_path / "lion"), *words[2:]])
    with pytest.raises(SettingsError, match="GPTs whose layers are alike: no experts"):
        tool.main(["to-megatron", str(tmp_path / "experts"), *words[2:]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experts", "lion", "ours"]
