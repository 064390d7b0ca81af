# SPDX-License-Identifier: Apache-2.0
"""Whole documents with the same text, against a set in Python."""

import json
import random

import pytest
import xxhash

from megatron.corpus import exact_duplicates
from megatron.errors import DataError, Failure
from tests.corpus.run_phases import phases_of, read_shards, run_phases, write_shards

MEMORY = 1 << 30


def run(documents, folder, options, shards=1, memory=MEMORY):
    paths = write_shards(folder / "in", documents, shards)
    made, counts = run_phases(exact_duplicates.phases(options, shards, memory), paths, options, folder / "work")
    return read_shards(made["remove"]), made, counts


def corpus(seed: int) -> list[dict]:
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(["a", "B", "b", " ", "c,"], k=rng.randrange(4))) for _ in range(400)]
    return [dict(text=text, url=f"u{number}") for number, text in enumerate(texts)]


SAME = dict(  # what of a text has to be equal
    none=lambda text: text,
    space=lambda text: tuple(text.split()),
    words=lambda text: tuple(text.lower().replace(",", " ").split()),
)


def first_of_each(documents, same) -> list[dict]:
    seen, kept = set(), []
    for document in documents:
        if same(document["text"]) not in seen:
            seen.add(same(document["text"]))
            kept.append(document)
    return kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize("normalize", SAME)
def test_the_first_of_each_text_stays(tmp_path, normalize):
    documents = corpus(seed=0)
    expected = first_of_each(documents, SAME[normalize])
    assert 10 < len(expected) < 200
    for number, (shards, partitions, memory) in enumerate([(1, 1, MEMORY), (5, 3, MEMORY), (3, 2, 2000)]):
        options = dict(normalize=normalize, partitions=partitions)
        kept, made, counts = run(documents, tmp_path / str(number), options, shards, memory)
        assert kept == expected
        gone = [json.loads(line) for path in made["remove"] for line in (path / "dropped.jsonl").open()]
        assert len(gone) == counts["match"]["to_remove"] == len(documents) - len(kept)
        texts = [[json.loads(line)["text"] for line in path.open()] for path in made["documents"]]
        by_url = {document["url"]: document["text"] for document in documents}
        for note in gone:
            first = texts[note["of_shard"]][note["of_row"]]
            assert SAME[normalize](by_url[note["url"]]) == SAME[normalize](first)


def test_against_an_earlier_corpus(tmp_path):
    documents = corpus(seed=1)
    both, _, _ = run(documents, tmp_path / "both", {})
    _, before, _ = run(documents[:60], tmp_path / "before", {}, shards=2)
    against = [str(before["digest"][0].parent)]
    kept, _, counts = run(documents[60:], tmp_path / "after", dict(against=against), shards=3)
    assert counts["match"]["to_remove"] == len(documents) - 60 - len(kept)
    assert kept == [document for document in both if document in documents[60:]] and kept
    with pytest.raises(DataError, match="normalize none .now words"):
        run(documents[60:], tmp_path / "other", dict(against=against, normalize="words"))


def test_all_bits_of_a_hash_count(tmp_path, monkeypatch):
    whole = xxhash.xxh3_128_digest
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: bytes(8) + whole(data)[8:])
    documents = corpus(seed=2)
    kept, _, _ = run(documents, tmp_path, {}, shards=2)
    assert kept == first_of_each(documents, SAME["none"])


def test_lines_without_a_text_stay(tmp_path):
    lines = [
        '{"n": 1}',
        '{"n": 1}',
        "broken",
        "broken",
        '{"text": "a"}',
        '{"text": "a", "n": 2}',
        '{"text": "\\ud800"}',
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    made, _ = run_phases(exact_duplicates.phases({}, 1, MEMORY), [path], {}, tmp_path / "work")
    import zstandard

    data = (made["remove"][0] / "documents.jsonl.zst").read_bytes()
    kept = zstandard.ZstdDecompressor().stream_reader(data).read().decode().splitlines()
    assert kept == [*lines[:5], lines[6]]


@pytest.mark.parametrize(
    "wrong, told",
    [
        (dict(normalise="none"), "did you mean normalize"),
        (dict(normalize="all"), "none or space or words"),
        (dict(partitions=-1), "partitions at 0"),
        (dict(against="folder"), "a list"),
    ],
)
def test_wrong_options(wrong, told):
    with pytest.raises(Failure, match=told):
        phases_of("exact-duplicates", wrong)
