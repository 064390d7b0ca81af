# SPDX-License-Identifier: Apache-2.0
"""Tools in chats: prompts are those of transformers, calls those that a regular expression finds in the whole answer."""

import json
import random
import re
from types import SimpleNamespace

import pytest

from megatron.inference.text_stream import TextPart
from megatron.serving.openai_api import Chats
from megatron.serving.openai_requests import Chat, parse
from megatron.serving.tool_calls import CallPart, CallReader
from megatron.tokenizer.chat_template import RefusedMessages, find_template
from tests.serving import toy
from tests.serving.test_chat import configured, template_of
from tests.tokenizer.turns import save_tokenizer

openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")

HERMES = """{% if tools %}{{ 'system: call <tool_call>{"name": ..., "arguments": ...}</tool_call> of ' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '\\n' }}{% endif %}
{%- for m in messages %}{{ m.role + ': ' + m.content }}{% for call in m.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}{% endfor %}{{ '\\n' }}{% endfor %}>"""
SCHEMA = dict(type="object", properties=dict(city=dict(type="string", description="Z\u00fcrich <|im_end|>")))
TOOLS = [dict(type="function", function=dict(name=name, description="d", parameters=SCHEMA)) for name in ("f", "g")]
CALL = dict(id="call_1", type="function", function=dict(name="f", arguments='{"city": "Bern"}'))
TALK = [
    dict(role="user", content="Weather?"),
    dict(role="assistant", content=None, tool_calls=[CALL]),
    dict(role="tool", content="rain", tool_call_id="call_1"),
]
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OTHER = '<tool_call>{"name": "g", "arguments": {"x": "\u00e9"}}</tool_call>'
PIECES = ["Let me see.\n", " ", "<tool", "\n", "</tool_call>", "<tool_call>no</tool_call>", "<tool_call>"]
PIECES += ["a < b", ONE, OTHER]


def test_prompts_are_those_of_transformers(tmp_path):
    """Names of special tokens in descriptions are text here, so they are left out there."""
    transformers = pytest.importorskip("transformers")
    folder = save_tokenizer(tmp_path)
    configured(folder, HERMES)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    tools = json.loads(json.dumps(TOOLS).replace(" <|im_end|>", ""))
    body = parse(Chat, dict(messages=TALK, tools=tools))
    called = dict(CALL, function=dict(name="f", arguments=dict(city="Bern")))
    talk = [TALK[0], dict(role="assistant", content="", tool_calls=[called]), TALK[2]]
    expected = theirs.apply_chat_template(talk, tools=tools, add_generation_prompt=True)["input_ids"]
    messages = [message.plain() for message in body.messages]
    assert template_of(folder).encode(messages, tools=body.callable) == expected
    end = template_of(folder).special["<|im_end|>"]
    assert end not in template_of(folder).encode(messages, tools=parse(Chat, dict(messages=TALK, tools=TOOLS)).callable)
    configured(folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RefusedMessages, match="tools: the chat template has no place"):
        template_of(folder).encode(messages[:1], tools=body.callable)


def by_expression(text: str) -> tuple[str, list[tuple[str, dict]]]:
    """(the words without white space, name and arguments of the calls) of a whole answer."""
    words, calls = "", []
    for number, part in enumerate(re.split(r"<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)):
        try:
            found = json.loads(part) if number % 2 else None
            calls += [(found["name"], found["arguments"])] if found else []
            words += "" if found else part
        except ValueError:
            words += f"<tool_call>{part}</tool_call>"
    return "".join(words.split()), calls


@pytest.mark.parametrize(
    "text, finish, said", [(ONE, "stop", "tool_calls"), (ONE, "length", "length"), ("a", "stop", "stop")]
)
def test_only_an_answer_that_has_ended_calls_tools(text, finish, said):
    """One that is cut after a call may have had more of them, or other words."""
    body = SimpleNamespace(logprobs=False, callable=TOOLS)
    form = Chats(SimpleNamespace(model=SimpleNamespace(name="m", token_texts=None), body=body, requests=[None]))
    assert form.choice(0, TextPart(text, finish=finish), 0, whole=True)["finish_reason"] == said


@pytest.mark.parametrize("cut", range(4))
def test_white_space_around_calls_is_in_neither(cut):
    """However it arrives; white space inside of the text stays, and so does that after what is no call."""
    text = f"Let me  see.\n\n{ONE} \n\n{OTHER}\n So.\n<tool_call>no</tool_call> \nWell. "
    parts = {0: [text], 1: list(text), 2: [f"{word} " for word in text.split(" ")], 3: text.splitlines(keepends=True)}[
        cut
    ]
    reader = CallReader()
    found = [reader.feed(part, last=number == len(parts)) for number, part in enumerate(parts, 1)]
    assert "".join(part.text for part in found).rstrip() == "Let me  see.So.\n<tool_call>no</tool_call> \nWell."
    assert [call["function"]["name"] for part in found for call in part.calls] == ["f", "g"]
    assert [call["function"]["arguments"] for part in found for call in part.calls] == ['{"a": 1}', '{"x": "\u00e9"}']


@pytest.mark.parametrize("seed", range(40))
def test_calls_are_found_however_the_text_arrives(seed):
    draw = random.Random(seed)
    text = "".join(draw.choices(PIECES, k=draw.randint(1, 6)))
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 9)))
    reader, parts = CallReader(), []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts.append(reader.feed(text[start:stop], last=False))
    parts.append(reader.feed("", last=True))
    words, calls = "".join(part.text for part in parts), [call for part in parts for call in part.calls]
    found = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]
    assert ("".join(words.split()), found) == by_expression(text), text
    assert reader.count == len(calls) == len({one["id"] for one in calls})
    if not calls:
        assert words == text, "a text without calls stays as it is"


def test_text_is_passed_on_at_once():
    reader = CallReader()
    assert [reader.feed(part).text for part in ("Let ", "me", " <to", "ol_x")] == ["Let", " me", "", " <tool_x"]
    assert reader.feed("<tool_call>{") == CallPart()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("template")
    (place / "chat_template.jinja").write_text(HERMES)
    with toy.served(template=find_template([place], toy.ByteTokenizer())) as one:
        yield one


@pytest.fixture
def client(server, monkeypatch):
    """A client of a model that writes a text and two calls."""
    calls = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    answer = f"Let me see.\n{calls}"
    script = [*answer.encode(), toy.EOD]
    monkeypatch.setattr(toy, "chosen", lambda request, new: script[len(new)])
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


SMALL = [dict(type="function", function=dict(name=name)) for name in ("f", "g")]
CALLED = [("f", '{"a": 1}'), ("g", "{}")]


def test_an_answer_with_calls(client):
    asked = dict(model="toy", messages=TALK[:1], tools=SMALL)
    [choice] = client.chat.completions.create(**asked).choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert [(one.function.name, one.function.arguments) for one in choice.message.tool_calls] == CALLED
    results = [dict(role="tool", content="1", tool_call_id=one.id) for one in choice.message.tool_calls]
    again = [*TALK[:1], choice.message, *results]
    assert client.chat.completions.create(**dict(asked, messages=again)).usage.prompt_tokens > 100
    text, calls, finish = "", {}, None
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
        calls |= {one.index: (one.function.name, one.function.arguments) for one in choice.delta.tool_calls or ()}
    assert (text, finish) == ("Let me see.", "tool_calls") and calls == dict(enumerate(CALLED))


def test_without_tools_an_answer_is_text(client):
    for more in ({}, dict(tools=SMALL, tool_choice="none"), dict(tools=[])):
        [choice] = client.chat.completions.create(model="toy", messages=TALK[:1], **more).choices
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert choice.message.content.count("<tool_call>") == 2
    [choice] = client.chat.completions.create(model="toy", messages=TALK[:1], tools=SMALL, max_tokens=30).choices
    assert (choice.finish_reason, choice.message.content) == ("length", 'Let me see.\n<tool_call>{"name"')


@pytest.mark.parametrize(
    "words, param",
    [
        (dict(tools=SMALL, tool_choice="required"), "tool_choice"),
        (dict(tools=SMALL, tool_choice=dict(type="function", function=dict(name="f"))), "tool_choice"),
        (dict(tools=SMALL, parallel_tool_calls=False), "parallel_tool_calls"),
        (dict(tools=[dict(type="function", function=dict(name="f", strict=True))]), "tools[0].function.strict"),
        (dict(tools=[dict(type="custom", custom=dict(name="f"))]), "tools[0].type"),
        (dict(messages=[dict(role="user", content="x", tool_calls=[CALL])]), "messages[0].tool_calls"),
        (dict(messages=[dict(role="assistant", content=None)]), "messages[0].content"),
    ],
)
def test_what_is_refused(client, words, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**dict(model="toy", messages=TALK[:1]) | words)
    assert error.value.param == param, error.value


def test_calls_of_another_form_are_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(HERMES.replace("tool_call>", "call>"))
    with toy.served(template=find_template([tmp_path], toy.ByteTokenizer())) as other:
        client = openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="in the form of Hermes and Qwen alone"):
            client.chat.completions.create(model="toy", messages=TALK[:1], tools=SMALL)


@pytest.mark.parametrize(
    "text, name, arguments",
    [
        ('{"name": "f", "arguments": {"city": "Z\u00fcrich"}}', "f", '{"city": "Z\u00fcrich"}'),
        ('{"name": "f", "arguments": "{}"}', "f", "{}"),
        ('{"name": "f"}', "f", "{}"),
        ('\n {"name": "f", "arguments": []} ', "f", "[]"),
        ('{"name": 5, "arguments": {}}', None, None),
        ('{"name": null}', None, None),
        ('{"arguments": {}}', None, None),
        ('["name"]', None, None),
        ('"name"', None, None),
        ("{", None, None),
    ],
)
def test_what_is_a_call(text, name, arguments):
    """JSON with a name; its arguments are JSON as it is, with the letters of any language."""
    part = CallReader().feed(f"<tool_call>{text}</tool_call>", last=True)
    if name is None:
        assert part.calls == () and part.text == f"<tool_call>{text}</tool_call>"
    else:
        [call] = part.calls
        assert call["function"] == dict(name=name, arguments=arguments) and call["type"] == "function" and not part.text
