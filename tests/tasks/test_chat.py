# SPDX-License-Identifier: Apache-2.0
"""Instruction tuning against plain torch, where each conversation is a text by itself: packed or not, in each layout."""

import numpy as np
import pytest

import finetune
import pretrain_gpt
from megatron.data.conversations import read_conversations
from megatron.tasks.chat_samples import conversation_samples, pack
from tests.tasks.chats import (
    RUN,
    SHAPE,
    TUNE,
    answer_losses,
    plain_tokens,
    talks,
    train,
    weights_of,
    write_lines,
    write_vocabulary,
)
from tests.training.test_plain_loop import records

LAYOUTS = {  # packed: 4 samples; 7 otherwise
    "one process": (1, "--packing --global-batch-size 4"),
    "not packed": (1, "--global-batch-size 7"),
    "tp3 with sequence parallelism": (
        3,
        "--packing --global-batch-size 4 --tensor-model-parallel-size 3 --sequence-parallel",
    ),
    "pp3": (3, "--packing --global-batch-size 4 --pipeline-model-parallel-size 3"),
    "pp3 zb-h1": (3, "--packing --global-batch-size 4 --pipeline-model-parallel-size 3 --pipeline-schedule zb-h1"),
    "cp2": (2, "--packing --global-batch-size 4 --context-parallel-size 2"),
    "zero2": (2, "--packing --global-batch-size 4 --sharding-stage 2"),
    "zero3 recomputed": (
        2,
        "--packing --global-batch-size 4 --sharding-stage 3 --recompute-granularity full --recompute-method uniform",
    ),
}
FULL = ("tp3 with sequence parallelism", "pp3 zb-h1", "zero2", "cp2", "zero3 recomputed")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a pretrained checkpoint and its vocabulary."""
    folder = tmp_path_factory.mktemp("base")
    words = write_vocabulary(folder / "vocabulary")
    line = f"{SHAPE} {words} {RUN} --mock-data --train-iters 1 --lr 1e-3 --eval-iters 0 --save {folder}"
    pretrain_gpt.main(line.split())
    return folder


def tune(rank: int, line: str) -> None:
    finetune.main(line.split())


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in LAYOUTS]
)
def test_any_layout_is_each_conversation_by_itself(layout, base, run_ranks, tmp_path):
    world, words = LAYOUTS[layout]
    file = write_lines(tmp_path / "talks.jsonl", [dict(messages=talk) for talk in talks()])
    line = f"--task chat --train-data {file} --chat-template plain --load {base} --save {tmp_path / 'run'} {TUNE}"
    line += f" --train-iters 3 {words}"
    tune(0, line) if world == 1 else run_ranks(world, tune, line)
    texts = [plain_tokens(talk) for talk in talks()]
    steps, weights = train(weights_of(base), lambda weights: answer_losses(weights, texts), 3, 1e-2)
    found = records(tmp_path / "run", "step")
    for step, wanted in zip(found, steps, strict=True):
        assert step["lm loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-5)
    for name, values in weights_of(tmp_path / "run").items():
        assert (values[: len(weights[name])].double() - weights[name]).abs().max() < 2e-5, name
