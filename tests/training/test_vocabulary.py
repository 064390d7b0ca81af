# SPDX-License-Identifier: Apache-2.0
"""Which vocabulary a checkpoint has learned: by what is in it, not by where it lies."""

import json
import re

import pytest

import pretrain_gpt
from megatron.checkpoint.choose import choose
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import build_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
RUN = """--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --lr 1e-3 --eval-iters 0
    --micro-batch-size 2 --device cpu --num-workers 0 --lr-decay-iters 9 --tokenizer-type BertWordPieceLowerCase"""
ANOTHER = "the checkpoint was trained with another vocabulary than this run's"


def test_a_vocabulary_may_lie_elsewhere_and_another_one_is_told(tmp_path, capsys):
    (tmp_path / "v.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "moved.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "other.txt").write_text("\n".join([*WORDS[:5], "x", "y", "z"]) + "\n")

    def run(steps: int, file: str, more: str) -> str:
        line = f"{RUN} --train-iters {steps} --vocab-file {tmp_path}/{file} {more}"
        pretrain_gpt.main(line.split())
        return capsys.readouterr().out

    assert ANOTHER not in run(1, "v.txt", f"--save {tmp_path}/run")
    go_on = f"--save {tmp_path}/run --load {tmp_path}/run"
    said = run(2, "moved.txt", go_on)
    assert f"is {tmp_path}/moved.txt now: the same vocabulary" in said and ANOTHER not in said
    with pytest.raises(SettingsError, match="--vocab-file: .*moved.txt in the checkpoint, .*other.txt now"):
        run(3, "other.txt", go_on)
    assert ANOTHER in run(3, "other.txt", f"{go_on} --override vocab-file")
    assert ANOTHER in run(1, "v.txt", f"--load {tmp_path}/run --finetune")
    assert ANOTHER not in run(1, "other.txt", f"--load {tmp_path}/run --finetune")


def test_a_checkpoint_names_the_files_of_a_vocabulary_that_was_given_by_its_name(tmp_path, monkeypatch, capsys):
    """Type, files and identity are recorded, as `generate` opens them; and a run that resumes by the name goes on."""
    words = tmp_path / "cache" / "letters"
    words.mkdir(parents=True)
    vocab = {**{chr(code): code - 97 for code in range(97, 123)}, "ab": 26, "<|endoftext|>": 27}
    (words / "vocab.json").write_text(json.dumps(vocab))
    (words / "merges.txt").write_text("#version: 0.2\na b\n")
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "cache"))
    run = re.sub(r"--tokenizer-type \w+", "--tokenizer-model letters", RUN)
    pretrain_gpt.main(f"{run} --train-iters 1 --save {tmp_path}/run".split())
    assert "--tokenizer-model" not in capsys.readouterr().out.split("\n", 1)[1]  # it has an effect
    with Reader(choose(tmp_path / "run").paths[0]) as reader:
        record = reader.state
    opened = {name: value for name, value in record["config"]["tokenizer"].items() if value}
    files = dict(vocab_file=str(words / "vocab.json"), merge_file=str(words / "merges.txt"))
    assert opened == dict(tokenizer_type="GPT2BPETokenizer", **files)
    fingerprint = build_tokenizer(TokenizerSettings("GPT2BPETokenizer", **files)).fingerprint
    assert record["tokenizer"] == dict(type="GPT2BPETokenizer", vocab_size=28, eod=27, fingerprint=fingerprint)
    pretrain_gpt.main(f"{run} --train-iters 2 --load {tmp_path}/run --save {tmp_path}/run".split())
    assert "vocab-file" not in capsys.readouterr().out
