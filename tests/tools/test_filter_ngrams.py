# SPDX-License-Identifier: Apache-2.0
"""filter_ngrams and the stage that decontaminates, against a slow filter that goes from word to word."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron.corpus import decontaminate
from megatron.data.contamination import NgramIndex
from megatron.errors import Failure, SettingsError
from megatron.tools import corpus
from megatron.tools.openwebtext import filter_ngrams
from tests.corpus.run_phases import phases_of

N, LEAST = 4, 3  # words of an n-gram, and of the shortest item
SIDE, KEEP, SPLITS = 12, 15, 2


def spans_of(text: str, wanted: set[tuple[str, ...]]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Places of n-grams in a text in order; of those that start together the longest first."""
    words = [(found.group().lower(), found.start(), found.end()) for found in re.finditer(r"\w+", text)]
    found = []
    for at in range(len(words)):
        for n in range(N, LEAST - 1, -1):
            gram = tuple(word for word, _, _ in words[at : at + n])
            if len(gram) == n and gram in wanted:
                found.append((words[at][1], words[at + n - 1][2], gram))
    return found


def grams_of(items: list[str]) -> set[tuple[str, ...]]:
    found = set()
    for item in items:
        words = re.findall(r"\w+", item.lower())
        n = min(N, len(words))
        if n >= LEAST:
            found |= {tuple(words[at : at + n]) for at in range(len(words) - n + 1)}
    return found


def documents_with(texts: list[str], wanted: set[tuple[str, ...]]) -> Counter:
    """In how many texts each n-gram is; of those that overlap the first counts."""
    counts = Counter()
    for text in texts:
        own, end = set(), 0
        for start, stop, gram in spans_of(text, wanted):
            if start >= end:
                own.add(gram)
                end = stop
        counts.update(own)
    return counts


def slow_filter(texts: list[str], wanted: set[tuple[str, ...]], common: int) -> list[list[str]]:
    """What is left of each text: cut at the first n-gram, then go on with what is behind it; however many pieces."""
    counts = documents_with(texts, wanted)
    wanted = {gram for gram in wanted if counts[gram] < common}
    kept = []
    for whole in texts:
        todo, pieces = [whole], []
        while todo:
            text = todo.pop()
            spans = spans_of(text, wanted)
            if not spans:
                pieces.append(text)
                continue
            start, stop, _ = spans[0]
            ends = [at for at, mark in enumerate(text) if mark in ".!?"]
            before = max((at for at in ends if 0 < at <= start - SIDE), default=0)
            if before and before + 1 > KEEP:
                pieces.append(text[: before + 1])
            behind = min((at for at in ends if at >= stop + SIDE), default=len(text))
            if len(text) - behind - 1 > KEEP:
                todo.append(text[behind + 1 :])
        kept.append(pieces)
    return kept


def made_up(seed: int) -> tuple[list[str], list[str]]:
    """(items of an evaluation set, texts, many of which hold some)."""
    r = random.Random(seed)
    sentence = lambda most: " ".join(r.choice("ab cd ef gh ij kl mn".split()) for _ in range(r.randrange(1, most)))
    items = [sentence(9) for _ in range(12)]
    texts = []
    for _ in range(150):
        parts = [
            r.choice(items) if r.random() < 0.15 else f"{sentence(6)} x{r.random()}" for _ in range(r.randrange(1, 20))
        ]
        texts.append(r.choice([". ", "! ", ", "]).join(parts))
    return items, texts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("threads", ["1", "2"])
def test_equals_the_slow_filter(tmp_path, monkeypatch, capsys, seed, threads):
    monkeypatch.setattr(filter_ngrams, "BLOCK", 1000)
    items, texts = made_up(seed)
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(dict(text=item)) + "\n" for item in items))
    found = documents_with(texts, grams_of(items))
    common = sorted(found.values())[len(found) * 2 // 3]  # as many as one of them has: it stays
    rows = [dict(text=text, url=f"u{number}") for number, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    filter_ngrams.main(
        f"--tasks lambada --lambada-path {tmp_path}/set.jsonl --dedup-dataset {tmp_path}/in.jsonl text "
        f"--output {tmp_path}/out.jsonl --num-threads {threads} --max-ngram-size {N} --min-ngram-size {LEAST} "
        f"--splits-count {SPLITS} --filter-text-char-len {KEEP} --key-threshold {common} "
        f"--remove-char-each-side {SIDE}".split()
    )
    pieces = slow_filter(texts, grams_of(items), common)
    expected = [own if len(own) <= SPLITS else [] for own in pieces]
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["url"], row["text"]) for row in found] == [
        (f"u{number}", piece) for number, pieces in enumerate(expected) for piece in pieces
    ]
    at = [(number + 1, piece) for number, pieces in enumerate(expected) for piece in range(len(pieces))]
    assert [row["split_id"] for row in found] == [f"lambada-{number:010d}-{piece:04d}" for number, piece in at]
    said = capsys.readouterr().out
    trimmed = sum(len(own) == 1 and own != [text] for own, text in zip(pieces, texts, strict=True))
    sizes = [len(own) for own in pieces]
    split, none, many = (sum(map(test, sizes)) for test in (lambda n: n > 1, lambda n: n == 0, lambda n: n > SPLITS))
    sums = (
        f"docs {len(texts) + 1} splitted {split} ignored {none} splits > theshold {many} trimmed {trimmed} bad lines 1"
    )
    assert sums in said and min(split, none, many, trimmed) > 0


def test_dictionaries_and_other_tasks(tmp_path, capsys):
    question = dict(question="one two three four five six seven eight", id="of no matter at all")
    (tmp_path / "squad.jsonl").write_text(json.dumps(question) + "\n")
    (tmp_path / "in.jsonl").write_text(
        '{"body": "One, two three four five six seven eight!", "split_id": "x"}\n{"body": "fine"}\n'
    )
    data = ["--dedup-dataset", str(tmp_path / "in.jsonl"), "body", "--num-threads", "1"]
    task = ["--tasks", "squad", "--task-files", f"squad={tmp_path / 'squad.jsonl'}"]
    saved = ["--save-dictionary", str(tmp_path / "index")]
    filter_ngrams.main([*task, *data, "--output", str(tmp_path / "a.jsonl"), *saved])
    filter_ngrams.main([*data, "--output", str(tmp_path / "b.jsonl"), "--load-dictionary", str(tmp_path / "index")])
    for name, prefix in (("a", "squad"), ("b", "index")):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert rows == [dict(body="fine", split_id=f"{prefix}-0000000002-0000")]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--tasks lambada --dedup-dataset in.jsonl text", "--tasks lambada: where is it"),
        ("--tasks squad --dedup-dataset in.jsonl text", "--task-files squad=FILE"),
        ("--dedup-dataset in.jsonl text", "what to look for"),
        ("--tasks lambada --lambada-path in.jsonl --dedup-dataset in.jsonl", "not pairs"),
        ("--tasks lambada --lambada-path in.jsonl --dedup-dataset gone.jsonl text", "no such file"),
        ("--tasks lambada --lambada-path in.jsonl --dedup-dataset - text", "read twice"),
        ("--tasks lambada --lambada-path in.jsonl --dedup-dataset in.jsonl text --key-threshold 0", "at least 1"),
        (
            "--tasks lambada --lambada-path in.jsonl --dedup-dataset in.jsonl text --min-ngram-size 20",
            "--max-ngram-size 13",
        ),
    ],
)
def test_mistakes(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "a b c d e f g h i j k l m n o p"}\n')
    with pytest.raises(Failure) as error:
        filter_ngrams.main([*flags.split(), "--output", "out.jsonl"])
    assert message in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    with pytest.raises(SettingsError, match="is the input"):
        flags = "--tasks lambada --lambada-path in.jsonl --dedup-dataset in.jsonl text --output in.jsonl"
        filter_ngrams.main(flags.split())


# -- the stage ---------------------------------------------------------------------------------------------------------


def documents_of(path: Path) -> list[dict]:
    zstandard = pytest.importorskip("zstandard")
    with zstandard.open(path, "rb") as file:
        return [json.loads(line) for line in file.read().splitlines()]


@pytest.mark.parametrize("action", ["cut", "drop", "count"])
def test_the_stage_does_the_same(tmp_path, monkeypatch, action):
    monkeypatch.setattr(decontaminate, "BLOCK", 900)
    items, texts = made_up(7)
    NgramIndex.empty(N, LEAST).with_set("set", [[item] for item in items]).save(tmp_path / "index")
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps(dict(text=text, id=f"d{n}")) + "\n" for n, text in enumerate(texts))
    )
    options = dict(index=str(tmp_path / "index"), action=action, side=SIDE, least=KEEP, most_pieces=SPLITS)
    [phase] = decontaminate.phases(options, shards=2, memory=1 << 30)
    assert phase.split({"documents": [Path("a"), Path("b")]}) == [[Path("a")], [Path("b")]]
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        counts = phase.run([tmp_path / "in.jsonl"], tmp_path / name, options)
        path = tmp_path / name / "documents.jsonl.zst"
        made.append(path.read_bytes())
        notes = [json.loads(line) for kind in ("dropped", "cut") for line in open(tmp_path / name / f"{kind}.jsonl")]
    assert made[0] == made[1]
    whole = [[text] for text in texts]
    held = [bool(spans_of(text, grams_of(items))) for text in texts]
    expected = {
        "cut": [own if len(own) <= SPLITS else [] for own in slow_filter(texts, grams_of(items), 10**9)],
        "drop": [[] if bad else [text] for text, bad in zip(texts, held, strict=True)],
        "count": whole,
    }[action]
    found = documents_of(path)
    assert [one["text"] for one in found] == [piece for pieces in expected for piece in pieces]
    ids = [one["id"].split("-")[0] for one in found]
    assert ids == [f"d{number}" for number, pieces in enumerate(expected) for _ in pieces]
    assert len({one["id"] for one in found}) == len(found)
    gone = [len(text) for text, pieces in zip(texts, expected, strict=True) if not pieces]
    assert counts["documents_in"] == len(texts) and counts["documents"] == len(found)
    assert counts["bytes_in"] == sum(map(len, texts)) and counts["bytes"] == sum(len(one["text"]) for one in found)
    assert counts["dropped"] == {"contaminated": dict(documents=len(gone), bytes=sum(gone))}
    assert counts["contaminated"] == sum(held) and counts["items_of_set"] > 0
    changed = [number for number, pieces in enumerate(expected) if pieces != whole[number]]
    assert sorted(note["row"] for note in notes) == changed
    for number, text in enumerate(texts):
        told = decontaminate.explain({"decontaminate": [tmp_path / "first"]}, 0, number, dict(text=text), options)
        assert (told is not None) == (number in changed)
        assert told is None or (told["document"] or {}).get("text") == next(iter(expected[number]), None)


def test_a_recipe_cuts_test_questions_out(tmp_path, monkeypatch, capsys):
    """Through the command: what is left, what the summary and `explain` say."""
    monkeypatch.chdir(tmp_path)
    items, texts = made_up(7)
    NgramIndex.empty(N, LEAST).with_set("set", [[item] for item in items]).save(tmp_path / "index")
    lines = [json.dumps(dict(text=text, id=f"d{n}")) + "\n" for n, text in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    stage = f"decontaminate: {{index: index, side: {SIDE}, least: {KEEP}, most_pieces: {SPLITS}}}"
    (tmp_path / "recipe.yaml").write_text(f"input: in.jsonl\nstages:\n  - {stage}\n")
    corpus.main("run recipe.yaml --output out --workers 1".split())
    said = capsys.readouterr().out
    cut = slow_filter(texts, grams_of(items), 10**9)
    expected = [pieces if len(pieces) <= SPLITS else [] for pieces in cut]
    found = [one["text"] for path in sorted((tmp_path / "out" / "final").glob("*.zst")) for one in documents_of(path)]
    assert found == [piece for pieces in expected for piece in pieces]
    gone = [number for number, pieces in enumerate(expected) if not pieces]
    assert f"contaminated dropped {len(gone)}" in said and f"final: {len(found)} documents" in said
    several = next(number for number, pieces in enumerate(expected) if len(pieces) > 1)
    for number, fate in ((gone[0], "dropped"), (several, "changed")):
        corpus.main(f"explain d{number} --output out".split())
        assert re.search(rf"decontaminate.*{fate}.*contaminated", capsys.readouterr().out)


def test_the_filter(tmp_path):
    NgramIndex.empty(N, LEAST).with_set("set", [["one two three four"]]).save(tmp_path / "index")
    bad, good = dict(text="So one, TWO three four!"), dict(text="one two four three")
    drop, count = (decontaminate.Decontaminate(str(tmp_path / "index"), action) for action in ("drop", "count"))
    assert drop(bad).document is None and drop(bad).reason == "contaminated" and drop(good).document is good
    assert count(bad).document is bad and count(bad).figures == dict(contaminating_ngrams=1, evaluation_sets="set")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(), "an index is needed"),
        (dict(index="gone"), "no such file"),
        (dict(index="i", size=3), "unknown option size"),
        (dict(index="i", action="hide"), "count or cut or drop"),
        (dict(index="i", least=-1), "start at 0"),
    ],
)
def test_wrong_options_of_the_stage(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Failure, match=message):
        phases_of("decontaminate", options)
