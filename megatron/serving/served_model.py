# SPDX-License-Identifier: Apache-2.0
"""A model as the server sees it: its name, tokenizer, limits and engine."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional, Union

from megatron.errors import Failure
from megatron.serving.engine_thread import EngineThread
from megatron.serving.errors import ApiError, in_one_line
from megatron.serving.texts import TokenTexts
from megatron.tokenizer.chat_template import ChatTemplate

SHORT = 10_000  # characters that are encoded at once; longer texts must not keep other clients waiting


@dataclass
class ServedModel:
    """longest: tokens of prompt and answer; template: None if the model has none.

    defaults: settings of requests that do not have them, by the names of `Sampling`
    """

    name: str
    tokenizer: object
    longest: int
    thread: EngineThread
    template: Optional[ChatTemplate] = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @property
    def end(self) -> Optional[int]:
        """The token that ends a text."""
        return self.tokenizer.eod

    @property
    def end_of_turn(self) -> Optional[int]:
        """The token that ends an answer in a conversation: the template's eos_token."""
        eos = self.template and self.template.special.get(self.template.tokens.get("eos_token"))
        return self.end if eos is None else eos

    async def encode(self, prompt: Union[str, list[int]], param: str) -> tuple[int, ...]:
        """The token ids of a prompt: a text, or ids. Raises ApiError for an empty one, or an id that does not exist."""
        if not prompt:
            raise ApiError(400, f"{param}: is empty; there is nothing to continue", param=param, code="invalid_value")
        if isinstance(prompt, str):
            return tuple(await self.in_turn(self.tokenizer.encode, prompt, size=len(prompt)))
        wrong = next((token for token in prompt if not 0 <= token < self.tokenizer.vocab_size), None)
        if wrong is not None:
            what = (
                f"{param}: there is no token {wrong}; the vocabulary has ids from 0 to {self.tokenizer.vocab_size - 1}"
            )
            raise ApiError(400, what, param=param, code="invalid_value")
        return tuple(prompt)

    async def in_turn(self, function, *args, size: int):
        """Call a function of the tokenizer, one at a time: in a thread if there is much to do."""
        try:
            async with self._encoding:
                return function(*args) if size < SHORT else await asyncio.to_thread(function, *args)
        except Failure as error:
            raise ApiError(400, in_one_line(error)) from None


def named(models: Mapping[str, ServedModel], name: Optional[str]) -> ServedModel:
    """The model of a name, or the only one. Raises ApiError."""
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name is None:
        raise ApiError(400, "model: is missing", param="model", code="missing_required_parameter")
    if name not in models:
        what = f"there is no model {name[:200]!r}; served: {', '.join(models)}"
        raise ApiError(404, what, param="model", code="model_not_found")
    return models[name]
