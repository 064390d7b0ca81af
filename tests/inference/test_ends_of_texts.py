# SPDX-License-Identifier: Apache-2.0
"""A text ends before its stop string, and says so, whichever token completes the string: also the last one that it may
have. Asked of all that make texts of tokens.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from megatron.inference.answers import _whole, continued, ignored
from megatron.inference.requests import Output, Request, TokenScore
from megatron.inference.sampling import Sampling
from megatron.inference.text_stream import BYTES, TextStream
from megatron.serving.texts import RunningText

WORDS = ["a", " stop", "st", "op", "\n", "x\n"]  # tokens after those of single bytes, which wait for their neighbours


class Tokens:
    """A vocabulary with byte fallback, as Llama 2's."""

    pieces = {name: byte for byte, name in enumerate(BYTES)}

    def decode(self, ids):
        return b"".join(bytes([id]) if id < 256 else WORDS[id - 256].encode() for id in ids).decode(errors="replace")


class Engine:
    """Gives the tokens of one text, the last of which is the last that it may have."""

    def __init__(self, tokens):
        self.left, self.busy = list(tokens), True

    def add(self, request):
        return 0

    def step(self):
        token = self.left.pop(0)
        self.busy = bool(self.left)
        return [Output(0, TokenScore(token), None if self.left else "length")]

    def cancel(self, number):
        self.busy = False


def sampling(tokens, stop: str) -> Sampling:
    return Sampling(tokens_to_generate=len(tokens), stop=[stop])


def by_steps(tokens, stop: str) -> tuple[str, str]:
    [answer] = continued(Engine(tokens), [Request((1,), sampling(tokens, stop))], Tokens(), alone=True)
    return answer.text, answer.finish


def all_at_once(tokens, stop: str) -> tuple[str, str]:
    [answer] = _whole([tokens], [len(tokens)], Tokens(), sampling(tokens, stop), ignored, [()])
    return answer.text, answer.finish


def served(tokens, stop: str) -> tuple[str, str]:
    running, engine, parts = RunningText(TextStream(Tokens(), [stop])), Engine(tokens), []
    while not running.ended:
        parts += [running.take(output) for output in engine.step()]
    return "".join(part.text for part in parts), parts[-1].finish


LETTERS = [*"a\n\u00e9\u4e2d", "stop"]
PIECES = st.sampled_from([*([256 + number] for number in range(len(WORDS))), *(list(x.encode()) for x in LETTERS)])


@given(st.lists(PIECES, min_size=1, max_size=8), st.sampled_from(["\n", "stop", "\u00e9", "a\n"]))
@example([[256], [10]], "\n")  # the last token is a byte
@example([[256], [0xC3, 0xA9]], "\u00e9")
def test_a_stop_string_ends_a_text_at_any_token(pieces, stop):
    tokens = [token for piece in pieces for token in piece]
    before, found, _ = Tokens().decode(tokens).partition(stop)
    for way in (by_steps, all_at_once, served):
        assert way(tokens, stop) == (before, "stop" if found else "length"), way.__name__
