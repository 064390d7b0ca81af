# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron.tools.checkpoint`: what each command says, its exit codes, wrong inputs, memory."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

import pretrain_bert
import pretrain_t5
from megatron.checkpoint import reshard
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.compare import differences
from megatron.checkpoint.folder import TRACKER, Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, share
from megatron.errors import CheckpointError, Locked, SettingsError, UsageError
from megatron.storage.durable import WriterLock
from megatron.tools import checkpoint as tool
from megatron.tools import checkpoint_util

MODEL = dict(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, make_vocab_size_divisible_by=4)
STATE = dict(config=dict(model=MODEL), vocab_size=10, mesh=dict(tp=1), optimizer_steps=3)


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "embedding.word.weight": (10, 8),
        "blocks.0.attention.qkv.weight": (2, 3, 4, 8),
        "final_norm.weight": (8,),
    }
    moments = {f"optimizer.exp_avg.{name}": shape for name, shape in weights.items()}
    return {
        name: torch.randn(shape, generator=generator) for name, shape in {**weights, **moments, "scalar": ()}.items()
    }


def save(folder, content, iteration=1, writers=1, state=STATE, **options):
    pieces = [Piece(name, tuple(x.shape), Box.whole(x.shape), x) for name, x in content.items()]
    with Saver(folder, **options) as saver:
        saver.write(iteration, [share(pieces, n, writers) for n in range(writers)], state)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "a", tensors())


def flip(path, at=-5):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shard_of(folder, iteration=1, writer=0):
    return folder / f"iter_{iteration:07d}" / f"shard_{writer:05d}.safetensors"


def test_inspect_reads_no_tensor(folder, capsys):
    flip(shard_of(folder))  # damage that only a reader of tensors would meet
    tool.main(["inspect", str(folder)])
    said = capsys.readouterr().out
    assert "iteration 1" in said and "embedding.word.weight" in said and "hidden_size 8" in said and "exp_avg" in said
    tool.main(["inspect", str(folder), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == 80 + 192 + 8 + 1 and told["tensors"]["final_norm.weight"]["shape"] == [8]


def test_inspect_does_not_even_open_shards(folder, capsys):
    with Reader(folder / "iter_0000001") as reader:
        shard_of(folder).unlink()
        from megatron.checkpoint import survey

        assert survey.describe(reader)


def test_verify_names_damaged_missing_and_foreign_files(tmp_path, capsys):
    folder = save(tmp_path, tensors(), writers=3)
    tool.main(["verify", str(folder)])
    assert "good" in capsys.readouterr().out
    flip(shard_of(folder, writer=0))
    shard_of(folder, writer=1).unlink()
    (folder / "iter_0000001" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="3 problems") as caught:
        tool.main(["verify", str(folder)])
    said = capsys.readouterr().out
    assert caught.value.code == 5
    assert "shard_00000.safetensors is damaged" in said and "shard_00001.safetensors cannot be read" in said
    assert "notes.txt does not belong" in said and "shard_00002" not in said


def test_verify_looks_at_every_checkpoint_of_a_folder(folder, capsys):
    save(folder, tensors(1), iteration=2)
    flip(folder / "iter_0000001" / "index.json")
    with pytest.raises(CheckpointError, match="1 problem in 2"):
        tool.main(["verify", str(folder)])
    tool.main(["verify", str(folder), "--ckpt-step", "2"])
    tool.main(["verify", str(folder), "--no-all"])


def test_diff_across_layouts_is_equal_to_the_bit(folder, tmp_path, capsys):
    other = save(tmp_path / "b", tensors(), writers=4)
    tool.main(["diff", str(folder), str(other)])
    assert "7 tensors are equal to the bit" in capsys.readouterr().out


def test_diff_lists_what_differs_largest_first(folder, tmp_path, capsys):
    changed = tensors()
    changed["final_norm.weight"][3] += 0.5
    changed["embedding.word.weight"][0, 0] += 2
    changed["optimizer.exp_avg.final_norm.weight"] = torch.zeros(9)
    del changed["scalar"]
    other = save(tmp_path / "b", changed, writers=2)
    with pytest.raises(SystemExit) as caught:
        tool.main(["diff", str(folder), str(other)])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 1 and "4 of 7 tensors differ" in lines[0]
    assert {lines[1].split(":")[0].strip(), lines[2].split(":")[0].strip()} == {
        "scalar",
        "optimizer.exp_avg.final_norm.weight",
    }
    assert "embedding.word.weight: 1 of 80 elements differ, by at most 2" in lines[3] and "0.5" in lines[4]
    with pytest.raises(SystemExit):
        tool.main(["diff", str(folder), str(other), "--tolerance", "1"])
    assert "3 of 7" in capsys.readouterr().out


def test_diff_knows_bits(tmp_path):
    one = save(tmp_path / "a", dict(x=torch.tensor([0.0, float("nan"), 1.0])))
    two = save(tmp_path / "b", dict(x=torch.tensor([-0.0, float("nan"), float("nan")])))
    with Reader(one / "iter_0000001") as a, Reader(two / "iter_0000001") as b:
        [found] = differences(a, b)
        assert found.elements == 2 and "1 of them not numbers" in str(found)
        assert not list(differences(a, a, part=4))


@pytest.mark.parametrize("flags", [["--writers", "3"], ["--tp", "2"], ["--writers", "1"]])
def test_reshard_keeps_every_bit(folder, tmp_path, flags):
    tool.main(["reshard", str(folder), str(tmp_path / "out"), *flags])
    tool.main(["diff", str(folder), str(tmp_path / "out")])
    count = 1 if flags[-1] == "1" else int(flags[-1])
    assert len(list((tmp_path / "out" / "iter_0000001").glob("shard_*"))) == count
    assert (tmp_path / "out" / TRACKER).read_text() == "1"


def test_reshard_gives_each_tensor_parallel_rank_its_padded_rows(folder, tmp_path):
    """10 rows in multiples of 4 x 2 ranks are 16: rank 0 holds 8, and 2 are left for rank 1."""
    tool.main(["reshard", str(folder), str(tmp_path / "out"), "--tp", "2", "--weights-only", "--dtype", "bf16"])
    with Reader(tmp_path / "out" / "iter_0000001") as reader:
        boxes = [item.box for item in reader.tensors["embedding.word.weight"].stored]
        assert sorted(boxes) == [Box((0, 0), (8, 8)), Box((8, 0), (2, 8))]
        qkv = reader.tensors["blocks.0.attention.qkv.weight"]
        assert sorted(item.file for item in qkv.stored) == ["shard_00000.safetensors", "shard_00001.safetensors"]
        assert torch.equal(reader.read("final_norm.weight"), tensors()["final_norm.weight"].bfloat16())
        assert not [name for name in reader.tensors if name.startswith("optimizer.")]
        assert reader.state["optimizer_steps"] is None


def test_checkpoint_util_splits_by_tensor_and_pipeline_parallel_ranks(tmp_path, capsys):
    """By Megatron-LM's flags: files 0 and 1 are those of the first stage, 2 and 3 those of the last."""
    state = STATE | dict(config=dict(model=MODEL | dict(num_layers=2)))
    content = tensors() | {"blocks.1.attention.qkv.weight": torch.randn(2, 3, 4, 8)}
    save(tmp_path / "a", content, state=state)
    words = f"--model-type GPT --load-dir {tmp_path / 'a'} --save-dir {tmp_path / 'b'} --target-tensor-parallel-size 2"
    checkpoint_util.main([*words.split(), "--target-pipeline-parallel-size", "2"])
    tool.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    with Reader(tmp_path / "b" / "iter_0000001") as reader:
        files = {
            name: sorted(int(item.file[6:11]) for item in tensor.stored) for name, tensor in reader.tensors.items()
        }
        assert reader.state["mesh"] == dict(pp=2, replicate=1, shard=1, cp=1, tp=2)
    assert files["embedding.word.weight"] == files["optimizer.exp_avg.embedding.word.weight"] == [0, 1]
    assert files["blocks.0.attention.qkv.weight"] == [0, 1] and files["blocks.1.attention.qkv.weight"] == [2, 3]
    assert set(files["final_norm.weight"]) <= {2, 3} and len(files["scalar"]) == 1
    with pytest.raises(SettingsError, match="2 layers cannot be divided by --pipeline-model-parallel-size 3"):
        tool.main(["reshard", str(tmp_path / "a"), str(tmp_path / "c"), "--pp", "3"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "script, layers",
    [(pretrain_t5, "--encoder-num-layers 3 --decoder-num-layers 1"), (pretrain_bert, "--num-layers 4")],
)
def test_checkpoint_util_knows_t5_and_bert(script, layers, tmp_path):
    """Files 0 and 1 hold the first two layers, 2 and 3 the last two: of each its tensor parallel part."""
    kind, one, two = script.recipe().model_type, str(tmp_path / "a"), str(tmp_path / "b")
    script.main(
        f"{layers} --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 60 --device cpu "
        f"--micro-batch-size 1 --train-iters 1 --eval-iters 0 --lr 1e-3 --num-workers 0 --save {one}".split()
    )
    sizes = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2".split()
    checkpoint_util.main(["--model-type", kind, "--load-dir", one, "--save-dir", two, *sizes])
    tool.main(["diff", one, two])
    with Reader(tmp_path / "b" / "iter_0000001") as reader:
        for name, tensor in reader.tensors.items():
            files = {int(item.file[6:11]) for item in tensor.stored}
            layer = re.match(r"blocks\.(\d)\.", name)
            assert not layer or files <= ({0, 1} if int(layer[1]) < 2 else {2, 3}), name
            assert not layer or "mlp.up.weight" not in name or len(files) == 2, name
    for other in {"GPT", "T5", "BERT"} - {kind}:
        with pytest.raises(CheckpointError, match=f"--model-type {other}: .* holds a model of type {kind}"):
            checkpoint_util.main(["--model-type", other, "--load-dir", one, "--save-dir", str(tmp_path / "c")])


def test_checkpoint_util_knows_checkpoints_of_megatron_lm(tmp_path):
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(SettingsError, match="--model-type T5: .* of Megatron-LM, of which GPTs are read"):
        checkpoint_util.main(["--load-dir", str(tmp_path), "--save-dir", str(tmp_path / "b"), "--model-type", "T5"])
    with pytest.raises(CheckpointError, match="holds no mp_rank"):  # asked as from-megatron asks: by its tracker
        checkpoint_util.main(["--load-dir", str(tmp_path), "--save-dir", str(tmp_path / "b")])


def test_checkpoint_util_knows_formats(tmp_path, capsys):
    save(tmp_path / "a", tensors(), state=STATE)
    words = ["--load-dir", str(tmp_path / "a"), "--save-dir", str(tmp_path / "b")]
    for flag, word, command in (("--saver", "llama_hf", "to-hf"), ("--loader", "llama_mistral", "from-hf")):
        with pytest.raises(SettingsError, match=f"{flag} {word}: .*\n.*checkpoint {command} {tmp_path / 'a'}"):
            checkpoint_util.main([*words, flag, word])
    assert not (tmp_path / "b").exists()
    checkpoint_util.main([*words, "--loader", "mcore", "--saver", "mcore"])
    assert "note: --saver mcore writes this suite's format; Megatron-LM's: python -m" in capsys.readouterr().err
    more = "--max-queue-size 10 --no-checking --true-vocab-size 7".split()
    checkpoint_util.main([*words[:2], "--save-dir", str(tmp_path / "e"), *more])
    assert "note: --true-vocab-size has no effect: the checkpoint knows" in capsys.readouterr().err
    (tmp_path / "c" / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds no mp_rank"):
        flags = ["--load-dir", str(tmp_path / "c"), "--save-dir", str(tmp_path / "d")]
        checkpoint_util.main([*flags, "--target-tensor-parallel-size", "4"])
    assert "parallel-size have no effect on what is read from Megatron-LM" in capsys.readouterr().err


def test_reshard_replaces_no_other_checkpoints(folder, tmp_path):
    save(tmp_path / "b", tensors(seed=1))
    save(tmp_path / "b", tensors(seed=1), iteration=2)
    for out in (tmp_path / "b", tmp_path / "b" / "iter_0000001"):
        with pytest.raises(SettingsError, match=f"{out} is there already"):
            tool.main(["reshard", str(folder), str(out), "--writers", "1"])
    assert (tmp_path / "b" / TRACKER).read_text() == "2" and list(checkpoints(tmp_path / "b")) == [1, 2]
    with Reader(tmp_path / "b" / "iter_0000001") as reader:
        assert torch.equal(reader.read("final_norm.weight"), tensors(seed=1)["final_norm.weight"])


def test_reshard_of_a_damaged_checkpoint_leaves_nothing(folder, tmp_path):
    flip(shard_of(folder))
    with pytest.raises(CheckpointError, match="is damaged"):
        tool.main(["reshard", str(folder), str(tmp_path / "out"), "--writers", "2"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.sampled(2)
def test_reshard_and_diff_need_little_memory(memory_folder, run_ranks, most_allocated):
    """160 MiB of tensors, one of them 80, pass through memory in parts of 4."""
    one, two, part = memory_folder / "a", memory_folder / "b", 4 << 20

    def make(rank):
        save(one, dict(big=torch.arange(20.0 * (1 << 20)).view(-1, 1024), other=torch.zeros(20 << 20)), writers=2)

    def pass_through():
        reshard.PART = part
        tool.main(["reshard", str(one), str(two), "--writers", "3"])
        with Reader(one / "iter_0000001") as a, Reader(two / "iter_0000001") as b:
            assert not list(differences(a, b, part=part))

    run_ranks(1, make)
    (used,) = run_ranks(1, lambda rank: most_allocated(pass_through))
    assert 2 * part <= used <= 8 * part  # of each side, beside the part before; and a block of each reading thread


def test_prune_keeps_the_newest_and_every_nth(folder, capsys):
    for iteration in range(2, 8):
        save(folder, dict(x=torch.ones(2)), iteration=iteration)
    tool.main(["prune", str(folder), "--keep-last", "2", "--save-retain-interval", "3", "--dry-run"])
    assert "would go" in capsys.readouterr().out and len(checkpoints(folder)) == 7
    tool.main(["prune", str(folder), "--keep-last", "2", "--save-retain-interval", "3"])
    assert list(checkpoints(folder)) == [3, 6, 7]
    tool.main(["prune", str(folder), "--save-retain-interval", "6"])
    assert list(checkpoints(folder)) == [6, 7]


def test_prune_deletes_nothing_when_the_newest_is_damaged_or_a_job_writes(folder):
    save(folder, tensors(), iteration=2)
    flip(shard_of(folder, 2))
    with pytest.raises(CheckpointError, match="nothing is deleted"):
        tool.main(["prune", str(folder), "--keep-last", "1"])
    flip(shard_of(folder, 2))
    there, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lock = WriterLock(folder)
            os.write(tell, b"." if lock else b"")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(tell)
        assert os.read(there, 1)
        with pytest.raises(Locked):
            tool.main(["prune", str(folder), "--keep-last", "1"])
    finally:
        os.close(there)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (folder / TRACKER).write_text("77")
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        tool.main(["prune", str(folder), "--keep-last", "1"])
    assert list(checkpoints(folder)) == [1, 2]


@pytest.mark.parametrize(
    "words, error, text",
    [
        ([], UsageError, "no command is given"),
        (["explode", "x"], UsageError, "'explode' is not a command"),
        (["compare", "x", "y"], UsageError, "did you mean diff"),
        (["convert", "x", "y"], UsageError, "did you mean from-hf or to-hf"),
        (["diff", "A"], UsageError, "diff takes A and B; got "),
        (["inspect"], UsageError, "got nothing"),
        (["inspect", "A", "--writers", "2"], UsageError, "unknown flag --writers"),
        (["inspect", "A/none"], CheckpointError, "holds no checkpoint"),
        (["verify", "A/none"], CheckpointError, "holds no checkpoint"),
        (["prune", "A/none", "--keep-last", "1"], CheckpointError, "holds no checkpoint"),
        (["inspect", "A", "--ckpt-step", "5"], CheckpointError, "no checkpoint of iteration 5"),
        (["verify", "A/1", "--ckpt-step", "5"], CheckpointError, "is of iteration 1, and --ckpt-step asks for 5"),
        (["prune", "A"], UsageError, "say what to keep"),
        (["prune", "A", "--keep-last", "-1"], UsageError, "say what to keep"),
        (["prune", "A", "--keep-last", "1", "--ckpt-step", "1"], UsageError, "not one checkpoint by its number"),
        (["reshard", "A", "B"], UsageError, "say what the new files are"),
        (
            ["reshard", "A", "B", "--writers", "2", "--tp", "2"],
            UsageError,
            "--writers 2 and --tensor-.*-size 2 contradict",
        ),
        (["reshard", "A", "B", "--writers", "-2"], UsageError, "cannot be written"),
        (["reshard", "A", "A", "--writers", "2"], SettingsError, "is where the checkpoint is"),
        (["reshard", "A", "B", "--writers", "2", "--dtype", "bf16"], UsageError, "--weights-only"),
        (["reshard", "A", "B", "--tp", "3"], SettingsError, "cannot be divided"),
    ],
)
def test_wrong_inputs(folder, tmp_path, words, error, text):
    paths = {
        "A": str(folder),
        "B": str(tmp_path / "b"),
        "A/none": str(folder / "none"),
        "A/1": str(folder / "iter_0000001"),
    }
    with pytest.raises(error, match=text):
        tool.main([paths.get(word, word) for word in words])
    assert not (tmp_path / "b").exists() or not checkpoints(tmp_path / "b")


def test_a_foreign_folder_is_not_a_checkpoint(tmp_path):
    shutil.copytree(Path(tool.__file__).parent, tmp_path / "iter_0000004")
    with pytest.raises(CheckpointError, match="holds no valid checkpoint"):
        tool.main(["inspect", str(tmp_path)])


@pytest.mark.parametrize("flags", ["--json", "--json --ckpt-step 3", "--json true", "--ckpt-step=3 --json"])
def test_paths_may_follow_flags(flags, tmp_path):
    """A switch takes the next word only if that is true or false."""
    words = ["inspect", *flags.split(), str(tmp_path / "none")]
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'none'} (holds|has) no checkpoint"):
        tool.main(words)
