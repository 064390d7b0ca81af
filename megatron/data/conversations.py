# SPDX-License-Identifier: Apache-2.0
"""Read conversations, and pairs of a chosen and a rejected answer, from JSON lines, a JSON array, or the rows of Parquet
and Arrow files. Needs no torch.

{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}          OpenAI's shape
{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]}              ShareGPT's
{"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}                        TRL's: answers
                                                                                of the prompt are not learned
{"prompt": "Hello", "chosen": "Hi.", "rejected": "No."}                                                a pair of texts
{"prompt": [{"role": "user", ...}], "chosen": [{"role": "assistant", ...}], "rejected": [...]}         of conversations
{"chosen": [...], "rejected": [...]}                                            the prompt is their common beginning
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from megatron.data.file_formats import TABLE_SUFFIXES
from megatron.data.tables import read_table, refuse_half_letters
from megatron.errors import DataError, did_you_mean
from megatron.tokenizer.chat_template import ASSISTANT

Message = Mapping[str, Any]
SHAREGPT = dict(system="system", human="user", user="user", gpt="assistant", assistant="assistant")
SHAREGPT |= dict(chatgpt="assistant", bing="assistant", bard="assistant", tool="tool", observation="tool")
ENDINGS = (".jsonl", ".json", *TABLE_SUFFIXES)
NAMED = 3  # lines that a note names
_AS_TURNS = 'give {{"messages": [{{"role": "user", "content": {}}}, {{"role": "assistant", "content": {}}}]}}'
# Keys of lines for other purposes -> what to do with them.
OTHER_SHAPES = {
    "chosen rejected": "pairs of answers are learned with --task dpo",
    "prompt completion": _AS_TURNS.format("the prompt", "the completion"),
    "instruction output": _AS_TURNS.format("instruction and input", "the output"),
    "text": "texts without turns are learned by pretrain_gpt.py, after preprocess_data.py",
}
KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "weight")


class Conversation(NamedTuple):
    """A conversation. where: its file and line; messages: with role and content each, and further keys of OpenAI's."""

    where: str
    messages: tuple[Message, ...]
    tools: Optional[Sequence[Any]] = None


class Pair(NamedTuple):
    """Two answers to a prompt. Each part is a text, or messages."""

    where: str
    prompt: Union[str, tuple[Message, ...]]
    chosen: Union[str, tuple[Message, ...]]
    rejected: Union[str, tuple[Message, ...]]
    tools: Optional[Sequence[Any]] = None


def read_conversations(paths: Sequence[str]) -> tuple[list[Conversation], list[str]]:
    """(conversations of these files, notes on keys that are not used). Raises DataError, and names file and line."""
    return _read(paths, conversation_in, ("messages", "conversations", "system", "tools", "prompt", "completion"))


def read_pairs(paths: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """(pairs of these files, notes on keys that are not used). Raises DataError, and names file and line."""
    return _read(paths, _pair, ("prompt", "chosen", "rejected", "tools"))


def _read(paths: Sequence[str], read, used: Sequence[str]):
    found, notes = [], []
    for path in paths:
        unused: Counter = Counter()
        count, empty = len(found), []
        for where, row in _rows(path):
            found.append(read(where, row))
            empty += [where.rpartition(", ")[2]] * has_empty_answer(found[-1])
            unused.update(name for name in row if name not in used)
        if len(found) == count:
            raise DataError(f"{path} is empty", do="give a file of JSON lines with a conversation each")
        if unused:
            notes.append(f"{path}: {', '.join(map(str, unused))} of its lines are not used")
        if empty:
            named = ", ".join(empty[:NAMED]) + ", ..." * (len(empty) > NAMED)
            notes.append(
                f"{path}: {len(empty):,} of {len(found) - count:,} lines have an empty answer, which is learned ({named}); "
                'leave them out, or give the message "weight": 0'
            )
    return found, notes


def has_empty_answer(one: Union[Conversation, Pair]) -> bool:
    """Whether a message of the assistant that is learned has no text and no call of a tool."""
    parts = [one.messages] if isinstance(one, Conversation) else [one.chosen, one.rejected]
    return any(
        message["role"] == ASSISTANT
        and not (message["content"].strip() or message.get("tool_calls") or message.get("weight") == 0)
        for part in parts
        if not isinstance(part, str)
        for message in part
    )


def _rows(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    place = Path(path)
    if place.suffix.lower() not in ENDINGS:
        raise DataError(
            f"{path} is no file of conversations", do="give .jsonl with an object a line, .json, .parquet or .arrow"
        )
    for row in read_table(place)[0]:
        yield f"{path}, {row.where}", row.columns


# ---- conversations ---------------------------------------------------------------------------------------------------


def conversation_in(where: str, row: Mapping[str, Any]) -> Conversation:
    """The conversation of an object. Raises DataError, which begins with `where`."""
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        prompt, answer = (messages_in(row[name], f"{where}, {name}") for name in ("prompt", "completion"))
        unlearned = (dict(one, weight=0) if one["role"] == ASSISTANT else one for one in prompt)
        return Conversation(where, (*unlearned, *answer), _tools(row, where))
    shapes = [name for name in ("messages", "conversations") if name in row]
    if len(shapes) != 1:
        other = next((do for keys, do in OTHER_SHAPES.items() if set(keys.split()) <= row.keys()), "")
        raise DataError(
            f"{where}: {'both messages and conversations' if shapes else 'no messages'}",
            f"it has {', '.join(map(str, row))}" if not shapes else "",
            other or 'give {"messages": [{"role": ..., "content": ...}]}',
        )
    given, where_list = row[shapes[0]], f"{where}, {shapes[0]}"
    messages = messages_in(given, where_list, sharegpt=shapes == ["conversations"])
    if row.get("system") is not None:
        if shapes == ["messages"]:
            raise DataError(f"{where}: system beside messages", do="make it the first message, of the role system")
        messages = ({"role": "system", "content": _text(row["system"], f"{where}, system")}, *messages)
    return Conversation(where, messages, _tools(row, where))


def messages_in(given: Any, where: str, sharegpt: bool = False) -> tuple[Message, ...]:
    """The messages of a list. Raises DataError for anything else."""
    if not isinstance(given, list):
        raise DataError(f"{where}: {type(given).__name__}, no list of messages", do="give a list of objects")
    if not given:
        raise DataError(f"{where}: there is no message", do="give it some, or leave the line out")
    read = _sharegpt if sharegpt else _message
    return tuple(read(one, f"{where}[{number}]") for number, one in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"{where}: {type(given).__name__}, no message", do='give {"role": ..., "content": ...}')
    if "role" not in given and {"from", "value"} & given.keys():
        raise DataError(
            f"{where}: a message of ShareGPT's shape in messages",
            do="call the list conversations, or say role and content",
        )
    message = {name: value for name, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str) or not message["role"].strip():
        raise DataError(
            f"{where}: no role", f"it has {', '.join(map(str, given))}", "say user, assistant, system or tool"
        )
    if "content" not in message and "tool_calls" not in message:
        null = "content" in given
        has = "its content is null" if null else f"it has {', '.join(map(str, given))}"
        raise DataError(f"{where}: no content", has, 'give it a text; "" is an empty one' if null else "give it a text")
    message["content"] = _text(message.get("content", ""), f"{where}, content")
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1) or "weight" in message and message["role"] != ASSISTANT:
        raise DataError(f"{where}: weight {weight!r}", do="0 or 1, of a message of the assistant: 0 is not learned")
    return message


def _sharegpt(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"{where}: {type(given).__name__}, no message", do='give {"from": ..., "value": ...}')
    if "from" not in given or "value" not in given:
        lacks = "from" if "from" not in given else "value"
        role = {"role", "content"} & given.keys()
        do = "call the list messages where messages have role and content" if role else "say human, gpt or system"
        raise DataError(f"{where}: no {lacks}", f"it has {', '.join(map(str, given)) or 'nothing'}", do)
    if given["from"] not in SHAREGPT:
        raise DataError(
            f"{where}: from {given['from']!r}{did_you_mean(str(given['from']), SHAREGPT)}",
            f"there are {', '.join(SHAREGPT)}",
            "calls of functions are read in OpenAI's shape: messages with tool_calls",
        )
    message = {"role": SHAREGPT[given["from"]], "content": _text(given["value"], f"{where}, value")}
    if others := [name for name, value in given.items() if name not in ("from", "value") and value is not None]:
        raise DataError(f"{where}: {', '.join(others)} beside from and value", do="leave it out, or use OpenAI's shape")
    return message


def _text(given: Any, where: str) -> str:
    """The text of a message: a string, or OpenAI's list of parts of type text."""
    if isinstance(given, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in given]
        if not all(isinstance(part, str) for part in parts):
            raise DataError(f"{where}: a part that is no text", do='give {"type": "text", "text": ...}')
        given = "".join(parts)
    if not isinstance(given, str):
        raise DataError(f"{where}: {type(given).__name__}, no text", do="give a string")
    refuse_half_letters(given, where)
    return given


def _tools(row: Mapping[str, Any], where: str) -> Optional[Sequence[Any]]:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: tools is no list of objects", do="give it as OpenAI's API takes it, or leave it out")
    return tools or None


# ---- pairs -----------------------------------------------------------------------------------------------------------


def _pair(where: str, row: Mapping[str, Any]) -> Pair:
    if missing := [name for name in ("chosen", "rejected") if row.get(name) is None]:
        talk = "messages" in row or "conversations" in row
        raise DataError(
            f"{where}: no {' and no '.join(missing)}",
            f"it has {', '.join(map(str, row))}",
            "conversations are learned with --task chat" if talk else 'give {"prompt", "chosen", "rejected"}',
        )
    parts = {name: row[name] for name in ("prompt", "chosen", "rejected") if row.get(name) is not None}
    texts = {name: isinstance(part, str) for name, part in parts.items()}
    if texts["chosen"] != texts["rejected"]:
        raise DataError(
            f"{where}: one answer is a text, the other one is not", do="give two texts, or two lists of messages"
        )
    read = (lambda part, there: _text(part, there)) if texts["chosen"] else messages_in
    chosen, rejected = (read(parts[name], f"{where}, {name}") for name in ("chosen", "rejected"))
    if "prompt" not in parts:
        prompt, chosen, rejected = _without_prompt(chosen, rejected)
    elif texts["prompt"] == texts["chosen"]:
        prompt = read(parts["prompt"], f"{where}, prompt")
        if (
            not texts["chosen"]
            and len(prompt) < len(chosen)
            and chosen[: len(prompt)] == prompt == rejected[: len(prompt)]
        ):
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:  # the prompt once more as a text, beside whole conversations
        prompt, chosen, rejected = _without_prompt(chosen, rejected)
        if not prompt or prompt[-1].get("content") != parts["prompt"]:
            raise DataError(
                f"{where}: the prompt is {'a text' if texts['prompt'] else 'no text'}, and the answers are of another kind",
                do="give three texts, or three lists of messages",
            )
    for name, part in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not part:
            begins = "have no common beginning" if name == "prompt" else "begin with each other"
            why = f"chosen and rejected {begins}, which is the prompt" if "prompt" not in parts else ""
            raise DataError(f"{where}: {name} is empty", why, "give prompt, chosen and rejected, or leave the line out")
    if not texts["chosen"]:
        for name, part in (("chosen", chosen), ("rejected", rejected)):
            if not any(message["role"] == ASSISTANT for message in part):
                raise DataError(f"{where}: {name} has no message of the assistant", do="give it an answer")
    return Pair(where, prompt, chosen, rejected, _tools(row, where))


def _without_prompt(chosen, rejected):
    """(prompt, chosen, rejected) of two whole conversations or texts: the prompt is what both begin with.

    A text is not divided after a space, which belongs to the next word.
    """
    same = next((n for n, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]
