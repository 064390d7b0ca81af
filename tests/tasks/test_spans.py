# SPDX-License-Identifier: Apache-2.0
"""Tasks whose answers are pieces of a text, against Hugging Face's models for question answering, each text by itself and
without padding; figures and best answers against brute force.
"""

import json
import random
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch.func import functional_call

from megatron.errors import DataError, Failure
from megatron.model.command_line import parse_any
from megatron.tasks.finetune import recipe
from megatron.tasks.readers import BertReader
from megatron.tasks.settings import TaskSettings, examples_of
from megatron.tasks.spans import (
    LONGEST_ANSWER,
    SpanSamples,
    best_span,
    exact,
    longest_common,
    overlap_f1,
    span_figures,
    units,
    windows,
)
from megatron.training.rules import check
from tests.ranks import on_ranks
from tests.tasks.test_backbones import CLS, LAYOUTS, SEP, WORDS, given, model_of, plain_loop  # noqa: F401
from tests.tasks.test_finetune import TUNE, tune
from tests.training.plain_loop import EOD, LENGTH
from tests.training.test_plain_loop import records

QUESTION = 2  # tokens
CASES = [
    ("BERT", "tp2 with sequence parallelism"),
    ("GPT", "pp2"),
    *(
        pytest.param(kind, layout, marks=pytest.mark.full)
        for kind, layout in product(("BERT", "GPT"), ("one process", "zero3", "tp2", "tp2 with sequence parallelism"))
    ),
]


class Questions:
    """Rows (question, text, first, last token of the answer) of each split, as numbers; and the files of them.

    A text fits in training; in validation it may be longer.
    """

    def __init__(self, folder):
        draw = random.Random(11)
        self.folder, folder_of = folder, folder / "cmrc2018"
        sizes = dict(train=(21, LENGTH - 3 - QUESTION), dev=(9, 3 * LENGTH))
        self.rows = {split: [self._row(draw, most) for _ in range(size)] for split, (size, most) in sizes.items()}
        folder_of.mkdir(parents=True, exist_ok=True)
        for split, rows in self.rows.items():
            content = [self._article(f"{split}{number}", *row) for number, row in enumerate(rows)]
            (folder_of / f"{split}.json").write_text(json.dumps(dict(version="v1", data=content), indent=1))

    @staticmethod
    def _row(draw, most):
        text = [draw.randrange(EOD) for _ in range(draw.randrange(3, most + 1))]
        first = draw.randrange(len(text))
        return [draw.randrange(EOD) for _ in range(QUESTION)], text, first, draw.randrange(first, len(text))

    @staticmethod
    def _article(id, question, text, first, last):
        words = lambda ids: " ".join(map(str, ids))
        start = len(words(text[:first])) + (first > 0)
        answer = dict(text=words(text[first : last + 1]), answer_start=start)
        asked = dict(id=id, question=words(question), answers=[answer])
        return dict(title="t", paragraphs=[dict(id=id, context=words(text), qas=[asked])])


def sample(kind: str, question: list, text: list) -> tuple[list, int]:
    """(ids, the row of the text's first token)."""
    if kind == "BERT":
        return [CLS, *question, SEP, *text, SEP], len(question) + 2
    return [*question, EOD, *text], len(question) + 1


def asked(model, head, kind: str, question, text, **places):
    """What Hugging Face's model for question answering says, with our head."""
    import transformers

    kinds = dict(BERT=transformers.BertForQuestionAnswering, GPT=transformers.GPT2ForQuestionAnswering)
    qa, (ids, first) = kinds[kind](model.config), sample(kind, question, text)
    trunk = "bert" if kind == "BERT" else "transformer"
    setattr(qa, trunk, getattr(model, trunk))
    more = dict(token_type_ids=torch.tensor([[0] * first + [1] * (len(ids) - first)])) if kind == "BERT" else {}
    for name, place in places.items():
        more[name] = torch.tensor([first + place])
    weights = {"qa_outputs.weight": head, "qa_outputs.bias": torch.zeros(2)}
    return functional_call(qa, weights, (torch.tensor([ids]),), more), first


@cache
def theirs(kind: str, folder):
    """([{loss, grad_norm} of each step], the answers of validation) of a plain loop."""
    model, toy = model_of(kind), Questions(folder)

    def loss_of(head, samples):
        losses = [
            asked(model, head, kind, *row[:2], start_positions=row[2], end_positions=row[3])[0].loss
            for row, _ in samples
        ]
        return torch.stack(losses).mean()

    head, steps = plain_loop(model, kind, folder.parent / "trunk", 2, toy.rows["train"], loss_of)
    with torch.no_grad():
        return steps, [answer(model, head, kind, *row[:2]) for row in toy.rows["dev"]]


def answer(model, head, kind: str, question: list, text: list) -> list:
    """The piece of a text with the largest sum of both logits, over windows that share half of their tokens."""
    room, best = LENGTH - len(question) - (3 if kind == "BERT" else 1), (-np.inf, None)
    step = room - room // 2
    starts = [0, *(min(start, len(text) - room) for start in range(step, len(text) - room + step, step))]
    for start in starts if len(text) > room else [0]:
        found, first = asked(model, head, kind, question, window := text[start : start + room])
        begin, end = (logits[0, first : first + len(window)] for logits in (found.start_logits, found.end_logits))
        for i, j in product(range(len(window)), repeat=2):
            if i <= j and (score := (begin[i] + end[j]).item()) > best[0]:
                best = score, window[i : j + 1]
    return best[1]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind, layout", CASES)
def test_any_layout_is_hugging_faces_model_for_questions(kind, layout, given, tmp_path):  # noqa: F811
    world, words = LAYOUTS[layout]
    trunk = given(kind)
    toy = Questions(trunk.parent / "spans")
    (trunk.parent / "trunk").exists() or (trunk.parent / "trunk").symlink_to(trunk)
    line = f"--task CMRC2018 --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {WORDS} {words}"
    line += f" --seq-length {LENGTH} --no-best-checkpoint"
    on_ranks(world, tune, line)
    steps, answers = theirs(kind, toy.folder)
    found = records(tmp_path / "run", "step")
    assert [{name: step[name] for name in ("loss", "grad_norm")} for step in found] == [
        pytest.approx(step, rel=5e-5) for step in steps
    ]
    told = json.loads((tmp_path / "run" / "predictions" / "validation-cmrc2018_predict.json").read_text())
    assert told == {f"dev{number}": " ".join(map(str, ids)) for number, ids in enumerate(answers)}
    [final] = [one for one in records(tmp_path / "run", "eval") if one["final"] and one["split"] == "validation"]
    right = [ids == row[1][row[2] : row[3] + 1] for ids, row in zip(answers, toy.rows["dev"], strict=True)]
    assert final["em"] == pytest.approx(sum(right) / len(right)) and final["f1"] >= final["em"]


# ---- figures and pieces ----------------------------------------------------------------------------------------------


def test_f1_is_of_the_longest_common_piece():
    """By trying all pieces of both; with three words, so that there are many."""
    draw = random.Random(3)
    for _ in range(300):
        one, other = ("".join(draw.choices("\u5317\u4eac\u4e0a", k=draw.randrange(6))) for _ in range(2))
        pieces = {one[i:j] for i in range(len(one)) for j in range(i, len(one) + 1)}
        common = max((len(piece) for piece in pieces if piece in other), default=0)
        assert longest_common(one, other) == common
        precision, recall = (common / max(1, len(text)) for text in (one, other))
        f1 = 2 * precision * recall / (precision + recall) if common else 0.0
        assert overlap_f1(one, [other]) == pytest.approx(f1)


@pytest.mark.parametrize(
    "answer, golds, f1, em",
    [
        ("\u5317\u4eac", ["\u5317\u4eac"], 1, 1),
        ("\u5317\u4eac\u3002", ["\u300a\u5317\u4eac\u300b"], 1, 1),  # marks do not count
        ("\u5317\u4eac\u5e02", ["\u5317\u4eac"], 2 * (2 / 3) / (2 / 3 + 1), 0),
        ("1998 \u5e74", ["1998\u5e74"], 1, 0),  # a blank is no mark
        ("The King", ["the king of"], 2 * 2 / 5, 0),  # words of other languages count as one each
        ("\u5317\u4eac", ["\u4e0a\u6d77", "\u5317\u4eac"], 1, 1),  # the best of several
        ("", ["\u5317"], 0, 0),
    ],
)
def test_figures_of_one_answer(answer, golds, f1, em):
    assert overlap_f1(answer, golds) == pytest.approx(f1) and exact(answer, golds) == em
    both = span_figures([answer, "x"], [golds, ["x"]])
    assert both == pytest.approx({"f1": (f1 + 1) / 2, "em": (em + 1) / 2, "f1 and em": (f1 + em + 2) / 4})


def test_words_of_figures_are_those_of_clues_loop():
    """Letter by letter: its Chinese characters are those from U+4E00 to U+9FA5, and others form words."""
    draw, letters = random.Random(5), "\u3fff\u4e00\u5317\u9fa5\u9fa6\u9fffab1 "
    for _ in range(200):
        text = "".join(draw.choices(letters, k=draw.randrange(9)))
        words, word = [], ""
        for letter in [*text, " "]:
            alone = "\u4e00" <= letter <= "\u9fa5"
            if (alone or letter == " ") and word:
                words, word = [*words, word], ""
            words += [letter] * alone
            word += letter if not alone and letter != " " else ""
        assert overlap_f1(text, [text]) == bool(words)
        assert overlap_f1(text, ["".join(words[-1:])]) == pytest.approx(2 / (len(words) + 1) if words else 0)


@pytest.mark.parametrize("wanted", [0, 1, LONGEST_ANSWER - 1, LONGEST_ANSWER])
@pytest.mark.parametrize("size", [1, 2, 7, LONGEST_ANSWER, LONGEST_ANSWER + 20])
def test_the_best_piece_is_that_of_all(size, wanted):
    """Also where a piece stands out that begins with the text or later, and is as long as an answer may be, or longer."""
    draw = np.random.default_rng(2)
    for first in range(0, max(1, size - wanted), 7):
        begin, last = draw.normal(size=(2, size))
        begin[first] += 9
        last[min(size - 1, first + wanted)] += 9
        sums = {(i, j): begin[i] + last[j] for i in range(size) for j in range(i, min(size, i + LONGEST_ANSWER))}
        place = max(sums, key=sums.get)
        assert best_span(begin, last) == (pytest.approx(sums[place]), place)


@pytest.mark.parametrize("tokens, room", [(0, 9), (9, 9), (10, 9), (100, 9), (1000, 400), (401, 400)])
def test_windows_cover_a_text(tokens, room):
    found = windows(tokens, room)
    assert {n for start, end in found for n in range(start, end)} == set(range(tokens))
    assert all(end - start == min(tokens, room) for start, end in found)
    overlaps = [before[1] - after[0] for before, after in pairwise(found)]
    assert all(overlap == min(128, room // 2) for overlap in overlaps[:-1])
    assert all(overlap >= min(128, room // 2) for overlap in overlaps)  # the last window ends with the text


def test_units_are_all_of_a_text_but_blanks():
    text = " \u4e2d\u6587 and English, 3.5 km\u3002\n\u00e9t\u00e9"
    found = [text[start:end] for start, end in units(text)]
    assert "".join(found) == text and [one.strip() for one in found] == [
        "\u4e2d", "\u6587", "and", "English", ",", "3", ".", "5", "km", "\u3002", "\u00e9t\u00e9",
    ]  # fmt: skip


# ---- files and samples -----------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: each letter is a token, and blanks are none."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text if not letter.isspace()]


def written(folder, *rows, name="train.json"):
    """Rows (context, question, [(answer, start)])."""
    qas = [
        dict(context=context, qas=[dict(id=f"q{n}", question=question, answers=[
            dict(text=text, answer_start=start) for text, start in answers])])
        for n, (context, question, answers) in enumerate(rows)
    ]  # fmt: skip
    (folder / name).write_text(json.dumps(dict(data=[dict(paragraphs=qas)])))


def test_files_are_read_as_they_are_published(tmp_path):
    written(
        tmp_path,
        ("in the old house", "where", [("old house", 7), ("house", 11)]),
        ("a b a", "which", [("a", 3)]),  # not there: the nearest one counts
        ("a b", "which", [("c", 0)]),
    )
    written(tmp_path, ("a b", "which", []), name="test.json")
    written(tmp_path, ("a b", "which", [("b", 2)]), name="dev.json")
    for task in ("CMRC2018", "cmrc-2018", "CLUE-CMRC2018", "DRCD"):
        found = examples_of(TaskSettings(task=task, task_data=str(tmp_path)), "train")
        assert [(row.id, row.text, row.pair, row.answers, row.gold) for row in found.rows] == [
            ("q0", "where", "in the old house", ((7, 16), (11, 16)), ("old house", "house")),
            ("q1", "which", "a b a", ((4, 5),), ("a",)),
        ]
        assert found.notes == (
            f"{tmp_path}/train.json: 1 questions are left out, whose answer is not in the text (first: q2)",
        )
        [row] = examples_of(TaskSettings(task=task, task_data=str(tmp_path)), "test").rows
        assert (row.answers, row.gold, row.label) == ((), (), None)


@pytest.mark.parametrize(
    "text, told",
    [
        ("[]", "is not as CMRC2018 has them"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "there is no 'context'"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 7, "question": "b"}]}]}]}', "7 .*no answers"),
        ('{"data": []}', "holds no questions"),
        ("{", "not JSON"),
    ],
)
def test_files_of_another_form_are_named(text, told, tmp_path):
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(DataError, match=f"(?s)train.json.*{told}"):
        examples_of(TaskSettings(task="CMRC2018", train_data=[str(tmp_path / "train.json")]), "train")


def test_a_sample_has_the_answer_or_the_first_row(tmp_path):
    text = " ".join("abcdefghijklmnopqrstuvwxyz")
    written(tmp_path, (text, "why", [("k l", text.index("k"))]), (text[:9], "why", [("b", 2)]))
    examples = examples_of(TaskSettings(task="CMRC2018", train_data=[str(tmp_path / "train.json")]), "train")
    reader = BertReader(length=16, cls=1, sep=2)
    whole, drawn = (SpanSamples(examples, Letters(), reader, whole=whole) for whole in (True, False))
    rows = []
    for index in range(len(whole)):
        one = whole[index]
        letters = [chr(id) if id > 2 else {0: "", 1: "<", 2: "|"}[id] for id in one["text"]]
        rows.append("".join(letters))
        if "kl" in rows[-1]:
            assert (letters[one["labels"]], letters[one["ends"]]) == ("k", "l")
        elif index < len(whole) - 1:
            assert (one["labels"], one["ends"]) == (0, 0)
    assert rows[0] == "<why|abcdefghij|" and rows[-1] == "<why|abcde|" and sum("kl" in row for row in rows) == 2
    assert len(drawn) == 2 and [drawn[1][name] for name in ("labels", "ends")] == [6, 6]
    same, again = drawn[0], drawn[0]
    assert all(np.array_equal(same[name], again[name]) for name in same)
    assert (whole.longest_question, whole.questions_cut(9)) == (6, 0)
    short = SpanSamples(examples, Letters(), BertReader(length=8, cls=1, sep=2))
    assert (short.longest_question, short.questions_cut(9), short.questions_cut(1)) == (2, 2, 1)
    scores = np.full((len(whole), 2, 16), -9.0)
    scores[1, 0, 5 + 3], scores[1, 1, 5 + 4], scores[-1, :, 5 + 2] = 3.0, 2.0, 1.0
    scores[0, :, 0] = 50.0  # not in a text
    assert whole.answers(scores.reshape(len(whole), -1)) == ["i j", "c"]


ALPHABET = " ".join("abcdefghijklmnopqrstuvwxyz")


def questions_on(folder, *answers: str) -> tuple[SpanSamples, SpanSamples]:
    """(samples of all windows, those of training) of one text with these answers, in windows of ten letters."""
    written(folder, *((ALPHABET, "why", [(answer, ALPHABET.index(answer))]) for answer in answers))
    examples = examples_of(TaskSettings(task="CMRC2018", train_data=[str(folder / "train.json")]), "train")
    reader = BertReader(length=16, cls=1, sep=2)
    return tuple(SpanSamples(examples, Letters(), reader, whole=whole) for whole in (True, False))


def test_each_window_that_has_all_of_an_answer_has_its_place(tmp_path):
    """Of one to three letters, anywhere in the text: also at the first and at the last place of a window."""
    answers = [ALPHABET[2 * at : 2 * (at + size) - 1] for size in (1, 2, 3) for at in range(27 - size)]
    whole, _ = questions_on(tmp_path, *answers)
    windows_of_each = len(whole) // len(answers)
    for index in range(len(whole)):
        sample, answer = whole[index], answers[index // windows_of_each].replace(" ", "")
        letters = "".join(chr(id) if id > 2 else "|" for id in sample["text"])
        first = letters.find(answer, letters.index("|", 1))
        wanted = (first, first + len(answer) - 1) if first > 0 else (0, 0)
        assert (sample["labels"], sample["ends"]) == wanted, (letters, answer)


@pytest.mark.parametrize("answer", ["a", "f", "j", "z", "m n"])
def test_half_of_the_samples_in_training_have_the_answer_and_the_others_any_window(answer, tmp_path):
    whole, drawn = questions_on(tmp_path, *[answer] * 300)
    each = [bool(whole[index]["labels"]) for index in range(len(whole) // 300)]
    has = [bool(drawn[index]["labels"]) for index in range(300)]
    assert sum(has) / 300 == pytest.approx(0.5 + 0.5 * sum(each) / len(each), abs=0.08)


@pytest.mark.parametrize(
    "words, told",
    [
        (
            "--backbone T5 --encoder-num-layers 2 --decoder-num-layers 2",
            "its answers are pieces of a text, which GPT and BERT",
        ),
        ("--backbone BERT --num-layers 2 --word-dropout 0.1", "--word-dropout: the answers of CMRC2018 are pieces"),
        ("--backbone BERT --num-layers 2 --examples-per-class 3", "--examples-per-class: the answers of CMRC2018"),
        ("--backbone BERT --num-layers 2 --seq-length 6", "--seq-length 6 must be at least 8"),
    ],
)
def test_what_such_a_task_does_not_have(words, told):
    line = (
        f"--task CMRC2018 --mock-data --hidden-size 16 --num-attention-heads 2 --lr 1 --train-iters 1 {WORDS} {words}"
    )
    with pytest.raises((Failure, AssertionError), match=told):
        config = parse_any(line.split(), recipe=recipe())
        assert check(config, 1) == []


@pytest.mark.parametrize("length, fits", [(7, False), (8, True)])
def test_the_shortest_samples_of_questions(length, fits):
    line = (
        f"--task CMRC2018 --mock-data --backbone BERT --num-layers 2 --hidden-size 16 --num-attention-heads 2 {WORDS}"
    )
    config = parse_any(f"{line} --lr 1 --train-iters 1 --seq-length {length}".split(), recipe=recipe())
    assert bool([words for words in check(config, 1) if "must be at least 8" in words]) is not fits


@pytest.mark.parametrize("kind", ["BERT", "GPT"])
def test_mock_questions_are_learned(kind, tmp_path):
    """The answer is where the text repeats the question's token."""
    line = f"--task CMRC2018 --mock-data --backbone {kind} --num-layers 1 --hidden-size 16 --num-attention-heads 2"
    line += f" --seq-length 16 --max-position-embeddings 16 {WORDS} {TUNE} --train-iters 2 --eval-iters 0".replace(
        "--train-epochs 2", ""
    )
    tune(0, f"{line} --save {tmp_path}")
    assert [step["loss"] < 5 for step in records(tmp_path, "step")] == [True, True]
