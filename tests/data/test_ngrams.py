# SPDX-License-Identifier: Apache-2.0
"""Hashed words and n-grams against regular expressions, sets of tuples, and a slow cutter of texts."""

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import ngrams
from megatron.data.contamination import Contained, NgramIndex, cut, item_ngrams
from megatron.data.evaluation_sets import read_items
from megatron.data.ngrams import ngram_hashes, words_of
from megatron.errors import DataError
from megatron.tools import contamination as tool

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"(?:(?![{CJK}])\w)+|[{CJK}]")  # a character of CJK is a word
TEXT = st.text(st.sampled_from("aAbB1_ .,'\n\u00e9\u00c9\u03a3\u03c3\u4e2d\u6587\u3042\U0001f600-"), max_size=60)


def slow_words(text: str) -> list[tuple[str, int, int]]:
    return [(found.group().lower(), found.start(), found.end()) for found in WORD.finditer(text)]


@given(st.lists(TEXT, max_size=4), st.integers(3, 40))
@settings(max_examples=150, deadline=None)
def test_words_are_those_of_a_regular_expression(texts, chunk):
    meanings, before = {}, ngrams.CHUNK
    ngrams.CHUNK = chunk
    try:
        for text in texts:
            words, expected = words_of(text), slow_words(text)
            assert list(zip(words.starts.tolist(), words.ends.tolist(), strict=True)) == [row[1:] for row in expected]
            for value, (word, _, _) in zip(words.hashes.tolist(), expected, strict=True):
                assert meanings.setdefault(value, word) == word  # no two words share a hash ...
    finally:
        ngrams.CHUNK = before
    assert len(set(meanings.values())) == len(meanings)  # ... and a word has one


def test_a_word_longer_than_a_chunk_is_one(monkeypatch):
    monkeypatch.setattr(ngrams, "CHUNK", 16)
    words = words_of("so " + "x" * 100 + " it" + "y" * 70)
    assert words.ends.tolist() == [2, 103, 176]
    assert words.hashes[1] == words_of("x" * 100).hashes[0] != words_of("x" * 99).hashes[0]


@pytest.mark.sampled(2)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 6))
@settings(deadline=None)
def test_ngrams_are_equal_where_their_words_are(numbers, n):
    vocabulary = words_of("zero one two three").hashes
    hashes = ngram_hashes(vocabulary[np.array(numbers, np.int64)], n).tolist()
    expected = [tuple(numbers[at : at + n]) for at in range(len(numbers) - n + 1)]
    assert len(hashes) == len(expected)
    pairs = set(zip(hashes, expected, strict=True))
    assert len(pairs) == len({value for value, _ in pairs}) == len({words for _, words in pairs})


# -- an index ----------------------------------------------------------------------------------------------------------


def slow_find(items, texts, longest=5, shortest=3) -> list[tuple[int, int, int, int]]:
    """(text, start, end, item) of every n-gram of an item in a text."""
    wanted = {}
    for number, item in enumerate(items):
        for text in item:
            words = [word for word, _, _ in slow_words(text)]
            n = min(longest, len(words))
            if n >= shortest:
                for at in range(len(words) - n + 1):
                    wanted.setdefault(tuple(words[at : at + n]), set()).add(number)
    found = []
    for number, text in enumerate(texts):
        words = slow_words(text)
        for n in {len(gram) for gram in wanted}:
            for at in range(len(words) - n + 1):
                for item in wanted.get(tuple(word for word, _, _ in words[at : at + n]), ()):
                    found.append((number, words[at][1], words[at + n - 1][2], item))
    return sorted(found)


def fast_find(index, texts) -> list[tuple[int, int, int, int]]:
    hits = index.find(texts)
    return sorted(
        (text, start, end, item)
        for text, start, end, ngram in zip(*(array.tolist() for array in hits), strict=True)
        for item in index.items_of(np.array([ngram])).tolist()
    )


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_what_is_found_is_what_sets_of_words_find(seed):
    def text(most):
        return "".join(
            seed.choice(["a", "B", "c", " ", " ", ". ", "\u4e2d", "\n"]) for _ in range(seed.randrange(most))
        )

    items = [[text(25) for _ in range(seed.randrange(3))] for _ in range(6)]
    texts = [text(40) for _ in range(12)] + [items[0][0] if items[0] else ""]
    if not slow_find(items, [one for item in items for one in item]):
        with pytest.raises(DataError, match="none of its 6 items has 3 words"):
            NgramIndex.empty(5, 3).with_set("set", items)
        return
    index = NgramIndex.empty(5, 3).with_set("set", items)
    assert fast_find(index, texts) == slow_find(items, texts)


def test_fifty_planted_passages_are_found_and_nothing_else(monkeypatch):
    monkeypatch.setattr("megatron.data.contamination.TOGETHER", 2000)
    random_ = random.Random(3)
    vocabulary = [f"w{number}" for number in range(3000)]
    passages = [" ".join(random_.choices(vocabulary, k=30)) for _ in range(400)]
    texts = [" ".join(random_.choices(vocabulary, k=200)) for _ in range(300)]
    planted = dict(zip(random_.sample(range(300), 50), random_.sample(range(400), 50), strict=True))
    for at, passage in planted.items():
        words = texts[at].split()
        middle = passages[passage].upper().replace(" ", ", ", 7).split(" ")[5:25]
        texts[at] = " ".join([*words[:100], *middle, *words[100:]])
    index = NgramIndex.empty().with_set("set", [[passage] for passage in passages])
    hits = index.find(texts)
    found = {
        (int(text), int(index.items_of(np.array([ngram]))[0]))
        for text, ngram in zip(hits.texts, hits.ngrams, strict=True)
    }
    assert found == set(planted.items())


def test_sets_are_replaced_forgotten_and_kept_in_a_file(tmp_path):
    a, b = [["one two three four five six"], ["x"]], [["seven eight nine ten eleven"], ["two three four five six"]]
    index = NgramIndex.empty(5, 3).with_set("a", a, ["a.txt"]).with_set("b", [["gone gone gone gone"]]).with_set("b", b)
    assert [(one.name, one.items, one.too_short) for one in index.sets] == [("a", 2, 1), ("b", 2, 0)]
    text = ["zero one two three four five six seven eight nine ten eleven", "gone gone gone gone"]
    index.save(tmp_path / "index")
    for made in (index, NgramIndex.open(tmp_path / "index")):
        assert made.sets_of(made.find(text).ngrams) == {"a": 1, "b": 2}
        assert set(made.find(text).texts.tolist()) == {0}
    common = index.lookup(item_ngrams(["two three four five six"], 5, 3)[0])[1]
    assert index.without(common).sets_of(index.without(common).find(text).ngrams) == {"a": 1, "b": 1}
    assert index.with_set("a", [["no such words here"]]).sets_of(index.find(text).ngrams[:0]) == {}


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: b"", "no index of n-grams"),
        (lambda data: data[:-200], "no index of n-grams"),
        (lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], "checksum"),
        (lambda data: data.replace(b'"version": 1', b'"version": 2', 1), "version 2"),
        (lambda data: data.replace(b"index of n-grams", b"index of m-grams", 1), "index of m-grams"),
    ],
)
def test_damaged_indexes_are_refused(tmp_path, damage, message):
    NgramIndex.empty(5, 3).with_set("a", [[" ".join(map(str, range(300)))]]).save(tmp_path / "index")
    (tmp_path / "index").write_bytes(damage((tmp_path / "index").read_bytes()))
    with pytest.raises(DataError) as error:
        NgramIndex.open(tmp_path / "index")
    assert message in str(error.value)


def test_what_several_token_files_hold_is_added_up_where_it_is_known():
    def contained(hashes, counts):
        return Contained(
            np.array(hashes, np.uint64), np.array(counts), np.array(counts), dict(documents=2, action="count")
        )

    joined = contained([1, 5, 9], [1, 0, 2]).joined(contained([5, 9, 11], [4, 0, 7]))
    assert joined.hashes.tolist() == [5, 9] and joined.counts.tolist() == [4, 2] and joined.about["documents"] == 4
    look_up = lambda *hashes: joined.look_up(np.array(hashes, np.uint64))
    assert look_up(5) == (True, True) and look_up(5, 1) == (False, True) and look_up(11) == (False, False)


# -- cutting -----------------------------------------------------------------------------------------------------------


def slow_cut(text, spans, side, least) -> list[str]:
    """Character by character: one place after another, each in what is left behind the one before."""
    pieces, offset = [], 0
    for start, end in spans:
        if start < offset:
            continue
        rest = text[offset:]
        at = start - offset - side
        while at > 0 and rest[at] not in ".!?":
            at -= 1
        if at > 0 and len(rest[: at + 1]) > least:
            pieces.append(rest[: at + 1])
        at = end - offset + side
        while at < len(rest) and rest[at] not in ".!?":
            at += 1
        offset += at + 1
        if len(text) - offset <= least:
            return pieces
    return [*pieces, text[offset:]]


@given(st.text(st.sampled_from("ab .!"), max_size=200), st.data(), st.integers(0, 12), st.integers(0, 12))
@settings(deadline=None)
def test_cutting_equals_going_character_by_character(text, data, side, least):
    places = sorted(data.draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(1, 9)), max_size=6)))
    spans = [(start, min(start + size, len(text))) for start, size in places if start < len(text)]
    pieces = [text[start:stop] for start, stop in cut(text, spans, side, least, 1000)]
    assert pieces == slow_cut(text, spans, side, least)
    assert cut(text, spans, side, least, len(pieces) - 1) == ([] if pieces else [])


def test_pieces_have_to_be_longer_than_the_least():
    assert cut("a.bb", [(0, 1)], 0, 2) == [] and cut("a.bbb", [(0, 1)], 0, 2) == [(2, 5)]
    assert cut("bb.a", [(3, 4)], 0, 3) == [] and cut("bbb.a", [(4, 5)], 0, 3) == [(0, 4)]


# -- the command -------------------------------------------------------------------------------------------------------


def test_registering_showing_scanning_ignoring(tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("the old man and the sea was calm that day\n\nshort line\n")
    rows = [dict(question="what colour has the sky at night when nobody looks at all"), dict(question="why")]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "crawl.jsonl").write_text(
        json.dumps(dict(text="x"))
        + "\nno json\n"
        + json.dumps(dict(text="So: The OLD man, and the sea was calm that day."))
    )
    index = str(tmp_path / "sets" / "e.ngrams")
    for name, file in (("LINES", "lines.txt"), ("QUESTIONS", "set.jsonl")):
        tool.main(["register", name, str(tmp_path / file), "--index", index])
    said = capsys.readouterr().out
    assert "LINES: 2 items, 1 of them of less than 8 words" in said and "2 sets" in said
    tool.main(["show", index])
    assert "QUESTIONS: 2 items, 1 too short" in capsys.readouterr().out
    tool.main(["scan", str(tmp_path / "crawl.jsonl"), "--index", index])
    said = capsys.readouterr().out
    assert '"line": 3' in said and "LINES: 1 of 2 items" in said and "QUESTIONS: 0 of 2" in said
    assert "1 of 2 texts hold any, 1 lines that are none" in said


@pytest.mark.parametrize(
    "argv, message",
    [
        (["register", "A", "nothere.txt", "--index", "i"], "no such file"),
        (["register", "A", "--index", "i"], "needs a name and files"),
        (["register", "A", "short.txt", "--index", "i"], "none of its 1 items has 8 words"),
        (["register", "A", "short.txt"], "which index"),
        (["register", "A", "odd.jsonl", "--index", "i"], "line 2"),
        (["scan", "short.txt", "--index", "short.txt"], "no index of n-grams"),
        (["show"], "show needs"),
        (["ignore", "nothere", "--index", "good"], "no record"),
        (["erase"], "erase: known are"),
        ([], "no command"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("few words\n")
    (tmp_path / "odd.jsonl").write_text('{"text": "a b c d e f g h i"}\nbroken\n')
    NgramIndex.empty().with_set("a", [["a b c d e f g h i"]]).save(tmp_path / "good")
    from megatron.errors import Failure

    with pytest.raises(Failure) as error:
        tool.main(argv)
    assert message in str(error.value)
    assert not (tmp_path / "i").exists()


def test_items_of_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "other": "y"}\n\n{"questions": ["p", "q"], "n": 1}\n')
    assert list(read_items(str(tmp_path / "a.jsonl"))) == [["x"], ["p", "q"]]
    (tmp_path / "b.jsonl").write_text('{"goal": "x", "text": "no"}\n')
    assert list(read_items(str(tmp_path / "b.jsonl"), ["goal"])) == [["x"]]


ITEMS = [f"item {n} asks which of the {n + 3} boats came home to harbour {n} first that windy night" for n in range(10)]
RECORDS = [dict(text=text, answer=f"boat {n}") for n, text in enumerate(ITEMS)]
LINES = [json.dumps(record) for record in RECORDS]
FORMS = dict(
    array=json.dumps(RECORDS),
    indented_array=json.dumps(RECORDS, indent=2),
    indented_objects="\n".join(json.dumps(record, indent=4) for record in RECORDS),
    in_an_object=json.dumps(dict(version="1.1", data=RECORDS), indent=1),
    array_a_line="[\n" + ",\n".join(LINES) + "\n]\n",
    lines="\n\n".join(LINES) + "\n",
    byte_order_mark="\ufeff" + "\n".join(LINES),
    texts=json.dumps(ITEMS),
    nested=json.dumps([dict(id=n, passage=dict(title="t", parts=[text])) for n, text in enumerate(ITEMS)]),
    plain="\n".join(ITEMS),
    plain_in_brackets="\n".join(f"[{n}] {text}" for n, text in enumerate(ITEMS)),
)


@pytest.mark.parametrize("form", FORMS)
def test_planted_items_are_found_whatever_the_form_of_their_file(form, tmp_path, capsys):
    (tmp_path / "set").write_text(FORMS[form], encoding="utf-8")
    texts = [f"Once upon a time. {text}! And so on." for text in ITEMS] + ["Nothing of it."] * 5
    (tmp_path / "crawl.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    index = str(tmp_path / "index")
    tool.main(["register", "EXAM", str(tmp_path / "set"), "--index", index])
    registered = capsys.readouterr().out
    assert "EXAM: 10 items; " in registered
    tool.main(["scan", str(tmp_path / "crawl.jsonl"), "--index", index])
    assert "10 of 15 texts hold any" in capsys.readouterr().out


def test_registered_ngrams_are_counted(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(ITEMS))
    (tmp_path / "b.json").write_text(json.dumps([ITEMS[3], "a b c d e f g h i", "too short"]))
    index = str(tmp_path / "index")
    for name in "ab":
        tool.main(["register", name, str(tmp_path / f"{name}.json"), "--index", index])
    count = len({tuple(text.split()[at : at + 13]) for text in ITEMS for at in range(len(text.split()) - 12)})
    said = capsys.readouterr().out
    assert f"a: 10 items; {count} n-grams" in said and f"1 sets, {count} n-grams" in said
    assert f"looked for; {len(ITEMS[3].split()) - 12 + 1} n-grams" in said and f"2 sets, {count + 1} n-grams" in said


@pytest.mark.parametrize(
    "text, line, word",
    [
        ("\n".join([LINES[0][:-9], *LINES[1:]]), 1, "not JSON"),  # the first line is broken
        ("\n".join([LINES[0][7:], *LINES[1:]]), 1, "not JSON"),
        ("\n".join([*LINES[:4], LINES[4][:30], *LINES[5:]]), 5, "not JSON"),
        ("\n".join([*LINES, LINES[0][:30]]), 11, "not JSON"),
        ("\n".join([*ITEMS[:2], *LINES]), 1, "not JSON"),
        ("\n".join([*LINES[:2], *ITEMS]), 3, "not JSON"),
        ("\n".join([*LINES[:2], "12", *LINES[2:]]), 3, "12 is no object"),
        (json.dumps(RECORDS, indent=1)[:-20], 1, "(line 40)"),  # cut short
        ("\n".join(LINES).replace('"text"', "'text'"), 1, "not JSON"),
        (json.dumps([*RECORDS, dict(answer=3)]), 1, "item 11 of 11: no JSON object with a text"),
        (json.dumps(RECORDS) + "\n" + json.dumps([12]), 2, "no JSON object with a text"),
    ],
)
def test_files_that_are_half_json_are_refused(tmp_path, text, line, word):
    (tmp_path / "set.txt").write_text(text)
    with pytest.raises(DataError) as error:
        tool.main(["register", "EXAM", str(tmp_path / "set.txt"), "--index", str(tmp_path / "index")])
    assert f"set.txt, line {line}" in str(error.value) and word in str(error.value)
    assert not (tmp_path / "index").exists()


def test_evaluation_sets_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "set.txt").write_bytes("first line\nder B\u00e4r schl\u00e4ft".encode("latin-1"))
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        list(read_items(str(tmp_path / "set.txt")))
