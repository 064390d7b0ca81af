# SPDX-License-Identifier: Apache-2.0
"""Which weights of a fine-tuning are the best ones; and that they stay so when a run is called again, goes on, or moves."""

import math
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.settings.from_checkpoint import saved_record
from megatron.telemetry.metrics import Metrics
from megatron.training.measures import Measures, early_end_reason, judge
from tests.tasks.classification import SIZE, Toy
from tests.tasks.test_finetune import TUNE, trunk, tune  # noqa: F401
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)


def validations(folder) -> list[tuple[int, float, bool]]:
    return [
        (record["iteration"], record["accuracy"], record["final"])
        for record in records(folder, "eval")
        if record["split"] == "validation"
    ]


def kept(folder) -> list[str]:
    return [path.name for path in (folder / "best").glob("iter_*")]


@pytest.fixture
def line(trunk, tmp_path):  # noqa: F811
    toy, run = Toy(tmp_path / "toy"), tmp_path / "run"
    return (
        f"--task {toy.yaml} --data-path {toy.folder} --pretrained-checkpoint {trunk} --load {run} --save {run} {TUNE}"
    )


def test_the_last_checkpoint_knows_the_best_weights(line, tmp_path, capsys):
    """The last step's evaluation is the best one: the same command again, and a longer run, have its weights."""
    run = tmp_path / "run"
    tune(0, line)
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f" > predictions: {run}/predictions"
    assert f"{run}/best" in said and said.count("successfully saved checkpoint") == said.count(f"to {run}/iter_")
    (_, first, _), (_, best, _), (_, final, _) = validations(run)
    assert best == final > first and kept(run) == ["iter_0000005"]
    assert saved_record(str(run))[1]["state"]["best_iteration"] == 5
    predictions = (run / "predictions" / "validation-toy.tsv").read_text()
    tune(0, line)
    assert (run / "predictions" / "validation-toy.tsv").read_text() == predictions
    tune(0, f"{line} --skip-train --save {tmp_path / 'alone'}")
    assert not (tmp_path / "alone" / "best").exists()
    tune(0, f"{line} --train-epochs 4 --lr 1")  # such steps spoil it
    assert validations(run)[-1] == (10, best, True) and kept(run) == ["iter_0000005"]


class Killed(BaseException):
    """What no part of a run expects."""


@pytest.fixture
def kill(monkeypatch):
    """kill(n): until `monkeypatch.undo` runs end within their evaluation behind step n."""

    def at(iteration: int):
        def record_eval(self, found, *rest, **more):
            if found == iteration:
                raise Killed
            return whole(self, found, *rest, **more)

        whole = Metrics.record_eval
        monkeypatch.setattr(Metrics, "record_eval", record_eval)

    return at


def state_of(folder) -> dict:
    return saved_record(str(folder))[1]["state"]


EARLY_END = "--save-interval 3 --eval-interval 3 --patience 1 --lr 1e-12 --train-epochs 4"


@pytest.mark.parametrize("iteration, words", [(5, ""), pytest.param(6, EARLY_END, marks=pytest.mark.full)])
def test_an_evaluation_that_was_not_finished_is_made_up_for(
    iteration, words, line, tmp_path, monkeypatch, kill, capsys
):
    """A run that is killed in its last evaluation and goes on judges as one that was not."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    tune(0, f"{line} {words}".replace(str(run), str(whole)))
    kill(iteration)
    with pytest.raises(Killed):
        tune(0, f"{line} {words}")
    monkeypatch.undo()
    tune(0, f"{line} {words}")
    assert state_of(run) == state_of(whole) and kept(run) == kept(whole)
    assert validations(run) == validations(whole)
    predictions = "predictions/validation-toy.tsv"
    assert (run / predictions).read_text() == (whole / predictions).read_text()
    assert state_of(run)["iteration"] == iteration
    capsys.readouterr()
    tune(0, f"{line} {words}")  # it is made up for once
    assert "was not finished" not in capsys.readouterr().out


@pytest.mark.parametrize("loss", [pytest.param(0.1, marks=pytest.mark.full), 9.0])
def test_pretraining_makes_up_for_the_evaluation_that_may_end_it(loss, tmp_path, monkeypatch, kill):
    line = f"{SIZE} --mock-data --train-iters 4 --lr 1e-2 --eval-iters 2 --eval-interval 4 --stop-at-loss {loss}"
    run, whole = (
        f"{line} --load {folder} --save {folder}".split() for folder in (tmp_path / "run", tmp_path / "whole")
    )
    pretrain_gpt.main(whole)
    kill(4)
    with pytest.raises(Killed):
        pretrain_gpt.main(run)
    monkeypatch.undo()
    for words in ([], ["--train-iters", "6"]):
        pretrain_gpt.main([*whole, *words])
        pretrain_gpt.main([*run, *words])
        assert state_of(tmp_path / "run") == state_of(tmp_path / "whole")
    assert state_of(tmp_path / "run")["iteration"] == (4 if loss == 9.0 else 6)


@pytest.mark.parametrize("one", ["", "/iter_0000005"])
def test_a_run_that_goes_on_elsewhere_takes_the_best_weights_along(one, line, tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    tune(0, line)
    best = validations(run)[-1][1]
    predictions = (run / "predictions" / "validation-toy.tsv").read_text()
    tune(0, f"{line} --load {run}{one} --save {other} --train-epochs 4 --lr 1")
    assert validations(other)[-1] == (10, best, True) and kept(other) == ["iter_0000005"]
    run.rename(tmp_path / "gone")
    tune(0, f"{line} --save {other} --load {other} --train-epochs 4 --lr 1")
    assert validations(other)[-1] == (10, best, True) and "WARNING" not in capsys.readouterr().out
    assert (other / "predictions" / "validation-toy.tsv").read_text() == predictions
    if not one:
        return
    (other / "best" / "iter_0000005").rename(tmp_path / "lost")
    tune(0, f"{line} --save {other} --load {other} --train-epochs 5 --lr 1")
    assert "has lost the weights of iteration 5, whose accuracy was best" in capsys.readouterr().out


def test_a_run_that_went_back_has_the_best_weights_that_it_knows(line, tmp_path, capsys):
    """Those in the folder of the best have given way to better ones of steps that do not count any more."""
    run = tmp_path / "run"
    tune(0, f"{line} --save-interval 3 --eval-interval 3")
    assert kept(run) == ["iter_0000005"]
    (run / "iter_0000005").rename(tmp_path / "iter_0000005")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    capsys.readouterr()
    tune(0, f"{line} --lr 1e-12")  # so it stays with what it was
    assert " > the weights of iteration 3, whose accuracy was best" in capsys.readouterr().out
    assert validations(run)[-1][1] == validations(run)[0][1]
    assert sorted(kept(run)) == ["iter_0000003", "iter_0000005"]


@pytest.mark.parametrize("words", ["--train-iters 6 --eval-interval 4", "--train-epochs 3 --eval-epoch 2"])
def test_the_last_weights_compete_with_the_others(words, line, tmp_path):
    tune(0, f"{line.replace('--train-epochs 2', '')} {words}")
    (_, first, _), (last, second, _), (_, final, _) = validations(tmp_path / "run")
    assert last in (6, 7) and final == max(first, second)


def test_patience_needs_no_checkpoint_of_the_best_weights(line, tmp_path, capsys):
    tune(0, f"{line} --train-epochs 9 --lr 1e-12 --patience 2 --no-best-checkpoint")
    assert "training ends at iteration 8 of 23: --patience 2" in capsys.readouterr().out
    assert not (tmp_path / "run" / "best").exists()


def test_what_patience_has_nothing_to_judge_by_is_told(line, capsys):
    tune(0, f"{line.replace('--train-epochs 2', '--train-iters 2')} --patience 1 --stop-at-loss 9")
    told = capsys.readouterr().out
    assert "--patience 1 has no effect without a validation file, and evaluations ahead of the end" in told
    assert "--stop-at-loss 9.0 has no effect" in told


@pytest.mark.sampled(1)
def test_a_figure_that_is_no_number_is_never_the_best(tmp_path):
    measures = type("Own", (Measures,), dict(best_by="mse", patience=2))(None)
    config = SimpleNamespace(batch=SimpleNamespace(stop_at_loss=None))
    from megatron.optimizer.scaler import LossScaler
    from megatron.training.state import State

    losses, checkpoints = SimpleNamespace(measures=measures), SimpleNamespace(best=None)
    run = SimpleNamespace(config=config, losses=losses, state=State(LossScaler(1.0)), checkpoints=checkpoints)
    since = []
    for value in (math.nan, math.nan):
        judge(run, {"mse": value})
        since.append(run.state.evaluations_since_best)
    assert since == [1, 2] and run.state.best is None
    assert early_end_reason(run) == "--patience 2: no evaluation had a mse that is a number"
    judge(run, {"mse": 0.5})
    judge(run, {"mse": math.nan})
    judge(run, {"mse": 0.4})
    assert run.state.best == 0.4 and early_end_reason(run) is None


def test_a_new_head_may_look_at_other_tokens_and_have_other_labels(trunk, tmp_path, capsys):  # noqa: F811
    toy = Toy(tmp_path / "toy")
    common = f"--task {toy.yaml} --data-path {toy.folder} {TUNE}"
    first, second = tmp_path / "first", tmp_path / "second"
    tune(0, f"{common} --load {trunk} --save {first} --pooling mean --labels red green blue")
    with pytest.raises(SettingsError, match="another model"):
        tune(0, f"{common} --load {first} --save {second} --pooling last --labels red green blue")
    tune(0, f"{common} --load {first} --finetune --save {second} --labels blue green red")
    assert records(second, "eval")[-1]["iteration"] in (3, 5)
