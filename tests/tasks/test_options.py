# SPDX-License-Identifier: Apache-2.0
"""Tasks that choose among options, against Hugging Face's models with a linear layer, each option by itself and without
padding.
"""

import json
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from megatron.data import published
from megatron.data.tables import read_table
from megatron.errors import Failure
from megatron.tasks.description import find_task, read_task
from megatron.tasks.evaluation import write_predictions
from megatron.tasks.examples import labels_in, read_examples
from megatron.tasks.settings import TaskSettings, examples_of, open_task
from tests.ranks import on_ranks
from tests.tasks.test_backbones import LAYOUTS, WORDS, given, model_of, plain_loop, scores_of  # noqa: F401
from tests.tasks.test_finetune import TUNE, tune
from tests.training.plain_loop import EOD, LENGTH
from tests.training.test_plain_loop import records

QUICK = {
    "BERT": ("tp2 with sequence parallelism", "pp2"),
    "T5 mean": ("zero3",),
    "T5": ("pp2",),
    "GPT": ("tp2 with sequence parallelism",),
}
CASES = [
    pytest.param(kind, layout, marks=() if layout in quick else pytest.mark.full)
    for kind, quick in QUICK.items()
    for layout in ("one process", "tp2 with sequence parallelism", "pp2", "zero3", "tp2")
]
DESCRIPTION = """name: toy
train: train.jsonl
valid: valid.jsonl
test: test.jsonl
text: question
text_pair: passage
options: answers
label: right
id: id
"""


class Questions:
    """Rows (question, with None for a gap; passage; options; place of the right one) of each split, and their files."""

    def __init__(self, folder):
        draw = random.Random(7)
        self.folder, self.yaml = folder, folder / "toy.yaml"
        self.rows = {
            split: [self._row(draw) for _ in range(size)] for split, size in dict(train=21, valid=11, test=5).items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.yaml.write_text(DESCRIPTION)
        words = lambda ids: " ".join("_" if one is None else str(one) for one in ids)
        for split, rows in self.rows.items():
            lines = []
            for number, (question, passage, options, label) in enumerate(rows):
                row = dict(id=f"{split}{number}", question=words(question), passage=words(passage))
                right = {} if split == "test" else dict(right=label if number % 2 else words(options[label]))
                lines.append(json.dumps(row | dict(answers=[words(option) for option in options]) | right))
            (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    @staticmethod
    def _row(draw):
        text = lambda least, most: [draw.randrange(EOD) for _ in range(draw.randrange(least, most))]
        question, options = text(1, 4), [text(2, 5) for _ in range(draw.choice((2, 3)))]
        if draw.random() < 0.5:
            question.insert(draw.randrange(len(question) + 1), None)
        return question, text(1, LENGTH), options, draw.randrange(len(options))

    def texts(self, row):
        """(question with the option, passage) of each option."""
        question, passage, options, _ = row
        for option in options:
            where = question.index(None) if None in question else len(question)
            yield [*question[:where], *option, *question[where + 1 :]], passage


def scores(model, head, kind: str, texts) -> torch.Tensor:
    """[o] of options."""
    if kind != "GPT":
        return torch.cat([scores_of(model, head, kind, text) for text in texts])
    found = []
    for first, second in texts:
        first, second = list(first), list(second)
        while len(first) + len(second) > LENGTH - 1:
            (second if len(second) >= len(first) else first).pop()
        found.append(model.transformer(torch.tensor([[*first, EOD, *second]]))[0][0, -1] @ head.T)
    return torch.cat(found)


@cache
def theirs(kind: str, folder):
    """([{loss, grad_norm} of each step], places that are found in validation) of a plain loop."""
    model, toy = model_of(kind), Questions(folder)

    def loss_of(head, samples):
        losses = [
            F.cross_entropy(scores(model, head, kind, toy.texts(row)), torch.tensor(row[3])) for row, _ in samples
        ]
        return torch.stack(losses).mean()

    head, steps = plain_loop(model, kind, folder.parent / "trunk", 1, toy.rows["train"], loss_of)
    with torch.no_grad():
        return steps, [scores(model, head, kind, toy.texts(row)).argmax().item() for row in toy.rows["valid"]]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind, layout", CASES)
def test_any_layout_is_hugging_faces_model_that_reads_each_option(kind, layout, given, tmp_path):  # noqa: F811
    world, words = LAYOUTS[layout]
    trunk = given(kind)
    toy = Questions(trunk.parent / "options")
    (trunk.parent / "trunk").exists() or (trunk.parent / "trunk").symlink_to(trunk)
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {WORDS} {words}"
    line += f" --seq-length {LENGTH} --no-best-checkpoint {'--pooling mean' * ('mean' in kind)}"
    on_ranks(world, tune, line)
    steps, right = theirs(kind, toy.folder)
    found = records(tmp_path / "run", "step")
    assert [{name: step[name] for name in ("loss", "grad_norm")} for step in found] == [
        pytest.approx(step, rel=5e-5) for step in steps
    ]
    told = (tmp_path / "run" / "predictions" / "validation-toy.tsv").read_text().splitlines()[1:]
    assert told == [f"valid{number}\t{place}" for number, place in enumerate(right)]
    [final] = [one for one in records(tmp_path / "run", "eval") if one["final"] and one["split"] == "validation"]
    assert final["accuracy"] == pytest.approx(
        sum(place == row[3] for place, row in zip(right, toy.rows["valid"], strict=True)) / len(right)
    )
    assert not list((tmp_path / "run" / "predictions").glob("confusion*"))  # a place is no class


# ---- files as they are published -------------------------------------------------------------------------------------

ARTICLE = dict(
    article="Tom has a cat. It is old.",
    questions=["Who has a cat?", "The cat is _ ."],
    options=[["Tom", "Ann", "I", "B"], ["old", "new", "red", "big"]],
    answers=["A", "B"],
    id="high1.txt",
)
TALK = [["A: hello.", "B: goodbye."], [dict(question="who begins?", choice=["B", "A", "nobody"], answer="A")], "1-1"]
PASSAGE = dict(
    content=["x" * 60 + "He#idiom000001#ly #idiom000002#.", "#idiom000003#!"],
    candidates=[f"idiom{n}" for n in range(10)],
)
ANSWERS = {"#idiom000001#": 7, "#idiom000002#": 0, "#idiom000003#": 9}


def read(name: str, folder, split: str = "train"):
    """(question, passage, options, place of the right one) of each example."""
    found = examples_of(TaskSettings(task=name, task_data=str(folder)), split)
    return (
        [(row.text, row.pair, row.options, row.label) for row in found.rows],
        [row.id for row in found.rows],
        found.sets,
    )


def test_race_is_read_as_it_is_published(tmp_path):
    for place in ("train/middle", "train/high", "dev/middle", "dev/high", "test/middle"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "1.txt").write_text(json.dumps({**ARTICLE, "id": f"{place[-4:]}1.txt"}))
    first, second = (("Who has a cat?", "Tom has a cat. It is old.", ("Tom", "Ann", "I", "B"), 0),) * 2
    second = ("The cat is _ .", "Tom has a cat. It is old.", ("old", "new", "red", "big"), 1)
    rows, ids, sets = read("RACE", tmp_path)
    assert rows == [first, second] * 2 and ids == ["high1.txt-0", "high1.txt-1", "ddle1.txt-0", "ddle1.txt-1"]
    assert read("race", tmp_path, "valid")[2] == {"middle": range(2), "high": range(2, 4)}
    files = TaskSettings(task="RACE", train_data=[str(tmp_path / "train/middle")], valid_data=[f"{tmp_path}/dev/high"])
    assert (len(examples_of(files, "train").rows), len(examples_of(files, "valid").rows)) == (2, 2)
    assert {name for name, _ in open_task(TaskSettings(task="RACE", task_data=str(tmp_path))).files["test"]} == {
        "middle"
    }


def test_c3_is_read_as_it_is_published(tmp_path):
    for name in ("m-train", "d-train", "m-dev", "d-dev"):
        (tmp_path / f"{name}.json").write_text(json.dumps([TALK, TALK], ensure_ascii=False, indent=1))
    unknown = [TALK[0], [{**TALK[1][0], "answer": "", "id": 5}], "1-1"]
    (tmp_path / "test1.1.json").write_text(json.dumps([unknown]))
    rows, ids, sets = read("CLUE-C3", tmp_path)
    assert rows == [("who begins?", "A: hello.\nB: goodbye.", ("B", "A", "nobody"), 1)] * 4 and ids == [
        "0",
        "1",
        "0",
        "1",
    ]
    assert sets == {"m": range(2), "d": range(2, 4)}
    rows, ids, sets = read("c3", tmp_path, "test")
    assert (rows[0][3], ids, list(sets)) == (None, ["5"], ["1.1"])
    write_predictions(find_task("C3"), [2], ids, tmp_path / "out" / "c311_predict.json")
    assert (tmp_path / "out" / "c311_predict.json").read_text() == '{"id": 5, "label": 2}\n'
    assert find_task("C3").answers["1.1"] == "c311_predict.json"


def test_chid_is_read_as_it_is_published(tmp_path):
    for name in ("train", "dev"):
        (tmp_path / f"{name}.json").write_text(f"{json.dumps(PASSAGE)}\n")
        (tmp_path / f"{name}_answer.json").write_text(json.dumps(ANSWERS))
    (tmp_path / "test1.0.json").write_text(f"{json.dumps(PASSAGE)}\n")
    rows, ids, _ = read("CHID", tmp_path)
    assert [row[0] for row in rows] == ["x" * 46 + "He_ly ....", "x" * 40 + "He...ly _.", "_!"]
    assert {row[1:3] for row in rows} == {(None, tuple(PASSAGE["candidates"]))}
    assert ([row[3] for row in rows], ids) == ([7, 0, 9], list(ANSWERS))
    rows, ids, sets = read("CHID", tmp_path, "test")
    assert ({row[3] for row in rows}, list(sets)) == ({None}, ["1.0"])
    write_predictions(find_task("CHID"), [7, 0, 9], ids, tmp_path / "chid10_predict.json")
    assert json.loads((tmp_path / "chid10_predict.json").read_text()) == ANSWERS
    (tmp_path / "alone").mkdir()
    (tmp_path / "train.json").rename(tmp_path / "alone" / "train.json")
    with pytest.raises(Failure, match="train_answer.json: no such file, with the answers"):
        read_examples(find_task("CHID"), {"": tmp_path / "alone" / "train.json"})


LISTS = {  # task -> (its file, a row with something else where a list is wanted, what is told)
    "RACE": [
        (dict(ARTICLE, answers="AB"), "options and answers are no lists"),
        (dict(ARTICLE, options="ab"), "options and answers are no lists"),
        (dict(ARTICLE, questions="ab"), "questions is no list of texts"),
        ({"id": 1}, "there is no 'questions'"),
    ],
    "C3": [
        (["A: hello.", *TALK[1:]], "0 is no list of texts"),
        ([TALK[0], [{**TALK[1][0], "choice": "BA"}], "1-1"], "choice is no list of texts"),
        ([TALK[0], [{**TALK[1][0], "answer": "C"}], "1-1"], "the answer 'C' is none of the options"),
    ],
    "CHID": [
        (dict(PASSAGE, content="He#idiom000001#ly"), "content is no list of texts"),
        (dict(PASSAGE, candidates="abcdefghij"), "candidates is no list of texts"),
    ],
}


@pytest.mark.parametrize("name", LISTS)
def test_texts_in_the_place_of_lists(name, tmp_path):
    (tmp_path / "train_answer.json").write_text(json.dumps(ANSWERS))
    for row, words in LISTS[name]:
        (tmp_path / "train.json").write_text(json.dumps([row]))
        with pytest.raises(Failure, match=f"train.json, item 1 is not as {name} has them: {words}"):
            read_examples(find_task(name), {"": tmp_path / "train.json"})
    if name == "CHID":
        (tmp_path / "train.json").write_text(json.dumps(PASSAGE))
        for text, words in {"[1]": "it is no object", '{"#idiom000001#": 1, "#idiom000001#": 2}': "twice"}.items():
            (tmp_path / "other_answer.json").write_text(text)
            (tmp_path / "other.json").write_text(json.dumps(PASSAGE))
            with pytest.raises(Failure, match=f"other_answer.json.*{words}"):
                read_examples(find_task(name), {"": tmp_path / "other.json"})
            published._answers.cache_clear()


WRONG = [
    (dict(answers="a", right=0), "answers: at least two options are wanted, as a list"),
    (dict(answers=["a"], right=0), "answers: at least two options are wanted, as a list"),
    (dict(answers=["a", None], right=0), "null stands where a text is wanted"),
    (dict(answers=["a", "b"], right="c"), "'c' is none of 2 options, nor the name of a place(.|\n)*these are 0, 1"),
    (dict(answers=["a", "b"], right=2), "'2' is none of 2 options"),
    (dict(answers=["1", "0"], right=0), "'0' is the name of a place, and the option in another place"),
    (dict(right=0), "has no column 'answers'"),
]


@pytest.mark.parametrize("line, words", WRONG)
def test_rows_that_are_none(line, words, tmp_path):
    good = dict(question="q", passage="p", answers=["a", "b", "c"], right="b")
    (tmp_path / "toy.yaml").write_text(DESCRIPTION)
    (tmp_path / "train.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in (good, dict(question="q", passage="p", id="x", **line)))
    )
    with pytest.raises(Failure, match=f"train.jsonl, line 2(.|\n)*{words}"):
        task = read_task(tmp_path / "toy.yaml")
        task = replace(task, labels=labels_in(task, [tmp_path / "train.jsonl"]))
        read_examples(task, {"": tmp_path / "train.jsonl"})


SETTINGS = {
    "--examples-per-class 2": "the labels of toy are options, not classes",
    "--labels x y": "is none of 2 options(.|\n)*these are x, y",
    "--pet-pattern {text}{label} --pet-verbalizer none.json": "toy has options of each text's own",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words, message", SETTINGS.items())
def test_what_options_do_not_go_with(words, message, given, tmp_path):  # noqa: F811
    toy = Questions(tmp_path / "toy")
    with pytest.raises(Failure, match=message):
        tune(0, f"--task {toy.yaml} --data-path {toy.folder} --load {given('BERT')} {TUNE} {WORDS} {words}")


def test_descriptions_that_contradict_themselves(tmp_path):
    for more, message in {
        "regression: true": "options are chosen among, and the labels are numbers",
        "metrics: [macro_f1]": "the metric macro_f1 is for classes, and answers are options",
    }.items():
        (tmp_path / "toy.yaml").write_text(f"{DESCRIPTION}{more}\n")
        with pytest.raises(Failure, match=message):
            read_task(tmp_path / "toy.yaml")


def test_arrays_and_folders_are_tables(tmp_path):
    (tmp_path / "a.json").write_text('[{"a": 1},\n ["x", "y"]]')
    assert [row.columns for row in read_table(tmp_path / "a.json")[0]] == [{"a": 1}, {0: "x", 1: "y"}]
    for text, words in {"[{}": "a.json: not JSON", "[{}, 3]": "a.json, item 2: int, no object"}.items():
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(Failure, match=words):
            read_table(tmp_path / "a.json")
    with pytest.raises(Failure, match="is a folder without .txt files"):
        read_table(tmp_path)
    (tmp_path / "b.txt").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(Failure, match="b.txt, line 2: not JSON"):
        read_table(tmp_path)
