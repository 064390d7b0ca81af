# SPDX-License-Identifier: Apache-2.0
"""2,000 hostile inputs through the cleaning of files: each is read with its bad lines set aside, or refused in words."""

import gzip
import json
import os
import resource
import subprocess
import sys

import pytest

from megatron.corpus.line_files import LineCleaner, clean_files
from megatron.corpus.registry import build_filter
from megatron.data.json_input import find_sources
from megatron.errors import DataError
from tests.corpus import hostile

CASES = 2000


@pytest.fixture(scope="module")
def filters():
    pytest.importorskip("ftfy", reason="ftfy is not installed")
    pytest.importorskip("eldc", reason="eldc is not installed")
    rules = ("gopher_repetition", "gopher", "c4", "fineweb")
    loose = dict(gopher=dict(min_words=1, min_stop_words=None), c4=dict(min_sentences=None), fineweb=dict())
    loose["gopher_repetition"] = dict(top_ngrams={}, duplicate_ngrams={5: 1.0})
    names = [("gate", {}), ("ftfy", {}), ("language", {}), *((name, loose[name]) for name in rules)]
    return [(name, build_filter(name, **options)) for name, options in names]


def check(seed, filters, folder):
    made = hostile.case(seed)
    folder.mkdir()
    (folder / made.name).write_bytes(made.data)
    output = folder / "out.jsonl"
    run = lambda: clean_files(
        find_sources([str(folder / made.name)]), LineCleaner(filters, longest=hostile.LIMIT), str(output)
    )
    if made.refused:
        with pytest.raises(DataError, match=made.refused):
            run()
        assert sorted(os.listdir(folder)) == [made.name]
        return
    counts = run()
    assert (counts["documents"], counts["rejected"]) == (made.documents, made.rejected), (made.name, made.data[:300])
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(found) == made.documents and all(type(document["text"]) is str for document in found)
    set_aside = folder / "out.jsonl.rejected.jsonl"
    reasons = [json.loads(line) for line in set_aside.read_text().split("\n")[:-1]] if made.rejected else []
    assert len(reasons) == made.rejected
    assert all(set(record) == {"file", "line", "reason"} and record["reason"] for record in reasons)
    assert sorted(os.listdir(folder)) == sorted([made.name, "out.jsonl", *[set_aside.name] * bool(reasons)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", range(4))
def test_some(part, filters, tmp_path):
    for seed in range(part, CASES, CASES // 12):
        check(seed, filters, tmp_path / str(seed))


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_all(part, filters, tmp_path):
    for seed in range(part, CASES, 8):
        check(seed, filters, tmp_path / str(seed))


def test_every_kind_of_file_and_of_line_is_among_the_cases():
    names = [hostile.case(seed).name for seed in range(0, CASES, 20)]
    assert len(set(names)) >= 14
    chance = hostile.random.Random(0)
    assert all(isinstance(make(chance), bytes) for make in (*hostile.REJECTED, *hostile.KEPT, *hostile.BLANK))


BOMBS = """
import resource, sys
from megatron.corpus.registry import build_filter
from megatron.corpus.line_files import LineCleaner, clean_files
from megatron.data.json_input import find_sources
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
filters = [(name, build_filter(name)) for name in ("gate", "gopher")]
print(clean_files(find_sources([sys.argv[1]]), LineCleaner(filters), sys.argv[2])["rejected"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.full
@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("kind", ["a line of 640 MB", "lists in a line"])
def test_bombs_stay_small(suffix, kind, tmp_path, root):
    """640 MB of one line out of a small file; and a line just short enough, of what takes most memory when it is parsed."""
    path = tmp_path / f"bomb.jsonl{suffix}"
    with opener(path, suffix) as file:
        if kind == "lists in a line":
            file.write(b"[" + b"[]," * (5 << 20) + b"[]]\n")
        else:
            for _ in range(40):
                file.write(b"a" * (16 << 20))
    assert path.stat().st_size < 3 << 20
    words = [sys.executable, "-c", BOMBS, str(path), str(tmp_path / "out.jsonl")]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    rejected, grown = map(int, done.stdout.split())
    assert rejected == 1 and grown < 700 << 10  # KiB


def opener(path, suffix):
    if suffix == ".gz":
        return gzip.open(path, "wb", compresslevel=9)
    if suffix == ".bz2":
        return __import__("bz2").open(path, "wb")
    return __import__("zstandard").open(path, "wb")


def test_memory_does_not_grow_with_a_line(tmp_path):
    """In this process: a line of 100 MB grows it by a small part of that."""
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(12):
            file.write(b"a" * (8 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = clean_files(find_sources([str(path)]), LineCleaner([], longest=1 << 20), str(tmp_path / "out.jsonl"))
    assert counts == dict(rejected=1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10
