# SPDX-License-Identifier: Apache-2.0
"""Import of Megatron-LM's distributed checkpoints, written here by torch.distributed.checkpoint itself."""

import argparse
import pickle
import shutil

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError, SettingsError
from megatron.settings import schema
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import GPT2, LLAMA, TIED, H, Runs, V, assert_same, loaded, weights_of

PADDED = 56


def megatron_tensors(model: dict, style: str) -> dict[str, torch.Tensor]:
    """Whole tensors as megatron-core names and shapes them.

    style: "stacked" (all layers in one tensor), "layers" (one by one), "local" (so too, norms apart from linear layers),
    "halves" (stacked, a gated layer's two matrices apart)
    """
    ours = weights_of(model)
    padded = lambda x: torch.cat([x, torch.full((PADDED - V, H), 9.0)])
    found = {"embedding.word_embeddings.weight": padded(ours["embedding.word.weight"])}
    if "embedding.position.weight" in ours:
        found["embedding.position_embeddings.weight"] = ours["embedding.position.weight"]
    if "output.weight" in ours:
        found["output_layer.weight"] = padded(ours["output.weight"])
    for name in ("weight", "bias"):
        if f"final_norm.{name}" in ours:
            found[f"decoder.final_layernorm.{name}"] = ours[f"final_norm.{name}"]
    norms = ["input_layernorm.", "pre_mlp_layernorm."]
    if style != "local":
        norms = ["self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"]
    modules = {
        "attention_norm.": norms[0],
        "attention.qkv.": "self_attention.linear_qkv.",
        "attention.output.": "self_attention.linear_proj.",
        "mlp_norm.": norms[1],
        "mlp.up.": "mlp.linear_fc1.",
        "mlp.down.": "mlp.linear_fc2.",
    }
    for module, theirs in modules.items():
        for kind in ("weight", "bias"):
            layers = [ours.get(f"blocks.{n}.{module}{kind}") for n in range(model["num_layers"])]
            if layers[0] is not None:
                found |= of_all_layers(module, f"{theirs}{kind}", layers, style)
    return found


def of_all_layers(module: str, name: str, layers: list[torch.Tensor], style: str) -> dict[str, torch.Tensor]:
    """What all layers have of one weight, as megatron-core names it."""
    if module in ("attention.qkv.", "mlp.up."):  # rows: groups, or gate and values, one after another
        layers = [x.reshape(-1, H) if name.endswith("weight") else x.reshape(-1) for x in layers]
    if style in ("layers", "local"):
        return {f"decoder.layers.{n}.{name}": x for n, x in enumerate(layers)}
    if style == "halves" and module == "mlp.up.":
        halves = {letter: [x.chunk(2)[half] for x in layers] for half, letter in enumerate("wv")}
        return {f"decoder.layers.{name}_{letter}": torch.stack(parts) for letter, parts in halves.items()}
    return {f"decoder.layers.{name}": torch.stack(layers)}


def write(run_ranks, folder, model: dict, style: str, ranks: int, dim: int = -2, **args) -> dict[str, torch.Tensor]:
    """A checkpoint in `folder`/iter_0000300 of `ranks` ranks, each of which has a part of each tensor along `dim`.

    Those that do not divide have one owner. Returns our tensors.
    """
    path, tensors = folder / "iter_0000300", megatron_tensors(model, style)
    path.mkdir(parents=True)

    def body(rank):
        state = {}
        for number, (name, x) in enumerate(tensors.items()):
            at = dim if x.dim() > (2 if "layers." in name and style in ("stacked", "halves") else 1) else -1
            even = x.shape[at] % ranks == 0
            parts = x.chunk(ranks, at) if even else [x]
            mine = rank if even else 0 if rank == number % ranks else None
            shards = []
            offset = [0] * x.dim()
            if mine is not None:
                offset[at] = mine * parts[0].shape[at]
                meta = ShardMetadata(list(offset), list(parts[mine].shape), f"rank:{rank}/cpu")
                shards = [Shard(parts[mine].contiguous(), meta)]
            everywhere = []
            for n, part in enumerate(parts):
                offset[at] = n * parts[0].shape[at]
                owner = n if even else number % ranks
                everywhere.append(ShardMetadata(list(offset), list(part.shape), f"rank:{owner}/cpu"))
            whole = ShardedTensorMetadata(everywhere, x.shape, TensorProperties(dtype=x.dtype))
            state[name] = ShardedTensor._init_from_local_shards_and_global_metadata(shards, whole)
        state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"] = b"fp8"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=True))

    run_ranks(ranks, body)
    shape = schema.Model(**model)
    names = argparse.Namespace(**model | dict(padded_vocab_size=PADDED, add_bias_linear=not shape.disable_bias_linear))
    vars(names).update(args)
    torch.save(dict(args=names, checkpoint_version=3.0, iteration=300, content_metadata={}), path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / "latest_checkpointed_iteration.txt").write_text("300")
    return weights_of(model)


def convert(folder, out, *words):
    tool.main(["from-megatron", str(folder), str(out), "--vocab-size", str(V), *words])


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "model, style, dim",
    [
        (GPT2, "stacked", -2),
        (GPT2, "layers", -2),
        (LLAMA, "local", -2),
        (LLAMA, "stacked", -1),
        (LLAMA | TIED, "halves", -2),
    ],
)
def test_each_form_is_the_model_to_the_bit(tmp_path, run_ranks, capsys, model, style, dim):
    weights = write(run_ranks, tmp_path / "theirs", model, style, ranks=2, dim=dim)
    assert len(list((tmp_path / "theirs" / "iter_0000300").glob("*.distcp"))) == 2
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert "weights of iteration 300" in capsys.readouterr().out
    assert_same(loaded(tmp_path / "ours"), weights)
    with Reader(tmp_path / "ours" / "iter_0000000") as reader:
        saved = schema.from_record(reader.state["config"]).model
    for name in ("num_layers", "query_groups", "head_dim", "ffn_size", "swiglu", "rotary_base", "normalization"):
        assert getattr(saved, name) == getattr(schema.Model(**model), name), name


def test_layers_that_lie_apart_and_rows_across_groups(tmp_path, run_ranks):
    """Pieces along the layers, as pipeline stages have them; and three parts of the rows, none a whole query group."""
    weights = write(run_ranks, tmp_path / "a", GPT2, "stacked", ranks=2, dim=0)
    convert(tmp_path / "a" / "iter_0000300", tmp_path / "ours-a")
    assert_same(loaded(tmp_path / "ours-a"), weights)
    weights = write(run_ranks, tmp_path / "b", LLAMA, "stacked", ranks=3)
    convert(tmp_path / "b", tmp_path / "ours-b", "--ckpt-step", "300")
    assert_same(loaded(tmp_path / "ours-b"), weights)


@pytest.fixture(scope="module")
def whole(run_ranks, tmp_path_factory):
    """A good checkpoint, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("whole")
    write(run_ranks, folder / "theirs", GPT2, "stacked", ranks=2)
    return folder / "theirs"


@pytest.fixture
def theirs(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "theirs") / "iter_0000300"


def edited(theirs, change):
    """Change the content of .metadata and write it again."""
    path = theirs / ".metadata"
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content))


class Refers:
    """A pickle that asks for something by name."""

    def __init__(self, *names):
        self.names = names

    def __reduce__(self):
        return getattr, self.names


@pytest.mark.sampled(10)
@pytest.mark.parametrize("file", [".metadata", "common.pt", "__0_0.distcp"])
@pytest.mark.parametrize("kind", ["pickle", "zip of torch"])
def test_pickles_are_not_run(theirs, tmp_path, file, kind):
    path, content = theirs / file, dict(state_dict_metadata=Runs(tmp_path / "ran"), large=torch.ones(1 << 14))
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        with path.open("wb") as stream:  # torch.save takes no name that begins with a dot
            torch.save(content, stream)
    if file == "__0_0.distcp":  # every chunk of that file is this pickle
        places = lambda m: [info for info in m.storage_data.values() if info.relative_path == file]
        size = path.stat().st_size
        edited(theirs, lambda m: [vars(info).update(offset=0, length=size) for info in places(m)])
    with pytest.raises(CheckpointError, match=f"{file} was refused"):
        convert(theirs.parent, tmp_path / "ours")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ours").exists()


def test_what_a_metadata_file_asks_for_is_named(theirs, tmp_path):
    for content, name in ((Runs(tmp_path / "ran"), "posix.system"), (Refers("a", "b"), "builtins.getattr")):
        (theirs / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=rf"\.metadata was refused: it asks for {name}"):
            convert(theirs.parent, tmp_path / "ours")


def test_damage_is_named(theirs, tmp_path):
    first, second = sorted(theirs.glob("*.distcp"))
    raw = first.read_bytes()
    for damaged, told in ((raw[:-100], "is damaged: it ends before"), (b"\0" * len(raw), "was refused")):
        first.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{first.name} {told}"):
            convert(theirs.parent, tmp_path / "ours")
    first.write_bytes(raw)
    (theirs / "common.pt").rename(theirs / "common")
    with pytest.raises(CheckpointError, match="no common.pt"):
        convert(theirs.parent, tmp_path / "ours")
    (theirs / "common").rename(theirs / "common.pt")
    second.unlink()
    with pytest.raises(CheckpointError, match=f"{second.name} is missing"):
        convert(theirs.parent, tmp_path / "ours")
    (theirs / ".metadata").write_bytes(pickle.dumps(dict(a=1)))
    torch.save(dict(args=None), theirs / "common.pt")
    with pytest.raises(CheckpointError, match="does not describe tensors"):
        convert(theirs.parent, tmp_path / "ours")
    (theirs / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        convert(theirs.parent, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def mistake(metadata, name, other):
    """One tensor is said to lie where another one does."""
    wrong, right = ([info for at, info in metadata.storage_data.items() if at.fqn == each] for each in (name, other))
    for a, b in zip(wrong, right, strict=True):
        vars(a).update(vars(b))


def test_forged_descriptions_are_refused(theirs, tmp_path):
    good = (theirs / ".metadata").read_bytes()
    places = lambda m: list(m.storage_data.values())
    name = "decoder.layers.mlp.linear_fc2.weight"
    for change, told in (
        (lambda m: [setattr(info, "relative_path", "../../secret") for info in places(m)], "no file of its folder"),
        (lambda m: [setattr(info, "offset", -1) for info in places(m)], "ends before"),
        (lambda m: [setattr(info, "length", 1 << 40) for info in places(m)], "ends before"),
        (lambda m: [setattr(info, "transform_descriptors", ["zstd"]) for info in places(m)], "is packed"),
        (lambda m: setattr(m.state_dict_metadata[name].chunks[0], "offsets", torch.Size([9, 0, 0])), "does not say"),
        (lambda m: setattr(m.state_dict_metadata[name], "size", torch.Size([4, 1, 1])), "is damaged"),
        (lambda m: m.state_dict_metadata.pop(name), "lacks 4 tensors"),
        (lambda m: mistake(m, name, "decoder.layers.mlp.linear_fc1.weight"), "is not there with shape"),
        (lambda m: m.state_dict_metadata[name].chunks.pop(), r"blocks.\d.mlp.down.weight: [\d,]+ of [\d,]+ elements"),
    ):
        (theirs / ".metadata").write_bytes(good)
        edited(theirs, change)
        with pytest.raises(CheckpointError, match=told):
            convert(theirs.parent, tmp_path / "ours")
        assert not (tmp_path / "ours").exists()


def test_settings_that_change_the_arithmetic_are_refused(tmp_path, run_ranks):
    write(run_ranks, tmp_path / "theirs", GPT2, "stacked", ranks=1, rotary_interleaved=True)
    with pytest.raises(CheckpointError, match="uses rotary_interleaved"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").touch()
    with pytest.raises(SettingsError, match="is there already"):
        convert(tmp_path / "theirs", tmp_path / "ours")
