# SPDX-License-Identifier: Apache-2.0
"""Patterns on BERT and T5 against Hugging Face's models, each sentence by itself and without padding."""

import json
import re
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import Failure
from tests.tasks.classification import LABELS, Toy
from tests.tasks.test_backbones import BOS, CLS, EOS, LAYOUTS, MASK, SEP, WORDS, given, model_of  # noqa: F401
from tests.tasks.test_finetune import STEPS, TUNE, tune
from tests.training.plain_loop import LENGTH
from tests.training.test_plain_loop import records

SENTINEL = EOS + 1
SPOKEN = {"red": [11, 17], "green": [12, 13], "blue": [14, 15, 16]}
PATTERN = "7 8 {label} 9 {text} 10"
QUICK = {"BERT": ("tp2 with sequence parallelism",), "T5": ()}
CASES = [
    pytest.param(kind, layout, marks=() if layout in quick else pytest.mark.full)
    for kind, quick in QUICK.items()
    for layout in LAYOUTS
]


def loss_of(model, kind: str, text: list[int], words: list[int]) -> torch.Tensor:
    """The negative log-probability of a label's words in the sentence. The text leaves room for three of them."""
    front, ids = [7, 8], lambda row: torch.tensor([row])
    if kind == "BERT":
        back = [9, *text[: LENGTH - 2 - 4 - 3], 10]
        logits = model(ids([CLS, *front, *[MASK] * len(words), *back, SEP])).prediction_logits[0]
        return F.cross_entropy(logits[3 : 3 + len(words)], torch.tensor(words), reduction="sum")
    back = [9, *text[: LENGTH - 4 - 3], 10]
    written = [SENTINEL, *words]
    found = model(input_ids=ids([*front, SENTINEL, *back]), decoder_input_ids=ids([BOS, *written[:-1]])).logits[0]
    return F.cross_entropy(found[1:], torch.tensor(words), reduction="sum")


@cache
def theirs(kind: str, folder):
    """([{loss, grad_norm} of each step], labels found in the validation set, a token's mean loss there) of a plain loop."""
    model, toy = model_of(kind), Toy(folder)
    if kind == "BERT":
        model.bert.embeddings.word_embeddings.padding_idx = None  # number 0 is a token like others
    unused = ("cls.seq_relationship", "bert.pooler")
    used = {name: p for name, p in model.named_parameters() if not name.startswith(unused)}
    groups = [
        dict(params=[p for p in used.values() if (p.dim() > 1) == decays], weight_decay=0.01 * decays)
        for decays in (True, False)
    ]
    adam, steps, rows = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4), [], toy.rows["train"]
    orders = [torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(3)]
    for step in range(STEPS):
        places = [orders[n // len(rows)][n % len(rows)] for n in range(step * 8, step * 8 + 8)]
        spoken = [SPOKEN[LABELS[rows[place][2]]] for place in places]
        losses = [loss_of(model, kind, rows[place][0], words) for place, words in zip(places, spoken, strict=True)]
        loss = torch.stack(losses).sum() / sum(map(len, spoken))
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in used.values() if p.grad is not None], 1.0).item()
        adam.step()
        steps.append({"lm loss": loss.item(), "grad_norm": norm})
    with torch.no_grad():
        scores = [[-loss_of(model, kind, row[0], SPOKEN[label]) for label in LABELS] for row in toy.rows["valid"]]
    mean = -sum(score.item() for row in scores for score in row) / (len(scores) * sum(map(len, SPOKEN.values())))
    return steps, [LABELS[max(range(len(LABELS)), key=row.__getitem__)] for row in scores], mean


def spoken_file(folder):
    (folder / "words.json").write_text(json.dumps({label: " ".join(map(str, ids)) for label, ids in SPOKEN.items()}))
    return ["--pet-pattern", PATTERN, "--pet-verbalizer", str(folder / "words.json")]


def run(rank: int, line: list[str]) -> None:
    import finetune

    finetune.main(line)


@pytest.mark.parametrize("kind, layout", CASES)
def test_words_in_a_gap_are_hugging_faces(kind, layout, given, tmp_path, run_ranks):  # noqa: F811
    (world, words), trunk = LAYOUTS[layout], given(kind)
    toy = Toy(trunk.parent / "patterns")
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {WORDS} {words}"
    line = [*f"{line} --seq-length {LENGTH} --no-best-checkpoint".split(), *spoken_file(tmp_path)]
    run_ranks(world, run, line)
    steps, labels, mean = theirs(kind, toy.folder)
    found = records(tmp_path / "run", "step")
    assert [{name: step[name] for name in ("lm loss", "grad_norm")} for step in found] == [
        pytest.approx(step, rel=5e-5) for step in steps
    ]
    final = next(one for one in records(tmp_path / "run", "eval") if one["final"] and one["split"] == "validation")
    assert final["lm loss"] == pytest.approx(mean, rel=5e-5)
    told = (tmp_path / "run" / "predictions" / "validation-toy.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[1] for row in told] == labels


WRONG = {
    ("T5", "--decoder-seq-length 3"): "words of 3 tokens, and the decoder finds 2 (.*)--decoder-seq-length 4",
    ("BERT", "--seq-length 8"): "the words around the text are 7 tokens, and a sample has room for 6",
    ("T5", "--tokenizer-type NullTokenizer --vocab-size 107 --vocab-extra-ids 0"): "has no \\[BOS\\], no sentinels",
}


@pytest.mark.full
@pytest.mark.parametrize("case", WRONG, ids=" ".join)
def test_what_has_no_room_is_told(case, given, tmp_path):  # noqa: F811
    kind, words = case
    toy = Toy(tmp_path / "toy")
    own = "" if "Tokenizer" in words else WORDS
    length = "" if "--seq-length" in words.split() else f"--seq-length {LENGTH}"
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {given(kind)} {TUNE} {own} {length} {words}".split()
    with pytest.raises(Failure) as problem:
        run(0, [*line, *spoken_file(tmp_path)])
    assert re.search(WRONG[case], str(problem.value), re.DOTALL)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["BERT", "T5"])
def test_made_up_sentences_train(kind, given, tmp_path):  # noqa: F811
    tune(
        0,
        f"--task SST2 --mock-data --load {given(kind)} {TUNE} {WORDS} --seq-length {LENGTH} --train-iters 1".replace(
            "--train-epochs 2", ""
        )
        + " --pet-pattern {text}{label} --pet-verbalizer none.json --eval-iters 1",
    )
