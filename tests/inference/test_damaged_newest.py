# SPDX-License-Identifier: Apache-2.0
"""A damaged newest checkpoint: a command that looks at a model warns and uses the one before, as training does; a command
that makes something of it refuses, unless it is told which one to take.
"""

import os
import re

import pytest

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError
from megatron.inference.load import load_model
from megatron.serving import weights
from megatron.tools import benchmark_inference, evaluate, export, generate, prune, teacher_logits
from megatron.tools import checkpoint as tool

PASSED_OVER = r"warning: .*iter_0000009 is passed over, and iteration 7 loaded instead: "


@pytest.fixture
def folder(new_checkpoint, tmp_path):
    """Iterations 7 and 9; the second is cut off."""
    folder = tmp_path / "run"
    new_checkpoint(folder)
    new_checkpoint(folder, iteration=9, by=1.5)
    os.truncate(folder / "iter_0000009" / "shard_00000.safetensors", 1000)
    return folder


def pieces_of(reader: Reader) -> list[Piece]:
    return [Piece(name, one.shape, Box.whole(one.shape), reader.read(name)) for name, one in reader.tensors.items()]


LOOKS = {
    "generate": (generate, "--load {folder} --prompt cat --tokens-to-generate 2 --greedy --device cpu"),
    "evaluate": (evaluate, "--load {folder} --task WIKITEXT103 --valid-data {folder}/../text --device cpu"),
    "benchmark": (
        benchmark_inference,
        "--load {folder} --prompt-length 4 --output-length 2 --batch-size 1 --iterations 1 --warmup 0 --device cpu",
    ),
    "inspect": (tool, "inspect {folder}"),
    "diff": (tool, "diff {folder} {folder}"),
    "verify": (tool, "verify {folder} --no-all"),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_command_that_looks_at_a_model_warns(name, folder, capsys):
    (folder.parent / "text").write_text("the cat sat on the mat and the dog sat on the hat\n" * 9)
    command, words = LOOKS[name]
    command.main(words.format(folder=folder).split())
    said = capsys.readouterr().err
    warnings = re.findall(PASSED_OVER + r".*shard_00000.safetensors has 1,000 bytes", said)
    assert len(warnings) == said.count("1,000 bytes") == (2 if name == "diff" else 1), said


MAKES = {
    "export": (export, "--load {folder} --output {out} --no-check"),
    "prune": (prune, "--load {folder} --save {out} --target-ffn-hidden-size 64"),
    "teacher_logits": (
        teacher_logits,
        "--load {folder} --output {out} --train-samples 2 --mock-data --top-k 2 --device cpu --micro-batch-size 1",
    ),
    "to-hf": (tool, "to-hf {folder} {out} --unchecked"),
    "to-megatron": (tool, "to-megatron {folder} {out} --unchecked"),
    "to-dcp": (tool, "to-dcp {folder} {out} --weights-only --unchecked"),
    "quantize": (tool, "quantize {folder} {out} --quantize int8"),
    "upcycle": (tool, "upcycle {folder} {out} --num-experts 2 --unchecked"),
    "reshard": (tool, "reshard {folder} {out} --writers 2"),
    "merge-lora": (tool, "merge-lora {folder} {out}"),
    "apply-masks": (tool, "apply-masks {folder} {out}"),
    "to-peft": (tool, "to-peft {folder} {out}"),
    "from-peft": (tool, "from-peft {folder} {out} --base {folder}"),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_command_that_makes_something_refuses(name, folder, tmp_path):
    command, words = MAKES[name]
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="newest checkpoint of .*run is damaged") as refused:
        command.main(words.format(folder=folder, out=out).split())
    assert "has 1,000 bytes instead of" in str(refused.value) and not out.exists()
    assert f"--ckpt-step 7, or the path {folder}/iter_0000007, takes the newest good one" in str(refused.value)


@pytest.mark.parametrize("name", ["export", "reshard", "teacher_logits"])
def test_it_takes_the_one_that_it_is_told(name, folder, tmp_path, capsys):
    command, words = MAKES[name]
    command.main([*words.format(folder=folder, out=tmp_path / "out").split(), "--ckpt-step", "7"])
    told = capsys.readouterr()
    assert (tmp_path / "out").is_dir() and "warning" not in told.err and "iter_0000009" not in told.out + told.err


@pytest.mark.parametrize(
    "command, flags",
    [
        (generate, "--prompt cat"),
        (evaluate, "--data-path tokens"),
        (teacher_logits, "--output out --train-samples 2 --mock-data"),
        (benchmark_inference, ""),
    ],
)
def test_a_missing_model_is_told_before_a_missing_device(command, flags, tmp_path, monkeypatch):
    """Otherwise it takes a second try to hear of it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "empty").mkdir()
    for folder in ("nope", "empty"):
        with pytest.raises(CheckpointError, match=f"{folder} holds no checkpoint"):
            command.main(f"--load {tmp_path / folder} --device cuda {flags}".split())


def test_damage_that_only_a_reader_of_tensors_meets(folder, capsys):
    """A bit of its data is wrong. The record is that of the model that was loaded."""
    new = folder / "iter_0000009"
    with Reader(folder / "iter_0000007") as reader, Saver(folder) as saver:
        saver.save(9, pieces_of(reader), reader.state | dict(run="of 9"))
    path = new / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    loaded = load_model(str(folder))
    assert re.search(PASSED_OVER + ".*do not match their checksum", capsys.readouterr().err)
    assert loaded.iteration == loaded.record["iteration"] == 7 and "run" not in loaded.record


def test_what_parity_files_mend_is_the_newest(folder, tmp_path, capsys):
    with Reader(folder / "iter_0000007") as reader, Saver(folder, parity=1) as saver:
        saver.save(9, pieces_of(reader), reader.state)
    shard = folder / "iter_0000009" / "shard_00000.safetensors"
    os.truncate(shard, 1000)
    tool.main(["reshard", str(folder), str(tmp_path / "out"), "--writers", "1"])
    said = capsys.readouterr()
    assert (tmp_path / "out" / "iter_0000009").is_dir() and shard.stat().st_size > 1000
    assert f"warning: {shard.name} of {shard.parent} were lost or damaged, and are rebuilt from parity" in said.err


def test_a_server_that_follows_a_folder_hears_of_it(folder):
    path, [problem] = weights._newest(str(folder))
    assert path.endswith("iter_0000007") and "has 1,000 bytes" in problem
