# SPDX-License-Identifier: Apache-2.0
"""The rules of Gopher, C4 and FineWeb beside datatrove's on the same documents, and beside counts made by hand.

datatrove's words come from spaCy, which is not here: it is given the tokens of `words.cut`, and what counts as punctuation,
so that everything else is compared. Tokens are compared with a regular expression.
"""

import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import regex

from megatron.corpus.filters.repetition import duplicate_characters, top_characters
from megatron.corpus.filters.words import LETTER, VISIBLE, cut
from megatron.corpus.registry import build_filter

W, N = r"[\p{L}\p{N}\p{M}_]", r"\p{N}"
JOINED = rf"{W}(?:{W}|\.(?={W})|(?<={N})[,:/](?={N}))*"
TOKEN = regex.compile(rf"(?<={W})['\u2019](?={W}){JOINED}|{JOINED}|\.+|-+|~+|[^\s\x1c-\x1f]")
NAMES = {  # datatrove's reason -> ours
    "gopher_short_doc": "too_few_words",
    "gopher_long_doc": "too_many_words",
    "gopher_below_avg_threshold": "short_words",
    "gopher_above_avg_threshold": "long_words",
    "gopher_too_many_hashes": "hashes",
    "gopher_too_many_ellipsis": "ellipses",
    "gopher_too_many_bullets": "bullet_lines",
    "gopher_too_many_end_ellipsis": "ellipsis_lines",
    "gopher_below_alpha_threshold": "few_alphabetic_words",
    "gopher_enough_stop_words": "few_stop_words",
    "dup_para_frac": "duplicate_paragraphs",
    "dup_para_char_frac": "duplicate_paragraph_characters",
    "dup_line_frac": "duplicate_lines",
    "dup_line_char_frac": "duplicate_line_characters",
    "line_punct_ratio": "few_punctuated_lines",
    "short_line_ratio": "short_lines",
    "char_dup_ratio": "duplicate_line_characters",
    "list_ratio": "newlines",
    **{f"duplicated_{n}_n_grams": f"duplicate_{n}_grams" for n in range(5, 11)},
}


def tokens(text, chinese=False):
    words = cut(text, chinese)
    return [text[start:end] for start, end in zip(words.starts.tolist(), words.ends.tolist(), strict=True)]


@pytest.fixture(scope="module")
def documents(root):
    """Pieces of this repository's texts, repeated, listed, cut off and bent so that each rule has work."""
    chance = random.Random(5)
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(root).glob("docs/*.md"))]
    texts += [path.read_text(encoding="utf-8") for path in sorted(Path(root).glob("megatron/data/*.py"))]
    found = ["", "\n\n", "word", "?" * 60, "# " * 100]
    for text in texts:
        paragraphs = text.split("\n\n")
        for _ in range(7):
            at = chance.randrange(len(paragraphs))
            piece = "\n\n".join(paragraphs[at : at + chance.choice((1, 3, 8, 30))])
            found.append(BENT[chance.randrange(len(BENT))](piece, chance))
    return found


def prose(piece):
    """Words and full stops alone, in lines of sentences."""
    words = re.findall(r"[A-Za-z]+", piece)
    return ".\n".join(" ".join(words[at : at + 12]) for at in range(0, len(words), 12)) + "."


BENT = (
    lambda piece, chance: piece,
    lambda piece, chance: prose(piece),
    lambda piece, chance: prose(piece).replace("\n", " "),
    lambda piece, chance: prose(piece) + "\n" + "\n".join(chance.choices(prose(piece).split("\n"), k=4)),
    lambda piece, chance: "\n".join(f"- {line}" for line in piece.split("\n")),
    lambda piece, chance: re.sub(r"(\w+)\n", r"\1 ...\n", piece),
    lambda piece, chance: " ".join(chance.choices(re.findall(r"[a-z]+", piece) or ["a"], k=200)),
    lambda piece, chance: " ".join([" ".join(re.findall(r"[a-z]+", piece)[:9])] * 6 + re.findall(r"[a-z]+", piece)),
    lambda piece, chance: piece + "\nWe use cookies.\nThe word javascript stands here.\n",
    lambda piece, chance: prose(piece).replace(" the ", " ").replace(" of ", " ").replace(" ", "  \u2026 #"),
    lambda piece, chance: "\n\n".join([prose(piece)[:200]] * 3 + [prose(piece)]),
    lambda piece, chance: prose(piece) + " lorem ipsum dolor sit amet.",
    lambda piece, chance: prose(piece).replace(".\n", ". [12]\n").replace("e ", "e[3] ") + "\n" + "x" * 1200 + ".",
    lambda piece, chance: re.sub(r"\b[a-z]{3,}\b ?", "", prose(piece)) * 4,
    lambda piece, chance: "\n".join(word + "." for word in prose(piece).split()),
    lambda piece, chance: re.sub(r"[a-z]{1,4} ", "", prose(piece)).replace(" ", ""),
)


@pytest.fixture
def theirs(monkeypatch):
    """datatrove's four filters with our tokens."""
    filters = pytest.importorskip("datatrove.pipeline.filters", reason="datatrove is not installed")
    from datatrove.pipeline.filters import (
        c4_filters,
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    class Punctuation:
        def __contains__(self, character):
            return unicodedata.category(character)[0] not in "LNM"

    def sentences(line, language):
        return [0] * max(1, len(re.findall(r"[.!?]+[\"')\]]*(?=\s|$)", line)))

    for module in (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: tokens(text))
    monkeypatch.setattr(gopher_quality_filter, "PUNCTUATION_SET", Punctuation())
    monkeypatch.setattr(c4_filters, "split_into_sentences", sentences)
    return {
        "gopher": filters.GopherQualityFilter(),
        "gopher_repetition": filters.GopherRepetitionFilter(),
        "c4": filters.C4QualityFilter(),
        "fineweb": filters.FineWebQualityFilter(),
    }


@pytest.mark.parametrize("name, least", [("gopher", 8), ("gopher_repetition", 9), ("c4", 3), ("fineweb", 4)])
def test_decisions_and_reasons_are_datatroves(name, least, documents, theirs):
    """least: different verdicts that have to occur, so that the documents show something."""
    from datatrove.data import Document

    ours, reasons = build_filter(name), Counter()
    for text in documents:
        if not text.strip():  # datatrove divides by no words
            continue
        verdict, document = ours(dict(text=text)), Document(text=text, id="0")
        told = theirs[name].filter(document)
        expected = "" if told is True else NAMES.get(told[1], told[1])
        if told is True and not document.text:
            expected = "no_lines"
        assert (verdict.reason if verdict.document is None else "") == expected, (text[:200], dict(verdict.figures))
        if verdict.document is not None:
            assert verdict.document["text"] == document.text
        reasons[expected] += 1
    assert len(reasons) >= least, reasons


def test_tokens_are_those_of_the_expression(documents):
    odd = [
        "don't",
        "'a' b's '",
        "...a.b..",
        "1,000:3/4,x 5,",
        "a\u00a0b\u3000c",
        "_x_ __",
        "--a-- ~~ -~",
        "\x1c\x1d",
        "e\u0301a",
    ]
    odd += [
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e01\u0e33",
        "\U0001f600\U0001f600 x",
        "\u4e2d\u6587abc\u3002",
        ".'.",
        "a''b",
        "1.,2",
    ]
    for text in odd + documents:
        assert tokens(text) == TOKEN.findall(text), text[:80]
    assert tokens("\u4e2d\u6587abc\u3002\u304b1.5", chinese=True) == [
        "\u4e2d",
        "\u6587",
        "abc",
        "\u3002",
        "\u304b",
        "1.5",
    ]


def test_classes_and_counts_of_tokens():
    words = cut("The 3rd cat -- and the 44 \u00e9t\u00e9s ...")
    visible = [bool(has) for has in words.having(VISIBLE)]
    assert visible == [True, True, True, False, True, True, True, True, False]
    assert [bool(has) for has in words.having(LETTER)] == [True, True, True, False, True, True, False, True, False]
    assert words.count(["the", "The", "and", "ca", "44"]) == 4
    assert cut("").count(["a"]) == 0


def test_ngram_counts_by_brute_force():
    chance = random.Random(3)
    for _ in range(100):
        count = chance.randrange(60)
        made = [chance.choice(("a", "b", "ab", "ba", "aba", ",", "\u4e2d")) for _ in range(count)]
        text = " ".join(made)
        words = cut(text)
        for n in (1, 2, 3, 4, 5, 7):
            grams = [" ".join(made[at : at + n]) for at in range(count - n + 1)]
            # The earliest of equally frequent ones
            first, times = Counter(grams).most_common(1)[0] if grams else ("", 0)
            assert top_characters(words, n) == len(first) * times
            seen, at, characters = set(), 0, 0
            while at <= count - n:
                gram = "".join(made[at : at + n])
                characters += len(gram) * (gram in seen)
                at += n if gram in seen else 1
                seen.add(gram)
            assert duplicate_characters(words, n) == characters


def test_every_threshold_is_an_option():
    text = "The black cat quietly slept there, and that was nearly all of it. " * 2 + "It was all there."
    assert build_filter("gopher")(dict(text=text)).reason == "too_few_words"
    assert build_filter("gopher", min_words=10)(dict(text=text)).document is not None
    assert build_filter("gopher", min_words=None, max_mean_word_length=2)(dict(text=text)).reason == "long_words"
    assert build_filter("gopher_repetition")(dict(text=text)).reason.startswith("top_")
    assert build_filter("gopher_repetition", top_ngrams={}, duplicate_ngrams={"5": 0.9})(dict(text=text)).document
    assert build_filter("c4")(dict(text=text)).reason == "too_few_sentences"
    assert build_filter("c4", min_sentences=3)(dict(text=text)).document == dict(text=text)
    assert build_filter("fineweb")(dict(text=text)).document is not None
    assert build_filter("fineweb", min_punctuated_lines=1.1)(dict(text=text)).reason == "few_punctuated_lines"


def test_figures_are_what_the_rules_say():
    text = "# The cat, # and the dog\u2026 # have \u2026 12 #"  # 6 words and a number, 7 signs
    figures = build_filter("gopher", min_words=1, max_symbol_ratio=1.0, max_ellipsis_lines=1.0)(dict(text=text)).figures
    expected = dict(words=7, mean_word_length=21 / 7, hashes=4 / 14, ellipses=2 / 14, bullet_lines=0, ellipsis_lines=0)
    assert figures == pytest.approx({**expected, "alphabetic_words": 6 / 14})
    lines = ["x" * 30 + ".", "y" * 29 + ".", "z" * 31, "", "z" * 31]
    figures = build_filter("fineweb", max_duplicate_line_characters=1.0)(dict(text="\n".join(lines))).figures
    ratios = dict(lines=4, punctuated_lines=0.5, short_lines=0.25, duplicate_line_characters=31 / 123, newlines=4 / 6)
    assert figures == pytest.approx(ratios)


CHINESE = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u6563\u6b65\u3002"


def test_chinese_variants_leave_out_what_is_made_for_spaces():
    chance = random.Random(1)
    characters = [chr(chance.randrange(0x4E00, 0x5200)) for _ in range(400)]
    lines = [
        "".join(characters[at : at + 40]) + "\uff0c" + "".join(characters[at + 3 : at + 9]) + "\u3002"
        for at in range(0, 400, 40)
    ]
    text = "\n".join(lines)
    for name in ("gopher", "c4"):
        assert build_filter(name)(dict(text=text)).document is None
    for name in ("gopher_chinese", "gopher_repetition_chinese", "c4_chinese", "fineweb_chinese"):
        verdict = build_filter(name)(dict(text=text))
        assert verdict.document == dict(text=text), (name, verdict.reason, verdict.figures)
    figures = build_filter("gopher_chinese")(dict(text=text)).figures
    assert figures["words"] == 460 and "mean_word_length" not in figures and "stop_words" not in figures
    assert build_filter("gopher_chinese")(dict(text=CHINESE)).reason == "too_few_words"
    assert build_filter("gopher_repetition_chinese")(dict(text=CHINESE * 9)).document is None
    assert build_filter("c4_chinese")(dict(text=CHINESE * 4)).reason == "too_few_sentences"
    assert (
        build_filter("fineweb_chinese")(dict(text="\n".join([CHINESE * 2] * 5))).reason == "duplicate_line_characters"
    )
