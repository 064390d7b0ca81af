# SPDX-License-Identifier: Apache-2.0
"""`--save-hf`: models in Hugging Face's format beside the checkpoints of a run, written in the background."""

import json
import threading
import time

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import manager as module
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.copies import export_to_hf
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.store import Piece
from megatron.convert import huggingface
from megatron.errors import SettingsError, StorageError
from megatron.settings import schema
from megatron.settings.parse import parse_pretrain
from megatron.training.rules import check

WORDS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2
    --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --device cpu --train-iters 4 --save-interval 2""".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that wrote checkpoints 2 and 4, and the model of 4."""
    folder = tmp_path_factory.mktemp("run")
    pretrain_gpt.main([*WORDS, "--save", f"{folder}/a", "--save-hf", f"{folder}/hf", "--save-hf-interval", "4"])
    return folder


@pytest.mark.sampled(2)
def test_a_run_leaves_models_for_transformers(trained, tmp_path):
    from transformers import AutoModelForCausalLM

    assert [path.name for path in (trained / "hf").iterdir()] == ["iter_0000004"]
    huggingface.to_hf(trained / "a" / "iter_0000004", tmp_path / "own", torch.bfloat16, {}, check=False)
    written, own = (trained / "hf" / "iter_0000004", tmp_path / "own")
    assert (written / "model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
    assert json.loads((written / "config.json").read_text()) == json.loads((own / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(written).config.n_layer == 2


@pytest.mark.sampled(5)
def test_the_model_of_a_step_that_is_saved_again_is_replaced_in_one_piece(trained, tmp_path):
    old = tmp_path / "iter_0000004"
    old.mkdir()
    (old / "model.safetensors").write_text("of a run that was rolled back")
    (tmp_path / ".tmp-iter_0000004-dead").mkdir()  # left by a killed run
    export_to_hf(trained / "a" / "iter_0000004", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000004"]
    assert (old / "model.safetensors").stat().st_size > 1000


@pytest.mark.sampled(5)
def test_an_export_that_fails_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")  # of the job, not of the export
    monkeypatch.setenv("WORLD_SIZE", "8")
    (tmp_path / "iter_0000007").mkdir()
    with pytest.raises(StorageError, match="exit code 5: error: .*iter_0000007"):
        export_to_hf(tmp_path / "iter_0000007", str(tmp_path / "hf"))
    assert not list((tmp_path / "hf").iterdir())


def saving(tmp_path, monkeypatch, export, **more):
    monkeypatch.setattr(module, "export_to_hf", export)
    said, settings = [], schema.Checkpoint(save=str(tmp_path / "a"), save_hf=str(tmp_path / "hf"), **more)
    return CheckpointManager(settings, log=said.append), said


def pieces(value):
    return [Piece("weight", (4, 3), Box.whole((4, 3)), torch.full((4, 3), float(value)))]


def test_a_checkpoint_that_is_exported_is_kept_until_then(tmp_path, monkeypatch):
    go, begun = threading.Event(), threading.Event()

    def slow(checkpoint, where):
        begun.set()
        go.wait(60)
        assert checkpoint.is_dir()

    manager, said = saving(tmp_path, monkeypatch, slow, keep_last=1)
    manager.save(1, pieces(1), {})
    assert begun.wait(60)
    manager.save(2, pieces(2), {})
    assert list(checkpoints(tmp_path / "a")) == [1, 2]
    go.set()
    manager.close()
    assert sum("copied iter_" in line for line in said) == 2 and not any("WARNING" in line for line in said)


def test_every_so_many_steps_and_a_failure_does_not_end_the_run(tmp_path, monkeypatch):
    made = []

    def broken(checkpoint, where):
        made.append((checkpoint.name, where))
        raise StorageError("exit code 3: error: no such model")

    manager, said = saving(tmp_path, monkeypatch, broken, save_hf_interval=3)
    for step in (1, 3, 4, 6):
        manager.save(step, pieces(step), {})
        time.sleep(0)
    manager.close()
    assert made == [("iter_0000003", str(tmp_path / "hf")), ("iter_0000006", str(tmp_path / "hf"))]
    assert sum("was not copied (--save-hf" in line and "no such model" in line for line in said) == 2


def test_a_model_that_transformers_does_not_have_is_refused_before_the_first_step(tmp_path):
    words = [*WORDS, "--save", str(tmp_path / "a"), "--save-hf", str(tmp_path / "hf")]
    words[words.index("--num-layers") : words.index("--num-layers") + 2] = ["--hybrid-layer-pattern", "*-*-"]
    with pytest.raises(SettingsError, match="other libraries do not name layers so"):
        pretrain_gpt.main(words)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        ("--save-hf h", "--save-hf needs --save"),
        ("--save s3://a/b --save-hf h", "must be local folders"),
        ("--save a --save-hf s3://a/b", "must be local folders"),
    ],
)
def test_what_cannot_be_written_is_named(words, said):
    assert any(said in problem for problem in check(parse_pretrain([*WORDS[:-2], *words.split()]), 1))
