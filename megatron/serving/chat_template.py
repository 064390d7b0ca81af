# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the messages of a conversation as one prompt, by the Jinja template of a Hugging Face tokenizer.

    template = find_template([folder], tokenizer)
    ids = template.encode([dict(role="user", content="Hello")])

Templates are programs of whoever made the model, so they run in Jinja's sandbox, and a long loop is refused there.
Names of special tokens are special where the template writes them. In a message they are ordinary text, so that no message
can end itself and begin another one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from megatron.errors import DataError
from megatron.serving.errors import ApiError
from megatron.settings.statements import NONE
from megatron.tokenizer.base import SPECIAL, Tokenizer

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
OWN = ("messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token", "tools", "documents")
REPEATED = ("system", "developer", "user")  # roles whose messages a template has to write as they are
MARKS = range(0xE000, 0xF900)  # Unicode's private characters: one stands in names of special tokens in messages


@dataclass(frozen=True)
class ChatTemplate:
    """A template, with the tokenizer of the model.

    tokens: names of special tokens for the template, as bos_token; special: name -> id of those in its output
    """

    source: str
    place: str
    tokenizer: Tokenizer
    tokens: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _compiled(self):
        from jinja2 import TemplateError, meta
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message):
            raise ApiError(400, f"the chat template refuses the messages: {message}", param="messages")

        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        world.filters["tojson"] = lambda value, indent=None, **more: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        world.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            names = meta.find_undeclared_variables(world.parse(self.source))
            return world.from_string(self.source), names
        except TemplateError as error:
            raise DataError(
                f"{self.place}: not a chat template", str(error), "give one: --chat-template FILE"
            ) from None

    def check(self) -> None:
        """Raise DataError if the template cannot be compiled."""
        self._compiled  # noqa: B018

    def encode(self, messages: Sequence[Mapping[str, str]], more: Mapping[str, Any] = NONE) -> list[int]:
        """A conversation as token ids, up to where the assistant's answer begins. more: variables for the template.

        Raises ApiError if the template cannot write the messages.
        """
        given = "".join(text for message in messages for text in message.values())
        mark = next(chr(code) for code in MARKS if chr(code) not in given)
        names = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or "(?!)"

        def marked(text: str) -> str:
            return re.sub(names, lambda found: found[0][0] + mark + found[0][1:], text)

        messages = [{name: marked(text) for name, text in message.items()} for message in messages]
        ids: list[int] = []
        for part in re.split(f"({names})", self._text(messages, more)):
            if part in self.special:
                ids.append(self.special[part])
            elif part:
                ids += self.tokenizer.encode(part.replace(mark, ""))
        return ids

    def _text(self, messages: Sequence[Mapping[str, str]], more: Mapping[str, Any]) -> str:
        template, names = self._compiled
        for name in more:
            if name in OWN or name not in names:
                raise ApiError(400, f"chat_template_kwargs.{name}: the model's chat template has no such variable")
        words = {name: None for name in ("tools", "documents")} | dict(self.tokens) | dict(more)
        try:
            text = template.render(messages=messages, add_generation_prompt=True, **words)
        except ApiError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise ApiError(400, f"the chat template cannot write these messages: {error}", param="messages") from None
        for number, message in enumerate(messages):
            if message["role"] in REPEATED and message["content"].strip() not in text:
                what = f"messages[{number}]: the model's chat template leaves out this message (role {message['role']})"
                raise ApiError(400, what, param=f"messages[{number}]")
            if "name" in message and message["name"] not in text:
                what = f"messages[{number}].name: the model's chat template has no place for it"
                raise ApiError(400, what, param=f"messages[{number}].name")
        return text


def find_template(folders: Sequence[Path], tokenizer: Tokenizer, file: Optional[str] = None) -> Optional[ChatTemplate]:
    """The template of `file`, else of the first folder that has one; None if there is none."""
    places = [Path(file)] if file else [folder / name for folder in folders for name in (FILE, CONFIG)]
    for place in places:
        source = _source(place, needed=bool(file))
        if source:
            config = _json(place.parent / CONFIG) or next(filter(None, (_json(one / CONFIG) for one in folders)), {})
            template = ChatTemplate(
                source, str(place), tokenizer, _tokens(config), _special(folders, tokenizer, config)
            )
            template.check()
            return template
    return None


def _source(place: Path, needed: bool) -> Optional[str]:
    if place.suffix == ".json":
        found = (_json(place) or {}).get("chat_template")
        if isinstance(found, list):  # several, with names
            found = next((one["template"] for one in found if one.get("name") == "default"), None)
        return found
    try:
        return place.read_text(encoding="utf-8")
    except OSError as error:
        if needed:
            raise DataError(f"--chat-template {place}: {error.strerror}") from None
        return None


def _json(place: Path) -> Optional[dict]:
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _name(token: Any) -> Optional[str]:
    """The name of a token of tokenizer_config.json, which is a text or an object."""
    return token.get("content") if isinstance(token, dict) else token


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {name: text for name in names if (text := _name(config.get(name)))}


def _special(folders: Sequence[Path], tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, int]:
    """Name -> id of the special tokens that a template may write."""
    added = [
        token for folder in folders for token in (_json(folder / "tokenizer.json") or {}).get("added_tokens") or ()
    ]
    found = {token["content"]: token["id"] for token in added if token.get("special")}
    names = [*_tokens(config).values(), *(name for names in SPECIAL.values() for name in names)]
    found |= {name: tokenizer.pieces[name] for name in names if name in tokenizer.pieces}
    if tokenizer.eod is not None and (name := tokenizer.decode([tokenizer.eod])).strip():
        found.setdefault(name, tokenizer.eod)
    return {name: id for name, id in found.items() if len(name) > 1 and id < tokenizer.vocab_size}
