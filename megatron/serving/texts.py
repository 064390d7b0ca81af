# SPDX-License-Identifier: Apache-2.0
"""Tokens of the engine as parts of texts, up to a stop string."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Optional

from megatron.errors import Failure
from megatron.inference.requests import Output, TokenScore
from megatron.inference.text_stream import TextStream
from megatron.serving.engine_thread import TextJob
from megatron.serving.errors import ApiError


@dataclass(frozen=True)
class TextPart:
    """What came of a text. finish: "stop" or "length" at its end; prompt: at its beginning, if it was asked for."""

    text: str = ""
    scores: tuple[TokenScore, ...] = ()
    finish: Optional[str] = None
    prompt: tuple[TokenScore, ...] = ()


@dataclass
class RunningText:
    """A text while it is generated. only_prompt: the answer has no new token (max_tokens 0)."""

    stream: TextStream
    only_prompt: bool = False
    tokens: int = 0
    cached: int = 0  # tokens of the prompt that were in the cache
    logprob: float = 0.0  # of all tokens
    ended: bool = False
    _waiting: list[TokenScore] = field(default_factory=list)  # tokens whose characters are not complete yet

    def take(self, output: Output) -> TextPart:
        """The part of the text that an output completes; it may be empty."""
        self.cached += output.cached
        if output.finish == "cancelled":
            raise ApiError(503, "the text was cancelled by the server", code="cancelled")
        if self.only_prompt:
            self.ended = True
            return TextPart(finish="length", prompt=output.prompt)
        text, finish = "", output.finish
        if output.new is not None:
            self.tokens += 1
            self.logprob += output.new.logprob or 0.0
            piece = self.stream.feed(output.new.token)
            text, finish = piece.text, "stop" if piece.stopped else finish
            if piece.stopped and not text:
                self._waiting.clear()  # all of them belong to the stop string
            else:
                self._waiting.append(output.new)
        if output.finish and not self.stream.stopped:
            rest = self.stream.finish()
            text, finish = text + rest.text, "stop" if rest.stopped else finish
        scores = ()
        if text or finish:
            scores, self._waiting = tuple(self._waiting), []
        self.ended = finish is not None
        return TextPart(text, scores, finish, output.prompt)


async def parts_of(job: TextJob, texts: Sequence[RunningText]) -> AsyncIterator[tuple[int, TextPart]]:
    """(number of the text, what came of it), until all have ended."""
    async for place, output in job:
        text = texts[place]
        if text.ended:  # by a stop string; the engine had the next token already
            continue
        part = text.take(output)
        if text.ended and not output.finish:
            job.cancel(place)
        if part != TextPart():
            yield place, part
        if all(one.ended for one in texts):
            return


def encoded(tokenizer, text: str) -> list[int]:
    """The ids of a text; none if the vocabulary lacks it, as one of numbers lacks letters."""
    try:
        return tokenizer.encode(text)
    except Failure:
        return []


class TokenTexts:
    """The text of single tokens, as log-probabilities name them. Within a text, so that a space before a word is there.

    A token of half a character has no text: it is named token_id:N.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.before = encoded(tokenizer, "a")
        self.prefix = tokenizer.decode(self.before)
        self.shown = lru_cache(maxsize=1 << 16)(self._shown)

    def _shown(self, token: int) -> str:
        """With U+FFFD for half a character."""
        text = self.tokenizer.decode([*self.before, token])
        return text[len(self.prefix) :] if text.startswith(self.prefix) else self.tokenizer.decode([token])

    def of(self, token: int) -> str:
        text = self.shown(token)
        return f"token_id:{token}" if "\ufffd" in text else text
