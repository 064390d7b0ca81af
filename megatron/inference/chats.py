# SPDX-License-Identifier: Apache-2.0
"""Prompts as conversations, for `tools.generate --chat`: the messages that a model answers, and their tokens.

    "What is the capital of Norway?"                                       a message of the user
    {"messages": [{"role": "user", "content": "..."}], "tools": [...]}     a conversation, or only the list of its messages

The chat template of the model writes them, as in `serve`. Answers at the end of a conversation are left out: the model
gives its own.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from megatron.data.conversations import Message, conversation_in, messages_in
from megatron.errors import DataError, SettingsError
from megatron.inference.sampling import Ends
from megatron.tokenizer.chat_template import ASSISTANT, ChatTemplate, RefusedMessages, find_template, template_folders


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that waits for an answer. without: answers that were left out at its end"""

    messages: tuple[Message, ...]
    tools: Optional[Sequence[Any]] = None
    without: int = 0

    @property
    def shown(self) -> str:
        """The message that is answered."""
        return str(self.messages[-1]["content"])

    def encoded(self, template: ChatTemplate, where: str = "the conversation") -> list[int]:
        """Its token ids, up to where the answer begins. Raises DataError if the template cannot write it."""
        try:
            return template.encode(self.messages, tools=self.tools)
        except RefusedMessages as error:
            raise DataError(f"{where}: {error}") from None


def chat_in(prompt: str, system: Optional[str] = None, where: str = "the prompt") -> ChatPrompt:
    """The conversation that a prompt stands for. system: the system's message, of conversations that have none

    >>> chat_in('[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]')
    ChatPrompt(messages=({'role': 'user', 'content': 'Hi'},), tools=None, without=1)
    """
    given = _as_json(prompt)
    if given is None:
        messages, tools = ({"role": "user", "content": prompt},), None
    elif isinstance(given, list):
        messages, tools = messages_in(given, where), None
    else:
        _, messages, tools = conversation_in(where, given)
    messages = tuple({name: value for name, value in one.items() if name != "weight"} for one in messages)
    whole = len(messages)
    while messages and messages[-1]["role"] == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        raise DataError(
            f"{where}: only answers of the assistant, and nothing to answer", do="give a message of the user"
        )
    if system is not None and messages[0]["role"] != "system":
        messages, whole = ({"role": "system", "content": system}, *messages), whole + 1
    return ChatPrompt(messages, tools, whole - len(messages))


def _as_json(prompt: str) -> Any:
    """A conversation that a prompt is the JSON of; None for a text of any other kind."""
    try:
        given = json.loads(prompt) if prompt.lstrip()[:1] in ("{", "[") else None
    except ValueError:
        return None
    if isinstance(given, dict):
        return given if {"messages", "conversations"} & given.keys() else None
    return given if isinstance(given, list) and given and all(isinstance(one, dict) for one in given) else None


def template_of(loaded, tokenizer, words, folder: str, file: Optional[str]) -> ChatTemplate:
    """The chat template of a model. words: settings of its tokenizer; file: --chat-template. Raises SettingsError."""
    places = template_folders([folder, str(loaded.path)], words)
    if found := find_template(places, tokenizer, file):
        return found
    raise SettingsError(
        f"--chat: {folder} has no chat template",
        do="--chat-template FILE, or a name: plain, chatml, qwen3; or leave --chat out: a text is continued as it is",
    )


def ends_of(loaded, template: ChatTemplate) -> Ends:
    """The tokens that end an answer: those of generation_config.json, or the template's eos_token."""
    if loaded.ends is not None:
        return loaded.ends
    return template.tokenizer.eod if template.end_of_turn is None else template.end_of_turn


def typed(system: Optional[str]) -> Iterator[list[Message]]:
    """The messages so far, each time that the user has typed one, until the end of the input.

    Whoever reads it appends the answer, or takes the last message away.
    """
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            yield messages
