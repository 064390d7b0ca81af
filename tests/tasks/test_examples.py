# SPDX-License-Identifier: Apache-2.0
"""The files of GLUE and CLUE as they are published, written here line by line, and what is wrong with others."""

import errno
import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data.mixture import tasks_of
from megatron.errors import DataError, Failure, SettingsError, StorageError, UsageError
from megatron.tasks import settings as kept_settings
from megatron.tasks.description import CLUE, GLUE, Task, find_task
from megatron.tasks.evaluation import TaskMeasures, draw_confusion, write_predictions
from megatron.tasks.examples import file_of, labels_in, read_examples
from megatron.tasks.settings import TaskSettings, examples_of, open_task

MNLI = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 "
    "sentence2"
)
# task -> {file: lines}, the texts and labels of its training and validation sets
GLUE_FILES = {
    "CoLA": (
        {
            "train.tsv": ["gj04\t1\t\tOur friends won't buy this.", 'gj04\t0\t*\tThey drank the "pub.'],
            "dev.tsv": ["gj04\t1\t\tThe sailors rode."],
            "test.tsv": ["index\tsentence", "0\tBill whistled past the house."],
        },
        [("Our friends won't buy this.", None, 1), ('They drank the "pub.', None, 0)],
    ),
    "SST2": (
        {
            "train.tsv": ["sentence\tlabel", "hide new secretions \t0", 'a "fine" film \t1'],
            "dev.tsv": ["sentence\tlabel", "it 's charming \t1"],
            "test.tsv": ["index\tsentence", "0\tuneasy mishmash"],
        },
        [("hide new secretions ", None, 0), ('a "fine" film ', None, 1)],
    ),
    "MRPC": (
        {
            "msr_paraphrase_train.txt": [
                "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
                '1\t702876\t702977\tAmrozi accused "the witness".\tReferring to him',
                "0\t1\t2\tYucaipa owned it\tYucaipa bought it",
            ],
            "msr_paraphrase_test.txt": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t3\t4\tA\tB"],
        },
        [('Amrozi accused "the witness".', "Referring to him", 1), ("Yucaipa owned it", "Yucaipa bought it", 0)],
    ),
    "QQP": (
        {
            "train.tsv": [
                "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
                "7\t1\t2\tHow is it?\tHow was it?\t0",
                "8\t3\t4\tbroken row",
                "9\t5\t6\tWhy?\tHow come?\t1",
            ],
            "dev.tsv": ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t1\t2\tA?\tB?\t1"],
        },
        [("How is it?", "How was it?", 0), ("Why?", "How come?", 1)],
    ),
    "STSB": (
        {
            "train.tsv": [
                "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
                "0\tmain\tMSR\t2012\t1\tnone\tnone\tA plane.\tAn air plane.\t5.000",
                "1\tmain\tMSR\t2012\t4\tnone\tnone\tA man.\tA dog.\t0.636",
            ],
            "dev.tsv": [
                "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
                "0\tmain\tMSR\t2012\t1\tnone\tnone\tA.\tB.\t2.5",
            ],
        },
        [("A plane.", "An air plane.", 5.0), ("A man.", "A dog.", 0.636)],
    ),
    "MNLI": (
        {
            "train.tsv": [
                "\t".join([*MNLI.split(), "label1", "gold_label"]),
                "\t".join(
                    [*"0 1 1n fiction p p p p".split(), "He left.", "He stayed.", "contradiction", "contradiction"]
                ),
                "\t".join([*"1 2 2n fiction p p p p".split(), "He left.", "He went.", "neutral", "-"]),
                "\t".join([*"2 2 2n fiction p p p p".split(), "He left.", "He went.", "entailment", "entailment"]),
            ],
            "dev_matched.tsv": [
                "\t".join([*MNLI.split(), *(f"label{n}" for n in range(1, 6)), "gold_label"]),
                "\t".join([*"0 1 1n fiction p p p p".split(), "A", "B", *["neutral"] * 6]),
            ],
            "dev_mismatched.tsv": [
                "\t".join([*MNLI.split(), *(f"label{n}" for n in range(1, 6)), "gold_label"]),
                "\t".join([*"0 1 1n fiction p p p p".split(), "C", "D", *["entailment"] * 6]),
            ],
        },
        [("He left.", "He stayed.", 0), ("He left.", "He went.", 1)],
    ),
    "QNLI": (
        {
            "train.tsv": [
                "index\tquestion\tsentence\tlabel",
                "0\tWhen?\tIn 1990.\tentailment",
                "1\tWho?\tIt.\tnot_entailment",
            ],
            "dev.tsv": ["index\tquestion\tsentence\tlabel", "0\tWhen?\tIn 1990.\tentailment"],
        },
        [("When?", "In 1990.", 0), ("Who?", "It.", 1)],
    ),
    "RTE": (
        {
            "train.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tA\tB\tnot_entailment", "1\tC\tD\tentailment"],
            "dev.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tA\tB\tnot_entailment"],
        },
        [("A", "B", 1), ("C", "D", 0)],
    ),
    "WNLI": (
        {
            "train.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tA\tB\t1\r", "1\tC\tD\t0\r"],
            "dev.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tA\tB\t1"],
        },
        [("A", "B", 1), ("C", "D", 0)],
    ),
}
WSC = dict(
    target=dict(span2_index=4, span1_index=0, span1_text="\u9a6c\u514b", span2_text="\u4ed6"), idx=0, label="true"
)
CLUE_ROWS = {  # rows of the training set -> texts and labels
    "AFQMC": (
        [dict(sentence1="a", sentence2="b", label="0"), dict(sentence1="c", sentence2="d", label="1")],
        [("a", "b", 0), ("c", "d", 1)],
    ),
    "TNEWS": (
        [dict(label="102", label_desc="news_x", sentence="s", keywords=""), dict(label="116", sentence="t")],
        [("s", None, 2), ("t", None, 14)],
    ),
    "IFLYTEK": (
        [dict(label="11", label_des="x", sentence="s"), dict(label="118", sentence="t")],
        [("s", None, 11), ("t", None, 118)],
    ),
    "CMNLI": (
        [dict(sentence1="a", sentence2="b", label=label) for label in ("neutral", "-", "entailment")],
        [("a", "b", 2), ("a", "b", 1)],
    ),
    "CLUEWSC": (
        [
            dict(WSC, text="\u9a6c\u514b\u8bf4\u4ed6\u6765"[:3] + "\uff0c\u4ed6\u6765"),
            dict(WSC, text="\u9a6c\u514b\u8bf4\uff0c\u4ed6\u6765", label="false"),
        ],
        [("[\u9a6c\u514b]\u8bf4\uff0c_\u4ed6_\u6765", None, 1), ("[\u9a6c\u514b]\u8bf4\uff0c_\u4ed6_\u6765", None, 0)],
    ),
    "CSL": (
        [dict(id=1, abst="abstract", keyword=["x", "y"], label="1"), dict(id=2, abst="b", keyword=["z"], label="0")],
        [("x y", "abstract", 1), ("z", "b", 0)],
    ),
    "OCNLI": (
        [
            dict(level="easy", sentence1="a", sentence2="b", label=label, genre="tv")
            for label in ("neutral", "contradiction")
        ],
        [("a", "b", 2), ("a", "b", 0)],
    ),
}


def write(folder: Path, files: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def settings(task: str, folder=None, **more) -> TaskSettings:
    return TaskSettings(task, task_data=str(folder) if folder else None, **more)


def triples(examples) -> list:
    return [(row.text, row.pair, row.label) for row in examples.rows]


def triples_of_a_mixture(name: str, path: Path) -> list:
    """The same out of --task-mixture, where a known name says how the file is read."""
    task = tasks_of(["masked=1", f"{name.lower()}=1:{path}"])[1]
    return [(first, second, task.labels.index(label)) for first, second, label in task.read().rows]


@pytest.mark.parametrize("name", GLUE_FILES)
def test_files_of_glue_are_read_as_they_are(name, tmp_path):
    files, wanted = GLUE_FILES[name]
    own = settings(name, write(tmp_path / find_task(name).folder, files))
    assert triples(examples_of(own, "train")) == wanted
    assert triples(examples_of(settings(name, tmp_path), "train")) == wanted  # the folder of all tasks
    if name == "STSB":
        with pytest.raises(DataError, match="numbers for labels"):
            triples_of_a_mixture(name, tmp_path / "STS-B" / "train.tsv")
    else:
        assert triples_of_a_mixture(name, tmp_path / find_task(name).folder / next(iter(files))) == wanted
    valid = examples_of(own, "valid")
    assert len(valid.rows) == (2 if name == "MNLI" else 1) and all(row.label is not None for row in valid.rows)
    if name == "MNLI":
        assert valid.sets == {"matched": range(0, 1), "mismatched": range(1, 2)}
    if "test.tsv" in files:
        assert [(row.id, row.label) for row in examples_of(own, "test").rows] == [("0", None)]
    if name == "QQP":
        assert "1 lines with another number of columns" in examples_of(own, "train").notes[0]


# As cola_public_1.1.zip and multinli_1.0.zip have them, and where PaddleFleetX's commands look.
PUBLISHED_COLA = {
    "raw/in_domain_train.tsv": ["gj04\t1\t\tOurs won.", "gj04\t0\t*\tOurs win the."],
    "raw/in_domain_dev.tsv": ["gj04\t1\t\tHe sang."],
    "raw/out_of_domain_dev.tsv": ["clc95\t1\t\tShe sang."],
}
COLUMNS = (
    "gold_label sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2 promptID "
    "pairID genre label1 label2 label3 label4 label5"
).split()
PUBLISHED_MNLI = {
    f"multinli_1.0_{name}.txt": [
        "\t".join(COLUMNS),
        *(
            "\t".join([label, *"pppp", f"It {name}s.", "It is.", "1", "1n", "fiction", label, *[""] * 4])
            for label in labels
        ),
    ]
    for name, *labels in (
        ["train", "neutral", "-", "entailment"],
        ["dev_matched", "neutral"],
        ["dev_mismatched", "neutral"],
    )
}


@pytest.mark.parametrize("below", ["", "dataset"])
def test_files_of_the_data_sets_themselves(below, tmp_path):
    for folder, files in dict(cola_public=PUBLISHED_COLA, **{"multinli_1.0": PUBLISHED_MNLI}).items():
        for name, lines in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text("\n".join(lines) + "\n")
    cola, mnli = (settings(task, tmp_path if below else tmp_path / own) for task, own in
                  (("CoLA", "cola_public"), ("MNLI", "multinli_1.0")))  # fmt: skip
    assert triples(examples_of(cola, "train")) == [("Ours won.", None, 1), ("Ours win the.", None, 0)]
    assert triples(examples_of(cola, "valid")) == [("He sang.", None, 1)]
    assert [row.text for row in examples_of(cola, "test").rows] == ["She sang."]
    assert triples(examples_of(mnli, "train")) == [("It trains.", "It is.", label) for label in (2, 1)]
    assert examples_of(mnli, "valid").sets == {"matched": range(0, 1), "mismatched": range(1, 2)}
    one = settings("MNLI", mnli.task_data, valid_data=["dev_mismatched.tsv"])  # of Data.Eval.dataset.split
    assert [row.text for row in examples_of(one, "valid").rows] == ["It dev_mismatcheds."]


@pytest.mark.parametrize("name", CLUE_ROWS)
def test_files_of_clue_are_read_as_they_are(name, tmp_path):
    rows, wanted = CLUE_ROWS[name]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    folder = write(tmp_path, {"train.json": lines, "dev.json": lines})
    assert triples(examples_of(settings(f"CLUE-{name}", folder), "train")) == wanted
    assert triples_of_a_mixture(name, folder / "train.json") == wanted


def test_all_tasks_are_there():
    assert {task.name for task in GLUE} == set(GLUE_FILES) and {task.name for task in CLUE} == set(CLUE_ROWS)
    assert len(find_task("tnews").labels) == 15 and len(find_task("IFLYTEK").labels) == 119
    assert find_task("SST-2").name == "SST2" and find_task("sts-b").regression
    assert {task.name: task.settings["train_epochs"] for task in GLUE if task.settings} == {"MRPC": 5, "WNLI": 5}


def test_a_task_of_ones_own(tmp_path):
    csv = ["stars,review,title", '3,"good, really",hm', '1,"a ""b""\nc",no', '3,fine,"x"']
    jsonl = [json.dumps(dict(stars=3, review="r", title="t")), "", json.dumps(dict(stars=1, review="s", title="u"))]
    write(tmp_path, {"a.csv": csv, "b.jsonl": jsonl})
    text = "train: a.csv\nvalid: b.jsonl\ntext: review\ntext_pair: title\nlabel: stars\nmetrics: [accuracy, macro_f1]\n"
    (tmp_path / "own.yaml").write_text(text)
    own = settings(str(tmp_path / "own.yaml"), tmp_path)
    assert open_task(own).task.labels == ("1", "3") and open_task(own).task.judged_by == "accuracy and macro_f1"
    assert triples(examples_of(own, "train")) == [("good, really", "hm", 1), ('a "b"\nc', "no", 0), ("fine", "x", 1)]
    assert triples(examples_of(own, "valid")) == [("r", "t", 1), ("s", "u", 0)]
    few = settings(str(tmp_path / "own.yaml"), tmp_path, examples_per_class=1)
    assert [row.text for row in examples_of(few, "train").rows] == ["good, really", 'a "b"\nc']


def test_files_of_a_task_are_looked_for_here_and_then_beside_it(tmp_path, monkeypatch):
    here, home = tmp_path / "here", tmp_path / "home"
    for folder in (here, home):
        folder.mkdir()
        (folder / "a.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    monkeypatch.chdir(here)
    task = SimpleNamespace(folder="", home=home)
    assert file_of(task, None, ["b.tsv", "a.tsv"]) == Path("a.tsv")
    (home / "b.tsv").touch()
    assert file_of(task, None, ["b.tsv", "a.tsv"]) == Path("a.tsv")
    (here / "a.tsv").unlink()
    assert file_of(task, None, ["b.tsv", "a.tsv"]) == home / "b.tsv"
    assert file_of(task, None, ["c.tsv", "a.tsv"]) == home / "a.tsv"


def test_an_empty_label_is_no_class(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\na\ty\nb\t\nc\tx\n")
    task = Task("own", text="text", label="label")
    assert labels_in(task, [tmp_path / "a.tsv"]) == ("x", "y")


ROWS = ["text\tlabel", "a\tx", "b\ty"]
YAML = "train: train.tsv\nvalid: dev.tsv\ntext: text\nlabel: label\n"
JSONL = YAML.replace("train.tsv", "a.jsonl") + "labels: [x, y]\n"
CSV = YAML.replace("train.tsv", "a.csv") + "labels: [x, y]\n"
WRONG = {  # what is wrong -> (YAML, files, what the message says)
    "unknown key": (YAML + "lable: x\n", {}, "unknown key lable; did you mean label?"),
    "no text": ("train: a\nlabel: b\n", {}, "says nothing of text"),
    "not YAML": ("train: [", {}, "while parsing"),
    "a list": ("- a\n", {}, "no mapping of names to values"),
    "unknown metric": (YAML + "metrics: [acuracy]\n", {}, "there is no metric acuracy; did you mean accuracy?"),
    "metric of numbers": (
        YAML + "metrics: [pearson]\n",
        {},
        "the metric pearson is for numbers, and the labels are classes",
    ),
    "f1 of three": (YAML + "metrics: [f1]\nlabels: [a, b, c]\n", {}, "is for two classes, and there are 3"),
    "labels as truth values": (YAML + "labels: [yes, no]\n", {}, "without quotes"),
    "one label": (YAML + "labels: [x]\n", {}, "at least two classes, and there is one, 'x'"),
    "label twice": (YAML + "labels: [x, y, x]\n", {}, "the label 'x' is there twice"),
    "no file": (YAML, {"train.tsv": ROWS}, "has no dev.tsv"),
    "no column": (
        YAML,
        {"train.tsv": ["txt\tlabel", "a\tx", "b\ty"], "dev.tsv": ROWS},
        "no column 'text'; did you mean txt?",
    ),
    "no label column": (YAML, {"train.tsv": ["text\tlabels", "a\tx"], "dev.tsv": ROWS}, "no column 'label'"),
    "unknown label": (
        YAML + "labels: [x, z]\n",
        {"train.tsv": ROWS, "dev.tsv": ROWS},
        "the label 'y' is none of the task's",
    ),
    "empty label": (
        YAML + "labels: [x, y]\n",
        {"train.tsv": ["text\tlabel", "a\t"], "dev.tsv": ROWS},
        "the label is empty",
    ),
    "one class only": (
        YAML + "labels: [x, y]\n",
        {"train.tsv": ["text\tlabel", "a\tx", "b\tx"], "dev.tsv": ROWS},
        "all 2 examples have the label 'x'",
    ),
    "empty file": (YAML + "labels: [x, y]\n", {"train.tsv": [], "dev.tsv": ROWS}, "is empty"),
    "header alone": (YAML + "labels: [x, y]\n", {"train.tsv": ["text\tlabel"], "dev.tsv": ROWS}, "holds no examples"),
    "not separated": (
        YAML + "labels: [x, y]\n",
        {"train.tsv": ["text\tlabel", "a,x", "b,y"], "dev.tsv": ROWS},
        "line 2: 1 columns",
    ),
    "no number": (YAML + "regression: true\n", {"train.tsv": ROWS, "dev.tsv": ROWS}, "the label 'x' is no number"),
    "one number": (
        YAML + "regression: true\n",
        {"train.tsv": ["text\tlabel", "a\t1", "b\t1"], "dev.tsv": ROWS},
        "have the same number",
    ),
    "broken JSON": (
        YAML.replace("train.tsv", "a.jsonl") + "labels: [x, y]\n",
        {"a.jsonl": ['{"text": '], "dev.tsv": ROWS},
        "line 1",
    ),
    "JSON list": (
        YAML.replace("train.tsv", "a.jsonl") + "labels: [x, y]\n",
        {"a.jsonl": ["[1]"], "dev.tsv": ROWS},
        "no object",
    ),
    "null as text": (
        JSONL,
        {"a.jsonl": ['{"text": "a", "label": "x"}', '{"text": null, "label": "y"}'], "dev.tsv": ROWS},
        "a.jsonl, line 2, text: null stands where a text is wanted",
    ),
    "list as text": (
        JSONL,
        {"a.jsonl": ['{"text": ["a", "b"], "label": "x"}'], "dev.tsv": ROWS},
        '["a", "b"] stands where a text is wanted',
    ),
    "list as label": (
        JSONL.replace("labels: [x, y]", ""),
        {"a.jsonl": ['{"text": "a", "label": ["x"]}', '{"text": "b", "label": "y"}'], "dev.tsv": ROWS},
        'line 1: ["x"] stands where a label is wanted',
    ),
    "unclosed quote": (
        CSV,
        {"a.csv": ["text,label", "a,x", '"b,y', *["c,x"] * 300], "dev.tsv": ROWS},
        "a.csv, line 3: unexpected end of data (line 303)",
    ),
    "quote that a later row closes": (
        CSV,
        {"a.csv": ["text,label", "a,x", '"b,y', *["c,x"] * 300, '"d, e",y'], "dev.tsv": ROWS},
        "a.csv, line 3: ',' expected after '\"' (line 304)",
    ),
    "a column twice": (
        YAML,
        {"train.tsv": ["text\tlabel\tlabel", "a\tx\ty"], "dev.tsv": ROWS},
        "train.tsv, line 1: the header names 'label' twice",
    ),
    "columns of a description twice": (
        YAML + "columns: [text, text]\n",
        {"train.tsv": ["a\tx"], "dev.tsv": ROWS},
        "train.tsv: columns names 'text' twice",
    ),
    "half of an emoji": (
        JSONL,
        {"a.jsonl": ['{"text": "a", "label": "x"}', '{"text": "\\ud83d", "label": "y"}'], "dev.tsv": ROWS},
        "a.jsonl, line 2, text: '\\ud83d' is half of a surrogate pair",
    ),
    "tab in a label": (
        JSONL.replace("labels: [x, y]", ""),
        {"a.jsonl": ['{"text": "a", "label": "x"}', '{"text": "b", "label": "y\\tz"}'], "dev.tsv": ROWS},
        "a.jsonl, line 2: 'y\\tz' has a tab or an end of line inside",
    ),
    "tab in a label of the description": (
        YAML + 'labels: [x, "y\\tz"]\n',
        {"train.tsv": ROWS, "dev.tsv": ROWS},
        "'y\\tz' has",
    ),
    "end of line in an id": (
        JSONL + "id: id\n",
        {
            "a.jsonl": ['{"text": "a", "label": "x", "id": 1}', '{"text": "b", "label": "y", "id": "2\\n"}'],
            "dev.tsv": ROWS,
        },
        "a.jsonl, line 2, id: '2\\n' has a tab or an end of line inside",
    ),
    "half of an emoji in an id": (
        JSONL + "id: id\n",
        {"a.jsonl": ['{"text": "a", "label": "x", "id": "\\udc00"}'], "dev.tsv": ROWS},
        "a.jsonl, line 1, id: '\\udc00' is half",
    ),
    "list as id": (
        JSONL + "id: id\n",
        {"a.jsonl": ['{"text": "a", "label": "x", "id": [1]}'], "dev.tsv": ROWS},
        "a.jsonl, line 1: the id is a list or an object",
    ),
    "one label beside an empty one": (
        YAML,
        {"train.tsv": ["text\tlabel", "a\tx", "b\t"], "dev.tsv": ROWS},
        "train.tsv, line 3: the label is empty",
    ),
    "one label beside one that is left out": (
        YAML + "skip: ['-']\n",
        {"train.tsv": ["text\tlabel", "a\tx", "b\t-"], "dev.tsv": ROWS},
        "all 1 examples have the label 'x'",
    ),
    "files in a list": (YAML.replace("train.tsv", "[a, b]"), {}, "train is neither a file nor names of sets"),
    "set without a file": (YAML.replace("dev.tsv", "{a: }"), {}, "valid is neither a file nor names of sets"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_tasks_are_told_once(what, tmp_path):
    text, files, wanted = WRONG[what]
    (tmp_path / "task.yaml").write_text(text)
    own = settings(str(tmp_path / "task.yaml"), write(tmp_path, files))
    with pytest.raises(Failure) as problem:
        examples_of(own, "train")
    assert wanted in str(problem.value) and isinstance(problem.value, (DataError, SettingsError))


def test_cells_of_a_csv_may_be_long_and_its_name_in_capitals(tmp_path):
    (tmp_path / "task.yaml").write_text(CSV.replace("a.csv", "A.CSV"))
    write(tmp_path, {"A.CSV": ["text,label", f'"{"a, " * 50_000}",x', '"b', 'c",y'], "dev.tsv": ROWS})
    train = triples(examples_of(settings(str(tmp_path / "task.yaml"), tmp_path), "train"))
    assert train == [("a, " * 50_000, None, 0), ("b\nc", None, 1)]


def test_ids_are_places_in_the_file_whatever_is_left_out(tmp_path):
    (tmp_path / "task.yaml").write_text(YAML + "test: test.tsv\nlabels: [x, y]\nskip: ['-']\n")
    write(tmp_path, {"test.tsv": ["text\tlabel", "a\tx", "b\tbad\tx", "c\t-", "", "d\ty"]})
    rows = examples_of(settings(str(tmp_path / "task.yaml"), test_data=[str(tmp_path / "test.tsv")]), "test").rows
    assert [(row.id, row.text) for row in rows] == [("0", "a"), ("3", "d")]


def test_ids_that_are_not_there_or_there_twice(tmp_path):
    (tmp_path / "task.yaml").write_text(YAML + "test: test.tsv\nlabels: [x, y]\nid: number\n")
    write(
        tmp_path,
        {
            "train.tsv": ROWS,
            "dev.tsv": ["number\ttext\tlabel", *["7\ta\tx"] * 2, "8\tb\ty"],
            "test.tsv": ["numbr\ttext", "1\ta"],
        },
    )
    own = settings(str(tmp_path / "task.yaml"), tmp_path)
    [note] = examples_of(own, "train").notes
    assert note == f"{tmp_path}/train.tsv has no column 'number'; predictions name its examples by their places"
    [note] = examples_of(own, "valid").notes
    assert "1 ids stand for several examples each" in note and "(first: '7', 2 times)" in note
    with pytest.raises(DataError, match="test.tsv has no column 'number'; did you mean numbr\\?\n  it has numbr, text"):
        examples_of(own, "test")
    write(tmp_path, {"sst.tsv": ["sentence", "a"]})  # published files have ids or not
    found = examples_of(settings("SST2", test_data=[str(tmp_path / "sst.tsv")]), "test")
    assert [row.id for row in found.rows] == ["0"] and not found.notes


def test_labels_of_a_test_set_may_be_half_an_emoji(tmp_path):
    (tmp_path / "task.yaml").write_text(YAML + "labels: [x, y]\n")
    write(tmp_path, {"test.jsonl": ['{"text": "a", "label": "\\ud83d"}']})
    [row] = examples_of(settings(str(tmp_path / "task.yaml"), test_data=[str(tmp_path / "test.jsonl")]), "test").rows
    assert row.label is None


@pytest.mark.parametrize(
    "name, row, words",
    [
        ("CSL", dict(id=1, abst="b", keyword="oops", label="1"), "keyword is no list of texts"),
        ("CSL", dict(id=1, abst="b", keyword=["a", 1], label="1"), "keyword is no list of texts"),
        ("CLUEWSC", dict(WSC, text="abc"), "cannot stand at 4 of its text"),
        (
            "CLUEWSC",
            dict(WSC, text="\u9a6c\u514bab\u4ed6", target=dict(WSC["target"], span1_index=-5)),
            "cannot stand at -5",
        ),
    ],
)
def test_rows_that_are_not_as_published(name, row, words, tmp_path):
    write(tmp_path, {"train.json": [json.dumps(row)]})
    with pytest.raises(DataError, match=f"train.json, line 1 is not as {name} has them: .*{words}"):
        read_examples(find_task(name), {"": tmp_path / "train.json"})
    with pytest.raises(DataError, match=words):
        triples_of_a_mixture(name, tmp_path / "train.json")


@pytest.mark.parametrize("more, known", [("labels: [x, y]\n", [0, None, None]), ("labels: []\n", [None, None, 2.5])])
def test_what_stands_for_the_labels_of_a_test_set_may_be_anything(more, known, tmp_path):
    (tmp_path / "task.yaml").write_text(YAML + more)
    write(tmp_path, {"test.tsv": ["text\tlabel", "a\tx", "b\t?", "c\t2.5"]})
    rows = examples_of(settings(str(tmp_path / "task.yaml"), test_data=[str(tmp_path / "test.tsv")]), "test").rows
    assert [row.label for row in rows] == known
    write(tmp_path, {"test.jsonl": ['{"text": "a", "label": ["x"]}', '{"text": "b"}', '{"text": "c", "label": null}']})
    rows = examples_of(settings(str(tmp_path / "task.yaml"), test_data=[str(tmp_path / "test.jsonl")]), "test").rows
    assert [row.label for row in rows] == [None, None, None]


def test_files_of_one_name_are_sets_of_their_own(tmp_path):
    (tmp_path / "task.yaml").write_text(YAML + "labels: [x, y]\n")
    for name in ("a", "b", "a/c"):
        write(tmp_path / name, {"dev.tsv": ["text\tlabel", f"{name}\tx"], "other.tsv": ROWS})
    write(tmp_path, {"train.tsv": ROWS})
    write(tmp_path / "a", {"dev.jsonl": ['{"text": "t", "label": "x"}']})
    own = lambda *files, **more: settings(str(tmp_path / "task.yaml"), tmp_path, valid_data=list(files), **more)
    sets = lambda *files: examples_of(own(*files), "valid").sets
    found = examples_of(own("a/dev.tsv", "b/dev.tsv"), "valid")
    assert [row.text for row in found.rows] == ["a", "b"] and list(found.sets) == ["a-dev", "b-dev"]
    assert list(sets("a/dev.tsv", "a/c/dev.tsv", "b/other.tsv")) == ["a-dev", "c-dev", "b-other"]
    assert list(sets("a/dev.tsv", "b/other.tsv")) == ["dev", "other"] and list(sets("a/dev.tsv")) == [""]
    for again in ("a/dev.tsv", "a/c/../dev.tsv", "a/dev.jsonl"):
        with pytest.raises(SettingsError, match="names one file twice, or files that differ by their ending"):
            sets("a/dev.tsv", again)


def test_labels_are_those_of_all_training_files(tmp_path):
    (tmp_path / "task.yaml").write_text(YAML.replace("train.tsv", "{a: a.tsv, b: b.tsv}"))
    own = settings(
        str(tmp_path / "task.yaml"),
        write(tmp_path, {"a.tsv": ROWS, "b.tsv": ["text\tlabel", "c\tz", "d\tw"], "dev.tsv": ROWS}),
    )
    assert open_task(own).task.labels == ("w", "x", "y", "z")
    assert [row.label for row in examples_of(own, "train").rows] == [1, 2, 3, 0]


def test_names_and_folders_that_are_not_there(tmp_path):
    with pytest.raises(UsageError, match="did you mean MNLI"):
        find_task("MNIL")
    with pytest.raises(DataError, match="no such folder"):
        examples_of(settings("RTE", tmp_path / "nowhere"), "train")
    with pytest.raises(DataError, match="no such file"):
        examples_of(settings("RTE", train_data=[str(tmp_path / "a.tsv")]), "train")
    with pytest.raises(SettingsError, match="2 files, and training takes one"):
        examples_of(settings("RTE", train_data=["a", "b"]), "train")
    write(tmp_path, {"train.json": [json.dumps(dict(text="t", label="true"))], "dev.json": []})
    with pytest.raises(DataError, match="is not as CLUEWSC has them"):
        examples_of(settings("CLUEWSC", tmp_path), "train")


@pytest.mark.parametrize("name", ["cluewsc2020", "CLUEWSC2020", "CLUEWSC", "cluewsc"])
def test_folders_of_cluewsc(name, tmp_path):
    """Published as CLUEWSC2020; of several folders the published name's is read."""
    row = json.dumps(CLUE_ROWS["CLUEWSC"][0][0])
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one / "csl", one / name, two / "CLUEWSC", two / "zz-wsc"):
        write(folder, {"train.json": [row], "dev.json": [row]})
    (one / "wsc").touch()  # no folder
    assert len(examples_of(settings("CLUEWSC", one), "valid").rows) == 1
    write(two / "cluewsc2020", {"train.json": [row], "dev.json": [row] * 3})
    assert len(examples_of(settings("CLUEWSC", two), "valid").rows) == 3


def test_classes_without_examples_are_told(tmp_path):
    (tmp_path / "task.yaml").write_text(YAML + "labels: [x, y, z]\n")
    own = settings(str(tmp_path / "task.yaml"), write(tmp_path, {"train.tsv": ROWS, "dev.tsv": ROWS}))
    assert "no example of 1 of 3 classes: z" in examples_of(own, "train").notes[0]


def test_figures_and_predictions_of_each_set(tmp_path):
    """MNLI has two sets, each with a file of its own for the leaderboard; the picture needs matplotlib."""
    files, _ = GLUE_FILES["MNLI"]
    examples = examples_of(settings("MNLI", write(tmp_path / "MNLI", files)), "valid")
    measures = TaskMeasures.__new__(TaskMeasures)
    measures.task, measures.folder = find_task("MNLI"), str(tmp_path / "out")
    logits = np.log([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]).astype(np.float32) + 3  # of the right class, and a wrong one
    found = measures.judged(logits, examples, "validation", final=True, rank=0)
    assert found == {"accuracy matched": 1.0, "accuracy mismatched": 0.0}
    assert (tmp_path / "out" / "validation-MNLI-m.tsv").read_text() == "index\tprediction\n0\tneutral\n"
    assert (tmp_path / "out" / "validation-MNLI-mm.tsv").read_text() == "index\tprediction\n0\tcontradiction\n"
    said = (tmp_path / "out" / "validation-MNLI-mm.probabilities.tsv").read_text().splitlines()
    assert said == ["index\tcontradiction\tentailment\tneutral", "0\t0.500000\t0.250000\t0.250000"]
    pictures = {path.name for path in (tmp_path / "out").glob("*.png")}
    drawn = {"confusion-validation-matched.png", "confusion-validation-mismatched.png"}
    assert pictures == (drawn if find_spec("matplotlib") else set())
    unknown = replace(examples, rows=tuple(row._replace(label=None) for row in examples.rows))
    assert measures.judged(logits, unknown, "test", final=True, rank=0) == {}
    assert (tmp_path / "out" / "MNLI-m.tsv").exists() and (tmp_path / "out" / "MNLI-mm.tsv").exists()


def test_predictions_as_clue_takes_them(tmp_path):
    write_predictions(find_task("TNEWS"), [2, 14], ["0", "1"], tmp_path / "tnews_predict.json")
    assert [json.loads(line) for line in (tmp_path / "tnews_predict.json").read_text().splitlines()] == [
        dict(id=0, label="102"),
        dict(id=1, label="116"),
    ]
    write_predictions(find_task("STSB"), [2.5, -0.00012345678], ["0", "1"], tmp_path / "STS-B.tsv")
    assert (tmp_path / "STS-B.tsv").read_text() == "index\tprediction\n0\t2.5\n1\t-0.000123457\n"


def test_predictions_are_whole_or_those_before(tmp_path, monkeypatch):
    write_predictions(find_task("SST2"), [0, 1], ["0", "1"], path := tmp_path / "SST-2.tsv")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="predictions cannot be written: .*No space left"):
        write_predictions(find_task("SST2"), [1, 1], ["0", "1"], path)
    assert path.read_text() == "index\tprediction\n0\t0\n1\t1\n"


def test_labels_are_no_formulas(tmp_path):
    """Matplotlib takes what is between dollars for one, and fails where it is none."""
    drawn = draw_confusion(np.eye(2, dtype=int), ["$a_$", "$b^{$"], tmp_path / "confusion.png")
    assert drawn == (tmp_path / "confusion.png" if find_spec("matplotlib") else None)


@pytest.mark.skipif(not find_spec("matplotlib"), reason="a picture needs matplotlib")
def test_a_confusion_matrix_is_drawn_by_the_shares_of_each_gold_class(tmp_path, monkeypatch):
    """In its rows, with the counts, which are white on dark squares; a class without examples has none."""
    from matplotlib.axes import Axes

    shown, texts = [], {}
    imshow = lambda axes, values, **how: shown.append(values)
    write = lambda axes, x, y, text, **how: texts.update({(y, x): (text, how["color"])})
    monkeypatch.setattr(Axes, "imshow", imshow), monkeypatch.setattr(Axes, "text", write)
    counts = [[1, 3, 0], [0, 0, 0], [2, 1, 1]]
    assert draw_confusion(np.array(counts), ["a", "b", "c"], tmp_path / "confusion.png").stat().st_size
    shares = [[0.25, 0.75, 0], [0, 0, 0], [0.5, 0.25, 0.25]]
    assert shown[0].tolist() == shares
    told = {(y, x): (str(counts[y][x]), "white" if shares[y][x] > 0.5 else "black") for y in range(3) for x in range(3)}
    assert texts == told


def test_each_setting_that_decides_examples_is_part_of_what_is_kept(tmp_path):
    """Each changed alone, after others were read, gives what it gives when nothing was read before."""
    lines = {name: ["text\tlabel\tmore", *(f"{word}\t{name}{word}\tz" for word in "xyxy")] for name in ("", "w")}
    for folder, rows in ("one", lines[""]), ("other", [*lines[""], "n\tx\tz"]):
        write(tmp_path / folder, dict.fromkeys(("train.tsv", "dev.tsv", "test.tsv", "two.tsv"), rows))
    write(tmp_path / "one", {"two.tsv": lines[""][:3]})
    (tmp_path / "own.yaml").write_text(f"{YAML}test: test.tsv\n")
    (tmp_path / "other.yaml").write_text(f"{YAML}test: test.tsv\n".replace("text: text", "text: more"))
    soft = tmp_path / "soft.tsv"
    soft.write_text("index\tx\ty\n" + "".join(f"{n}\t0.25\t0.75\n" for n in range(4)))
    base = TaskSettings(task=str(tmp_path / "own.yaml"), task_data=str(tmp_path / "one"))
    changes = dict(task=str(tmp_path / "other.yaml"), task_data=str(tmp_path / "other"), labels=["y", "x"])
    changes |= dict.fromkeys(("train_data", "valid_data", "test_data"), [str(tmp_path / "one" / "two.tsv")])
    changes |= dict(examples_per_class=1, soft_labels=[str(soft)])
    forget = lambda: (kept_settings._open.cache_clear(), kept_settings._examples.cache_clear())
    read = lambda own: [examples_of(own, split) for split in ("train", "valid", "test")]
    before = read(base)
    for name, value in changes.items():
        found = read(replace(base, **{name: value}))
        forget()
        assert found == read(replace(base, **{name: value})) and found != before, name
        assert read(base) == before
