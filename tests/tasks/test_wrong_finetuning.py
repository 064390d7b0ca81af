# SPDX-License-Identifier: Apache-2.0
"""Command lines of finetune.py that cannot work: one message each, which says what to do."""

import json
import re
import shutil
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import finetune
import pretrain_gpt
from megatron.errors import Failure, SettingsError
from megatron.tools import checkpoint, generate, lm_eval
from tests.tasks.classification import SIZE, Toy
from tests.tasks.test_finetune import TUNE, trunk, tune  # noqa: F401

WRONG = {  # command line -> exit code, what the message says; {toy}, {trunk}, {empty}: folders
    "--task SST3 --load {trunk}": (2, "there is no such task; did you mean SST2?"),
    "--task chatt --load {trunk}": (2, r"(?s)there is no such task; did you mean chat\?.* chat, dpo"),
    "--task CLUE-CMRC --load {trunk}": (4, "--task CMRC2018: there is no training file"),
    "--task CLUE-MULTITASK --load {trunk}": (2, "--task-mixture"),
    "--load {trunk}": (2, "--task"),
    "--task {toy}/toy.yaml --data-path {toy}": (2, "there is no model to fine-tune"),
    "--task {toy}/none.yaml --load {trunk}": (4, "none.yaml"),
    "--task {alone}/toy.yaml --load {trunk}": (4, "there is no training file"),
    "--task {half}/toy.yaml --load {trunk}": (4, "half has no valid.tsv"),
    "--task RTE --data-path {empty} --load {trunk}": (4, "has no train.tsv"),
    "--task {toy}/toy.yaml --data-path {toy} --load {empty}": (5, "empty holds no checkpoint"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --ckpt-step 77": (5, "no checkpoint of iteration 77"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --save {trunk}": (3, "holds the model that the run begins"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --predictions {toy}/toy.yaml": (
        6,
        "is a file, not a folder",
    ),
    "--task {toy}/odd.yaml --data-path {toy} --load {trunk}": (4, "there is no setting lrr; did you mean lr"),
    "--task {toy}/rate.yaml --data-path {toy} --load {trunk}": (4, "rate.yaml: settings: lr 'high' is not a number"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --examples-per-class 1": (
        3,
        "6 training samples (.*)--train-epochs 2(.*) do not fill a batch of --global-batch-size 8",
    ),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --no-full-validation": (3, "metrics are over all examples"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --predictions {toy}/toy.yaml/below": (
        6,
        "predictions cannot be written(.*)\\n(.*)--predictions",
    ),
    "--task {toy}/free.yaml --data-path {toy} --load {trunk} --train-data {toy}/head.tsv": (4, "no labelled examples"),
    "--task {toy}/free.yaml --data-path {toy} --load {trunk} --train-data {toy}/one.tsv": (4, "have the label 'red'"),
    "--task {toy}/toy.yaml --data-path {toy} --pretrained-checkpoint {empty}": (5, "holds no checkpoint"),
    "--task {toy}/toy.yaml --data-path {toy} --pretrained-checkpoint {trunk} --load {trunk}": (
        5,
        "nothing|no run of fine-tuning",
    ),
    "--task {toy}/toy.yaml --data-path {toy} --load {hf}": (5, "from-hf"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --num-layers 3": (
        3,
        "num-layers: 2 in the checkpoint, 3 now",
    ),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --backbone BERT9": (
        3,
        "--backbone BERT9: fine-tuning knows",
    ),
    "--task {toy}/other.yaml --data-path {toy} --load {trunk}": (4, "a task cannot give another one"),
    "--task {toy}/start.yaml --data-path {toy}": (5, "--load nowhere holds no checkpoint"),
    "--task {toy}/sets.yaml --data-path {toy} --load {trunk}": (4, "valid has two sets of one name"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --patience 0": (3, "--patience 0 must be at least 1"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --examples-per-class 0": (3, "must be at least 1"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --pet-pattern x": (3, "belong together"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --pooling first": (3, "one of last, mean"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --pooling mean --pet-pattern {{text}}{{label}} "
    "--pet-verbalizer words.json": (3, "--pooling mean is of a head"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --word-dropout 1": (3, "less than 1"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --word-dropout 0.1 --pet-pattern {{text}}{{label}} "
    "--pet-verbalizer words.json": (3, "--word-dropout 0.1 hides words from a head"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --labels red": (3, "at least two classes"),
    "--task {toy}/numbers.yaml --data-path {toy} --load {trunk} --labels red green": (3, "are numbers, not classes"),
    "--task {alone}/free.yaml --load {trunk} --skip-train --test-data {toy}/test.tsv": (3, "does not say its labels"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --labels red green violet": (4, "the label 'blue' is none"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --valid-data no.tsv": (4, "no.tsv: no such file"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --train-iters 4": (3, "train-epochs|--train-iters"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --context-parallel-size 2": (3, "context-parallel-size"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --eval-requests x": (3, "does not continue texts"),
    "--task {toy}/toy.yaml --data-path {toy} --load {trunk} --seq-length 99": (3, "seq-length 99 is longer"),
}
SOFT = "--data-path {toy} --load {trunk} --soft-labels {toy}/"
WRONG |= {
    f"--task {{toy}}/toy.yaml {SOFT}none.tsv": (4, "none.tsv: No such file"),
    f"--task {{toy}}/toy.yaml {SOFT}toy.yaml": (4, "is no table of probabilities"),
    f"--task {{toy}}/toy.yaml {SOFT}soft-short.tsv": (4, "has 1 examples, and the training file 21"),
    f"--task {{toy}}/toy.yaml {SOFT}soft-labels.tsv": (4, "has probabilities of red, violet, blue"),
    f"--task {{toy}}/toy.yaml {SOFT}soft-words.tsv": (4, "line 2: no 3 probabilities"),
    f"--task {{toy}}/toy.yaml {SOFT}soft-sum.tsv": (4, "add up to 0.9000, not to 1"),
    f"--task {{toy}}/toy.yaml {SOFT}soft-others.tsv": (4, "line 2: example train1, where training has train0"),
    f"--task {{toy}}/toy.yaml {SOFT}soft0.tsv --train-data valid.tsv": (4, "21 examples, and the training file 11"),
    f"--task {{toy}}/toy.yaml {SOFT}soft0.tsv --examples-per-class 3": (3, "leave out --examples-per-class"),
    f"--task {{toy}}/toy.yaml {SOFT}soft0.tsv --pet-pattern {{{{text}}}}{{{{label}}}} --pet-verbalizer w "
    "--pet-loss words": (3, "leave out --pet-loss words"),
    f"--task {{toy}}/numbers.yaml {SOFT}soft0.tsv": (3, "are numbers, not classes"),
}


@pytest.fixture(scope="module")
def places(trunk, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty").mkdir()
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(dict(model_type="gpt2")))
    toy = Toy(folder / "toy", soft=True)
    write_wrong_soft_labels(toy.folder)
    (toy.folder / "numbers.yaml").write_text(
        "name: toy\ntext: first\nlabel: number\ntrain: train.tsv\nregression: true\nvalid: valid.tsv"
    )
    free = "\n".join(line for line in toy.yaml.read_text().splitlines() if not line.startswith("labels"))
    (toy.folder / "free.yaml").write_text(free)
    (toy.folder / "rate.yaml").write_text(f"{free}\nsettings: {{lr: high}}\n")
    (toy.folder / "odd.yaml").write_text(f"{free}\nsettings: {{lrr: 1.0e-3}}\n")
    (toy.folder / "other.yaml").write_text(f"{free}\nsettings: {{task: SST2}}\n")
    (toy.folder / "start.yaml").write_text(f"{free}\nsettings: {{load: nowhere}}\n")
    (toy.folder / "sets.yaml").write_text(free.replace("valid: valid.tsv", "valid: {1: valid.tsv, '1': test.tsv}"))
    lines = (toy.folder / "train.tsv").read_text().splitlines()
    (toy.folder / "head.tsv").write_text(lines[0] + "\n")
    (toy.folder / "one.tsv").write_text(
        "\n".join([lines[0], *(line for line in lines if line.endswith("\tred"))]) + "\n"
    )
    for name, files in dict(alone=("toy.yaml", "free.yaml"), half=("toy.yaml", "train.tsv")).items():
        (folder / name).mkdir()
        for file in files:
            shutil.copy(toy.folder / file, folder / name)
    return dict(toy=toy.folder, trunk=trunk, **{name: folder / name for name in ("empty", "hf", "alone", "half")})


def write_wrong_soft_labels(folder) -> None:
    header, first, *rows = (folder / "soft0.tsv").read_text().splitlines()
    files = {
        "short": [header, first],
        "labels": [header.replace("green", "violet"), first, *rows],
        "words": [header, "train0\t0.5\thalf\t0", *rows],
        "sum": [header, "train0\t0.5\t0.2\t0.2", *rows],
        "others": [header, *rows, first],
    }
    for name, lines in files.items():
        (folder / f"soft-{name}.tsv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_work_is_told(line, places):
    code, told = WRONG[line]
    with pytest.raises(Failure, match=told) as problem:
        finetune.main(f"{line.format(**places)} {TUNE}".split())
    assert problem.value.code == code, problem.value


def test_a_folder_for_predictions_is_tried_ahead_of_training(places, capsys):
    line = f"--task {places['toy']}/toy.yaml --data-path {places['toy']} --load {places['trunk']} {TUNE}"
    with pytest.raises(Failure, match="predictions cannot be written") as problem:
        finetune.main(f"{line} --predictions {places['toy']}/toy.yaml/below".split())
    assert problem.value.code == 6 and not re.search("iteration +[0-9]+/", capsys.readouterr().out)


@pytest.mark.sampled(2)
def test_a_run_goes_on_with_the_same_task_alone(places, tmp_path):
    other = Toy(tmp_path / "other", regression=True)
    save = tmp_path / "run"
    tune(
        0, f"--task {places['toy']}/toy.yaml --data-path {places['toy']} --load {places['trunk']} --save {save} {TUNE}"
    )
    with pytest.raises(Failure, match="task"):
        tune(0, f"--task {other.yaml} --data-path {other.folder} --load {save} {TUNE}")


@pytest.mark.sampled(2)
def test_a_vocabulary_of_the_checkpoints_rows(places, tmp_path):
    """--vocab-size of NullTokenizer is one less than the rows, which state.json has. The advice works."""
    (tmp_path / "run.yaml").write_text("tokenizer_type: NullTokenizer\nvocab_size: 100\n")
    toy, model = places["toy"], tmp_path / "model"
    size = f"{SIZE} --then --vocab-size 99"
    pretrain_gpt.main(f"{size} --mock-data --train-iters 1 --lr 1 --save {model}".split())
    line = f"-c {tmp_path / 'run.yaml'} --task {toy}/toy.yaml --data-path {toy} --load {model} {TUNE}"
    with pytest.raises(
        SettingsError, match=r"of 100, this run one of 101\n(.*) one more (.*)\n  -> give --vocab-size 99"
    ):
        tune(0, line)
    tune(0, f"{line} --vocab-size 99")


def test_a_head_has_no_words(places, tmp_path, monkeypatch):
    save = tmp_path / "run"
    tune(
        0, f"--task {places['toy']}/toy.yaml --data-path {places['toy']} --load {places['trunk']} --save {save} {TUNE}"
    )
    if find_spec("lm_eval") is None:  # which is not asked
        monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    for main, words in ((generate.main, "--prompt 5"), (lm_eval.main, "--tasks a")):
        with pytest.raises(SettingsError, match="in the place of the output layer: it has no words"):
            main(f"--load {save}/best --device cpu {words}".split())
    with pytest.raises(SettingsError, match="in the place of the output layer: it has no words"):
        checkpoint.main(["to-hf", str(save), str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()


def test_random_weights_need_a_tokenizer(places):
    shape = SIZE.replace("--tokenizer-type NullTokenizer", "").replace(
        "--micro-batch-size 2 --device cpu --num-workers 0", ""
    )
    with pytest.raises(Failure, match="tokenizer|vocab"):
        tune(
            0,
            f"--task {places['toy']}/toy.yaml --data-path {places['toy']} {shape} {TUNE}".replace(
                "--vocab-size 100", ""
            ),
        )
