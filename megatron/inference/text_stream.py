# SPDX-License-Identifier: Apache-2.0
"""The text of tokens that arrive one by one, for streaming: never half a character, never a part of a stop string.

    stream = TextStream(tokenizer, stop=["\\n"])
    for token in tokens:
        piece = stream.feed(token)
        print(piece.text, end="")
        if piece.stopped:
            break
    else:
        print(stream.finish().text)

The pieces together are exactly `tokenizer.decode(tokens)`, up to the stop string. With `after`, the tokens that the text
continues, they are what `tokenizer.decode` adds to the text of those: SentencePiece decodes a word at the beginning
without the space before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from megatron.inference.requests import Output, TokenScore

UNFINISHED = 3  # bytes at most of an incomplete UTF-8 character; tokenizers decode them to as many U+FFFD, or to one
# Tokens that are decoded together at most, usually; and those before them that are decoded again
WINDOW, CONTEXT = 48, 8
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # tokens for single bytes, in vocabularies with byte fallback


class TextPiece(NamedTuple):
    """New text, and whether the text has ended at a stop string (which is not part of it)."""

    text: str
    stopped: bool = False


class TextStream:
    """Decodes the tokens of one text.

    tokenizer  anything with `decode(ids) -> str`
    stop       strings that end the text. The one that is complete first counts, however tokens divide it
    least      tokens at the beginning whose text is not searched for them
    after      tokens that the text continues; none if it is a text of its own
    """

    def __init__(self, tokenizer, stop: Sequence[str] = (), least: int = 0, after: Sequence[int] = ()):
        self.decode, self.stop, self.least = tokenizer.decode, tuple(stop), least
        # A run of byte tokens that is not valid as a whole is decoded otherwise than its valid part: wait for its end.
        pieces = getattr(tokenizer, "pieces", {})
        self.bytes = {pieces[name] for name in BYTES if name in pieces}
        self.fed = 0
        self._passed_on = 0  # characters
        self.window: list[int] = []  # the last tokens
        self.given = ""  # their text as far as it was passed on
        self.held = ""  # text that may begin a stop string
        self.stopped = False
        self._begin_with(list(after[-CONTEXT:]))

    def feed(self, token: int) -> TextPiece:
        """The text that is certain with one more token; often "", until a character or a possible stop string ends."""
        assert not self.stopped, "the text has ended"
        self.fed += 1
        self.window.append(token)
        new = "" if token in self.bytes else self._decoded(whole=False)
        self._passed_on += len(new)
        return self._passed(new)

    @property
    def position(self) -> int:
        """Characters of the text of all tokens so far, without an unfinished one at its end: where the next one begins."""
        text = self.decode(self.window)
        finished = len(text) if not text.endswith("\ufffd") else len(text.rstrip("\ufffd"))
        return self._passed_on + max(0, finished - len(self.given))

    def finish(self) -> TextPiece:
        """The rest of a text that has ended by itself."""
        piece = self._passed(self._decoded(whole=True))
        rest, self.held = self.held, ""
        return piece if piece.stopped else TextPiece(piece.text + rest)

    def _decoded(self, whole: bool) -> str:
        """The text of the window that is not passed on yet. whole: with an unfinished character at its end."""
        text = self.decode(self.window)
        certain = len(text)
        while not whole and certain and text[certain - 1] == "\ufffd" and len(text) - certain < UNFINISHED:
            certain -= 1
        text, new = text[:certain], text[len(self.given) : certain]
        if len(self.given) <= certain:
            self.given = text
        if certain and len(self.window) >= WINDOW and not whole:
            self._begin_with(self.window[-CONTEXT:])  # what they decode to depends on no others
        return new

    def _begin_with(self, context: list[int]) -> None:
        """Let the window have these tokens alone, whose text was passed on, unless that ends within a character."""
        text = self.decode(context)
        if text.strip() and not text.endswith("\ufffd"):
            self.window, self.given = context, text

    def _passed(self, new: str) -> TextPiece:
        """Search for stop strings; keep what may begin one."""
        if self.fed <= self.least or not self.stop:
            return TextPiece(new)
        text, self.held = self.held + new, ""
        found = [(at + len(word), at) for word in self.stop if (at := text.find(word)) >= 0]
        if found:
            self.stopped = True
            return TextPiece(text[: min(found)[1]], True)
        keep = max(overlap(text, word) for word in self.stop)
        self.held = text[len(text) - keep :]
        return TextPiece(text[: len(text) - keep])


@dataclass(frozen=True)
class TextPart:
    """What came of a text. finish: "stop" or "length" at its end; prompt: at its beginning, if it was asked for."""

    text: str = ""
    scores: tuple[TokenScore, ...] = ()
    finish: Optional[str] = None
    prompt: tuple[TokenScore, ...] = ()


@dataclass
class RunningText:
    """A text while an engine generates it. only_prompt: the answer has no new token (max_tokens 0).

    tokens: its new tokens, those of a stop string too; cached: tokens of the prompt that were in the cache
    """

    stream: TextStream
    only_prompt: bool = False
    tokens: list[TokenScore] = field(default_factory=list)
    cached: int = 0
    ended: bool = False
    _waiting: list[TokenScore] = field(default_factory=list)  # tokens whose characters are not complete yet

    def take(self, output: Output) -> TextPart:
        """The part of the text that an output completes; it may be empty."""
        self.cached += output.cached
        if self.only_prompt:
            self.ended = True
            return TextPart(finish="length", prompt=output.prompt)
        text, finish = "", output.finish
        if output.new is not None:
            self.tokens.append(output.new)
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

    @property
    def logprob(self) -> float:
        """The log-probability of all tokens."""
        return sum(one.logprob or 0.0 for one in self.tokens)


def overlap(text: str, word: str) -> int:
    """Length of the longest end of a text that begins `word`, and is not all of it.

    >>> overlap("1 2 3, th", "the end")
    2
    """
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:size])), 0)
