# SPDX-License-Identifier: Apache-2.0
"""Scores without what the training data holds: equal to evaluating the clean items alone, or to sums made by hand."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import preprocess_data
from megatron.data.contamination import Contained, NgramIndex
from megatron.inference.load import load_model
from megatron.inference.scoring import score, windows
from megatron.settings.schema import Data
from megatron.tasks import zeroshot
from megatron.tasks.contaminated import judge, judge_lines, lines_of_tokens, training_contents
from megatron.tasks.lambada import Example, find_correct
from megatron.tasks.zeroshot import detokenize
from megatron.tools import evaluate as tool

SEEN = "the cat sat on the mat and the dog sat on the hat while it was raining"
CLEAN = [
    "a dog is a dog and a cat is a cat but no hat is a mat",
    "they say that it is so because it is so and so on it goes",
]
TRAINED_ON = (f"So: {SEEN.upper()}!", "nothing else is here")


def run(checkpoint, *words) -> None:
    tool.main(["--load", str(checkpoint), "--device", "cpu", *words])


def lines(texts) -> str:
    return "".join(json.dumps(dict(text=text)) + "\n" for text in texts)


@pytest.fixture
def trained_on(tmp_path, vocabulary):
    """`trained_on(items, texts)`: token files whose `.contamination` tells of these items."""

    def make(items, texts=TRAINED_ON, name="train") -> str:
        NgramIndex.empty().with_set("set", [[item] for item in items]).save(tmp_path / "index")
        (tmp_path / "texts.jsonl").write_text(lines(texts))
        files = ["--vocab-file", str(vocabulary / "vocab.json"), "--merge-file", str(vocabulary / "merges.txt")]
        flags = ["--input", str(tmp_path / "texts.jsonl"), "--output-prefix", str(tmp_path / name), "--append-eod"]
        preprocess_data.main([*flags, *files, "--contamination", str(tmp_path / "index"), "--workers", "1"])
        return str(tmp_path / f"{name}_text_document")

    return make


def results(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_part_of_a_text_is_the_sum_of_its_tokens(small_gpt):
    model, tokens = small_gpt(), np.random.RandomState(0).randint(0, 500, 75)
    part = np.random.RandomState(1).rand(75) < 0.4
    part[0] = True  # which nothing predicts
    expected = 0.0
    for window in windows(len(tokens), 16, 5):
        logits = model.logits(torch.from_numpy(tokens[window.start :][: window.length]).unsqueeze(1))[:, 0]
        targets = np.arange(window.start + 1, window.start + window.length + 1)
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(tokens[targets]), reduction="none")
        counted = part[targets] & (np.arange(window.length) >= window.length - window.counted)
        expected += losses[torch.from_numpy(counted)].double().sum().item()
    options = dict(length=16, stride=5, batch_size=4)
    found, plain = score(model, tokens, part=part, **options), score(model, tokens, **options)
    assert found.part.loss_sum == pytest.approx(expected, rel=1e-5) and found.part.tokens == part[1:].sum()
    assert (found.loss_sum, found.tokens, plain.part) == (plain.loss_sum, plain.tokens, None)
    for nobody_predicts in (np.zeros(75, bool), np.arange(75) == 0):
        assert score(model, tokens, part=nobody_predicts, **options).part is None


@pytest.mark.parametrize("count", range(1, 12))
def test_documents_are_judged_as_far_as_their_tokens_are_scored(count, monkeypatch):
    """Five documents of 3, 0, 4, 1 and 3 tokens, every other one clean: also if the last token ends one of them."""
    lengths = np.array([3, 0, 4, 1, 3])
    fields = dict(sequence_lengths=lengths, document_indices=np.arange(6), tokens=np.arange(11))
    documents = type("Documents", (), {**fields, "__len__": lambda self: 5})()
    texts = []
    clean = lambda _, found: texts.extend(found) or SimpleNamespace(clean=np.arange(len(texts)) % 2 == 0)
    monkeypatch.setattr(zeroshot, "judge", clean)
    work = SimpleNamespace(contained=None, tokenizer=SimpleNamespace(decode=list, eod=99))
    _, found = zeroshot.judged_documents(work, documents, count)
    starts = np.cumsum(lengths) - lengths
    inside = [n for n in range(5) if starts[n] < count]
    assert texts == [[list(range(starts[n], starts[n] + lengths[n]))] for n in inside]
    assert found.tolist() == [n % 2 == 0 for n in range(5) for _ in range(lengths[n])][:count]


def test_which_passages_are_answered_right(small_gpt):
    model, generator, examples = small_gpt(scale=3.0), torch.Generator().manual_seed(0), []
    for number in range(20):
        tokens = torch.randint(0, 400, (24 - number,), generator=generator)  # the longest first
        best = model.logits(tokens.unsqueeze(1))[-1, 0].argmax()
        examples.append(Example([*tokens.tolist(), best.item() if number % 3 else 7], 1))
    found = find_correct(model, examples, longest=32, batch_size=3)
    assert found.tolist() == [bool(number % 3) for number in range(20)]


def test_lambada_without_what_was_seen(checkpoint, trained_on, tmp_path, capsys):
    (tmp_path / "all.jsonl").write_text(lines([CLEAN[0], SEEN, CLEAN[1], "too short"]))
    (tmp_path / "clean.jsonl").write_text(lines([*CLEAN, "too short"]))
    prefix = trained_on([*CLEAN, SEEN])
    flags = ["--task", "LAMBADA", "--output", str(tmp_path / "r.jsonl")]
    run(checkpoint, *flags, "--valid-data", str(tmp_path / "clean.jsonl"))
    clean = results(tmp_path / "r.jsonl")
    assert "contamination" not in clean[0]  # the run's own data has no record of it
    run(checkpoint, *flags, "--valid-data", str(tmp_path / "all.jsonl"), "--train-data", prefix)
    said, found = capsys.readouterr().out, results(tmp_path / "r.jsonl")
    for one, alone in zip(found, clean, strict=True):
        without = one["contamination"]["without"]
        assert without == {name: alone[name] for name in ("correct", "examples", "accuracy")}
        assert (one["contamination"]["items"], one["contamination"]["contaminated"]) == (4, 1) and one["examples"] == 4
    assert "LAMBADA (strict), without 1 of 4 items that the training data holds | number correct" in said


def test_held_out_documents_without_those_seen(checkpoint, trained_on, tmp_path, vocabulary, capsys):
    texts = [CLEAN[0], SEEN, "", CLEAN[1]]
    held = trained_on(texts, texts, "held")
    prefix = trained_on(texts)
    run(checkpoint, "--data-path", held, "--train-data", prefix, "--output", str(tmp_path / "r.jsonl"))
    [found] = results(tmp_path / "r.jsonl")
    loaded = load_model(str(checkpoint))
    from megatron.data.indexed import IndexedDataset

    data = IndexedDataset(held)
    part = np.concatenate(
        [np.full(len(data.get(n)), text != SEEN) for n, text in enumerate((CLEAN[0], SEEN, CLEAN[1]))]
    )
    length = loaded.longest
    expected = score(loaded.model, data.tokens, length=length, stride=length, batch_size=8, part=part)
    without = found["contamination"]["without"]
    assert without["loss"] == expected.part.loss and without["tokens"] == expected.part.tokens
    assert found["loss"] == expected.loss and found["contamination"]["contaminated"] == 1
    assert "without 1 of 4 items" in capsys.readouterr().out


def test_wikitext_without_the_lines_seen(checkpoint, trained_on, tmp_path, capsys):
    original = (
        f" \n = The cat = \n \n {CLEAN[0]} , they say . \n {SEEN} ( it is @-@ so ) . \n {CLEAN[1]} . \n = A dog = \n"
    )
    (tmp_path / "wiki.tokens").write_text(original)
    items = [line for line in original.split("\n") if line.strip()]
    flags = [
        "--task",
        "WIKITEXT103",
        "--valid-data",
        str(tmp_path / "wiki.tokens"),
        "--output",
        str(tmp_path / "r.jsonl"),
    ]
    run(checkpoint, *flags, "--train-data", trained_on(items))
    [found] = results(tmp_path / "r.jsonl")
    assert "without 1 of 5 items" in capsys.readouterr().out
    text = detokenize(original)
    [bad] = [line for line in text.split("\n") if "raining" in line]
    from megatron.inference.load import open_tokenizer

    encode = open_tokenizer(load_model(str(checkpoint))).encode
    ends = len(encode(text[: text.index(bad)])), len(encode(text[: text.index(bad) + len(bad) + 1]))
    left = found["tokens"] - found["contamination"]["without"]["tokens"]
    assert abs(left - (ends[1] - ends[0])) <= 2  # what stands on both sides of the ends of the line
    whole, part = found["loss"] * found["tokens"], found["contamination"]["without"]
    assert math.isfinite(part["loss"]) and part["loss"] * part["tokens"] < whole


def test_lines_that_detokenizing_joins():
    original = "one two three ( \n four five six seven ) eight nine \n ten"
    text = detokenize(original)
    assert original.count("\n") == 2 and text.count("\n") == 1
    hashes = NgramIndex.empty(3, 3).with_set("s", [[line] for line in original.split("\n")]).hashes
    contained = Contained(hashes, np.zeros(len(hashes), int), np.zeros(len(hashes), int), dict(longest=3, shortest=3))
    judged, clean = judge_lines(contained, original, text)
    assert judged.known.tolist() == [True] * 3 and clean.tolist() == [True, True]
    one = NgramIndex.empty(3, 3).with_set("s", [["five six seven"]]).hashes
    counts = np.isin(hashes, one).astype(int)
    judged, clean = judge_lines(replace(contained, counts=counts), original, text)
    assert judged.contaminated.tolist() == [False, True, False] and clean.tolist() == [False, True]


def test_lines_of_tokens():
    decode = lambda ids: {0: "a", 1: " b\n", 2: "\n\n", 3: "c"}[ids[0]]
    assert lines_of_tokens(np.array([0, 1, 3, 2, 0]), decode, 3).tolist() == [0, 0, 1, 1, 3]
    assert lines_of_tokens(np.array([0, 3]), decode, 1) is None  # a tokenizer that loses them


def test_what_was_not_looked_for_is_not_called_clean(checkpoint, trained_on, tmp_path, capsys):
    (tmp_path / "all.jsonl").write_text(lines([CLEAN[0], SEEN]))
    flags = ["--task", "LAMBADA", "--valid-data", str(tmp_path / "all.jsonl"), "--strict-lambada"]
    run(checkpoint, *flags, "--train-data", trained_on([SEEN]))
    said = capsys.readouterr()
    assert "no clean item" in said.err + said.out or "there is no score without" in said.err
    run(checkpoint, *flags, "--train-data", trained_on([CLEAN[1]]))
    assert "its items were not looked for" in capsys.readouterr().err
    judged = judge(Contained.open(trained_on([SEEN]) + ".contamination"), [[SEEN], [CLEAN[0]], ["x"]])
    assert judged.known.tolist() == [True, False, True] and judged.clean.tolist() == [False, False, True]


def test_which_data_is_asked(trained_on):
    one, other = trained_on([SEEN]), trained_on([SEEN], ["no such thing in here"], "other")
    both = training_contents(Data(data_path=["0.3", one, "0.7", other]), None)[0]
    assert both.about["documents"] == 3 and both.counts.sum() == Contained.open(one + ".contamination").counts.sum()
    assert training_contents(Data(train_data_path=[one]), None)[0].about["documents"] == 2
    found, notes = training_contents(Data(data_path=[one, "gone"]), None)
    assert found is None and "1 of 2 token files of training have no .contamination" in notes[0]
    assert training_contents(Data(data_path=["gone"]), None) == (None, [])
    assert "gone has no .contamination" in training_contents(Data(), ["gone"])[1][0]
