# SPDX-License-Identifier: Apache-2.0
"""What stands somewhere before, against a dict of all windows in plain Python."""

import json
import random
import re

import numpy as np
import pytest

from megatron.corpus import exact_substrings
from megatron.errors import Failure
from tests.corpus.run_phases import phases_of, read_shards, run_phases, write_shards

pytest.importorskip("pydivsufsort", reason="the package pydivsufsort is missing")

MEMORY = 1 << 30


def run(documents, folder, options, shards=1, memory=MEMORY):
    paths = write_shards(folder / "in", documents, shards)
    made, counts = run_phases(exact_substrings.phases(options, shards, memory), paths, options, folder / "work")
    return read_shards(made["cut"]), made, counts


def plain_units(text: str, unit: str) -> tuple[list, list[int]]:
    """(units, where each begins) of a text, by characters or bytes."""
    if unit == "bytes":
        return list(text.encode()), list(range(len(text.encode())))
    found = list(re.finditer(r"[\u3400-\u9fff]|(?:(?![\u3400-\u9fff])[^\W_])+|[^\w\s]|_", text))
    return [one.group() for one in found], [one.start() for one in found]


def plain_cut(texts: list[str], unit: str, length: int) -> tuple[list[str], list[float]]:
    """(texts without what has stood before, share that was covered)."""
    seen, left, shares = set(), [], []
    for text in texts:
        units, starts = plain_units(text, unit)
        covered = [False] * len(units)
        for at in range(len(units) - length + 1):
            window = tuple(units[at : at + length])
            if window in seen:
                covered[at : at + length] = [True] * length
            seen.add(window)
        data = text.encode() if unit == "bytes" else text
        gone = [False] * len(data)
        for start, end, cover in zip(starts, [*starts[1:], len(data)][: len(starts)], covered, strict=True):
            gone[start:end] = [cover] * (end - start)
        shares.append(sum(gone) / len(data) if data else 0.0)
        if unit == "tokens":
            left.append("".join(character for character, cover in zip(text, gone, strict=True) if not cover))
            continue
        at, kept = 0, ""
        for character in text:  # of bytes, a character goes where all of it is covered
            width = len(character.encode())
            kept += "" if all(gone[at : at + width]) else character
            at += width
        left.append(kept)
    return left, shares


def corpus(seed: int) -> list[str]:
    """Texts with passages in common, of few words: windows repeat within texts, too."""
    rng = random.Random(seed)
    words = [
        "the",
        "cat",
        "sat,",
        "on",
        "a",
        "mat.",
        "\u4f60\u597d",
        "caf\u00e9",
        "x_y",
        "\n",
        "(and)",
        "B52",
        "b52",
        "--",
    ]
    passages = [" ".join(rng.choices(words, k=rng.randrange(4, 30))) for _ in range(12)]
    texts = []
    for number in range(70):
        parts = [rng.choice(passages) for _ in range(rng.randrange(4))]
        parts += [" ".join(rng.choices(words, k=rng.randrange(12))) for _ in range(2)] + [f"text{number}"]
        rng.shuffle(parts)
        texts.append("  ".join(parts))
    # Characters that begin, and that end, with the same bytes of UTF-8 as another one.
    parts = ["a passage of so many bytes before \u4f60", "a passage of so many bytes before \u4f65"]
    parts += ["\u4f60 and one of many more bytes behind it", "\u5f60 and one of many more bytes behind it"]
    return texts + parts + ["", " ", "the cat", "\u4f60\u597d" * 9]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("unit, length", [("tokens", 5), ("tokens", 9), ("bytes", 15), ("bytes", 40)])
def test_what_is_cut_is_what_brute_force_cuts(tmp_path, unit, length):
    texts = corpus(seed=length)
    left, shares = plain_cut(texts, unit, length)
    expected = [dict(n=number, text=text) for number, text in enumerate(left) if text.strip() or not shares[number]]
    assert sum(0 < share < 1 for share in shares) > 20
    ways = [(1, 1, MEMORY), (3, 2, MEMORY), (4, 3, 30_000)]  # the last one: several blocks a shard, ranges a partition
    for number, (shards, partitions, memory) in enumerate(ways):
        options = dict(unit=unit, length=length, partitions=partitions)
        documents = [dict(n=row, text=text) for row, text in enumerate(texts)]
        kept, made, counts = run(documents, tmp_path / str(number), options, shards, memory)
        assert kept == expected
        told = counts["cut"]
        assert told["documents_in"] == len(texts) and told["documents"] == len(expected)
        assert told["bytes_in"] == sum(len(text.encode()) for text in texts)
        assert told["bytes"] == sum(len(document["text"].encode()) for document in expected)
        starts = [len(texts) * shard // shards for shard in range(shards)]  # as write_shards does
        for row, (text, share) in enumerate(zip(left, shares, strict=True)):
            shard = max(at for at in range(shards) if starts[at] <= row)
            said = exact_substrings.explain(made, shard, row - starts[shard], documents[row], options)
            if not share:
                assert said is None
                continue
            assert said["figures"]["repeated"] == round(share, 4) and said["reason"] == "exact_substring"
            assert said["document"] == (dict(n=row, text=text) if text.strip() else None)


@pytest.mark.parametrize("kind", [np.uint8, np.uint64])
def test_suffix_arrays_find_what_stands_before(kind):
    rng = np.random.default_rng(0)
    for length in (2, 3, 7):
        units, whole = rng.integers(0, 3, 500).astype(kind) * kind(85), rng.random(500) < 0.9
        whole[501 - length :] = False
        seen, expected = set(), []
        for at in range(500):
            window = tuple(units[at : at + length].tolist())
            expected.append(bool(whole[at]) and window in seen)
            seen |= {window} if whole[at] else set()
        assert exact_substrings.repeats(units, whole, length).tolist() == expected
        assert any(expected) and sum(expected) < sum(whole)


@pytest.mark.parametrize("least", [0.2, 0.6])
def test_documents_that_mostly_repeat_are_dropped(tmp_path, least):
    texts = corpus(seed=1)
    _, shares = plain_cut(texts, "tokens", 6)
    documents = [dict(text=text, url=f"u{number}") for number, text in enumerate(texts)]
    options = dict(action="drop", drop_share=least, length=6)
    kept, _, _ = run(documents, tmp_path, options, shards=2)
    assert kept == [document for document, share in zip(documents, shares, strict=True) if share < least]
    assert 3 < len(kept) < len(texts)


def test_a_longer_passage_is_found_across_shards_and_a_shorter_one_left(tmp_path):
    rng = random.Random(0)
    own = lambda: " ".join(f"w{rng.randrange(10**9)}" for _ in range(30))
    long, short = (" ".join(f"p{rng.randrange(10**9)}" for _ in range(count)) for count in (50, 49))
    texts = [f"{own()} {part} {own()}" for part in (long, short) for _ in range(2)]
    kept, _, _ = run([dict(text=text) for text in texts], tmp_path, {}, shards=4)
    found = [document["text"] for document in kept]
    assert found[0] == texts[0] and found[2:] == texts[2:]
    assert found[1] == texts[1].replace(long + " ", "")


def test_odd_lines_pass_through(tmp_path):
    passage = "of eight tokens that stand in both texts "
    lines = [
        b"{broken",
        b'{"no": "text"}',
        b'["text"]',
        b'{"text": ""}',
        json.dumps(dict(text=passage)).encode(),
        b'{"text": "half \\ud800 ' + passage.encode() + b'end", "big": 1e400}',
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    options = dict(length=8)
    paths = [path, tmp_path / "empty.jsonl"]
    made, _ = run_phases(exact_substrings.phases(options, 2, MEMORY), paths, options, tmp_path / "work")
    import zstandard

    data = (made["cut"][0] / "documents.jsonl.zst").read_bytes()
    kept = zstandard.ZstdDecompressor().stream_reader(data).read().splitlines()
    assert kept[:5] == lines[:5]
    assert json.loads(kept[5])["text"] == "half \ud800 end"


@pytest.mark.parametrize(
    "wrong",
    [dict(length=1), dict(length="50"), dict(unit="words"), dict(action="mask"), dict(drop_share=0), dict(size=5)],
)
def test_wrong_options(wrong):
    with pytest.raises(Failure, match=next(iter(wrong))):
        phases_of("exact-substrings", wrong)
