# SPDX-License-Identifier: Apache-2.0
"""What a prompt of `generate --chat` stands for: a message, or a conversation as JSON; and what ends its answer."""

import json
from types import SimpleNamespace

import pytest

from megatron.errors import DataError
from megatron.inference.chats import chat_in, ends_of

USER, OTHER, ANSWER, SYSTEM = (
    dict(role=role, content=text)
    for role, text in (("user", "Hi"), ("user", "Why?"), ("assistant", "No."), ("system", "S"))
)


@pytest.mark.parametrize("system", [None, "S"])
@pytest.mark.parametrize("form", ["a list", "an object"])
@pytest.mark.parametrize(
    "talk, kept",
    [
        ([USER], 1),
        ([USER, ANSWER], 1),
        ([USER, ANSWER, ANSWER], 1),
        ([USER, ANSWER, OTHER], 3),
        ([SYSTEM, USER, ANSWER], 2),
        ([SYSTEM, USER, ANSWER, OTHER, ANSWER], 4),
    ],
)
def test_answers_at_the_end_are_left_out_and_counted(talk, kept, form, system):
    """The system's message is the conversation's own, if it has one."""
    found = chat_in(json.dumps(talk if form == "a list" else dict(messages=talk)), system)
    first = [SYSTEM] if system and talk[0] is not SYSTEM else []
    assert (list(found.messages), found.without) == ([*first, *talk[:kept]], len(talk) - kept)
    assert found.shown == talk[kept - 1]["content"]


@pytest.mark.parametrize("before", ["", " ", "\n\t "])
def test_white_space_before_a_conversation_and_weights_in_it_mean_nothing(before):
    """A weight is of training."""
    talk = [USER, ANSWER | dict(weight=0), OTHER, ANSWER | dict(weight=1), USER]
    found = chat_in(before + json.dumps(talk))
    assert list(found.messages) == [USER, ANSWER, OTHER, ANSWER, USER] and found.without == 0


@pytest.mark.parametrize(
    "text", ["Hi", "[1]", "[]", "{}", '[{"role": "user"}, 1]', '[1, {"role": "user"}]', '{"a": 1}', "[", "{x"]
)
def test_any_other_text_is_a_message(text):
    """Also JSON that is no conversation."""
    assert list(chat_in(text).messages) == [dict(role="user", content=text)]
    assert (
        list(chat_in(text, "S").messages) == [SYSTEM, dict(role="user", content=text)]
        and chat_in(text, "S").without == 0
    )


def test_a_conversation_without_a_question_is_refused():
    with pytest.raises(DataError, match="only answers of the assistant"):
        chat_in(json.dumps([ANSWER]), "S")


@pytest.mark.parametrize(
    "of_model, of_turn, wanted", [((7, 8), 5, (7, 8)), (None, 5, 5), (None, None, 3), ((7,), None, (7,))]
)
def test_the_file_beside_the_model_counts_before_the_template_and_that_before_the_tokenizer(of_model, of_turn, wanted):
    template = SimpleNamespace(end_of_turn=of_turn, tokenizer=SimpleNamespace(eod=3))
    assert ends_of(SimpleNamespace(ends=of_model), template) == wanted
