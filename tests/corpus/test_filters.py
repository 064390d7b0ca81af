# SPDX-License-Identifier: Apache-2.0
"""Single filters: the gate, languages, lengths, tasks, addresses, pages, classifiers, perplexity, and filters by name."""

import json
import math
import re
import struct
import unicodedata

import pytest

from megatron.corpus.filters import FILTERS
from megatron.corpus.filters.repair import junk
from megatron.corpus.filters.tasks import count_pieces, general_cleaning
from megatron.corpus.registry import build_filter, load
from megatron.corpus.stage import Verdict
from megatron.errors import DataError, SettingsError, UsageError

ENGLISH = "The committee has published its report about the state of the roads in the northern counties."
CHINESE = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u6563\u6b65\u3002"
GERMAN = "Der Ausschuss hat seinen Bericht \u00fcber den Zustand der Stra\u00dfen ver\u00f6ffentlicht."


def verdict(name, text, **options):
    return build_filter(name, **options)(dict(text=text))


# ---------------------------------------------------------------------------------------------------- by name


def test_each_name_of_the_table_is_a_class_whose_options_have_defaults():
    for name in FILTERS:
        assert isinstance(load(FILTERS[name]), type), name
    with pytest.raises(UsageError, match="did you mean gopher"):
        build_filter("gophr")
    with pytest.raises(UsageError, match="did you mean min-words"):
        build_filter("gopher", min_word=3)
    with pytest.raises(UsageError, match="needs model"):
        build_filter("fasttext")


def test_filters_of_ones_own(tmp_path, monkeypatch):
    source = "class Shout:\n    def __init__(self, times=1):\n        self.times = times\n    def __call__(self, d):\n"
    source += "        from megatron.corpus.stage import Verdict\n"
    source += "        return Verdict({**d, 'text': d['text'].upper() * self.times}, 'shouted')\n"
    (tmp_path / "filters_of_mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert build_filter("filters_of_mine:Shout", times=2)(dict(text="a")).document == dict(text="AA")
    for name, words in (
        ("filters_of_mine:Whisper", "has no Whisper"),
        ("filters_of_yours:Shout", "no module filters_of_yours"),
        ("filters_of_mine", "unknown filter filters_of_mine"),
        (":Shout", "':Shout' has no module"),
    ):
        with pytest.raises(UsageError, match=words):
            build_filter(name)


# ---------------------------------------------------------------------------------------------------- gate


def test_junk_is_counted_by_category():
    everything = "".join(map(chr, [*range(0x3000), 0xFFFD, 0xD800, 0xDFFF, 0x1F600]))
    layout = "\t\n\v\f\r\x85"
    expected = sum(unicodedata.category(c) in ("Cc", "Cs") and c not in layout or c == "\ufffd" for c in everything)
    assert junk(everything) == expected
    assert junk("plain\ttext\n") == 0 and junk("a\0b\x1b") == 2


def test_gate():
    assert verdict("gate", "a" * 98 + "\0\0").document is not None  # 2 % and not more
    dropped = verdict("gate", "a" * 97 + "\ufffd\0\x80")
    assert dropped.document is None and dropped.reason == "binary" and dropped.figures == {"junk": 0.03}
    assert verdict("gate", "a\0", max_share=0.5).document is not None
    assert verdict("gate", "").document is not None
    assert verdict("gate", bytes(range(256)).decode("latin-1") * 9).document is None


# ---------------------------------------------------------------------------------------------------- language


@pytest.mark.parametrize("detector", ["eldc", "langdetect"])
def test_languages(detector):
    pytest.importorskip(detector, reason=f"{detector} is not installed")
    keep = build_filter("language", detector=detector)
    assert keep(dict(text=ENGLISH)).document == dict(text=ENGLISH)
    for text in (GERMAN, CHINESE * 3):
        assert keep(dict(text=text)).reason == "other_language"
    chinese = build_filter("language", keep=["de", "zh"], detector=detector, key="language")
    assert chinese(dict(text=CHINESE * 3)).document["language"].startswith("zh")
    assert chinese(dict(text=GERMAN)).figures["language"] == "de"
    for text in ("", "12 + 3 = 15", "\0", "?!"):
        assert keep(dict(text=text)).reason == "no_language"
    assert keep(dict(text="\0" + ENGLISH)).document is not None
    assert keep(dict(text="\ud800" + ENGLISH)).document is not None
    unsure = build_filter("language", keep="en", min_score=1.0, detector=detector)(dict(text=ENGLISH))
    assert unsure.document is None and unsure.reason == "unsure_language" or unsure.figures["score"] >= 1.0
    assert build_filter("language", keep=None, detector=detector)(dict(text=GERMAN)).document is not None


@pytest.mark.parametrize("detector", ["eldc", "langdetect"])
def test_languages_that_a_detector_does_not_know_are_refused(detector):
    """They would drop every document; a code in capitals is that code."""
    pytest.importorskip(detector, reason=f"{detector} is not installed")
    for wanted in ("EN", ["En", "DE"], ["en,de"], " en "):
        keep = build_filter("language", keep=wanted, detector=detector)
        assert keep(dict(text=ENGLISH)).document is not None and keep(dict(text=CHINESE * 3)).document is None
    for wanted in (["english"], ["en", "xx"], "en,zz", [], ["zh-cnn"]):
        with pytest.raises(SettingsError, match="no language") as error:
            build_filter("language", keep=wanted, detector=detector)
        assert ", de, el, en, es, " in error.value.do


def test_what_a_detector_says_does_not_depend_on_what_came_before():
    pytest.importorskip("langdetect", reason="langdetect is not installed")
    keep = build_filter("language", detector="langdetect")
    texts = ["no more", "es una de", "the art of", ENGLISH, "rapport de la"]
    first = [keep(dict(text=text)).figures for text in texts]
    assert [keep(dict(text=text)).figures for text in reversed(texts)] == first[::-1]


def fasttext_model(path, words, labels, weights):
    """A fastText model of the simplest kind: a text's vector is the mean of its words' rows, each label a row of it.

    weights: word -> the scores of the labels; the input matrix is the identity
    """
    size = len(words)
    header = struct.pack("<ii", 793712314, 12)
    arguments = struct.pack("<12id", size, 5, 5, 1, 5, 1, 3, 3, 0, 0, 0, 100, 1e-4)  # softmax, supervised, no n-grams
    dictionary = struct.pack("<iiiqq", size + len(labels), size, len(labels), 100, -1)
    for kind, entries in ((0, words), (1, [f"__label__{label}" for label in labels])):
        for entry in entries:
            dictionary += entry.encode() + b"\0" + struct.pack("<qb", 10, kind)
    rows = [float(row == column) for row in range(size) for column in range(size)]
    matrix = struct.pack("<?qq", False, size, size) + struct.pack(f"<{size * size}f", *rows)
    out = [weights[word][label] for label in range(len(labels)) for word in words]
    output = struct.pack("<?qq", False, len(labels), size) + struct.pack(f"<{len(out)}f", *out)
    path.write_bytes(header + arguments + dictionary + matrix + output)
    return str(path)


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("fasttext", reason="fasttext-predict is not installed")
    weights = {"</s>": (0, 0), "the": (4, 0), "of": (3, 0), "der": (0, 5), "und": (0, 2)}
    return fasttext_model(tmp_path / "tiny.bin", list(weights), ["en", "de"], weights)


def softmax(*scores):
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def test_fasttext_tells_languages_and_classes(model, tmp_path):
    keep = build_filter("language", detector="fasttext", model=model)
    english = keep(dict(text="the\nof"))
    assert english.document is not None and english.figures["language"] == "en"
    assert math.isclose(english.figures["score"], softmax(7 / 3, 0)[0], rel_tol=1e-4)  # the end of the text is a word
    assert keep(dict(text="der und\ud800")).reason == "other_language"
    assert build_filter("language", detector="fasttext", model=model, min_score=0.99)(dict(text="the")).document is None
    assert build_filter("language", detector="fasttext", model=model, keep="DE")(dict(text="der")).document is not None
    with pytest.raises(SettingsError, match="no language 'fr'") as error:
        build_filter("language", detector="fasttext", model=model, keep=["fr"])
    assert error.value.do == "its codes are de, en"

    classify = build_filter("fasttext", model=model, keep={"de": 0.5})
    assert classify(dict(text="der der und")).document is not None
    dropped = classify(dict(text="the of"))
    assert dropped.reason == "no_kept_label"
    assert math.isclose(dropped.figures["de"], softmax(7 / 3, 0)[1], abs_tol=1e-4)
    assert build_filter("fasttext", model=model, drop={"de": 0.5})(dict(text="der der")).reason == "dropped_label"
    for options, words in (
        (dict(keep={"fr": 0.5}), "no label 'fr'"),
        (dict(), "either keep or drop"),
        (dict(keep={"de": 1}, drop={"en": 1}), "either keep or drop"),
    ):
        with pytest.raises(SettingsError, match=words):
            build_filter("fasttext", model=model, **options)
    (tmp_path / "other.bin").write_bytes(b"PK\3\4 no model at all")
    with pytest.raises(DataError, match="no fastText model"):
        build_filter("language", detector="fasttext", model=str(tmp_path / "other.bin"))
    with pytest.raises(DataError, match="No such file"):
        build_filter("fasttext", model=str(tmp_path / "none.bin"), keep={"a": 1})
    with pytest.raises(SettingsError, match="needs a model"):
        build_filter("language", detector="fasttext")


# ---------------------------------------------------------------------------------------------------- length


def test_short_documents(tmp_path):
    words = " ".join(["word"] * 127)
    assert verdict("megatron", words).reason == "too_few_tokens"
    assert verdict("megatron", words + " more").figures == {"characters": len(words) + 5, "tokens": 128}
    assert "tokens" not in verdict("megatron", "x" * 1024).figures  # long enough without counting
    assert verdict("megatron", "x" * 1023).document is None
    assert verdict("megatron", "a b c", min_tokens=3).document is not None
    letters = {chr(c): number for number, c in enumerate([*range(33, 127), *range(161, 173), *range(174, 256)])}
    letters |= {chr(256 + n): 188 + n for n in range(68)} | {"!!": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n! !\n")
    files = dict(vocab_file=str(tmp_path / "vocab.json"), merge_file=str(tmp_path / "merges.txt"))
    assert verdict("megatron", "caf\u00e9 x", min_tokens=8, **files).reason == "too_few_tokens"  # a token a byte: 7
    assert verdict("megatron", "caf\u00e9 x", min_tokens=7, **files).document is not None


def test_pieces_are_those_of_the_byte_level_pattern():
    regex = pytest.importorskip("regex")
    pattern = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    for text in ("It's 3 o'clock.", "a_b __init__  (x)\n\n y", "na\u00efve 42x, don't!", "  lead\ttab \n", ENGLISH):
        assert count_pieces(text) == len(pattern.findall(text)), text


# ---------------------------------------------------------------------------------------------------- tasks


def test_tasks():
    assert verdict("tasks", "x" * 511).reason == "remove_512"
    assert verdict("tasks", "x" * 512).document == dict(text="x" * 512)
    javascript = dict(tasks=["remove_256_javascript"])
    assert verdict("tasks", "Enable JavaScript", **javascript).reason == "remove_256_javascript"
    assert verdict("tasks", "Enable JavaScript".ljust(256), **javascript).document is not None
    spaces = "one  two\n\nthree\n four"
    assert verdict("tasks", spaces, tasks=["general_cleaning"]).document["text"] == "one two three four"


def test_tasks_go_on_after_one_another_in_the_order_given():
    pytest.importorskip("ftfy", reason="ftfy is not installed")
    text = "\u201cone\u201d  two\n\n\n\nthree &amp; four"
    both = verdict("tasks", text, tasks=["ftfy_fix_text", "general_cleaning"])
    assert both.document["text"] == '"one" two three & four' and set(both.figures) == {
        "ftfy_fix_text",
        "general_cleaning",
    }
    text = "A line.\n\n\n\nA line."
    assert verdict("tasks", text, tasks=["gutenberg", "realnews"]).document["text"] == "A line.\n\n\n\nA line."
    assert verdict("tasks", text, tasks=["realnews", "gutenberg"]).document["text"] == "A line.\n\nA line."
    long = "word  " * 100
    assert verdict("tasks", long, tasks=["general_cleaning", "remove_512"]).reason == "remove_512"
    assert verdict("tasks", long, tasks=["remove_512", "general_cleaning"]).document is not None


def test_short_texts_in_other_languages():
    pytest.importorskip("eldc", reason="eldc is not installed")
    task = dict(tasks=["remove_512_non_english"])
    assert verdict("tasks", GERMAN, **task).reason == "remove_512_non_english"
    assert verdict("tasks", ENGLISH, **task).document is not None
    assert verdict("tasks", GERMAN * 8, **task).document is not None  # 512 characters and more stay in any language


def test_wrong_tasks():
    for tasks, words in ((["remove_521"], "did you mean remove_512"), ([], "names none"), (["stories"] * 2, "twice")):
        with pytest.raises(SettingsError, match=words):
            build_filter("tasks", tasks=tasks)


def test_general_cleaning_is_the_originals():
    for text in ("a  b", "a\n b", "a\n\n\nb", "a.\n\nb", "a \n  b", "\n\na", "a\n"):
        assert general_cleaning(text) == re.sub(r"  +|\b\n+ |\b\n+", " ", text)


# ---------------------------------------------------------------------------------------------------- addresses, pages


def test_addresses(tmp_path, monkeypatch):
    (tmp_path / "rules_of_urls.py").write_text(
        "def rule(url):\n    return 'no_pictures' if url.endswith('.jpg') else ''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    keep = build_filter("url", rule="rules_of_urls:rule", domains=["Bad.com", "co.uk"])
    for url, reason in (
        ("http://x.org/a.jpg", "no_pictures"),
        ("https://www.bad.com/x", "listed_domain"),
        ("http://user@bad.com:80/", "listed_domain"),
        ("bad.com/x", "listed_domain"),
        ("a.co.uk", "listed_domain"),
        ("http://notbad.com/", ""),
        ("http://[::1", ""),
        ("http://bad.com.org/", ""),
    ):
        found = keep(dict(text="", url=url))
        assert (found.reason, found.document is None) == (reason, bool(reason)), url
    assert keep(dict(text="")).document is not None
    assert build_filter("url", missing="drop")(dict(text="", url=None)).reason == "no_url"
    with pytest.raises(SettingsError, match="no wrong"):
        build_filter("url", rule="rules_of_urls:wrong")


PAGE = "<html><head><title>T</title><script>x = 1</script></head><body><nav>menu</nav><main><p>Bread &amp; butter</p>"


@pytest.mark.parametrize("extractor", ["resiliparse", "trafilatura"])
def test_pages(extractor):
    try:
        __import__(extractor)
    except ImportError:
        pytest.skip(f"{extractor} is not installed, or lacks a package")
    extract = build_filter("html", extractor=extractor)
    page = PAGE + "<p>" + ENGLISH + "</p></main></body></html>"
    made = extract(dict(html=page, url="u"))
    assert set(made.document) == {"text", "url"} and made.reason == "extracted"
    assert ENGLISH in made.document["text"] and "Bread & butter" in made.document["text"]
    assert "x = 1" not in made.document["text"] and "menu" not in made.document["text"]
    for page, reason in (
        (None, "no_page"),
        ("", "no_text"),
        ("\0\0", "no_text"),
        ("<p>" * 1000, "no_text"),
        ("<div>" * 100_000, "nested_too_deep"),
        ("<b><i>" * 5_000 + ENGLISH, "nested_too_deep"),
    ):
        found = extract(dict(html=page))
        assert found.document is None and found.reason == reason, page and page[:20]


# ---------------------------------------------------------------------------------------------------- perplexity

ARPA = """
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.0\t<unk>
-99\t<s>\t-0.5
-0.7\t</s>
-0.4\tcat\t-0.3

\\2-grams:
-0.2\t<s> cat
-0.1\tcat </s>

\\end\\
"""


def test_perplexity(tmp_path, monkeypatch):
    (tmp_path / "tiny.arpa").write_text(ARPA)
    path = str(tmp_path / "tiny.arpa")
    score = lambda text: verdict("perplexity", text, model=path).figures["perplexity"]
    assert math.isclose(score("cat"), 10 ** ((0.2 + 0.1) / 2))  # <s> cat, cat </s>
    # <s> dog: back-off of <s>, <unk>; dog cat: <unk> has no back-off; cat </s>
    assert math.isclose(score("dog cat"), 10 ** ((0.5 + 1.0 + 0.4 + 0.1) / 3))
    assert math.isclose(score("cat\n\ncat"), score("cat"))
    assert math.isclose(score("cat cat"), 10 ** ((0.2 + 0.3 + 0.4 + 0.1) / 3))
    assert verdict("perplexity", "dog dog", model=path, most=5).reason == "high_perplexity"
    assert verdict("perplexity", "cat", model=path, least=5).reason == "low_perplexity"
    assert verdict("perplexity", "", model=path, most=1e9).reason == "high_perplexity"
    (tmp_path / "scorer_of_mine.py").write_text(
        "class Length:\n    def __call__(self, text):\n        return len(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    kept = verdict("perplexity", "1234", scorer="scorer_of_mine:Length", most=4)
    assert kept == Verdict(dict(text="1234"), "", {"perplexity": 4.0})
    for model, words in ((None, "needs a model"), (__file__, "no ARPA file"), (path + "x", "No such file")):
        with pytest.raises((SettingsError, DataError), match=words):
            build_filter("perplexity", model=model)
