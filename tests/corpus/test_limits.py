# SPDX-License-Identifier: Apache-2.0
"""Values exactly at a limit: what reaches a minimum, or is as large as a maximum, is kept; one step more is dropped.

The limits are those of the papers, and of Megatron-LM's scripts, written out here.
"""

import inspect
import math
import sys
import types

import numpy as np
import pytest

from megatron.corpus import commit, lines, near_duplicates
from megatron.corpus.duplicates.compare import ComparedPairs, ShingleStore, doubtful
from megatron.corpus.duplicates.pairs import load_pairs, save_pairs
from megatron.corpus.duplicates.signatures import Signing
from megatron.corpus.exact_substrings import ExactSubstringOptions, repeats, whole_windows
from megatron.corpus.filters import FILTERS, language
from megatron.corpus.filters.html import depth
from megatron.corpus.filters.url import AddressLists, AddressRules
from megatron.corpus.near_duplicates import PRESETS, NearDuplicateOptions
from megatron.corpus.registry import build_filter, load
from megatron.errors import DataError, SettingsError
from megatron.tools.openwebtext import find_duplicates

# Six lines of which two are equal, in two equal paragraphs; a bullet, hashes, both kinds of ellipsis, repeated n-grams.
PARAGRAPH = "- The cat # and the dog have slept with all of it.\nIt was so.\n12 were ... that long ago \u2026"
TEXT = f"{PARAGRAPH}\n\nIt was so.\n{'the cat and the dog that sat on the mat ' * 2}\n\n{PARAGRAPH}"
LEAST, MOST = -math.inf, math.inf  # where a value is dropped: just below a minimum, or just above a maximum
FIGURES = [  # filter, option, figure, its side
    ("gopher", "min_words", "words", LEAST),
    ("gopher", "max_words", "words", MOST),
    ("gopher", "min_mean_word_length", "mean_word_length", LEAST),
    ("gopher", "max_mean_word_length", "mean_word_length", MOST),
    ("gopher", "max_symbol_ratio", "hashes", MOST),
    ("gopher", "max_symbol_ratio", "ellipses", MOST),
    ("gopher", "max_bullet_lines", "bullet_lines", MOST),
    ("gopher", "max_ellipsis_lines", "ellipsis_lines", MOST),
    ("gopher", "min_alphabetic_words", "alphabetic_words", LEAST),
    ("gopher", "min_stop_words", "stop_words", LEAST),
    ("gopher-repetition", "max_duplicate_lines", "duplicate_lines", MOST),
    ("gopher-repetition", "max_duplicate_paragraphs", "duplicate_paragraphs", MOST),
    ("gopher-repetition", "max_duplicate_line_characters", "duplicate_line_characters", MOST),
    ("gopher-repetition", "max_duplicate_paragraph_characters", "duplicate_paragraph_characters", MOST),
    *(("gopher-repetition", ("top_ngrams", n), f"top_{n}_gram", MOST) for n in (2, 3, 4)),
    *(("gopher-repetition", ("duplicate_ngrams", n), f"duplicate_{n}_grams", MOST) for n in range(5, 11)),
    ("fineweb", "min_punctuated_lines", "punctuated_lines", LEAST),
    ("fineweb", "max_short_lines", "short_lines", MOST),
    ("fineweb", "max_duplicate_line_characters", "duplicate_line_characters", MOST),
    ("fineweb", "max_newlines", "newlines", MOST),
]


def verdict(name, text, **options):
    return load(FILTERS[name])(**options)(dict(text=text))


def kept(name, text, **options):
    return verdict(name, text, **options).document is not None


@pytest.mark.parametrize("name, option, figure, side", FIGURES, ids=lambda word: str(word))
def test_a_figure_at_its_limit_is_kept(name, option, figure, side):
    """The rule of the option alone, at the figure of a text, and at the next number on the side where it drops."""
    thresholds = [one for one in inspect.signature(load(FILTERS[name])).parameters if one.startswith(("min_", "max_"))]
    rest = dict.fromkeys(thresholds)
    if name == "gopher-repetition":
        rest |= dict(top_ngrams={}, duplicate_ngrams={})
    if isinstance(option, tuple):
        option, n = option
        limit = lambda value: {option: {n: value}}
    else:
        limit = lambda value: {option: value}
    text = TEXT if figure != "hashes" else TEXT.replace("...", "").replace("\u2026", "")  # the option limits both
    value = verdict(name, text, **rest | limit(LEAST if side is LEAST else MOST)).figures[figure]
    assert 0 < value < MOST
    assert kept(name, text, **rest | limit(value))
    beyond = verdict(name, text, **rest | limit(math.nextafter(value, -side)))
    assert beyond.document is None and list(beyond.figures)[-1] == figure


DEFAULTS = {  # Rae et al. 2021, A1.1 and table A1; Raffel et al. 2020, 2.2; Penedo et al. 2024, 3.6; Megatron-LM
    "gopher": "50 100000 3 10 .1 .9 .3 .8 2",
    "gopher-chinese": "50 100000 None None .1 .9 .3 .7 None",
    "gopher-repetition": ".3 .3 .2 .2",
    "gopher-repetition-chinese": ".3 .3 .2 .2",
    "c4": "5 3 1000",
    "c4-chinese": "5 None None",
    "fineweb": ".12 .67 30 .01 .3",
    "fineweb-chinese": ".12 .67 15 .01 None",
    "megatron": "128",
    "gate": ".02",
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_limits_are_those_of_the_papers(name):
    parameters = inspect.signature(load(FILTERS[name])).parameters.values()
    numbers = [one.default for one in parameters if one.name.startswith(("min_", "max_", "short_line"))]
    assert numbers == [None if word == "None" else float(word) for word in DEFAULTS[name].split()]


def test_limits_of_ngrams_are_those_of_the_paper():
    english, chinese = (load(FILTERS[f"gopher-repetition{more}"])() for more in ("", "-chinese"))
    assert english.top_ngrams == {2: 0.20, 3: 0.18, 4: 0.16}
    assert english.duplicate_ngrams == {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
    assert chinese.top_ngrams == {4: 0.20, 6: 0.18, 8: 0.16}
    assert chinese.duplicate_ngrams == {10: 0.15, 12: 0.14, 14: 0.13, 16: 0.12, 18: 0.11, 20: 0.10}


SENTENCE = "This is one sentence."
AT = [  # filter, options, a text at the limit, the text a step beyond
    ("c4", {}, "\n".join([SENTENCE] * 5), "\n".join([SENTENCE] * 4)),
    ("c4", dict(min_sentences=1), "one two three.", "one two."),
    ("c4", dict(min_sentences=1), f"{'a' * 999}. b c.", f"{'a' * 1000}. b c."),  # a word with its full stop
    ("c4", dict(min_sentences=1, min_words_a_line=None), "a" * 999 + ".", "a" * 1000 + "."),
    ("fineweb", dict(max_newlines=None, max_short_lines=0), "x" * 30 + ".", "x" * 29 + "."),  # 31 and 30 characters
    ("fineweb-chinese", dict(max_short_lines=0), "x" * 15 + ".", "x" * 14 + "."),
    ("gate", {}, "a" * 98 + "\0\0", "a" * 97 + "\0\0"),
    ("megatron", {}, "a." * 64, "a." * 63 + "a"),  # words and signs: 128 and 127
    ("megatron", dict(min_tokens=3), "x" * 24, "x" * 23),
    ("tasks", dict(tasks=["remove_512"]), "x" * 512, "x" * 511),
    ("tasks", dict(tasks=["remove_256_javascript"]), "JavaScript".rjust(256), "JavaScript".rjust(255)),
]


@pytest.mark.parametrize("name, options, at, beyond", AT, ids=[f"{row[0]} {row[1]}" for row in AT])
def test_a_text_at_a_limit_is_kept(name, options, at, beyond):
    assert kept(name, at, **options)
    assert not kept(name, beyond, **options)


def test_sentences_are_counted_up_to_the_limit():
    assert verdict("c4", "\n".join([SENTENCE] * 9)).figures["sentences"] == 5


def test_texts_of_512_characters_in_any_language_are_kept(monkeypatch):
    monkeypatch.setitem(language.DETECTORS, "eldc", lambda model, scored: (lambda text: ("de", 1.0), ["de", "en"]))
    assert kept("tasks", "x" * 512, tasks=["remove_512_non_english"])
    assert not kept("tasks", "x" * 511, tasks=["remove_512_non_english"])


def test_scores_at_a_limit(monkeypatch):
    asked = []

    def detector(model, scored):
        asked.append(scored)
        return lambda text: ("en", 0.75), ["en"]

    monkeypatch.setitem(language.DETECTORS, "eldc", detector)
    assert kept("language", "a", min_score=0.75) and not kept("language", "a", min_score=math.nextafter(0.75, 1))
    assert kept("language", "a") and asked == [True, True, False]  # no score is computed for a minimum of 0
    model = types.SimpleNamespace(predict=lambda text, k, threshold: (["__label__hq", "__label__ad"], [0.75, 0.25]))
    monkeypatch.setattr(language, "load_fasttext", lambda path: model)
    for least, stays in ((0.75, True), (math.nextafter(0.75, 1), False)):
        assert kept("fasttext", "a", model="m", keep={"hq": least}) == stays
        assert kept("fasttext", "a", model="m", drop={"hq": least}) != stays


class Fixed:
    def __call__(self, text):
        return 100.0


def test_perplexities_at_a_limit(monkeypatch):
    monkeypatch.setitem(sys.modules, "scorers", types.SimpleNamespace(Fixed=Fixed))
    judge = lambda **limits: kept("perplexity", "a", scorer="scorers:Fixed", **limits)
    assert judge(least=100.0) and not judge(least=100.001)
    assert judge(most=100.0) and not judge(most=99.999)


def test_pages_at_the_limit_of_depth():
    pytest.importorskip("resiliparse", reason="resiliparse is not installed")
    page = "<div>" * 3 + "A page of words." + "</div>" * 3
    assert depth(page) == 3
    assert build_filter("html", max_depth=3)(dict(html=page)).document == dict(text="A page of words.")
    assert build_filter("html", max_depth=2)(dict(html=page)).reason == "nested_too_deep"


def test_addresses_at_the_limits():
    judge = AddressRules(AddressLists(frozenset(), frozenset(), frozenset(), (".jpg",)))
    assert judge("http://a.io/" + "x" * (8192 - 12)) == "" and judge("http://a.io/" + "x" * (8193 - 12)) == "malformed"
    assert (judge("//[a.com"), judge("//[a.comm")) == ("short", "malformed")  # 8 and 9 characters
    assert (judge("http://a"), judge("http://a.")) == ("short", "malformed")


def test_lines_at_the_limit_of_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"12345678\n123\n12345678")
    assert list(lines.lines(path, 8)) == [b"12345678", b"123", b"12345678"]
    with pytest.raises(DataError, match="line 1 is longer"):
        list(lines.lines(path, 7))
    assert list(lines.split([b"1234", b"5678", b"9\n12"], 8)) == [b"123456789", b"12"]
    assert list(lines.split([b"1234", b"5678", b"\n12"], 8)) == [b"12345678", b"12"]


# ------------------------------------------------------------------------------------------------------ duplicates


def test_pairs_at_the_threshold_are_duplicates():
    """Similarities that a float32 holds exactly."""
    how = Signing(bands=8, rows=8)
    pairs, similarity = np.array([[0, 1], [2, 3], [4, 5]]), np.array([0.5, 0.484375, 0.515625], np.float32)
    found = ComparedPairs(how, 0.5, "signatures", 0, earlier=0)
    found.add(pairs, similarity)
    assert np.concatenate([part[0] for part in found._kept["accepted"]]).tolist() == [[0, 1], [4, 5]]
    # 64 numbers, a threshold of .5: three standard errors are .1875
    near = np.array([0.3125, 0.6875, np.nextafter(0.3125, 0), np.nextafter(0.6875, 1)])
    assert doubtful(near, 0.5, how, "doubtful").tolist() == [True, True, False, False]
    assert doubtful(near, 0.5, how, "texts").tolist() == [True, True, False, True]
    assert not doubtful(near, 0.5, how, "signatures").any()


@pytest.mark.parametrize("both, union", [(5, 10), (7, 10), (8, 10), (2, 3)])
def test_doubtful_pairs_at_the_threshold_are_duplicates(both, union, tmp_path, monkeypatch):
    """By their sets: one with `both` of the other's `union`, one with an element less, one with an element more."""
    sets = dict(enumerate(np.arange(size, dtype=np.uint64) for size in (both, union, both - 1, both + 1)))

    class Store(ShingleStore):
        def __init__(self, folders, memory):
            pass

        def shingle_set(self, number):
            return sets[number]

    monkeypatch.setattr(near_duplicates.compare, "ShingleStore", Store)
    monkeypatch.setattr(near_duplicates.compare, "example_rows", lambda folder, known: [])
    save_pairs(tmp_path / "doubtful.npy", np.array([[0, 1], [2, 1], [3, 1]]))
    near_duplicates.decide([tmp_path], tmp_path, dict(threshold=both / union, memory=0))
    assert np.asarray(load_pairs(tmp_path / "accepted.npy")).tolist() == [[0, 1], [3, 1]]


def test_an_earlier_corpus_has_no_texts_to_compare():
    """Documents below `earlier` are those of the earlier corpus; the first of this one has its text."""
    found = ComparedPairs(Signing(bands=8, rows=8), 0.5, "texts", 0, earlier=2)
    found.add(np.array([[1, 5], [2, 5], [3, 5]]), np.full(3, 0.5, np.float32))
    kinds = {kind: [pair for part in parts for pair in part[0].tolist()] for kind, parts in found._kept.items()}
    assert kinds == dict(accepted=[[1, 5]], doubtful=[[2, 5], [3, 5]])


def test_presets_are_those_of_the_originals():
    """Megatron-LM's find_duplicates.py, FineWeb's and NeMo Curator's recipes."""
    assert PRESETS["megatron"] == dict(shingle="characters", width=5, bands=10, rows=10, threshold=0.5)
    assert PRESETS["fineweb"] == dict(shingle="words", width=5, bands=14, rows=8, threshold=0.75)
    assert PRESETS["curator"] == dict(shingle="characters", width=24, bands=20, rows=13, threshold=0.8)


@pytest.mark.parametrize(
    "made, good, bad",
    [
        (NearDuplicateOptions, dict(threshold=1.0), dict(threshold=math.nextafter(1.0, 2))),
        (NearDuplicateOptions, dict(threshold=1e-300), dict(threshold=0.0)),
        (NearDuplicateOptions, dict(links=1), dict(links=0)),
        (NearDuplicateOptions, dict(examples=0), dict(examples=-1)),
        (NearDuplicateOptions, dict(documents_per_shard=1), dict(documents_per_shard=0)),
        (NearDuplicateOptions, dict(partitions=0), dict(partitions=-1)),
        (ExactSubstringOptions, dict(length=2), dict(length=1)),
        (ExactSubstringOptions, dict(length=1_000_000), dict(length=1_000_001)),
        (ExactSubstringOptions, dict(drop_share=1.0), dict(drop_share=math.nextafter(1.0, 2))),
        (ExactSubstringOptions, dict(drop_share=1e-300), dict(drop_share=0.0)),
        (ExactSubstringOptions, dict(partitions=0), dict(partitions=-1)),
        (ExactSubstringOptions, dict(shard_mb=1e-300), dict(shard_mb=0.0)),
    ],
    ids=lambda word: str(word)[:60],
)
def test_options_at_the_ends_of_their_ranges(made, good, bad):
    made(**good)
    with pytest.raises(SettingsError):
        made(**bad)


def test_repeats_of_the_least_length():
    pytest.importorskip("pydivsufsort")
    units = np.array([1, 2, 3, 9, 1, 2, 3, 8, 1, 2], np.uint8)
    assert np.flatnonzero(repeats(units, whole_windows(np.array([0, 10]), 3), 3)).tolist() == [4]
    assert np.flatnonzero(repeats(units, whole_windows(np.array([0, 10]), 2), 2)).tolist() == [4, 5, 8]
    assert not repeats(units, whole_windows(np.array([0, 10]), 4), 4).any()
    # a document as long as a window has one; a shorter one has none
    assert whole_windows(np.array([0, 3, 5, 9]), 3).tolist() == [1, 0, 0, 0, 0, 1, 1, 0, 0]


# ---------------------------------------------------------------------------------------------------------- engine


def test_the_attempt_of_another_machine_is_stale_after_a_day(tmp_path, monkeypatch):
    attempt = tmp_path / ".tmp-task.1-2.abcdef01.elsewhere"
    attempt.mkdir()
    newest = attempt.stat().st_mtime
    for age, alive in ((24 * 3600 - 1, True), (24 * 3600, False)):
        monkeypatch.setattr(commit.time, "time", lambda age=age: newest + age)
        assert commit._alive(attempt) == alive


def test_a_file_of_just_now_is_read_again(tmp_path, monkeypatch):
    """Its digest is kept only when it is older than two seconds: a clock of file systems is as coarse."""
    path = tmp_path / "a"
    path.write_text("a")
    written = path.stat().st_mtime_ns
    for age, count in ((2_000_000_000, 0), (2_000_000_001, 1)):
        monkeypatch.setattr(commit.time, "time_ns", lambda age=age: written + age)
        found = commit.Digests(tmp_path)
        found.of(str(path))
        assert len(found.known) == count


def test_documents_at_the_threshold_of_megatrons_script_are_different():
    """find_duplicates.py: `jaccard_sim > threshold`. They are compared again with the next document."""
    similarity = {(0, 1): 0.5, (0, 2): 0.500001, (0, 3): 0.1, (1, 3): 0.9}
    own = types.SimpleNamespace(
        options=types.SimpleNamespace(heuristic_iter=-1, jaccard_threshold=0.5),
        _similarity=lambda one, other: similarity[one, other],
    )
    rounds = list(find_duplicates._Work._rounds(own, [0, 1, 2, 3]))
    assert rounds == [(0, [(2, 0.500001)], 3), (1, [(3, 0.9)], 1)]
    own.options.heuristic_iter = 1
    assert len(list(find_duplicates._Work._rounds(own, [0, 1, 2, 3]))) == 1
