# SPDX-License-Identifier: Apache-2.0
"""Which vocabulary a checkpoint has learned: by what is in it, not by where it lies."""

import pytest

import pretrain_gpt
from megatron.errors import SettingsError

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
