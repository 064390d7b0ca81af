# SPDX-License-Identifier: Apache-2.0
"""A text ends before its stop string, and says so, whichever token completes the string: also the last one that it may
have. Asked of all that make texts of tokens. And tokens that end texts are those of the folder that is nearest to a model.
"""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from megatron.inference.answers import _whole, continued, ignored
from megatron.inference.generation_config import ends_beside
from megatron.inference.requests import Output, Request, TokenScore
from megatron.inference.sampling import Sampling
from megatron.inference.text_stream import BYTES, RunningText, TextStream

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


def test_the_folder_of_a_checkpoint_counts_before_the_one_around_it(tmp_path):
    inner = tmp_path / "iter_0000009"
    inner.mkdir()
    assert ends_beside(inner) is None
    for folder, ends in ((tmp_path, [3, 4]), (inner, 7)):
        (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=ends)))
        assert ends_beside(inner) == ((3, 4) if ends == [3, 4] else (7,))
    assert ends_beside(tmp_path) == (3, 4)


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


WHOLE = st.lists(st.integers(256, 255 + len(WORDS)), min_size=1, max_size=8)  # tokens without bytes


@given(WHOLE, st.integers(0, 9), st.sampled_from(["\n", "stop", "a"]))
@example([257, 257], 1, "stop")  # in the last of the least tokens, and in the first after them
@example([257, 256], 1, "stop")
def test_the_least_tokens_are_not_searched_and_the_first_after_them_is(tokens, least, stop):
    stream, text = TextStream(Tokens(), [stop], least=least), ""
    for token in tokens:
        text += stream.feed(token).text
        if stream.stopped:
            break
    text += "" if stream.stopped else stream.finish().text
    before, after = (Tokens().decode(some) for some in (tokens[:least], tokens[least:]))
    assert (text, stream.stopped) == (before + after.partition(stop)[0], stop in after)


@given(WHOLE, st.sampled_from(["\n", "stop", "a", "zz"]))
@example([261], "\n")  # a token with text before the stop string that it ends
def test_scores_are_sent_of_each_token_that_has_some_of_the_text(tokens, stop):
    running, engine, parts = RunningText(TextStream(Tokens(), [stop])), Engine(tokens), []
    while not running.ended:
        parts += [running.take(output) for output in engine.step()]
    text, scored = "".join(part.text for part in parts), [score.token for part in parts for score in part.scores]
    ends = [len(Tokens().decode(tokens[: n + 1])) for n in range(len(tokens))]
    starts = [0, *ends]
    wanted = [token for token, start in zip(tokens, starts, strict=False) if start < len(text)]
    assert scored[: len(wanted)] == wanted and scored == tokens[: len(scored)]
