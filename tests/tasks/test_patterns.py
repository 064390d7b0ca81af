# SPDX-License-Identifier: Apache-2.0
"""Patterns against Hugging Face's models, each sentence by itself and without padding: with each of the labels, or (BERT,
T5, GPT) with a gap for them all.
"""

import json
import re
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import Failure, SettingsError
from megatron.tools import checkpoint
from tests.tasks.classification import LABELS, Toy
from tests.tasks.test_backbones import BOS, CLS, DEEP, EOS, LAYOUTS, MASK, SEP, WORDS, given, model_of  # noqa: F401
from tests.tasks.test_finetune import STEPS, TUNE, tune, weights_of
from tests.training.plain_loop import EOD, LENGTH
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

SENTINEL = EOS + 1
SPOKEN = {"red": [11, 17], "green": [12, 13], "blue": [14, 15, 16]}
EQUAL = {  # labels of equally many tokens, on all ranks; one token where it is found behind those before it
    "BERT": {"red": [11, 90], "green": [92, 13], "blue": [90, 11]},
    "T5": {"red": [11], "green": [92], "blue": [14]},
    "GPT": {"red": [11], "green": [92], "blue": [14]},
}
PATTERN, PATTERN_OF_GPT = "7 8 {label} 9 {text} 10", "7 {text} 9 8 {label} 10"
QUICK = {
    "BERT words": ("tp2 with sequence parallelism",),
    "T5 words": (),
    "BERT labels": ("tp2 with sequence parallelism", "pp2"),
    "T5 labels": ("tp2",),
    "GPT labels": ("tp2 with sequence parallelism",),
    "BERT soft": ("one process",),
}
CASES = [
    pytest.param(*case.split(), layout, marks=() if layout in quick else pytest.mark.full)
    for case, quick in QUICK.items()
    for layout in LAYOUTS
    if layout not in DEEP
]


def loss_of(model, kind: str, text: list[int], words: list[int], longest: int = 3) -> torch.Tensor:
    """The negative log-probability of a label's words in the sentence. The text leaves room for the longest label."""
    front, ids = [7, 8], lambda row: torch.tensor([row])
    if kind == "GPT":
        sentence = [EOD, 7, *text[: LENGTH + 1 - 4 - longest], 9, 8]
        return F.cross_entropy(model(ids(sentence)).logits[0, -1:], torch.tensor(words), reduction="sum")
    if kind == "BERT":
        back = [9, *text[: LENGTH - 2 - 4 - longest], 10]
        logits = model(ids([CLS, *front, *[MASK] * len(words), *back, SEP])).prediction_logits[0]
        return F.cross_entropy(logits[3 : 3 + len(words)], torch.tensor(words), reduction="sum")
    back = [9, *text[: LENGTH - 4 - longest], 10]
    written = [SENTINEL, *words]
    found = model(input_ids=ids([*front, SENTINEL, *back]), decoder_input_ids=ids([BOS, *written[:-1]])).logits[0]
    return F.cross_entropy(found[1:], torch.tensor(words), reduction="sum")


@cache
def theirs(kind: str, learned: str, folder):
    """([{loss, grad_norm} of each step], labels found in the validation set, the mean loss there) of a plain loop. learned:
    which of the "labels" it is, how likely each is ("soft"), or the "words" of the right one.
    """
    model, toy = model_of(kind), Toy(folder, soft=True)
    if kind == "BERT":
        model.bert.embeddings.word_embeddings.padding_idx = None  # number 0 is a token like others
    unused = ("cls.seq_relationship", "bert.pooler")
    used = {name: p for name, p in model.named_parameters() if not name.startswith(unused)}
    groups = [
        dict(params=[p for p in used.values() if (p.dim() > 1) == decays], weight_decay=0.01 * decays)
        for decays in (True, False)
    ]
    adam, steps, rows = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4), [], toy.rows["train"]
    spoken = SPOKEN if learned == "words" else EQUAL[kind]
    longest = max(map(len, spoken.values()))
    scores_of = lambda row: torch.stack([-loss_of(model, kind, row[0], spoken[label], longest) for label in LABELS])

    def loss_of_rows(rows, shares):
        scores = [scores_of(row) for row in rows]
        gold = torch.tensor([row[2] for row in rows])
        if learned != "words":
            return F.cross_entropy(torch.stack(scores), shares if learned == "soft" else gold)
        right = torch.stack(scores).gather(1, gold.unsqueeze(1))
        return -right.sum() / sum(len(spoken[LABELS[row[2]]]) for row in rows)

    orders = [torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(3)]
    for step in range(STEPS):
        places = [orders[n // len(rows)][n % len(rows)] for n in range(step * 8, step * 8 + 8)]
        loss = loss_of_rows([rows[place] for place in places], toy.shares[places])
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in used.values() if p.grad is not None], 1.0).item()
        adam.step()
        steps.append({"loss": loss.item(), "grad_norm": norm})
    with torch.no_grad():
        scores = torch.stack([scores_of(row) for row in toy.rows["valid"]])
        if learned != "words":
            mean = F.cross_entropy(scores, torch.tensor([row[2] for row in toy.rows["valid"]])).item()
        else:  # of the right words
            mean = loss_of_rows(toy.rows["valid"], None).item()
    return steps, [LABELS[one] for one in scores.argmax(1).tolist()], mean


def spoken_file(folder, kind: str = "BERT", learned: str = "words"):
    spoken, pattern = SPOKEN if learned == "words" else EQUAL[kind], PATTERN_OF_GPT if kind == "GPT" else PATTERN
    (folder / "words.json").write_text(json.dumps({label: " ".join(map(str, ids)) for label, ids in spoken.items()}))
    return ["--pet-pattern", pattern, "--pet-verbalizer", str(folder / "words.json")] + (
        ["--pet-loss", "words"] if learned == "words" else []
    )


def run(rank: int, line: list[str]) -> None:
    import finetune

    finetune.main(line)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind, learned, layout", CASES)
def test_words_in_a_gap_are_hugging_faces(kind, learned, layout, given, tmp_path, run_ranks):  # noqa: F811
    (world, words), trunk = LAYOUTS[layout], given(kind)
    toy = Toy(trunk.parent / "patterns", soft=True)
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {WORDS} {words}"
    if learned == "soft":
        line += f" --soft-labels {toy.folder / 'soft0.tsv'} {toy.folder / 'soft1.tsv'}"
    line += " --make-vocab-size-divisible-by 8"  # both ranks have words of labels
    line = [*f"{line} --seq-length {LENGTH} --no-best-checkpoint".split(), *spoken_file(tmp_path, kind, learned)]
    run_ranks(world, run, line)
    steps, labels, mean = theirs(kind, learned, toy.folder)
    name = "lm loss" if learned == "words" else "loss"
    found = records(tmp_path / "run", "step")
    assert [{"loss": step[name], "grad_norm": step["grad_norm"]} for step in found] == [
        pytest.approx(step, rel=5e-5) for step in steps
    ]
    final = next(one for one in records(tmp_path / "run", "eval") if one["final"] and one["split"] == "validation")
    assert final[name] == pytest.approx(mean, rel=5e-5)
    assert predicted(tmp_path / "run") == labels


def predicted(folder) -> list[str]:
    rows = (folder / "predictions" / "validation-toy.tsv").read_text().splitlines()[1:]
    return [row.split("\t")[1] for row in rows]


WRONG = {
    ("T5", "--decoder-seq-length 3", "words"): "words of 3 tokens, and the decoder finds 2 (.*)--decoder-seq-length 4",
    ("BERT", "--seq-length 8", "words"): "the words around the text are 7 tokens, and a sample has room for 6",
    ("T5", "--tokenizer-type NullTokenizer --vocab-size 107 --vocab-extra-ids 0", "words"): (
        "has no \\[BOS\\], no sentinels"
    ),
}


@pytest.mark.parametrize(
    "case", ["BERT labels", pytest.param("BERT words", marks=pytest.mark.full), "T5 words", "T5 1.0 labels"]
)
def test_what_was_tuned_is_exported(case, given, tmp_path, capsys):  # noqa: F811
    """Hugging Face's model of the folder predicts what the run did."""
    kind, learned = case.rsplit(" ", 1)
    name, toy = kind.split()[0], Toy(tmp_path / "toy")
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {given(kind)} --save {tmp_path / 'run'} {TUNE} {WORDS}"
    line = f"{line} --seq-length {LENGTH} --no-best-checkpoint --train-epochs 1".split()
    run(0, [*line, *spoken_file(tmp_path, name, learned)])
    checkpoint.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "fp32"])
    assert "both models agree" in capsys.readouterr().out
    model = type(model_of(kind)).from_pretrained(tmp_path / "hf").eval()
    spoken = SPOKEN if learned == "words" else EQUAL[name]
    longest = max(map(len, spoken.values()))
    with torch.no_grad():
        losses = [
            [loss_of(model, name, row[0], spoken[label], longest) for label in LABELS] for row in toy.rows["valid"]
        ]
    assert predicted(tmp_path / "run") == [LABELS[one] for one in torch.tensor(losses).argmin(1).tolist()]


@pytest.mark.parametrize("kind, words", [("BERT", ""), ("T5", "--pooling mean"), ("GPT", "another pattern")])
def test_another_task_begins_with_what_a_pattern_tuned(kind, words, given, tmp_path, capsys):  # noqa: F811
    """With a head, or a pattern of its own: the weights of before are those of the run with the pattern."""
    toy, first, second = Toy(tmp_path / "toy"), tmp_path / "first", tmp_path / "second"
    line = (
        f"--task {toy.yaml} --data-path {toy.folder} {TUNE} {WORDS} --seq-length {LENGTH} --no-best-checkpoint".split()
    )
    line += ["--train-epochs", "1"]
    run(0, [*line, "--load", str(given(kind)), "--save", str(first), *spoken_file(tmp_path, kind, "labels")])
    more = words.split()
    if words == "another pattern":
        more = ["--pet-pattern", "{text} 5 {label} 9", *spoken_file(tmp_path, kind, "labels")[2:]]
    line = [*line, *more, "--load", str(first), "--save", str(second), "--lr", "1e-12", "--weight-decay", "0"]
    with pytest.raises(SettingsError, match="--(pet-pattern|pooling)"):
        run(0, line)
    run(0, [*line, "--finetune"])
    told = "new, and not out of the checkpoint: head.weight" in capsys.readouterr().out
    before, after = weights_of(first), weights_of(second)
    assert told == ("head.weight" in after) == (words != "another pattern")
    assert all((after[name] - before[name]).abs().max() < 1e-9 for name in {*after} - {"head.weight"})


UNEQUAL = {  # kind, pattern, words of the labels -> what the message says
    ("BERT", PATTERN, ("11", "12 13", "14")): "'11' and '12 13' have 1 and 2 tokens\n.*a gap for each token",
    ("BERT", PATTERN, ("1 " * 9, "2 " * 9, "3 " * 9)): "has 9 tokens, and this model predicts at most 8",
    ("T5", PATTERN, ("11 12", "12 13", "14 15")): "'11 12' has 2 tokens, and this model predicts at most 1",
    ("GPT", PATTERN, ("11", "12", "13")): "{label} stands before a text",
    ("GPT", PATTERN_OF_GPT, ("11", "12", "012")): "'12' and '012' are the same tokens \\[12\\]",
}


@pytest.mark.parametrize("case", UNEQUAL, ids=str)
def test_labels_that_cannot_be_compared_are_told(case, given, tmp_path):  # noqa: F811
    kind, pattern, spoken = case
    toy = Toy(tmp_path / "toy")
    (tmp_path / "words.json").write_text(json.dumps(dict(zip(LABELS, spoken, strict=True))))
    line = (
        f"--task {toy.yaml} --data-path {toy.folder} --load {given(kind)} {TUNE} {WORDS} --seq-length {LENGTH}".split()
    )
    with pytest.raises(Failure) as problem:
        run(0, [*line, "--pet-pattern", pattern, "--pet-verbalizer", str(tmp_path / "words.json")])
    assert re.search(UNEQUAL[case], str(problem.value), re.DOTALL)


@pytest.mark.full
@pytest.mark.parametrize("case", WRONG, ids=" ".join)
def test_what_has_no_room_is_told(case, given, tmp_path):  # noqa: F811
    kind, words, learned = case
    toy = Toy(tmp_path / "toy")
    own = "" if "Tokenizer" in words else WORDS
    length = "" if "--seq-length" in words.split() else f"--seq-length {LENGTH}"
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {given(kind)} {TUNE} {own} {length} {words}".split()
    with pytest.raises(Failure) as problem:
        run(0, [*line, *spoken_file(tmp_path, kind, learned)])
    assert re.search(WRONG[case], str(problem.value), re.DOTALL)


@pytest.mark.full
@pytest.mark.parametrize("learned", ["labels", "words"])
@pytest.mark.parametrize("kind", ["BERT", "T5", "GPT"])
def test_made_up_sentences_train(kind, learned, given, tmp_path):  # noqa: F811
    tune(
        0,
        f"--task SST2 --mock-data --load {given(kind)} {TUNE} {WORDS} --seq-length {LENGTH} --train-iters 1".replace(
            "--train-epochs 2", ""
        )
        + f" --pet-pattern {{text}}{{label}} --pet-verbalizer none.json --pet-loss {learned} --eval-iters 1",
    )
