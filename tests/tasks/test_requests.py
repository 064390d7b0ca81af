# SPDX-License-Identifier: Apache-2.0
"""Requests in the loop: scores of continuations against a plain network's, in layouts; patterns (PET) likewise."""

import json
import random

import pytest

import finetune
import pretrain_gpt
from megatron.data.requests import RequestSamples, encode_pair, read_requests, request_figures
from megatron.errors import DataError, Failure, UsageError
from megatron.settings.schema import TokenizerSettings
from megatron.tasks.description import find_task
from megatron.tasks.examples import TaskExample
from megatron.tasks.pet import Pattern, read_verbalizer
from megatron.tokenizer import build_tokenizer
from tests.ranks import on_ranks
from tests.tasks.classification import LABELS, SIZE, Toy, double, token_scores
from tests.tasks.test_finetune import TUNE, trunk, weights_of  # noqa: F401
from tests.tokenizer.plain import PlainTokenizer, letters
from tests.training.plain_loop import EOD, LENGTH
from tests.training.test_plain_loop import records

TRAIN = f"{SIZE} --mock-data --global-batch-size 8 --train-iters 4 --lr 1e-2 --eval-interval 2 --eval-iters 0"


def write_requests(path, count=7):
    draw, rows = random.Random(3), []
    for number in range(count):

        def text(most):
            return " ".join(str(draw.randrange(EOD)) for _ in range(draw.randrange(1, most)))

        continuations = [f" {text(4)}" for _ in range(draw.randrange(2, 5))]
        context = "" if number == 2 else text(LENGTH + 3)  # some are longer than the model can look at
        gold = draw.randrange(len(continuations))
        rows.append(dict(context=context, continuations=continuations, gold=gold, task=f"t{number % 2}"))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def plain_figures(weights, rows) -> dict[str, float]:
    """Texts one by one, the last LENGTH + 1 tokens of each."""
    found = {"": [], "t0": [], "t1": []}
    for row in rows:
        scores = []
        for continuation in row["continuations"]:
            context = [int(word) for word in row["context"].split()] or [EOD]
            own = [int(word) for word in continuation.split()]
            scores.append(token_scores(weights, (context + own)[-LENGTH - 1 :])[-len(own) :].sum().item())
        lengths = [len(text.strip()) for text in row["continuations"]]
        normal = [score / length for score, length in zip(scores, lengths, strict=True)]
        right = (scores.index(max(scores)) == row["gold"], normal.index(max(normal)) == row["gold"])
        for name in ("", row["task"]):
            found[name].append(right)
    return {
        f"{figure} {name}".strip(): sum(one[place] for one in rights) / len(rights)
        for name, rights in found.items()
        for place, figure in enumerate(("accuracy", "normalised accuracy"))
    }


def run(rank, line):
    pretrain_gpt.main(line.split())


LAYOUTS = {
    "one process": (1, "--eod-mask-loss"),
    "tp3 sp, zero3": (3, "--tensor-model-parallel-size 3 --sequence-parallel --sharding-stage 3"),
    "pp2 dp1": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
}


SLOW = [pytest.param(name, marks=pytest.mark.full) if name in ("tp3 sp, zero3", "cp2") else name for name in LAYOUTS]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", SLOW)
def test_requests_in_the_loop_are_those_of_the_plain_network(layout, tmp_path):
    world, words = LAYOUTS[layout]
    rows = write_requests(tmp_path / "requests.jsonl")
    line = f"{TRAIN} --eval-requests {tmp_path / 'requests.jsonl'} --save {tmp_path / 'run'} --save-interval 2 {words}"
    on_ranks(world, run, line)
    evals = records(tmp_path / "run", "eval")
    assert [(one["split"], one["iteration"], one["final"]) for one in evals] == [
        ("requests", 2, False),
        ("requests", 4, True),
    ]
    for one in evals:
        weights = double(weights_of(tmp_path / "run" / f"iter_{one['iteration']:07d}"))
        wanted = plain_figures(weights, rows)
        assert {name: one[name] for name in wanted} == pytest.approx(wanted)
        assert "lm loss" not in one


def test_scores_themselves(tmp_path):
    """Accuracies may agree by chance."""
    rows = write_requests(tmp_path / "requests.jsonl")
    run(0, f"{TRAIN} --train-iters 1 --save {tmp_path / 'run'}")
    from megatron.inference.load import load_model
    from megatron.training.measures import RequestMeasures

    loaded = load_model(str(tmp_path / "run"))
    numbers = build_tokenizer(TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=EOD))
    samples = RequestSamples.of(read_requests(tmp_path / "requests.jsonl"), numbers, LENGTH)
    import numpy as np
    import torch

    from megatron.data.loader import MicroBatchLoader
    from megatron.settings.schema import Data

    batches = MicroBatchLoader(samples, Data(num_workers=0), micro_batch_size=len(samples), whole=True)
    [batch] = batches.step(0, 1)
    found = RequestMeasures.values(None, batch, loaded.model.token_losses(None, batch))[:, 0]
    weights, wanted = double(dict(loaded.model.named_parameters())), []
    for row in rows:
        for continuation in row["continuations"]:
            own = [int(word) for word in continuation.split()]
            context = [int(word) for word in row["context"].split()] or [EOD]
            wanted.append(token_scores(weights, (context + own)[-LENGTH - 1 :])[-len(own) :].sum())
    assert (found - torch.stack(wanted)).abs().max() < 1e-4
    assert request_figures(samples, np.array(wanted))["accuracy"] == plain_figures(weights, rows)["accuracy"]


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation():
    tokenizer = PlainTokenizer(letters, eod=7)
    assert encode_pair(tokenizer, "ab ", "c") == encode_pair(tokenizer, "ab", " c") == ([97, 98, 32, 99], 2)
    assert encode_pair(tokenizer, "", "c") == ([7, 99], 1)
    tokenizer.prefix = [3]
    assert encode_pair(tokenizer, "ab ", "c") == ([3, 97, 98, 32, 99], 3)
    assert encode_pair(tokenizer, "", "c") == ([3, 99], 1)


WRONG = {
    "not JSON": ('{"context": "a"', "line 1: not JSON"),
    "half of an emoji": (
        '{"context": "a", "continuations": ["b", "\\ud83d"], "gold": 0}',
        "line 1: '.ud83d' is half of a surrogate pair",
    ),
    "nested without end": ("[" * 100_000, "line 1: lists or objects stand inside of each other"),
    "gold twice": ('{"context": "a", "continuations": ["b", "c"], "gold": 0, "gold": 1}', "an object has 'gold' twice"),
    "no gold": ('{"context": "a", "continuations": ["b", "c"]}', "there is no 'gold'"),
    "one continuation": ('{"context": "a", "continuations": ["b"], "gold": 0}', "at least two continuations"),
    "an empty one": ('{"context": "a", "continuations": ["b", ""], "gold": 0}', "not empty"),
    "gold outside": ('{"context": "a", "continuations": ["b", "c"], "gold": 2}', "numbers 0 to 1"),
    "nothing": ("\n", "holds no requests"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_requests(what, tmp_path):
    text, told = WRONG[what]
    (tmp_path / "requests.jsonl").write_text(text)
    with pytest.raises(DataError, match=told):
        read_requests(tmp_path / "requests.jsonl")


# ---- patterns --------------------------------------------------------------------------------------------------------


def filled(pattern, label="good", length=50, eod=None, reserve=0, text="a film", pair=None):
    found = Pattern.of(pattern, pair is not None).filled(
        TaskExample(text, pair, None, "0"), label, letters, eod, length, reserve
    )
    text = "".join(map(chr, found.ids))
    return text[: found.start], text[found.start :]


def test_a_sentence_is_filled_as_it_is_written():
    assert filled("{text} It was {label}.") == ("a film It was", " good")  # what comes behind the label says nothing
    assert filled("This is a {label} text: {text}!") == ("This is a", " good text: a film!")
    assert filled("{text}? {label}, {pair}", pair="it is") == ("a film?", " good, it is")
    assert filled("{text} It was {label}.", length=14) == ("a  It was", " good")  # the text is cut, nothing else
    assert filled("{label}: {text}", eod=7, length=10) == (chr(7), "good: a f")


@pytest.mark.parametrize("pattern", ["In one word, {text} was {label}.", "In one {label} word was: {text}"])
def test_a_sentence_without_room_for_the_text_is_told(pattern):
    around = len("In one word, was terrible")  # spaces before texts are the texts'
    for length in (9, around):
        with pytest.raises(DataError, match=f"words around the text are {around} tokens, .* has room for {length}"):
            filled(pattern, length=length, reserve=len(" terrible"))
    assert filled(pattern, length=around + 2, reserve=len(" terrible"))


TEXT_PATTERN = ("{text} 1 {label} 2", "{label} 3 {text}")


@pytest.mark.parametrize("pattern", [TEXT_PATTERN[0], pytest.param(TEXT_PATTERN[1], marks=pytest.mark.full)])
def test_pet_is_the_sum_of_log_probabilities(pattern, trunk, tmp_path, run_ranks):  # noqa: F811
    toy = Toy(tmp_path / "toy")
    words = {"red": "11", "green": "12 13", "blue": "14 15 16"}
    (tmp_path / "words.json").write_text(json.dumps(words))
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE}".split()
    line += ["--pet-pattern", pattern, "--pet-verbalizer", str(tmp_path / "words.json"), "--pet-loss", "words"]
    if pattern == TEXT_PATTERN[0]:
        finetune.main(line)
    else:
        run_ranks(2, lambda rank: finetune.main([*line, "--pipeline-model-parallel-size", "2"]))
    weights = double(weights_of(tmp_path / "run" / "best"))
    predicted = []
    for first, _, _ in toy.rows["valid"]:
        scores = []
        for label in LABELS:
            own = [int(word) for word in words[label].split()]
            if pattern == TEXT_PATTERN[0]:  # the end of a document, the text, 1, three tokens at most
                text = [EOD, *first[: LENGTH + 1 - 5], 1, *own]
                scores.append(token_scores(weights, text)[-len(own) :].sum().item())
            else:
                text = [EOD, *own, 3, *first[: LENGTH + 1 - 5]]
                scores.append(token_scores(weights, text).sum().item())
        predicted.append(scores.index(max(scores)))
    told = (tmp_path / "run" / "predictions" / "validation-toy.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in told] == [LABELS[one] for one in predicted]
    gold = [label for *_, label in toy.rows["valid"]]
    final = [one for one in records(tmp_path / "run", "eval") if one["final"]][0]
    assert final["accuracy"] == pytest.approx(sum(map(int.__eq__, gold, predicted)) / len(gold))
    assert "lm loss" in records(tmp_path / "run", "step")[0]


@pytest.mark.parametrize(
    "pattern, told",
    [
        ("{text} it was", "needs {label} and {text}"),
        ("{label}", "needs {label}"),
        ("{text} {lable}", "did you mean label"),
    ]
    + [("{text} {pair} {label}", "no second text"), ("{text} {text} {label}", "twice")],
)
def test_wrong_patterns(pattern, told):
    with pytest.raises(UsageError, match=told):
        Pattern.of(pattern)


@pytest.mark.parametrize(
    "words, told",
    [
        ('{"0": "bad"}', "says nothing of 1"),
        ('{"0": "bad", "1": "good", "2": "x"}', "no label '2'"),
        ('{"0": "bad", "1": "bad"}', "stands for two labels"),
        ('{"0": "bad", "1": " "}', "no mapping of labels to words"),
        ("[]", "no mapping"),
        ("{", "Expecting"),
        ('{"0": "bad", "1": "\\ud83d"}', "words.json: '.ud83d' is half of a surrogate pair"),
        ('{"0": "bad", "1": "good", "1": "fine"}', "an object has '1' twice"),
        ("[" * 100_000, "lists or objects stand inside of each other"),
    ],
)
def test_wrong_verbalizers(words, told, tmp_path):
    (tmp_path / "words.json").write_text(words)
    with pytest.raises(Failure, match=told):
        read_verbalizer(str(tmp_path / "words.json"), find_task("SST2"))
