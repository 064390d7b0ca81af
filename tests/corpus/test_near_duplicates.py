# SPDX-License-Identifier: Apache-2.0
"""The whole stage: the protocol with planted pairs, brute force, any number of shards and partitions, earlier corpora."""

import json
import random
from importlib.util import find_spec

import numpy as np
import pytest
import zstandard

from megatron.corpus import near_duplicates
from megatron.corpus.duplicates import shingles
from megatron.corpus.duplicates.pairs import DocumentGroups, RunReader, RunWriter, load_pairs, sorted_pairs
from megatron.corpus.duplicates.signatures import sign_texts
from megatron.errors import DataError, Failure
from tests.corpus.run_phases import phases_of, read_shards, run_phases, write_shards

needs_rensa = pytest.mark.skipif(find_spec("rensa") is None, reason="the package rensa is missing")

MEMORY = 1 << 30


def deduplicated(documents, folder, options, shards=1, memory=MEMORY):
    """(documents kept, folders made, counts)"""
    paths = write_shards(folder / "in", documents, shards)
    made, counts = run_phases(near_duplicates.phases(options, shards, memory), paths, options, folder / "work")
    return read_shards(made["remove"]), made, counts


def smallest_of_groups(documents: int, pairs) -> list[int]:
    """By walking from each document along all pairs."""
    neighbours = {number: set() for number in range(documents)}
    for one, other in pairs:
        neighbours[one].add(other)
        neighbours[other].add(one)
    smallest = [-1] * documents
    for start in range(documents):
        todo = [start] if smallest[start] < 0 else []
        while todo:
            at = todo.pop()
            if smallest[at] < 0:
                smallest[at] = start
                todo += neighbours[at]
    return smallest


# ------------------------------------------------------------------------------------------------------- the protocol

WORDS = 60


def planted_corpus(per_bin: int) -> tuple[list[dict], np.ndarray]:
    """(documents, similarity of each pair): documents 2 i and 2 i + 1 have so many words in common, other pairs none."""
    rng = np.random.default_rng(7)
    shared = np.repeat([30, 36, 42, 46, 50, 53, 56, 57, 58, 59], per_bin)
    documents = []
    for count in shared.tolist():
        names = [f"w{number:x}" for number in rng.integers(0, 2**62, 2 * WORDS - count)]
        documents += [dict(text=" ".join(names[:WORDS])), dict(text=" ".join(names[WORDS - count :]))]
    return documents, shared / (2 * WORDS - shared)


@pytest.mark.sampled(5)
@needs_rensa
def test_protocol(tmp_path):
    """Recall of pairs by similarity, and precision and recall of what is accepted, at the threshold of a preset."""
    documents, true = planted_corpus(per_bin=1200)
    options = dict(preset="fineweb", width=1, threshold=0.7)
    _, made, counts = deduplicated(documents, tmp_path, options, shards=2)
    asked = near_duplicates.read_options(options)

    def found(*folders, name):
        pairs = np.concatenate([load_pairs(path / name) for folder in folders for path in made[folder]])
        pairs = sorted_pairs(pairs)
        assert (pairs[:, 0] % 2 == 0).all() and (pairs[:, 1] == pairs[:, 0] + 1).all()
        return np.isin(np.arange(len(true)), pairs[:, 0] // 2)

    candidates = found("pair", name="pairs.npy")
    for similarity in np.unique(true):
        expected = 1 - (1 - similarity**asked.rows) ** asked.bands
        assert abs(candidates[true == similarity].mean() - expected) < 0.03, similarity
    accepted = found("compare", "decide", name="accepted.npy")
    assert (true[accepted] >= asked.threshold).mean() >= 0.99
    assert accepted[true >= 0.9].mean() >= 0.995
    assert counts["decide"]["compared_by_text"] > 1000  # many of these pairs are near the threshold
    report = json.loads((made["group"][0] / "report.json").read_text())
    assert sum(report["similarities"].values()) == candidates.sum() == counts["compare"]["pairs"]
    assert report["to_remove"] == accepted.sum()
    for example in report["examples"]:
        assert example["jaccard"] == pytest.approx(true[example["documents"][0] // 2], abs=1e-4)


# -------------------------------------------------------------------------------- brute force, and the same in any way


def families(seed: int, families: int = 60) -> list[dict]:
    """Texts and changed copies of them, of every similarity, shuffled; some texts hold a part of another."""
    rng = random.Random(seed)
    words = [f"{a}{b}{c}" for a in "bdfklmst" for b in "aeiou" for c in "nrstx"]
    texts = []
    for _ in range(families):
        text = rng.choices(words, k=rng.randrange(20, 120))
        texts.append(" ".join(text))
        for _ in range(rng.randrange(4)):
            changed = list(text)
            for _ in range(rng.randrange(len(text) // 4)):
                changed[rng.randrange(len(changed))] = rng.choice(words)
            text = changed if rng.random() < 0.5 else text
            texts.append(" ".join(changed))
    rng.shuffle(texts)
    return [dict(text=text, url=f"u{number}") for number, text in enumerate(texts)]


@pytest.mark.sampled(2)
@needs_rensa
def test_kept_are_those_of_brute_force(tmp_path):
    documents = families(seed=3)
    sets = [shingles.shingle_set(document["text"], "characters", 5) for document in documents]
    similar = [
        (one, other)
        for other in range(len(sets))
        for one in range(other)
        if len(np.intersect1d(sets[one], sets[other])) / len(np.union1d(sets[one], sets[other])) >= 0.6
    ]
    smallest = smallest_of_groups(len(documents), similar)
    expected = [document for number, document in enumerate(documents) if smallest[number] == number]
    assert 30 < len(expected) < len(documents) - 30
    options = dict(bands=64, rows=2, threshold=0.6, verify="texts", links=100)  # each similar pair is a candidate
    kept, made, counts = deduplicated(documents, tmp_path, options, shards=3)
    assert kept == expected
    sizes = [[len(document["text"]) for document in some] for some in (documents, expected)]
    told = {"documents_in": len(sizes[0]), "bytes_in": sum(sizes[0])}
    told |= {"documents": len(sizes[1]), "bytes": sum(sizes[1])}
    assert {name: counts["remove"][name] for name in told} == told
    notes = [json.loads(line) for path in made["remove"] for line in (path / "dropped.jsonl").open()]
    starts = np.cumsum([0] + [sum(1 for _ in path.open()) for path in made["documents"]])
    for note in notes:
        pair = [sets[number] for number in (int(note["url"][1:]), starts[note["of_shard"]] + note["of_row"])]
        assert abs(note["similarity"] - shingles.jaccard(*pair)) < 0.25  # 128 numbers: five standard errors
    assert {note["url"]: f"u{starts[note['of_shard']] + note['of_row']}" for note in notes} == {
        f"u{number}": f"u{first}" for number, first in enumerate(smallest) if first != number
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("verify", ["signatures", "doubtful"])
def test_kept_do_not_depend_on_how_the_work_is_divided(tmp_path, verify):
    documents = families(seed=4, families=20) * 2  # groups of more than `links`
    options = dict(bands=8, rows=4, threshold=0.6, links=2, verify=verify, kind="one_permutation")
    ways = [(1, 0, MEMORY), (2, 3, MEMORY), (7, 1, MEMORY), (3, 2, 6000), (5, 4, 20_000)]
    seen = []
    for number, (shards, partitions, memory) in enumerate(ways):
        asked = dict(options, partitions=partitions)
        kept, made, counts = deduplicated(documents, tmp_path / str(number), asked, shards, memory)
        report = json.loads((made["group"][0] / "report.json").read_text())
        del report["options"]
        seen.append((kept, report, counts["compare"]["pairs"]))
        assert counts["pair"]["records"] == len(documents) * options["bands"]
    assert all(one == seen[0] for one in seen)
    assert 10 < len(seen[0][0]) < len(documents) / 2


@pytest.mark.parametrize("links", [1, 2, 5])
def test_pairs_of_a_band_are_those_of_its_keys(tmp_path, links):
    """In each group of one key: with the `links` before, and with the first."""
    documents = families(seed=8, families=12) * 3
    options = dict(bands=6, rows=1, links=links, kind="one_permutation", partitions=2)
    _, made, _ = deduplicated(documents, tmp_path, options, shards=4)
    how = near_duplicates.read_options(options).signing
    signatures, _ = sign_texts([document["text"] for document in documents], how)
    expected = set()
    for numbers in signatures.T.tolist():  # a band is one number
        groups = {}
        for document, number in enumerate(numbers):
            groups.setdefault(number, []).append(document)
        for group in groups.values():
            expected |= {(one, two) for at, two in enumerate(group) for one in [*group[:at][-links:], *group[:at][:1]]}
    found = sorted_pairs(np.concatenate([load_pairs(folder / "pairs.npy") for folder in made["pair"]]))
    assert [tuple(pair) for pair in found.tolist()] == sorted(expected)
    assert max(two - one for one, two in expected) > len(documents) / 2


def test_records_of_a_range_of_keys(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        writer = RunWriter(tmp_path / str(number), dict(places="<u4"))
        for run in range(number):
            keys = rng.integers(0, 20, 30)
            writer.add(keys.astype(np.uint64), places=np.arange(30) + 100 * run)
            rows += [(number, int(key), place + 100 * run) for place, key in enumerate(keys)]
        writer.close()
    reader = RunReader([tmp_path / str(number) for number in range(3)])
    for first, last in ((0, 19), (3, 3), (7, 12), (19, 2**64 - 1), (20, 30)):
        whose, columns = reader.read(first, last)
        found = zip(whose.tolist(), columns["keys"].tolist(), columns["places"].tolist(), strict=True)
        expected = sorted(row for row in rows if first <= row[1] <= last)
        assert sorted(found) == expected and reader.count(first, last) == len(expected)


def test_groups_of_many_pairs():
    rng = np.random.default_rng(0)
    for documents, pairs in ((1, 0), (50, 20), (1000, 900), (1000, 5000)):
        drawn = rng.integers(0, documents, (pairs, 2))
        groups = DocumentGroups(documents)
        for part in np.array_split(drawn, 3):
            groups.join(part)
        assert groups.smallest(0, documents).tolist() == smallest_of_groups(documents, drawn.tolist())


# ------------------------------------------------------------------------------------------------- an earlier corpus


def test_against_an_earlier_corpus_is_as_both_at_once(tmp_path):
    documents = families(seed=5)
    earlier, later = documents[:90], documents[90:]
    options = dict(bands=20, rows=4, threshold=0.6, verify="signatures", kind="one_permutation")
    both, _, _ = deduplicated(documents, tmp_path / "both", options)
    _, before, _ = deduplicated(earlier, tmp_path / "before", options, shards=3)
    asked = dict(options, against=[str(before["sign"][0].parent)])
    kept, made, counts = deduplicated(later, tmp_path / "after", asked, shards=2)
    assert kept == [document for document in both if document in later]
    assert 0 < len(kept) < len(later)
    of = {json.loads(line)["of_shard"] for path in made["remove"] for line in (path / "dropped.jsonl").open()}
    assert {name for name in of if isinstance(name, str)} <= {str(path) for path in before["sign"]}
    assert any(isinstance(name, str) for name in of)


@needs_rensa
def test_fingerprints_made_otherwise_are_refused(tmp_path):
    _, before, _ = deduplicated(families(seed=6, families=5), tmp_path / "before", dict(seed=1))
    with pytest.raises(DataError, match="seed 1 .now 2"):
        deduplicated(
            families(seed=7, families=5), tmp_path / "after", dict(seed=2, against=[str(before["sign"][0].parent)])
        )
    with pytest.raises(DataError, match="no fingerprints"):
        deduplicated(families(seed=7, families=5), tmp_path / "none", dict(against=[str(tmp_path / "before" / "in")]))


# ---------------------------------------------------------------------------------------------------- odd documents


@pytest.mark.parametrize("kind", [pytest.param("minhash", marks=needs_rensa), "one_permutation"])
def test_odd_lines_pass_through(tmp_path, kind):
    again = b'{"text": "a text that stands here twice", "n": 2}'
    lines = [
        b'{"text": "a text that stands here twice"}',
        b"{broken",
        b'{"no": "text"}',
        b'{"text": 5}',
        b'{"text": ""}',
        b'{"text": ""}',
        b'["text"]',
        b'{"text": "half \\ud800 of a pair"}',
        b'{"text": "\xff invalid"}',
        b'{"text": "ab"}',
        b'{"text": "ac"}',
        b"[" * 100_000,
        again,
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\r\n".join(lines[:5]) + b"\n\n" + b"\n".join(lines[5:]))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    paths, options = [tmp_path / "in.jsonl", tmp_path / "empty.jsonl"], dict(kind=kind)
    made, counts = run_phases(near_duplicates.phases(options, 2, MEMORY), paths, options, tmp_path / "work")
    data = (made["remove"][0] / "documents.jsonl.zst").read_bytes()
    kept = zstandard.ZstdDecompressor().stream_reader(data).read()
    assert [line.rstrip(b"\r") for line in kept.splitlines()] == [line for line in lines if line != again]
    assert counts["group"]["to_remove"] == 1 and counts["sign"]["without_text"] == 6


@pytest.mark.parametrize(
    "wrong, word",
    [
        (dict(treshold=0.5), "threshold"),
        (dict(preset="gopher"), "fineweb"),
        (dict(threshold=0), "above 0"),
        (dict(threshold="0.5"), "a number"),
        (dict(bands=0), "bands"),
        (dict(verify="maybe"), "doubtful"),
        (dict(links=0), "links"),
        (dict(against="folder"), "list"),
        (dict(width=2.5), "width"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(wrong, word):
    with pytest.raises(Failure, match=word):
        phases_of("near-duplicates", wrong)
