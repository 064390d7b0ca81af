# SPDX-License-Identifier: Apache-2.0
"""A model as the server sees it: its name, tokenizer, limits and engine."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional, Union

from megatron.errors import Failure
from megatron.inference.prompts import source_of
from megatron.inference.sampling import Ends
from megatron.serving.engine_thread import EngineThread
from megatron.serving.errors import ApiError, in_one_line
from megatron.serving.openai_requests import length_of, target_length_of
from megatron.serving.texts import TokenTexts
from megatron.settings.statements import NONE
from megatron.tokenizer.chat_template import ChatTemplate, RefusedMessages

SHORT = 10_000  # characters that are encoded at once; longer texts must not keep other clients waiting


@dataclass(frozen=True)
class Targets:
    """The answers of an encoder-decoder: their greatest length, and the tokens that they begin and end with."""

    longest: int
    start: int
    end: Optional[int]


@dataclass
class ServedModel:
    """longest: tokens of prompt and answer, or of an encoder-decoder's source; template: None if the model has none.

    defaults: settings of requests that do not have them, by the names of `Sampling`
    targets:  of an encoder-decoder, whose prompts are sources; None: answers continue their prompts
    ends:     the tokens that end a text, if generation_config.json beside the model names them
    """

    name: str
    tokenizer: object
    longest: int
    thread: EngineThread
    template: Optional[ChatTemplate] = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    targets: Optional[Targets] = None
    ends: Optional[tuple[int, ...]] = None
    created: int = field(default_factory=lambda: int(time.time()))
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @property
    def end(self) -> Ends:
        """The tokens that end a text."""
        if self.targets:
            return self.targets.end
        return self.tokenizer.eod if self.ends is None else self.ends

    @property
    def start(self) -> int:
        """The token that the targets of an encoder-decoder begin with; for other models it has no meaning."""
        return self.targets.start if self.targets else 0

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer, at most."""
        return self.targets.longest if self.targets else self.longest

    def answer_length(self, asked: Optional[int], default: int, prompt: int, limit: int) -> int:
        """The number of tokens of an answer. Raises ApiError if the model or the server has no room for it.

        prompt: tokens of the prompt; limit: the server's, on answers
        """
        if self.targets:
            return target_length_of(asked, default, prompt, self.longest, self.targets.longest, limit)
        return length_of(asked, default, prompt, self.longest, limit)

    @property
    def end_of_turn(self) -> Ends:
        """The tokens that end an answer in a conversation: those of generation_config.json, or the template's eos_token."""
        if self.ends is not None:
            return self.ends
        eos = self.template and self.template.end_of_turn
        return self.end if eos is None else eos

    async def encode(self, prompt: Union[str, list[int]], param: str) -> tuple[int, ...]:
        """The token ids of a prompt: a text, or ids. Raises ApiError for an empty one, or an id that does not exist."""
        if not prompt:
            raise ApiError(400, f"{param}: is empty; there is nothing to continue", param=param, code="invalid_value")
        if isinstance(prompt, str):
            return tuple(await self.in_turn(self._ids, prompt, size=len(prompt)))
        wrong = next((token for token in prompt if not 0 <= token < self.tokenizer.vocab_size), None)
        if wrong is not None:
            what = (
                f"{param}: there is no token {wrong}; the vocabulary has ids from 0 to {self.tokenizer.vocab_size - 1}"
            )
            raise ApiError(400, what, param=param, code="invalid_value")
        return tuple(prompt)

    async def conversation(
        self, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any] = NONE, tools: Sequence[Any] = ()
    ) -> tuple[int, ...]:
        """The token ids of a conversation. more: further names for the template.

        Raises ApiError without a template, and for messages that it cannot write, or calls that are not read from answers.
        """
        if self.template is None:
            what = (
                f"{self.name} has no chat template; use /v1/completions, or start the server with --chat-template FILE"
            )
            raise ApiError(400, what, param="messages", code="no_chat_template")
        if tools and self.template.has_tools and not self.template.calls_as_json:
            what = "tools: calls are read in the form of Hermes and Qwen alone, <tool_call> with JSON, and"
            raise ApiError(400, f"{what} the chat template has another", param="tools", code="unsupported_parameter")
        size = sum(len(str(part)) for message in messages for part in message.values()) + len(str(tools))
        return tuple(await self.in_turn(self.template.encode, messages, dict(more), tools, size=size))

    def _ids(self, prompt: str) -> list[int]:
        return source_of(self.tokenizer, prompt) if self.targets else self.tokenizer.encode_prompt(prompt)

    async def in_turn(self, function, *args, size: int):
        """Call a function of the tokenizer, one at a time: in a thread if there is much to do."""
        try:
            async with self._encoding:
                return function(*args) if size < SHORT else await asyncio.to_thread(function, *args)
        except RefusedMessages as error:
            raise ApiError(400, str(error), param=error.param, code="invalid_value") from None
        except Failure as error:
            raise ApiError(400, in_one_line(error)) from None


def named(models: Mapping[str, ServedModel], name: Optional[str]) -> ServedModel:
    """The model of a name, or the only one. Raises ApiError that names the models."""
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name is None:
        what = f"model: is missing; served: {', '.join(models)}"
        raise ApiError(400, what, param="model", code="missing_required_parameter")
    if name not in models:
        what = f"there is no model {name[:200]!r}; served: {', '.join(models)}"
        raise ApiError(404, what, param="model", code="model_not_found")
    return models[name]
