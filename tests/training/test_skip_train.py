# SPDX-License-Identifier: Apache-2.0
"""--skip-train: the evaluation at the end of a training, from its checkpoint, in any layout."""

import json

import pytest

import pretrain_gpt
from megatron.training import loop

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --device cpu --num-workers 0 --train-iters 4 --eval-interval 3 "
    "--eval-iters 2 "
).split()


def _evaluations(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {(record["split"], record["iteration"]): record["lm loss"] for record in records if record["kind"] == "eval"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Without state of the optimizer, which an evaluation asks for nowhere."""
    folder = tmp_path_factory.mktemp("trained")
    pretrain_gpt.main([*FLAGS, "--save", str(folder), "--no-save-optim"])
    return folder


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["", "--tp 2", "--pp 2", "--sharding-stage 3"])
def test_the_last_evaluation_of_training_in_another_layout(layout, trained, run_ranks, tmp_path, monkeypatch):
    """The same samples of validation as training would have had next: those behind iteration 3's."""

    def body(rank):
        steps = []
        monkeypatch.setattr(loop, "train_step", steps.append)
        words = ["--skip-train", "--load", str(trained), "--save", str(tmp_path), *layout.split()]
        pretrain_gpt.main([*FLAGS, *words])
        return len(steps)

    assert run_ranks(2 if layout else 1, body) == [0] * (2 if layout else 1)
    expected, found = _evaluations(trained), _evaluations(tmp_path)
    assert set(found) == {("validation", 4), ("test", 4)}
    assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-5)
    assert expected["validation", 3] != pytest.approx(found["validation", 4], rel=1e-3)
    assert not list(tmp_path.glob("iter_*"))


def test_what_is_evaluated_is_said(capsys):
    pretrain_gpt.main([*FLAGS, "--skip-train"])
    said = capsys.readouterr().out
    assert "note: skipping training (--skip-train is on)" in said and "that --seed draws" in said
    assert "validation loss at iteration 0 on test set" in said or "test at iteration 0" in said


def test_nothing_is_said_of_learning_rates(trained, capsys):
    """They decide about nothing here: neither those of the command, nor how they differ from the checkpoint's."""
    more = "--lr 3e-2 --train-iters 6 --min-lr 1e-5 --lr-decay-style constant --sgd-momentum 0.5 --skip-train"
    pretrain_gpt.main([*FLAGS, "--load", str(trained), *more.split()])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("note: ", "warning: "))]
    assert any("--train-iters was 4 in the checkpoint, is 6 now" in line for line in said)
    assert not [line for line in said if "lr" in line or "learning rate" in line or "momentum" in line]
