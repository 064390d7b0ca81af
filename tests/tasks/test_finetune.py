# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning against the same in plain torch, in each layout: losses, gradients, weights, predictions, figures."""

import base64
import json
import re

import pytest
import torch

import finetune
import pretrain_gpt
from megatron.errors import DataError, SettingsError
from megatron.inference.load import load_model
from megatron.tools import report
from tests.ranks import on_ranks, trains
from tests.tasks.classification import LABELS, SIZE, Toy, losses, outputs, train
from tests.tools.test_report import curves
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

TUNE = (
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant --lr-warmup-fraction 0 --adam-eps 1e-4 "
    "--weight-decay 0.01 --train-epochs 2 --log-interval 1 --device cpu --num-workers 0"
)
STEPS = 5  # 2 x 21 examples in batches of 8
LAYOUTS = {
    "one process": (1, ""),
    "tp3": (3, "--tensor-model-parallel-size 3"),
    "tp3 with sequence parallelism": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "pp2 zb-h1": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "tp3 with sequence parallelism, the mean of all tokens": (
        3,
        "--tensor-model-parallel-size 3 --sequence-parallel --pooling mean",
    ),
    "pp2 with hidden words": (2, "--pipeline-model-parallel-size 2 --micro-batch-size 4 --word-dropout 0.4"),
    "pp2 with soft labels": (2, "--pipeline-model-parallel-size 2"),
    "zero3": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    """A folder with a pretrained checkpoint."""
    folder = tmp_path_factory.mktemp("trunk")
    pretrain_gpt.main(f"{SIZE} --mock-data --train-iters 2 --lr 1e-2 --eval-iters 0 --save {folder}".split())
    return folder


tune = trains(finetune)


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {name: values.detach() for name, values in load_model(str(folder)).model.named_parameters()}


SLOW = [pytest.param(name, marks=pytest.mark.full) if name in ("tp3", "zero3") else name for name in LAYOUTS]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", SLOW)
def test_any_layout_is_the_plain_loop(layout, trunk, tmp_path):
    world, words = LAYOUTS[layout]
    pooling = "mean" if "mean" in layout else "last"
    toy = Toy(tmp_path / "toy", pairs="tp3" in layout, pooling=pooling, soft="soft" in layout)
    toy.word_dropout = 0.4 if "hidden" in layout else 0.0
    if toy.soft:
        words += f" --soft-labels {toy.folder / 'soft0.tsv'} {toy.folder / 'soft1.tsv'}"
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {words}"
    on_ranks(world, tune, line)
    steps, weights = train(weights_of(trunk), toy, STEPS, 8, 1e-2)
    found = records(tmp_path / "run", "step")
    assert [{name: step[name] for name in ("loss", "grad_norm")} for step in found] == [
        pytest.approx(step, rel=2e-5) for step in steps
    ]
    for name, values in weights_of(tmp_path / "run").items():
        assert (values[: len(weights[name])].double() - weights[name]).abs().max() < 2e-5, name
    check_evaluations(tmp_path / "run", toy)


def test_a_head_alone_is_trained(trunk, run_ranks, tmp_path):
    """On a stage whose input nobody learns from."""
    toy, flags = Toy(tmp_path / "toy"), "--train-only head.* --pipeline-model-parallel-size 2"
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {flags}"
    run_ranks(2, tune, line)
    first, last = weights_of(trunk), weights_of(tmp_path / "run")
    same = {name: torch.equal(values, first[name]) for name, values in last.items() if name in first}
    assert all(same.values()) and {*last} - {*same} == {"head.weight"} and last["head.weight"].abs().max() > 0.01


def check_evaluations(folder, toy: Toy) -> None:
    """The figures of each evaluation, and the predictions at the end, are those of the plain network with the weights
    that were kept.
    """
    evals = records(folder, "eval")
    at_the_end = [record for record in evals if record["final"]]
    assert [(record["split"], record["final"]) for record in evals] == [
        ("validation", False),
        ("validation", False),
        ("validation", True),
        ("test", True),
    ]
    best = {name: values.double() for name, values in weights_of(folder / "best").items()}
    gold = torch.tensor([label for *_, label in toy.rows["valid"]])
    right = outputs(best, toy.tokens("valid"), toy.pooling).argmax(1) == gold
    assert at_the_end[0]["accuracy"] == pytest.approx(right.double().mean().item(), abs=1e-9)
    assert at_the_end[0]["accuracy"] == max(record["accuracy"] for record in evals[:2])
    assert at_the_end[0]["loss"] == pytest.approx(losses(best, toy, "valid").mean().item(), rel=2e-5)
    told = [line.split("\t") for line in (folder / "predictions" / "toy.tsv").read_text().splitlines()]
    wanted = outputs(best, toy.tokens("test"), toy.pooling).argmax(1).tolist()
    assert told == [["index", "prediction"], *([f"test{n}", LABELS[one]] for n, one in enumerate(wanted))]
    assert "loss" not in at_the_end[1]  # nobody knows the labels


def test_what_is_told_at_the_end_is_of_the_best_weights(trunk, tmp_path):
    toy = Toy(tmp_path / "toy")
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE}"
    tune(0, f"{line} --train-epochs 6")
    *evals, final = [one for one in records(tmp_path / "run", "eval") if one["split"] == "validation"]
    best = max(evals, key=lambda one: one["accuracy"])  # the first of equal ones
    assert best["iteration"] < evals[-1]["iteration"] and best["loss"] != evals[-1]["loss"]
    assert (final["accuracy"], final["loss"]) == (best["accuracy"], best["loss"])
    log = (tmp_path / "run" / "train.log").read_text()  # they are of that iteration, not of the last one
    assert f" validation loss at iteration {best['iteration']} on validation set | loss value: " in log
    assert " on test set | none: its samples have no labels | \n" in log
    assert (final["iteration"], final["weights_of"]) == (evals[-1]["iteration"], best["iteration"])
    assert [path.name for path in (tmp_path / "run" / "best").glob("iter_*")] == [f"iter_{best['iteration']:07d}"]
    last = {name: values.double() for name, values in weights_of(tmp_path / "run").items()}
    told = [line.split("\t")[1] for line in (tmp_path / "run/predictions/validation-toy.tsv").read_text().splitlines()]
    assert told[1:] != [LABELS[one] for one in outputs(last, toy.tokens("valid")).argmax(1).tolist()]


def test_numbers_are_learned_by_their_square_error(trunk, tmp_path):
    toy = Toy(tmp_path / "toy", regression=True)
    tune(0, f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE}")
    steps, weights = train(weights_of(trunk), toy, STEPS, 8, 1e-2)
    found = records(tmp_path / "run", "step")
    assert [step["loss"] for step in found] == [pytest.approx(step["loss"], rel=2e-5) for step in steps]
    told = (tmp_path / "run" / "predictions" / "validation-toy.tsv").read_text().splitlines()[1:]
    best = {name: values.double() for name, values in weights_of(tmp_path / "run" / "best").items()}
    wanted = outputs(best, toy.tokens("valid"), toy.pooling)[:, 0].tolist()
    assert [float(line.split("\t")[1]) for line in told] == pytest.approx(wanted, abs=6e-4)


def test_what_one_model_predicts_another_learns_without_labels(trunk, tmp_path):
    """The file of probabilities that an evaluation writes, of texts whose labels nobody knows."""
    toy = Toy(tmp_path / "toy")
    tune(0, f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'first'} {TUNE}")
    written = tmp_path / "first" / "predictions" / "toy.probabilities.tsv"
    common = f"--data-path {toy.folder} --load {trunk} --train-data test.tsv --soft-labels {written} {TUNE}"
    tune(0, f"--task {toy.yaml} {common} --save {tmp_path / 'second'}")
    best = {name: values.double() for name, values in weights_of(tmp_path / "first" / "best").items()}
    toy.rows["train"], toy.soft = toy.rows["test"], True
    toy.shares = outputs(best, toy.tokens("test")).softmax(-1)
    steps, _ = train(weights_of(trunk), toy, 1, 8, 1e-2)
    found = records(tmp_path / "second", "step")
    assert found[0]["loss"] == pytest.approx(steps[0]["loss"], rel=2e-5)
    free = tmp_path / "free.yaml"  # the labels stand in the file of probabilities
    free.write_text("\n".join(line for line in toy.yaml.read_text().splitlines() if "labels" not in line))
    tune(0, f"--task {free} {common} --save {tmp_path / 'third'}")
    assert [step["loss"] for step in records(tmp_path / "third", "step")] == [step["loss"] for step in found]


def test_a_run_that_was_stopped_goes_on_to_the_same_end(trunk, tmp_path):
    toy = Toy(tmp_path / "toy")
    common = f"--task {toy.yaml} --data-path {toy.folder} {TUNE} --pretrained-checkpoint {trunk}"
    tune(0, f"{common} --save {tmp_path / 'whole'}")
    cut = f"{common} --save {tmp_path / 'cut'} --load {tmp_path / 'cut'}"
    tune(0, f"{cut} --exit-interval 3")
    tune(0, cut)
    whole, cut = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    evals = [records(tmp_path / name, "eval") for name in ("whole", "cut")]
    assert [[record["accuracy"] for record in found if "accuracy" in record] for found in evals][0] == [
        record["accuracy"] for record in evals[1] if "accuracy" in record
    ]


def test_an_evaluation_alone_does_not_ask_what_was_learned_and_how(trunk, tmp_path, capsys):
    toy = Toy(tmp_path / "toy", soft=True)
    common = f"--task {toy.yaml} --data-path {toy.folder} {TUNE}"
    tune(
        0,
        f"{common} --load {trunk} --save {tmp_path / 'run'} --word-dropout 0.4 --soft-labels {toy.folder / 'soft0.tsv'} "
        f"--train-data {toy.folder / 'train.tsv'}",
    )
    capsys.readouterr()
    with pytest.raises(SettingsError, match="train-data(.|\n)*word-dropout(.|\n)*soft-labels"):
        tune(0, f"{common} --load {tmp_path / 'run'}")
    tune(0, f"{common} --load {tmp_path / 'run' / 'best'} --skip-train --predictions {tmp_path / 'again'}")
    assert "--word-dropout was 0.4 in the checkpoint, is 0.0 now" in capsys.readouterr().out
    first, again = (folder / "validation-toy.tsv" for folder in (tmp_path / "run" / "predictions", tmp_path / "again"))
    assert first.read_text() == again.read_text()


def test_it_is_the_same_run_however_its_task_is_said(trunk, tmp_path, monkeypatch):
    """Another path of the file, what the head sees said in words; and a length, and a set with a name, out of the file."""
    toy = Toy(tmp_path / "toy")
    text = toy.yaml.read_text().replace("valid: valid.tsv", "valid: {dev: valid.tsv}")
    toy.yaml.write_text(f"{text}settings: {{train_iters: 3, eval_interval: 2}}\n")
    short = TUNE.replace("--train-epochs 2", f"--data-path {toy.folder}")
    tune(0, f"--task {toy.yaml} {short} --load {trunk} --save {tmp_path}/run")
    assert [one["iteration"] for one in records(tmp_path / "run", "step")] == [1, 2, 3]
    monkeypatch.chdir(toy.folder)
    tune(0, f"--task toy.yaml {short} --load {tmp_path}/run --pooling last --skip-train --predictions {tmp_path}/again")
    found = [record for record in records(tmp_path / "run", "eval") if record["split"] == "validation"]
    best = max(record["accuracy dev"] for record in found)
    assert found[-1]["accuracy dev"] == best
    both = [(folder / "validation-toy-dev.tsv") for folder in (tmp_path / "run" / "predictions", tmp_path / "again")]
    assert all(path.exists() for path in both)
    with pytest.raises(SettingsError, match="--pooling: last in the checkpoint, mean now"):
        tune(0, f"--task toy.yaml {short} --load {tmp_path}/run --pooling mean")
    tune(0, f"--task toy.yaml {short} --load {trunk} --save {tmp_path}/epoch --train-epochs 1")
    assert len(records(tmp_path / "epoch", "step")) == 2  # the command line's length goes before the file's


def test_files_lie_beside_the_task_and_a_report_shows_its_metric_first(trunk, tmp_path, monkeypatch, capsys):
    """Data and checkpoint are named as they lie there; nobody says a micro-batch; for its page the run is moved."""
    toy, elsewhere = Toy(tmp_path / "toy"), tmp_path / "elsewhere"
    (toy.folder / "trunk").symlink_to(trunk)
    toy.yaml.write_text(f"{toy.yaml.read_text()}settings: {{load: trunk, save: run}}\n")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "valid.tsv").write_text("id\tfirst\tlabel\na\t1 2\tred\nb\t1 2\tgreen\n")  # what is here goes first
    tune(0, f"--task ../toy/toy.yaml {TUNE} --micro-batch-size auto")
    told = capsys.readouterr().out
    assert (
        f"train: 21 examples of toy ({toy.folder}/train.tsv)" in told and "valid: 2 examples of toy (valid.tsv)" in told
    )
    assert "--micro-batch-size auto: 8 is expected to be the fastest" in told
    (elsewhere / "run").rename(tmp_path / "moved")
    report.main([str(tmp_path / "moved")])
    page = (tmp_path / "moved" / "report.html").read_text()
    values = [one["accuracy"] for one in records(tmp_path / "moved", "eval") if one["split"] == "validation"]
    first, second = re.findall(r'<div class="tile"><b>([^<]*)</b><span>([^<]*)', page)[:2]
    assert first == (f"{max(values):.4f}", "accuracy") and second[1] == "training loss"
    assert re.findall("<figcaption>([^<]*)", page) == ["Confusion matrix, validation"]
    assert {"loss", "accuracy"} <= curves(page).keys()
    drawn = (tmp_path / "moved" / "predictions" / "confusion-validation.png").read_bytes()
    assert base64.b64encode(drawn).decode() in page


def test_patience_and_a_loss_that_is_reached_end_training(trunk, tmp_path, capsys):
    toy = Toy(tmp_path / "toy")
    common = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} {TUNE} --train-epochs 9 --lr 1e-12"
    tune(0, f"{common} --save {tmp_path / 'patient'} --patience 2")  # nothing changes: the first evaluation is the best
    epochs = [record["iteration"] for record in records(tmp_path / "patient", "eval") if not record["final"]]
    assert len(epochs) == 3 and "training ends at iteration 8 of 23: --patience 2" in capsys.readouterr().out
    tune(0, f"{common} --save {tmp_path / 'reached'} --stop-at-loss 100")
    assert "--stop-at-loss 100: the last evaluation had" in capsys.readouterr().out
    evals = records(tmp_path / "reached", "eval")
    assert [(record["iteration"], record["final"]) for record in evals] == [(3, False), (3, True), (3, True)]
    assert json.loads((tmp_path / "reached" / "metrics.jsonl").read_text().splitlines()[-1])["kind"] == "end"


def test_a_head_is_new_whatever_task_the_weights_are_of(trunk, tmp_path, capsys):
    """A trunk that was tuned on one task begins another."""
    first, second = Toy(tmp_path / "a"), Toy(tmp_path / "b", regression=True)
    tune(0, f"--task {first.yaml} --data-path {first.folder} --load {trunk} --save {tmp_path / 'first'} {TUNE}")
    capsys.readouterr()
    other = f"--task {second.yaml} --data-path {second.folder} --load {tmp_path / 'first'} --finetune"
    tune(0, f"{other} --save {tmp_path / 'second'} {TUNE}")
    assert "new, and not out of the checkpoint: head.weight" in capsys.readouterr().out
    steps, _ = train(
        {name: values for name, values in weights_of(tmp_path / "first").items() if name != "head.weight"},
        second,
        STEPS,
        8,
        1e-2,
    )
    assert records(tmp_path / "second", "step")[0]["loss"] == pytest.approx(steps[0]["loss"], rel=2e-5)


def test_a_run_keeps_the_labels_of_its_training_file(trunk, tmp_path):
    """A head's outputs have the labels that were learned, whatever the training file holds later, or without one."""
    toy = Toy(tmp_path / "toy")
    text = "\n".join(line for line in toy.yaml.read_text().splitlines() if not line.startswith("labels"))
    toy.yaml.write_text(f"{text}\n")
    tune(0, f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE}")
    again = (
        f"--task {toy.yaml} --load {tmp_path / 'run' / 'best'} --skip-train --predictions {tmp_path / 'again'} {TUNE}"
    )
    tune(0, f"{again} --test-data {toy.folder / 'test.tsv'}")
    first, second = (
        folder / "toy.probabilities.tsv" for folder in (tmp_path / "run" / "predictions", tmp_path / "again")
    )
    assert first.read_text() == second.read_text() and first.read_text().startswith("index\tblue\tgreen\tred\n")
    with pytest.raises(SettingsError, match="labels: .*'blue', 'green', 'red'.* in the checkpoint, .*'red', 'blue'"):
        tune(0, f"{again} --test-data {toy.folder / 'test.tsv'} --labels green red blue")
    other = tmp_path / "other"
    other.mkdir()
    for file in toy.folder.glob("*.tsv"):  # red has another name there, which stands before blue
        (other / file.name).write_text(file.read_text().replace("\tred\n", "\tazure\n"))
    with pytest.raises(DataError, match="the label 'azure' is none of the task's(.|\n)*toy has blue, green, red"):
        tune(0, f"{again} --data-path {other}")
    tune(0, f"{again.replace('--skip-train', '--finetune')} --data-path {other}")  # a new head has new labels
    assert (tmp_path / "again" / "toy.probabilities.tsv").read_text().startswith("index\tazure\tblue\tgreen\n")


def test_settings_may_stand_in_a_file(trunk, tmp_path):
    """Those that decide where a run begins, too; and a task's rate may be written as YAML has no numbers."""
    toy = Toy(tmp_path / "toy")
    toy.yaml.write_text(toy.yaml.read_text() + "settings: {lr: 1e-2}\n")
    words, found = TUNE.replace("--lr 1e-2", ""), []
    places = dict(pretrained_checkpoint=trunk, task=toy.yaml, data_path=toy.folder)
    for name in ("flags", "file"):
        here = {**places, "load": tmp_path / name, "save": tmp_path / name}
        if name == "flags":
            tune(0, " ".join(f"--{key.replace('_', '-')} {value}" for key, value in here.items()) + f" {words}")
        else:
            (tmp_path / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in here.items()))
            tune(0, f"--config {tmp_path / 'run.yaml'} --use-checkpoint-args {words}")
        found.append([(record["loss"], record["learning_rate"]) for record in records(tmp_path / name, "step")])
    assert found[0] == found[1] and found[0][0][1] == 1e-2
