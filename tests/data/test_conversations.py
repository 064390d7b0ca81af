# SPDX-License-Identifier: Apache-2.0
"""Files of conversations and of pairs: their shapes, and what is refused, with the line."""

import json

import pytest

from megatron.data.conversations import read_conversations, read_pairs
from megatron.errors import DataError

USER, ANSWER = dict(role="user", content="Hello"), dict(role="assistant", content="Hi.")
TALK = [USER, ANSWER]
NO = [dict(role="assistant", content="No.")]


def written(tmp_path, *rows):
    """A file whose second line is the last of these rows; the first one is good."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return [str(path)]


@pytest.mark.parametrize(
    "row",
    [
        dict(messages=TALK),
        dict(conversations=[{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]),
        dict(
            messages=[dict(role="user", content=[dict(type="text", text="Hel"), dict(type="text", text="lo")]), ANSWER]
        ),
        dict(messages=[USER, dict(ANSWER, refusal=None, tool_calls=None)]),
    ],
)
def test_shapes_of_conversations(tmp_path, row):
    [found], notes = read_conversations(written(tmp_path, row))
    assert list(found.messages) == TALK and found.where.endswith("rows.jsonl, line 1") and not notes


def test_rows_of_parquet_are_lines(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    call = dict(id="1", type="function")
    rows = [dict(messages=TALK, more=1), dict(messages=[USER, dict(ANSWER, tool_calls=[call])], more=None)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=1)
    found, notes = read_conversations([str(tmp_path / "rows.parquet")])
    lines, _ = read_conversations(written(tmp_path, *(dict(messages=one["messages"]) for one in rows)))
    assert [one.messages for one in found] == [one.messages for one in lines]
    assert notes == [f"{tmp_path}/rows.parquet: more of its lines are not used"]
    assert found[1].where.endswith("rows.parquet, row 2")
    (tmp_path / "rows.parquet").write_text("{}")
    with pytest.raises(DataError, match="rows.parquet holds neither Parquet nor Arrow"):
        read_conversations([str(tmp_path / "rows.parquet")])


def test_prompt_and_completion_of_trl(tmp_path):
    """The loss is on the completion alone."""
    [found], notes = read_conversations(written(tmp_path, dict(prompt=[*TALK, USER], completion=[ANSWER])))
    assert list(found.messages) == [USER, dict(ANSWER, weight=0), USER, ANSWER] and not notes


@pytest.mark.parametrize(
    "row, advice",
    [
        (dict(prompt="Hello", completion="Hi."), "the prompt"),
        (dict(instruction="Add", input="1 2", output="3"), "instruction and input"),
        (dict(text="Hello"), "pretrain_gpt.py"),
        (dict(prompt="a", chosen="b", rejected="c"), "--task dpo"),
    ],
)
def test_rows_of_other_purposes_are_named(tmp_path, row, advice):
    with pytest.raises(DataError, match="line 2: no messages") as raised:
        read_conversations(written(tmp_path, dict(messages=TALK), row))
    assert advice in str(raised.value)


def test_empty_answers_are_counted_and_named(tmp_path):
    """Those that are learned: not an answer of weight 0, and not a call of a tool."""
    empty, call = dict(role="assistant", content=" \n"), dict(role="assistant", tool_calls=[dict(name="f")])
    rows = [[USER, ANSWER], [USER, empty], [USER, dict(empty, weight=0), USER, ANSWER], [USER, call]]
    rows += [[USER, ANSWER, USER, empty, USER, empty]]
    file = written(tmp_path, *(dict(messages=row) for row in rows))
    [note] = read_conversations(file)[1]
    assert note.startswith(f"{file[0]}: 2 of 5 lines have an empty answer, which is learned (line 2, line 5)")
    [note] = read_pairs(written(tmp_path, dict(prompt=[USER], chosen=[ANSWER], rejected=[empty])))[1]
    assert "1 of 1 lines have an empty answer" in note


def test_keys_beside_the_messages(tmp_path):
    rows = (
        dict(conversations=[{"from": "human", "value": "Hello"}], system="Be kind.", id=3),
        dict(messages=TALK, tools=[dict(type="function")], id=4, score=1),
    )
    (first, second), [note] = read_conversations(written(tmp_path, *rows))
    assert first.messages[0] == dict(role="system", content="Be kind.") and second.tools == [dict(type="function")]
    assert note.endswith("rows.jsonl: id, score of its lines are not used")


def test_an_array_of_conversations(tmp_path):
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([dict(messages=TALK), dict(messages=TALK[:1])]))
    assert [one.where for one in read_conversations([str(path)])[0]] == [f"{path}, item 1", f"{path}, item 2"]


@pytest.mark.parametrize(
    "row, said",
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: list, no object"),
        (dict(text="Hello"), "line 2: no messages"),
        (dict(messages=TALK, conversations=TALK), "line 2: both messages and conversations"),
        (dict(prompt="a", chosen="b", rejected="c"), "--task dpo"),
        (dict(messages="Hello"), "line 2, messages: str, no list of messages"),
        (dict(messages=[]), "line 2, messages: there is no message"),
        (dict(messages=["Hello"]), r"messages\[0\]: str, no message"),
        (dict(messages=[dict(content="Hello")]), r"messages\[0\]: no role"),
        (dict(messages=[USER, dict(role="assistant")]), r"messages\[1\]: no content"),
        (
            dict(messages=[USER, dict(role="assistant", content=None)]),
            r"messages\[1\]: no content\n  its content is null",
        ),
        (dict(messages=[dict(role="user", content=3)]), r"messages\[0\], content: int, no text"),
        (dict(messages=[dict(role="user", content=[dict(type="image_url")])]), r"content: a part that is no text"),
        (dict(messages=[dict(role="user", content="\ud83d")]), "half of a surrogate pair"),
        (dict(messages=[{"from": "human", "value": "Hi"}]), "ShareGPT's shape in messages"),
        (dict(messages=[dict(USER, weight=0)]), "weight 0"),
        (dict(messages=TALK, system="Be kind."), "system beside messages"),
        (dict(messages=TALK, tools="sum"), "tools is no list of objects"),
        (dict(conversations=TALK), r"conversations\[0\]: no from.*\n.*\n.*call the list messages"),
        (dict(conversations=[{"from": "humn", "value": "Hi"}]), r"from 'humn'; did you mean human"),
        (dict(conversations=[{"from": "human", "value": None}]), "NoneType, no text"),
        (dict(conversations=[{"from": "human", "value": "Hi", "weight": 0}]), "weight beside from and value"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, row, said):
    with pytest.raises(DataError, match=said) as error:
        read_conversations(written(tmp_path, dict(messages=TALK), row))
    assert error.value.code == 4 and "rows.jsonl, line 2" in str(error.value)


def test_other_files(tmp_path):
    for name, content, said in [
        ("talks.txt", "Hello", "no file of conversations"),
        ("empty.jsonl", "", "is empty"),
        ("latin.jsonl", b"\xe9", "not UTF-8"),
        ("missing.jsonl", None, "No such file"),
    ]:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError, match=said):
            read_conversations([str(path)])


@pytest.mark.parametrize(
    "row",
    [
        dict(prompt=TALK[:1], chosen=TALK[1:], rejected=NO),
        dict(chosen=TALK, rejected=[USER, *NO]),
        dict(prompt=TALK[:1], chosen=TALK, rejected=[USER, *NO]),
        dict(prompt="Hello", chosen=TALK, rejected=[USER, *NO]),
    ],
)
def test_shapes_of_pairs(tmp_path, row):
    [pair], _ = read_pairs(written(tmp_path, row))
    assert list(pair.prompt) == TALK[:1] and list(pair.chosen) == TALK[1:] and list(pair.rejected) == NO


def test_pairs_of_texts(tmp_path):
    [given, implied], _ = read_pairs(
        written(
            tmp_path,
            dict(prompt="It is", chosen=" red.", rejected=" blue."),
            dict(chosen="A big x", rejected="A big y"),
        )
    )
    assert given[1:4] == ("It is", " red.", " blue.") and implied[1:4] == ("A big", " x", " y")


@pytest.mark.parametrize(
    "row, said",
    [
        (dict(chosen="a"), "line 2: no rejected"),
        (dict(messages=TALK), "--task chat"),
        (dict(prompt="a", chosen="b", rejected=NO), "one answer is a text"),
        (dict(prompt=TALK[:1], chosen="b", rejected="c"), "the prompt is no text"),
        (dict(prompt="Bye", chosen=TALK, rejected=[USER, *NO]), "the prompt is a text"),
        (dict(chosen="abc", rejected="xyz"), "prompt is empty"),
        (dict(chosen="abc", rejected="ab"), "rejected is empty"),
        (dict(prompt=TALK[:1], chosen=TALK[1:], rejected=[USER]), "rejected has no message of the assistant"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path, row, said):
    with pytest.raises(DataError, match=said) as error:
        read_pairs(written(tmp_path, dict(prompt="a", chosen="b", rejected="c"), row))
    assert error.value.code == 4 and "rows.jsonl, line 2" in str(error.value)
