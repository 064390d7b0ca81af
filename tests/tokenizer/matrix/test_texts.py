# SPDX-License-Identifier: Apache-2.0
"""Documents, prompts, continuations, LAMBADA, requests of lm-evaluation-harness and the server: ids of transformers."""

import asyncio
import copy
import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from megatron.data.requests import encode_pair
from megatron.inference.requests import TokenScore
from megatron.inference.text_stream import TextPart
from megatron.serving.openai_api import Completions
from megatron.serving.served_model import ServedModel
from megatron.tasks.lambada import read_examples
from tests.tokenizer.matrix.differences import assert_equal
from tests.tokenizer.matrix.layouts import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def cuts(text: str) -> list[tuple[str, str]]:
    """A text in two, at several places: before it, in it, and after the first and before the last white space or name."""
    places = {
        0,
        len(text) // 2,
        text.find(" ") + 1,
        max(text.rfind(" "), text.rfind("\n"), text.rfind("<")) % (len(text) + 1),
    }
    return [(text[:at], text[at:]) for at in sorted(places) if at < max(1, len(text))]


@pytest.mark.sampled(10)
@every_variant
def test_documents(matrix, variant):
    theirs, ours = matrix.theirs(variant), matrix.ours(variant)
    added = theirs.added_tokens_decoder
    unknown = () if matrix.family(variant).kind == "bytes" else ("<unk>", "[UNK]")
    special = {id for id, token in added.items() if token.special and token.content not in unknown}
    pieces = sentencepiece_of(matrix, variant)
    other = ["<unk>", *(token.content for token in added.values() if not token.special)]

    def rows():
        for title, text in matrix.texts(variant).items():
            expected, found = (
                theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"],
                ours.encode(text),
            )
            if special & set(expected):  # transformers makes a special token of pieces of text: the suite never does
                assert not special & set(found), f"{variant}, {title}: {text!r} has special tokens"
                if pieces and not any(name in text for name in other):
                    yield title, text, pieces.encode(text), found
            else:
                yield title, text, expected, found

    assert_equal(f"{variant}, documents", theirs, rows())


def sentencepiece_of(matrix, variant):
    """SentencePiece's own model, which takes names of its control pieces as text; None without one of this kind."""
    if matrix.family(variant).kind != "unigram":
        return None
    from sentencepiece import SentencePieceProcessor

    from tests.tokenizer.matrix.layouts import usual_files

    return SentencePieceProcessor(model_proto=usual_files(VARIANTS[variant][0])["spiece.model"])


@pytest.mark.sampled(10)
@every_variant
def test_documents_with_special_tokens(matrix, variant):
    """--parse-special; and what decoding makes of ids."""
    theirs, ours = matrix.theirs(variant), copy.copy(matrix.ours(variant))
    ours.parse_special = True
    texts = matrix.texts(variant)
    ids = {title: matrix.ids(variant, text, False) for title, text in texts.items()}
    assert_equal(
        f"{variant}, parsed", theirs, ((title, text, ids[title], ours.encode(text)) for title, text in texts.items())
    )
    for title, one in ids.items():
        expected = theirs.decode(list(one), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert ours.decode(one) == expected, f"{variant}, {title}"


@pytest.mark.sampled(10)
@every_variant
def test_fast_libraries(matrix, variant):
    """What passes the probes alone gives the ids of the reference for all texts."""
    ours = copy.copy(matrix.ours(variant))
    texts = matrix.texts(variant)
    expected = {title: list(ours.encode(text)) for title, text in texts.items()}
    if ours.use_fastest([]) == list(ours._engines)[-1]:
        pytest.skip("there is none")
    theirs = matrix.theirs(variant)
    assert_equal(
        f"{variant}, {ours.engine}",
        theirs,
        ((title, text, expected[title], ours.encode(text)) for title, text in texts.items()),
    )


@pytest.mark.sampled(10)
@every_variant
def test_prompts(matrix, variant):
    theirs, ours = matrix.theirs(variant), matrix.ours(variant)
    texts = matrix.texts(variant).items()
    rows = ((title, text, matrix.ids(variant, text), ours.encode_prompt(text)) for title, text in texts)
    assert_equal(f"{variant}, prompts", theirs, rows)


@pytest.mark.sampled(10)
@every_variant
def test_continuations(matrix, variant):
    theirs, ours = matrix.theirs(variant), matrix.ours(variant)
    wrong = []

    def rows():
        for title, text in matrix.texts(variant).items():
            for context, continuation in cuts(text):
                expected, start = matrix.pair(variant, context, continuation)
                ids, begins = ours.encode_pair(context, continuation)
                yield title, f"{context} | {continuation}", expected, ids
                if begins != start:
                    wrong.append(
                        f"{variant}, {title}, {context!r} | {continuation!r}: begins at {begins}, not at {start}"
                    )

    assert_equal(f"{variant}, continuations", theirs, rows())
    assert not wrong, "\n".join(wrong[:5])


@pytest.mark.sampled(10)
@every_variant
def test_lambada(matrix, variant, tmp_path):
    theirs, ours = matrix.theirs(variant), matrix.ours(variant)
    texts = {title: text for title, text in matrix.texts(variant).items() if len(text.split()) > 1}
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts.values()), encoding="utf-8")
    for strict in (True, False):
        found = dict(zip(texts, read_examples(path, ours, strict=strict), strict=True))
        expected = {}
        for title, text in texts.items():
            word = text.split()[-1]
            head = text[: text.rfind(word)].strip()
            whole, start = matrix.pair(variant, head, f" {word}") if strict else (matrix.beginning(variant, text), -1)
            expected[title] = whole, len(whole) - start if strict else 1
        rows = ((title, text, expected[title][0], found[title].tokens) for title, text in texts.items())
        assert_equal(f"{variant}, LAMBADA, strict {strict}", theirs, rows)
        assert {title: one.answer for title, one in found.items()} == {title: one[1] for title, one in expected.items()}


@pytest.fixture
def harness(monkeypatch):
    """The adapter for lm-evaluation-harness, which need not be installed."""
    if find_spec("lm_eval") is None:
        names = dict(get_rolling_token_windows=None, make_disjoint_window=None)
        monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "lm_eval.api", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", SimpleNamespace(TemplateLM=object))
        monkeypatch.setitem(sys.modules, "lm_eval.utils", SimpleNamespace(**names))
    from megatron.tasks.harness import HarnessModel

    return HarnessModel


@pytest.mark.sampled(10)
@every_variant
def test_requests(matrix, variant, harness):
    """Requests in the loop, and lm-evaluation-harness's rule for a context and a continuation.

    Its TemplateLM._encode_pair: white space at the end of the context moves to the continuation; both are encoded together,
    and the continuation is what follows as many tokens as the context has.
    """
    theirs, ours = matrix.theirs(variant), matrix.ours(variant)
    if ours.eod is None:
        pytest.skip("no end of document")
    model = harness(None, ours, None, longest=64, batch_size=1)
    wrong = []

    def rows():
        for title, text in matrix.texts(variant).items():
            for add in (True, False):
                ids = model.tok_encode(text, add_special_tokens=None if add else False)
                yield title, text, matrix.beginning(variant, text, add), ids
            for context, continuation in cuts(text):
                yield title, f"{context} | {continuation}", *_scored(context, continuation)

    def _scored(context, continuation):
        found = encode_pair(ours, context, continuation)
        moved = len(context) - len(context.rstrip())
        context, continuation = context[: len(context) - moved], context[len(context) - moved :] + continuation
        whole, start = matrix.pair(variant, context, continuation)
        if start == 0:
            whole, start = (model.prefix_token_id, *whole), 1
        before, both = model.tok_encode(context), tuple(model.tok_encode(context + continuation))
        if context and not matrix.begins_by_itself(variant, context) and both[: len(before)] == tuple(before):
            assert (whole, start) == (both, len(before))  # the harness's rule
        if found.start != (min(start, len(whole) - 1) if len(whole) > 1 else 1):
            wrong.append(f"{context!r} | {continuation!r}: begins at {found.start}, not at {start} of {len(whole)}")
        return whole, found.ids

    assert_equal(f"{variant}, requests", theirs, rows())
    assert not wrong, "\n".join([variant, *wrong[:5]])


@pytest.mark.sampled(10)
@every_variant
def test_the_server(matrix, variant):
    """Prompts with an echo: their ids, the text of each token and where it begins, by decoding what precedes it. Where the
    tokenizer drops or changes characters, names of special tokens are where the text has them.
    """
    theirs, ours = matrix.theirs(variant), matrix.ours(variant)
    model = ServedModel("m", ours, 1 << 20, SimpleNamespace(version="1"))
    texts = {title: text for title, text in matrix.texts(variant).items() if text}
    prompts = {title: asyncio.run(model.encode(text, "prompt")) for title, text in texts.items()}
    rows = ((title, text, matrix.ids(variant, text), prompts[title]) for title, text in texts.items())
    assert_equal(f"{variant}, the server", theirs, rows)
    decoded = lambda ids: theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for title, text in texts.items():
        ids, body = prompts[title], SimpleNamespace(logprobs=1, echo=True)
        scores = tuple(TokenScore(id, -1.0, ((id, -1.0),)) for id in ids)
        work = SimpleNamespace(model=model, body=body, prompts=[ids])
        choice = Completions(work, [text]).choice(0, TextPart("", (), "length", scores), 0, whole=True)
        assert choice["text"] == text
        hidden = len(ours.prefix)
        shown, offsets = ids[hidden:], choice["logprobs"]["text_offset"]
        assert len(choice["logprobs"]["tokens"]) == len(offsets) == len(ids) and offsets[:hidden] == [0] * hidden
        wanted = [finished(decoded(list(shown[:n]))) for n in range(len(shown))]
        if (whole := decoded(list(shown))) != text:
            special = {id: token.content for id, token in theirs.added_tokens_decoder.items() if token.special}
            special.pop(theirs.unk_token_id, None)  # which stands for other characters, too
            decodes = matrix.family(variant).kind in ("bytes", "pieces") and not variant.endswith("merged")
            found = list(zip(ids, offsets, strict=True))[hidden : len(ids) - len(ours.suffix)] * decodes
            wrong = [(special[id], at) for id, at in found if id in special and not text.startswith(special[id], at)]
            assert not wrong, f"{variant}, {title}: {text[:60]!r}, {whole[:60]!r}: {wrong}"
            continue
        assert offsets[hidden:] == wanted, f"{variant}, {title}: {text[:60]!r}"


def finished(text: str) -> int:
    """Characters of a text without those at its end that are not complete."""
    return len(text.rstrip("\ufffd"))
