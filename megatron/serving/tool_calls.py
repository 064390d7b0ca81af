# SPDX-License-Identifier: Apache-2.0
"""Calls of tools in a chat: what clients send, and what a model writes, in the form of Hermes, Qwen2.5 and Qwen3:

<tool_call>
{"name": "weather", "arguments": {"city": "Bern"}}
</tool_call>

reader = CallReader()
reader.feed("Let me see.\\n<tool_call>")     # CallPart("Let me see.")
reader.feed(..., last=True)                  # CallPart("", calls=[...]), in OpenAI's form
"""

import json
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Optional

from pydantic import BaseModel, ConfigDict, Field

from megatron.inference.text_stream import overlap

BEGIN, END = "<tool_call>", "</tool_call>"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ToolFunction(_Strict):
    """What a model may call. parameters: a JSON schema; strict: answers are not forced into it"""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: Optional[str] = None
    parameters: Optional[dict[str, Any]] = None
    strict: Optional[Literal[False]] = None


class Tool(_Strict):
    type: Literal["function"]
    function: ToolFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        return self.model_dump(exclude_unset=True)


class CalledFunction(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    """A call in a message of the assistant."""

    function: CalledFunction
    id: Optional[str] = None
    type: Literal["function"] = "function"

    def plain(self) -> dict[str, Any]:
        """As chat templates take it: arguments are no text, if they are JSON."""
        called = self.function.model_dump()
        try:
            called["arguments"] = json.loads(called["arguments"])
        except ValueError:
            pass
        return dict(type=self.type, function=called) | ({} if self.id is None else dict(id=self.id))


class CallPart(NamedTuple):
    """New text of an answer, and new calls."""

    text: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()


class CallReader:
    """Separates the calls of an answer from its text, as the answer arrives. count: calls so far

    White space around calls is in neither. A call that is no JSON with a name, or has no end, is text.
    """

    def __init__(self):
        self.count, self._held, self._after_call = 0, "", False

    def feed(self, text: str, last: bool = False) -> CallPart:
        """last: the answer has ended."""
        self._held, said, calls = self._held + text, "", []
        while True:
            if self._after_call and (text := self._held.lstrip()):
                self._held, self._after_call = text, False
            start = self._held.find(BEGIN)
            stop = self._held.find(END, start) if start >= 0 else -1
            if stop < 0:
                break
            call, rest = _call(self._held[start + len(BEGIN) : stop]), stop + len(END)
            said += self._held[:start].rstrip() if call else self._held[:rest]
            calls += [call] if call else []
            self._held, self._after_call = self._held[rest:], call is not None
        certain = start if start >= 0 else len(self._held) - overlap(self._held, BEGIN)
        certain = len(self._held) if last else len(self._held[:certain].rstrip())
        said, self._held = said + self._held[:certain] * (not self._after_call), self._held[certain:]
        self.count += len(calls)
        return CallPart(said, tuple(calls))


def _call(text: str) -> Optional[dict[str, Any]]:
    """A call in OpenAI's form; None for other texts."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return dict(
        id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=dict(name=found["name"], arguments=arguments)
    )
