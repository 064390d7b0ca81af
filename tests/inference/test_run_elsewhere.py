# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is used from another folder than its run's, and with a vocabulary that is not its own."""

import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

import finetune
import preprocess_data
import pretrain_gpt
from megatron.errors import DataError, SettingsError
from megatron.mpu.mesh import Mesh
from megatron.tools import evaluate, generate, lm_eval, trace, train_tokenizer

TEXTS = dict(
    mine="the cat sat on the mat and the dog sat on the hat", other="zwei boxen quer vom jagdhof, xylophon und pyjama"
)
RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --lr 1e-3 --eval-iters 0 --train-iters 1
    --micro-batch-size 2 --device cpu --num-workers 0 --save runs/gpt --data-path data/mine_text_document
    --vocab-file mine/vocab.json --merge-file mine/merges.txt"""
TASK = "name: toy\ntrain: toy.tsv\nvalid: toy.tsv\ntext: text\nlabel: label\nlabels: [a, b]\n"
FINETUNE = "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --device cpu --num-workers 0"


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with two vocabularies, token files of both, and a run that names everything as it lies in there."""
    desk, before = tmp_path_factory.mktemp("desk"), os.getcwd()
    os.chdir(desk)
    try:
        for name, text in TEXTS.items():
            os.makedirs("data", exist_ok=True)
            rows = "".join(json.dumps(dict(text=f"{text} {number}")) + "\n" for number in range(20))
            (desk / f"{name}.jsonl").write_text(rows)
            train_tokenizer.main(["--input", f"{name}.jsonl", "--output", name, "--vocab-size", "270"])
            line = f"--input {name}.jsonl --output-prefix data/{name} --append-eod --workers 1"
            preprocess_data.main(f"{line} --vocab-file {name}/vocab.json --merge-file {name}/merges.txt".split())
        pretrain_gpt.main(RUN.split())
        (desk / "wiki.tokens").write_text(f" {TEXTS['mine']} \n" * 4)
        (desk / "toy.yaml").write_text(TASK)
        (desk / "toy.tsv").write_text("text\tlabel\nthe cat\ta\nthe dog\tb\n")
    finally:
        os.chdir(before)
    return desk


@pytest.fixture
def elsewhere(desk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return desk


def scored(capsys, line: str) -> str:
    evaluate.main(f"--device cpu {line}".split())
    return capsys.readouterr().out.splitlines()[-1].partition("|")[2]


def test_another_vocabulary_is_refused_before_anything_is_scored(desk, elsewhere, capsys):
    ours, theirs = (f"--vocab-file {desk}/{name}/vocab.json --merge-file {desk}/{name}/merges.txt" for name in TEXTS)
    load, wiki = f"--load {desk}/runs/gpt", f"--task WIKITEXT103 --valid-data {desk}/wiki.tokens"
    assert scored(capsys, f"{load} {wiki} {ours}") == scored(capsys, f"{load} {wiki}")
    tokens = f"{load} --data-path {desk}/data"
    for line in (
        f"{wiki} {theirs}",
        f"--data-path {desk}/data/mine_text_document {theirs}",
        f"{wiki} --tokenizer-model {desk}/other",
    ):
        with pytest.raises(SettingsError, match="not the vocabulary that .* has learned"):
            scored(capsys, f"{load} {line}")
        assert "validation results" not in capsys.readouterr().out
    with pytest.raises(DataError, match="other_text_document was made with another vocabulary"):
        scored(capsys, f"{tokens}/other_text_document")
    with pytest.raises(SettingsError, match="not the vocabulary that .* has learned"):
        generate.main(f"{load} {theirs} --device cpu --prompt the".split())
    assert "tokens: " in scored(capsys, f"{tokens}/mine_text_document {ours}")


def test_files_that_were_overwritten_are_another_vocabulary(desk, elsewhere, tmp_path, capsys):
    """Their names are the checkpoint's. Token files need no vocabulary, and say themselves which one they are of."""
    (tmp_path / "mine").symlink_to(desk / "other")  # what lies in the present folder is found first
    with pytest.raises(SettingsError, match="not the vocabulary that .* has learned"):
        generate.main(f"--load {desk}/runs/gpt --device cpu --prompt the".split())
    load = f"--load {desk}/runs/gpt --data-path {desk}/data"
    assert "tokens: " in scored(capsys, f"{load}/mine_text_document")
    with pytest.raises(DataError, match="other_text_document was made with another vocabulary"):
        scored(capsys, f"{load}/other_text_document")


def test_the_harness_checks_the_vocabulary_too(desk, elsewhere, monkeypatch):
    """lm-evaluation-harness itself is not asked: the model is made before."""
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "megatron.tasks.harness", SimpleNamespace(HarnessModel=None))
    given = dict(vocab_file=f"{desk}/other/vocab.json", merge_file=f"{desk}/other/merges.txt")
    options = lm_eval.HarnessOptions(load=f"{desk}/runs/gpt", tasks=["any"])
    with pytest.raises(SettingsError, match="not the vocabulary that .* has learned"):
        lm_eval.evaluate(options, given, SimpleNamespace(device="cpu", mesh=Mesh()))


def test_relative_paths_are_found_from_another_folder(desk, elsewhere, capsys):
    generate.main(f"--load {desk}/runs/gpt --device cpu --prompt the --tokens-to-generate 2".split())
    scored(capsys, f"--load {desk}/runs/gpt --task WIKITEXT103 --valid-data {desk}/wiki.tokens")
    trace.main(f"--load {desk}/runs/gpt --iter 1".split())
    told = capsys.readouterr()
    assert "no tokenizer" not in told.err and "the cat sat" in told.out
    finetune.main(f"--task {desk}/toy.yaml --data-path {desk} --load {desk}/runs/gpt {FINETUNE}".split())
    pretrain_gpt.main(f"--load {desk}/runs/gpt --finetune --mock-data --lr 1e-3 --eval-iters 0 {FINETUNE}".split())


def test_a_path_that_is_lost_is_said_to_be_the_checkpoints(desk, elsewhere, tmp_path):
    """The folder of the run has gone with all but its checkpoints."""
    gone = desk.with_name("gone")
    desk.rename(gone)
    try:
        (tmp_path / "gpt").symlink_to(gone / "runs/gpt")
        commands = (
            (generate, "--load gpt --device cpu --prompt the"),
            (evaluate, f"--load gpt --device cpu --task WIKITEXT103 --valid-data {gone}/wiki.tokens"),
            (finetune, f"--task {gone}/toy.yaml --data-path {gone} --load gpt {FINETUNE}"),
            (trace, "--load gpt --iter 1"),
        )
        for tool, line in commands:
            with pytest.raises(DataError) as error:
                tool.main(line.split())
            assert f"comes from the checkpoint, whose run was started in {desk}" in str(error.value)
            assert "--data-path" in error.value.do if tool is trace else "--vocab-file" in error.value.do
    finally:
        gone.rename(desk)
