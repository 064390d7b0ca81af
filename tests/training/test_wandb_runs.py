# SPDX-License-Identifier: Apache-2.0
"""All launches of a training are one run at Weights & Biases, and other trainings are others."""

import itertools
import shutil
import sys
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Checkpoint
from megatron.telemetry.trackers import WANDB_RUN
from megatron.training.checkpointing import earlier_wandb_run
from megatron.training.loop import pretrain
from megatron.training.rules import resolve

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --mock-data --vocab-size 20 --lr 1e-2 "
    "--micro-batch-size 2 --eval-iters 0 --device cpu --num-workers 0 --lr-decay-iters 9"
)


class FakeWandb:
    """wandb as its documentation tells: `allow` continues a run of this id, and rows of an earlier step are dropped."""

    def __init__(self):
        self.runs, self.ids, self.new = {}, [], itertools.count()

    def init(self, *, id=None, resume=None, **_):
        id = id or f"new{next(self.new)}"
        self.ids.append(id)
        kept = self.runs.get(id) if resume == "allow" else None
        self.runs[id] = run = kept or SimpleNamespace(rows=[], step=0, axes={})
        return SimpleNamespace(
            log=lambda row, step=None: self.log(run, row, step),
            define_metric=lambda name, step_metric=None: run.axes.update({name: step_metric}),
            finish=lambda: None,
        )

    def log(self, run, row, step):
        step = run.step + 1 if step is None else step
        if step >= run.step:
            run.rows.append(row)
            run.step = step


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM"):
        monkeypatch.delenv(name, raising=False)
    return fake


def train(flags, project="--wandb-project p"):
    pretrain(resolve(parse_pretrain(f"{TINY} {project} {flags}".split()), 1), pretrain_gpt.recipe())


def iterations(run):
    assert run.axes == {"iteration": None, "*": "iteration"}
    return [row["iteration"] for row in run.rows if "lm loss" in row]


def test_restarts_continue_the_run_and_its_curve(wandb, tmp_path):
    flags = f"--save {tmp_path} --load {tmp_path} --save-interval 1 --train-iters"
    train(f"{flags} 2")
    train(f"{flags} 3", project="")  # without curves
    train(f"{flags} 4")
    train(f"{flags} 4 --ckpt-step 1")  # these steps are in the curve already
    assert len(set(wandb.ids)) == 1 and len(wandb.ids) == 3
    assert iterations(wandb.runs[wandb.ids[0]]) == [1, 2, 4, 2, 3, 4]


def test_a_row_of_an_iteration_has_all_its_values(wandb, tmp_path):
    train(f"--save {tmp_path} --train-iters 2 --log-interval 1 --eval-iters 1 --eval-interval 2")
    first, second = wandb.runs[wandb.ids[0]].rows[:2]
    assert {"lm loss", "learning-rate", "throughput", "consumed-samples"} <= first.keys()
    assert {"lm loss", "lm loss validation", "lm loss validation ppl"} <= second.keys()


def test_a_run_that_has_saved_nothing_continues(wandb, tmp_path):
    folder = tmp_path / "run"
    flags = f"--save {folder} --load {folder} --train-iters 1"
    train(flags)
    for path in folder.iterdir():
        if path.name != f"{WANDB_RUN}.txt":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(flags)
    assert wandb.ids[0] == wandb.ids[1]


def test_a_folder_that_was_lost_continues_from_the_copies(wandb, tmp_path):
    folder, copies = tmp_path / "run", tmp_path / "copies"
    flags = f"--save {folder} --load {folder} --save-copy {copies} --train-iters"
    train(f"{flags} 1")
    shutil.rmtree(folder)
    train(f"{flags} 2", project="")
    train(f"{flags} 3")
    assert wandb.ids[0] == wandb.ids[1]
    (folder / f"{WANDB_RUN}.txt").unlink()
    train(f"{flags} 4")
    train(f"--load {copies} --save {folder} --save-copy {copies} --train-iters 5")
    assert len(set(wandb.ids)) == 1


@pytest.mark.parametrize("how", ["--save {0}/b", "--save {0}/b --finetune", ""])
def test_another_training_is_another_run(how, wandb, tmp_path):
    train(f"--save {tmp_path}/a --train-iters 1")
    train(f"--load {tmp_path}/a --train-iters 2 {how.format(tmp_path)}")
    first, second = wandb.ids
    assert first != second and iterations(wandb.runs[first]) == [1]


def test_the_users_id_counts(wandb, tmp_path, monkeypatch):
    flags = f"--save {tmp_path} --load {tmp_path} --save-interval 1 --train-iters"
    train(f"{flags} 1")
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    train(f"{flags} 2")
    monkeypatch.delenv("WANDB_RUN_ID")
    train(f"{flags} 3")
    monkeypatch.setenv("WANDB_RESUME", "never")
    train(f"{flags} 4")
    monkeypatch.delenv("WANDB_RESUME")
    train(f"{flags} 5")
    assert wandb.ids[1:] == ["mine", "mine", "new0", "mine"] != wandb.ids[:1]


def test_a_model_that_a_tool_made_starts_a_run(tmp_path):
    settings = Checkpoint(load=str(tmp_path), save=str(tmp_path))
    assert earlier_wandb_run(settings, {WANDB_RUN: "a1", "optimizer_steps": 5}) == "a1"
    assert earlier_wandb_run(settings, {WANDB_RUN: "a1", "optimizer_steps": None}) is None
