# SPDX-License-Identifier: Apache-2.0
"""Tokens of the engine as parts of texts, up to a stop string."""

from collections.abc import AsyncIterator, Sequence
from functools import lru_cache

from megatron.errors import Failure
from megatron.inference.text_stream import RunningText, TextPart
from megatron.serving.engine_thread import TextJob
from megatron.serving.errors import ApiError


async def parts_of(job: TextJob, texts: Sequence[RunningText]) -> AsyncIterator[tuple[int, TextPart]]:
    """(number of the text, what came of it), until all have ended."""
    async for place, output in job:
        text = texts[place]
        if text.ended:  # by a stop string; the engine had the next token already
            continue
        if output.finish == "cancelled":
            raise ApiError(503, "the text was cancelled by the server", code="cancelled")
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
