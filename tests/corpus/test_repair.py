# SPDX-License-Identifier: Apache-2.0
"""The filter `ftfy` beside `ftfy.fix_text`: the same texts, whatever is left out on the way."""

import itertools
import random
import sys

import pytest

ftfy = pytest.importorskip("ftfy", reason="ftfy is not installed")

from megatron.corpus.filters import repair  # noqa: E402
from megatron.corpus.registry import build_filter  # noqa: E402

if sys.version_info >= (3, 11):
    from re import _parser as sre_parse
else:
    import sre_parse

PIECES = (
    "a b c the ; . , & < > &amp; &lt; &eacute; &#233; &#x80; &EACUTE; &nothing; &amp;lt; 1 . ? ' \" \n \n \n \r "
    "\r\n \t \x00 \x01 \x0b \x0c \x1b[31m \x1b[0m \x1b \x7f \x80 \x85 \x92 \x9f \xa0 \xad \u00e9 e\u0301 \u00c3 "
    "\u00c2 \u00c3\u00a9 \u00e2\u20ac\u2122 \u00e2\u20ac\u0153 \u00c2\u00a0 \u2018 \u2019 \u201c \u201d \u201f "
    "\u02bc \u2013 \u2014 \u2026 \u2022 \u20ac \u00a3 \u00bb \u00ab \u00bf \u00d7 \u00b2 \u0152 \u0153 \ufb01 "
    "\ufb03 \u0133 \uff21 \uff61 \uff76\uff9e \u3000 \uff02 \uff07 \u4e2d\u6587 \u3002 \ufffd \ufeff \u2028 \u2029 "
    "\ufff9 \ufffc \u206a \ud83d \ud83d\ude00 \udc00 \U0001f600 \u0412\u0430 \u0432\u0402 \u0393 \u03b2\u20ac "
    "\u0101\u20ac \u0160 \u2502 \u2500 \u1100\u1161 \u212b \u0344 \u0340 \u221a"
)


def texts(count, longest):
    chance = random.Random(11)
    pieces = PIECES.split(" ") + [" "] * 12 + ["word "] * 12
    for _ in range(count):
        yield "".join(chance.choice(pieces) for _ in range(chance.randrange(1, longest)))


def assert_as_ftfy(given):
    keep = build_filter("ftfy")
    for text in given:
        verdict = keep(dict(text=text, url="u"))
        assert verdict.document == dict(text=ftfy.fix_text(text), url="u"), text
        assert (verdict.reason == "repaired") == (verdict.document["text"] != text)


def test_same_texts_as_ftfy():
    assert repair.rules_of_ftfy().known, "another ftfy than the one that the shortcuts were checked against"
    assert_as_ftfy(texts(1500, 12))
    assert_as_ftfy(texts(100, 200))


@pytest.mark.full
def test_same_texts_as_ftfy_many():
    assert_as_ftfy(texts(60_000, 14))
    assert_as_ftfy(texts(3_000, 300))


def test_texts_that_are_mostly_plain(root):
    pages = [path.read_text(encoding="utf-8") for path in sorted(root.glob("docs/*.md"))[:6]]
    odd = (
        "caf\u00e9 \u2014 \u201cquoted\u201d",
        "na\u00c3\u00afve",
        "l\x01ne",
        "A&amp;B",
        "&amp; <b>",
        "e\u0301t\u00e9 \u2026",
    )
    for page, line in itertools.product(pages, odd):
        middle = page.find("\n", len(page) // 2)
        assert_as_ftfy([page[:middle] + "\n" + line + page[middle:]])


def test_each_character_alone():
    points = [*range(0x3100), *range(0xD7F0, 0xE010), *range(0xF8F0, 0x10000), *range(0x1D170, 0x1D180)]
    assert_as_ftfy(f"word{chr(point)}word" for point in points[::3])


@pytest.mark.full
def test_each_character_alone_all_of_them():
    assert_as_ftfy(f"word{chr(point)}word" for point in range(sys.maxunicode + 1))


@pytest.mark.full
def test_huge_lines_are_cut_as_ftfy_cuts_them():
    line = "x" * 999_999 + "\u00c3\u00a9 &amp;\n"
    assert build_filter("ftfy")(dict(text=line)).document["text"] == ftfy.fix_text(line)


def test_every_branch_of_the_heuristic_for_mojibake_is_seen_by_the_cheap_test():
    """A proof for the installed ftfy: each alternative of its pattern needs something that `hard` finds.

    That is a C1 control or one of four letters, or two mandatory neighbours each of whose pairs `hard` finds.
    """
    pattern = ftfy.badness.BADNESS_RE
    hard = repair.rules_of_ftfy().hard
    [(operation, (_, branches))] = sre_parse.parse(pattern.pattern, pattern.flags)
    assert operation == sre_parse.BRANCH and len(branches) > 30
    for branch in branches:
        sets = [characters(item) for item in branch]
        alone = any(found and all(hard.search(c) for c in found) for found in sets)
        pairs = (pair for pair in itertools.pairwise(sets) if all(pair))
        assert alone or any(all(hard.search(a + b) for a, b in itertools.product(*pair)) for pair in pairs), branch


def characters(item):
    """The characters that a mandatory item of a pattern can be; none for what is optional or of any script."""
    operation, value = item
    if operation == sre_parse.LITERAL:
        return {chr(value)}
    if operation != sre_parse.IN:
        return set()
    found = set()
    for kind, what in value:
        if kind == sre_parse.LITERAL:
            found.add(chr(what))
        elif kind == sre_parse.RANGE:
            found |= set(map(chr, range(what[0], what[1] + 1)))
        else:
            return set()
    return found


def test_another_ftfy_is_not_taken_for_the_known_one(monkeypatch):
    text = "\u201cplain\u201d"
    monkeypatch.setattr(ftfy.badness, "BADNESS_RE", ftfy.badness.re.compile("x"))
    assert not repair.FtfyRules(ftfy).known
    assert repair.FtfyRules(ftfy).fix(text) == ftfy.fix_text(text) == '"plain"'
