# SPDX-License-Identifier: Apache-2.0
"""<prefix>.origin and <prefix>.contamination: every document is where they say, whatever the input and the workers."""

import gzip
import itertools
import json
import re

import numpy as np
import pytest
import xxhash

import merge_datasets
import preprocess_data
from megatron.data import contamination, preprocess
from megatron.data.contamination import Contained, NgramIndex, Screen, cut
from megatron.data.indexed import IndexedDataset
from megatron.data.origin import find_file, lines_at, open_origins, text_hash
from megatron.errors import DataError, SettingsError
from megatron.tools import verify_data

TEXTS = ["1 2 3", "", "4", "5 6 7 8 9", "10 11", "12 13 14 15 16 17", "", "18"]
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--append-eod"]


def lines(texts) -> bytes:
    return "".join(json.dumps(dict(text=text)) + "\n" for text in texts).encode()


def run(path, prefix, *more):
    preprocess_data.main(["--input", str(path), "--output-prefix", str(prefix), *NUMBERS, *more])
    return f"{prefix}_text_document"


def texts_of(prefix) -> list[str]:
    """What the documents say, from their tokens; the end of a document is 999 or its like."""
    data = IndexedDataset(prefix)
    ids = [data.get(sequence).tolist() for sequence in range(len(data))]
    bounds = data.document_indices.tolist()
    return [" ".join(str(id) for part in ids[a:b] for id in part if id < 999) for a, b in itertools.pairwise(bounds)]


def check_origins(prefix, key="text"):
    """Each document's line is read from its source and compared with the document's tokens."""
    origins = open_origins(prefix, IndexedDataset(prefix).num_documents, verify=True)
    for number, text in enumerate(texts_of(prefix)):
        origin = origins[number]
        record = json.loads(lines_at(origin.file, [origin.offset])[origin.offset])
        assert record[key] == text
        assert origin.hash == f"{xxhash.xxh3_64_intdigest(text.encode()):016x}" and origin.piece == 0
    return origins


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["plain", "mark", "gz", "zst", "two gz", "bad lines"])
@pytest.mark.parametrize("block", [40, 1 << 20])
def test_every_document_is_where_it_is_said_to_be(tmp_path, monkeypatch, form, block):
    folder = tmp_path / "in"
    folder.mkdir()
    data = lines(TEXTS)
    if form == "mark":
        data = b"\xef\xbb\xbf" + data
    if form == "bad lines":
        data = data.replace(b"\n", b"\n\nno json\n", 3) + b'{"text": 5}\n' + lines(["19 20"])
    if form == "gz" or form == "two gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(data))
        if form == "two gz":
            (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(["30", "31 32", "33"])))
    elif form == "zst":
        zstandard = pytest.importorskip("zstandard")
        (folder / "a.jsonl.zst").write_bytes(zstandard.compress(data))
    else:
        (folder / "a.jsonl").write_bytes(data)
        (folder / "b.jsonl").write_bytes(lines(["40", "41"]))
    monkeypatch.setattr(preprocess.divide, "__defaults__", (block,))
    monkeypatch.setattr(preprocess.preprocess, "__defaults__", (*preprocess.preprocess.__defaults__[:2], block, None))
    for workers in ("1", "2"):
        check_origins(run(folder, tmp_path / f"out{workers}", "--workers", workers))
    first, second = (tmp_path / f"out{workers}_text_document.origin" for workers in "12")
    assert first.read_bytes() == second.read_bytes()


def test_partitions_and_sentences(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    prefix = run(tmp_path / "a.jsonl", tmp_path / "parts", "--partitions", "3")
    check_origins(prefix)
    assert texts_of(prefix) == [TEXTS[at] for at in (0, 3, 6, 1, 4, 7, 2, 5)]
    (tmp_path / "b.jsonl").write_text('{"text": ["1 2", "3"]}\n')
    origins = open_origins(run(tmp_path / "b.jsonl", tmp_path / "sentences"))
    assert origins[0].hash == f"{text_hash('1 2' + chr(10) + '3'):016x}"


def test_no_origin_leaves_it_out_and_changes_nothing_else(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    there, gone = run(tmp_path / "a.jsonl", tmp_path / "a"), run(tmp_path / "a.jsonl", tmp_path / "b", "--no-origin")
    for ending in (".bin", ".idx", ".stats.json"):
        assert open(there + ending, "rb").read() == open(gone + ending, "rb").read()
    assert open_origins(there) is not None and open_origins(gone) is None
    again = run(tmp_path / "a.jsonl", tmp_path / "a", "--no-origin")
    assert open_origins(again) is None  # what an earlier run left does not stand beside other tokens


def test_merged_files_know_their_sources(tmp_path):
    (tmp_path / "parts").mkdir()
    for name, texts in (("a", TEXTS[:3]), ("b", TEXTS[3:5]), ("c", TEXTS[5:])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(texts))
        run(tmp_path / f"{name}.jsonl", tmp_path / "parts" / name)
    merge_datasets.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "whole")])
    origins = check_origins(str(tmp_path / "whole"))
    assert [one["path"][-7:] for one in origins.files] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    verify_data.main([str(tmp_path / "whole")])
    merge_datasets.main(
        [
            "--input",
            *[str(tmp_path / "whole")] * 1,
            str(tmp_path / "parts" / "a_text_document"),
            "--output-prefix",
            str(tmp_path / "twice"),
        ]
    )
    assert len(check_origins(str(tmp_path / "twice")).files) == 3  # a file is in the table once


def test_what_is_not_known_of_all_is_left_out(tmp_path, capsys):
    for name, flags in (("a", []), ("b", ["--no-origin"])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(TEXTS))
        run(tmp_path / f"{name}.jsonl", tmp_path / name, *flags)
    prefixes = [str(tmp_path / f"{name}_text_document") for name in "ab"]
    merge_datasets.main(["--input", *prefixes, "--output-prefix", str(tmp_path / "both")])
    assert open_origins(str(tmp_path / "both")) is None and "b_text_document has no .origin" in capsys.readouterr().out


def other_file(prefix):
    """Numbers of files that the table does not have; the checksum is theirs."""
    from megatron.data.origin import write_origins

    origins = open_origins(prefix)
    rows = np.array(origins.rows)
    rows["file"] = 3
    write_origins(prefix + ".origin", origins.files, len(rows), [rows], origins.about["tokens"])


def flipped(prefix):
    data = bytearray(open(prefix + ".origin", "rb").read())
    data[-40] ^= 1
    open(prefix + ".origin", "wb").write(data)


@pytest.mark.parametrize(
    "damage, message",
    [
        (flipped, "checksum"),
        (other_file, "not in its table"),
        (lambda prefix: open(prefix + ".origin", "r+b").truncate(200), "is no origin of documents"),
        (lambda prefix: open(prefix + ".origin", "wb").write(b"nothing"), "is no origin of documents"),
    ],
)
def test_damage_is_told(tmp_path, capsys, damage, message):
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    prefix = run(tmp_path / "a.jsonl", tmp_path / "a")
    damage(prefix)
    with pytest.raises(DataError, match="1 of 1 dataset is damaged"):
        verify_data.main([prefix])
    assert message in capsys.readouterr().out


def test_origins_of_other_token_files_are_refused(tmp_path, capsys):
    for name, texts in (("a", TEXTS), ("b", TEXTS[1:]), ("c", [*TEXTS[:-1], "18 19"])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(texts))
        run(tmp_path / f"{name}.jsonl", tmp_path / name)
    whole = tmp_path / "a_text_document.origin"
    for other, message in (
        ("b", "8 documents, .*b_text_document has 7"),
        ("c", "of a token file of 24 tokens, not of 25"),
    ):
        (tmp_path / f"{other}_text_document.origin").write_bytes(whole.read_bytes())
        with pytest.raises(DataError):
            verify_data.main([str(tmp_path / f"{other}_text_document")])
        said = " ".join(capsys.readouterr().out.split())
        assert re.search(message, said), said


def test_sources_that_have_moved_are_found(tmp_path):
    for name in ("old/crawl/1/a.jsonl", "new/1/a.jsonl", "new/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    old = str(tmp_path / "old/crawl/1/a.jsonl")
    assert find_file(old) == old and find_file("/nothere/a.jsonl") is None
    assert find_file(old, [str(tmp_path / "new")]) == str(tmp_path / "new/1/a.jsonl")
    assert find_file("/gone/a.jsonl", [str(tmp_path / "new")]) == str(tmp_path / "new/a.jsonl")


# -- evaluation sets in the text ---------------------------------------------------------------------------------------

SET = [
    "the quick brown fox jumps over the lazy dog while seven wizards watch from the hill",
    "one two three four five six seven",
]


def corpus() -> list[str]:
    filler = "Nothing happens here at all. " * 20
    return [
        filler,
        filler + SET[0].upper() + ". " + filler,
        "short: " + SET[0],
        "so " + SET[0][:50],  # nine words of it: not thirteen
        filler + SET[0] + "! " + filler * 2 + SET[0][4:] + ". " + filler,
    ]


@pytest.fixture
def index(tmp_path):
    NgramIndex.empty().with_set("set", [[text] for text in SET]).save(tmp_path / "index")
    return str(tmp_path / "index")


def words(vocab_folder, path, prefix, *more):
    files = ["--vocab-file", str(vocab_folder / "vocab.json"), "--merge-file", str(vocab_folder / "merges.txt")]
    preprocess_data.main(["--input", str(path), "--output-prefix", str(prefix), "--append-eod", *files, *more])
    return f"{prefix}_text_document"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    from megatron.tools import train_tokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "text.jsonl").write_bytes(lines(corpus()))
    train_tokenizer.main(["--input", str(folder / "text.jsonl"), "--vocab-size", "400", "--output", str(folder)])
    return folder


def left_of(text: str) -> list[str]:
    """The pieces of a text of the corpus, found by string search."""
    low, spans = text.lower(), []
    for phrase in (SET[0], SET[0][4:]):
        at = low.find(phrase)
        while at >= 0:
            spans.append((at, at + len(phrase)))
            at = low.find(phrase, at + 1)
    return [text] if not spans else [text[start:stop] for start, stop in cut(text, sorted(spans))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("action", ["count", "cut", "drop"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_becomes_of_texts_with_evaluation_items(tmp_path, vocabulary, index, action, workers, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(corpus()))
    held = [1, 2, 4]
    expected = {
        "count": corpus(),
        "cut": [piece for text in corpus() for piece in left_of(text)],
        "drop": [text for number, text in enumerate(corpus()) if number not in held],
    }[action]
    (tmp_path / "expected.jsonl").write_bytes(lines(expected))
    plain = words(vocabulary, tmp_path / "expected.jsonl", tmp_path / "plain")
    flags = ["--contamination", index, "--on-contamination", action, "--workers", workers]
    found = words(vocabulary, tmp_path / "a.jsonl", tmp_path / "found", *flags)
    for ending in (".bin", ".idx", ".stats.json"):
        assert open(plain + ending, "rb").read() == open(found + ending, "rb").read()
    assert "3 texts share n-grams with 1 of 2 items of set" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "found.contaminated.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == [number + 1 for number in held]
    assert all(row["sets"] == {"set": 1} and row["first"].lower() in SET[0] for row in rows)
    known = Contained.open(found + contamination.ENDING)
    assert known.before.sum() == sum(row["ngrams"] for row in rows) == 4 + 4 + 4 + 3
    assert known.counts.sum() == (15 if action == "count" else 0)
    assert known.about["documents"] == len(expected) and known.about["items"] == {"set": 1}
    origins = open_origins(found, len(expected), verify=True)
    pieces = [origins[number].piece for number in range(len(expected))]
    assert [origins[number].hash for number in range(len(expected))] == [f"{text_hash(text):016x}" for text in expected]
    assert any(pieces) == (action == "cut")
    verify_data.main([found])


def test_searching_and_not_finding_changes_nothing(tmp_path, vocabulary, index):
    (tmp_path / "a.jsonl").write_bytes(lines(corpus()[:1]) * 3 + b"bad\n")
    plain = words(vocabulary, tmp_path / "a.jsonl", tmp_path / "plain")
    found = words(
        vocabulary, tmp_path / "a.jsonl", tmp_path / "found", "--contamination", index, "--on-contamination", "drop"
    )
    for ending in (".bin", ".idx", ".origin"):
        assert open(plain + ending, "rb").read() == open(found + ending, "rb").read()
    assert not (tmp_path / "found.contaminated.jsonl").exists()


def test_sentences_are_cut_as_a_whole(index):
    filler = ["Nothing happens here at all."] * 30
    text = [*filler, SET[0] + ".", *filler]
    screening = Screen(NgramIndex.open(index), "cut")([(0, [text, "other"]), (1, ["nothing", "here"])])
    assert list(screening.parts) == [0]
    parts = screening.parts[0]
    assert [(key, number) for key, number, _ in parts] == [(0, 1), (0, 2), (1, 0)] and parts[2][2] == "other"
    assert all(sentence in filler for _, _, value in parts[:2] for sentence in value)
    assert 10 < len(parts[0][2]) < 24 and 10 < len(parts[1][2]) < 24


def test_all_dropped_is_told(tmp_path, vocabulary, index):
    (tmp_path / "a.jsonl").write_bytes(lines(corpus()[2:3]))
    with pytest.raises(DataError, match="no text in .*\n.*1 texts with n-grams"):
        words(
            vocabulary, tmp_path / "a.jsonl", tmp_path / "out", "--contamination", index, "--on-contamination", "drop"
        )


def test_an_action_needs_an_index(tmp_path):
    with pytest.raises(SettingsError, match="needs --contamination"):
        run(tmp_path / "a.jsonl", tmp_path / "out", "--on-contamination", "cut")
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    with pytest.raises(DataError, match="no such file"):
        run(tmp_path / "a.jsonl", tmp_path / "out", "--contamination", str(tmp_path / "gone"))
