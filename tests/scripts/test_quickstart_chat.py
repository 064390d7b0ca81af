# SPDX-License-Identifier: Apache-2.0
"""The quickstart of conversations: what it asks was held out, and the script runs as a newcomer runs it."""

import json
import re
from pathlib import Path

import pytest

from scripts import quickstart_chat


def test_a_way_to_ask_each_fact_is_held_out(tmp_path):
    quickstart_chat.write_talks(tmp_path)
    train, valid = (
        [json.loads(line)["messages"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "valid")
    )
    asked = {message["content"] for talk in train for message in talk if message["role"] == "user"}
    told = {message["content"] for talk in train for message in talk if message["role"] == "assistant"}
    assert len(valid) == len(quickstart_chat.facts()) > 100
    assert not asked & {question["content"] for question, _ in valid}
    assert {answer["content"] for _, answer in valid} <= told


def test_what_was_learned_is_said_by_the_right_answers():
    assert quickstart_chat.verdict(57, 114).startswith("It has learned to answer, not to know")
    few = quickstart_chat.verdict(4, 114)
    assert few.startswith("It has not learned to answer yet: 4 of 114") and "--train-iters 400" in few
    assert "has learned" not in Path(quickstart_chat.__file__).with_suffix(".sh").read_text()


@pytest.mark.full
def test_from_the_model_to_answers(copy, bash, quickstart):
    said = bash("scripts/quickstart_chat.sh", "--train-iters", "2", "--log-interval", "1").stdout
    assert re.search(r"iteration +2/ +2 \|.* lm loss: ", said) and "validation loss" in said
    assert re.search(r"right: \d+ of \d+ questions", said) and "> What is the capital of France?" in said
    run = copy / "runs" / "quickstart_chat"
    assert (run / "checkpoints" / "chat_template.jinja").exists() and "Traceback" not in (run / "serve.log").read_text()
    again = bash("scripts/quickstart_chat.sh", "--train-iters", "2").stdout
    assert again.count("already there") == 2 and "right: " in again
