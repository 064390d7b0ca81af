# SPDX-License-Identifier: Apache-2.0
"""`--save-copy`: finished checkpoints in a second place, and a run that goes on from there."""

import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint import copies as module
from megatron.checkpoint.all_ranks import alone
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints, read_tracker
from megatron.checkpoint.compare import differences
from megatron.checkpoint.copies import Copies
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError
from megatron.settings import schema
from megatron.settings.parse import parse_pretrain
from megatron.storage.urls import location
from megatron.training import checkpointing
from megatron.training.rules import check


def pieces(value):
    return [Piece("weight", (4, 3), Box.whole((4, 3)), torch.full((4, 3), float(value)))]


@pytest.fixture
def run(tmp_path):
    """`run(where, steps)`: a manager that saves these steps and closes; returns what it said."""

    def save(where, steps, **more):
        said = []
        settings = schema.Checkpoint(save=str(tmp_path / "home"), save_copy=where and str(where), **more)
        manager = CheckpointManager(settings, log=said.append)
        for step in steps:
            manager.save(step, pieces(step), {})
            if step != steps[-1] and manager._copies:  # so that retention finds both places alike
                while not any(f"copied iter_{step:07d}" in line for line in said):
                    assert not any("WARNING" in line for line in said)
                    time.sleep(0.002)
        manager.close()
        return said

    return save


@pytest.mark.parametrize("background", [False, True])
def test_copies_are_checkpoints_and_a_run_goes_on_from_them(run, tmp_path, background):
    home, copy = tmp_path / "home", tmp_path / "far" / "away"
    said = run(copy, [1, 2, 3], keep_last=2, async_save=background)
    assert list(checkpoints(home)) == list(checkpoints(copy)) == [2, 3] and (copy / TRACKER).read_text() == "3"
    with Reader(home / "iter_0000003") as one, Reader(copy / "iter_0000003") as two:
        assert not list(differences(one, two))
    assert any(f"copied iter_0000003 to {copy}" in line for line in said)
    settings = schema.Checkpoint(load=str(home), save_copy=str(copy))
    assert checkpointing.load_folder(settings, alone) == home  # as new as the copy
    shutil.rmtree(home / "iter_0000003")
    assert checkpointing.load_folder(settings, alone) == copy
    settings = schema.Checkpoint(load=str(home / "iter_0000002"), save_copy=str(copy))
    assert checkpointing.load_folder(settings, alone) == home / "iter_0000002"  # this one was asked for
    shutil.rmtree(home)
    assert checkpointing.load_folder(settings, alone) == copy


def test_a_new_run_does_not_lay_its_checkpoints_between_the_copies_of_another(run, tmp_path):
    of = lambda checkpoint: SimpleNamespace(checkpoint=checkpoint)
    run(tmp_path / "copy", [1, 2])
    for flag in ("save_copy", "save_mirror"):
        settings = schema.Checkpoint(save=str(tmp_path / "new"), **{flag: str(tmp_path / "copy")})
        with pytest.raises(CheckpointError, match="copy holds checkpoints of another run, up to iteration 2"):
            checkpointing.check_later_checkpoints(of(settings), 0, alone)
        checkpointing.check_later_checkpoints(of(settings), 2, alone)
    command = schema.Checkpoint(save=str(tmp_path / "new"), save_copy="rclone copy {} site:run")
    checkpointing.check_later_checkpoints(of(command), 0, alone)


def test_a_run_that_starts_anew_does_not_save_among_its_own_checkpoints(run, tmp_path):
    """--finetune --load X --save X: the next load would take the highest number, which is the old run's."""
    run(tmp_path / "own", [1, 2])
    own = str(tmp_path / "own")
    settings = schema.Checkpoint(load=own, save=own, finetune=True)
    of = lambda skip: SimpleNamespace(checkpoint=settings, batch=SimpleNamespace(skip_train=skip))
    with pytest.raises(CheckpointError, match="holds checkpoints, up to iteration 2, and --finetune starts") as refused:
        checkpointing.check_later_checkpoints(of(False), 0, alone)
    assert f"--load {own} --finetune false --use-checkpoint-args" in refused.value.do
    assert checkpointing.check_later_checkpoints(of(False), 2, alone) == []
    assert checkpointing.check_later_checkpoints(of(True), 0, alone) == []  # an evaluation saves nothing


def test_a_copy_of_the_same_iteration_is_replaced(run, tmp_path):
    run(tmp_path / "copy", [1])
    (tmp_path / "copy" / "iter_0000001" / "index.json").write_text("torn")
    run(tmp_path / "copy", [1])
    with Reader(tmp_path / "copy" / "iter_0000001") as reader:
        assert reader.state["iteration"] == 1


def test_a_command_takes_them(run, tmp_path):
    (tmp_path / "site").mkdir()
    run(f"cp -r {{}} {tmp_path}/site/ && echo {{}} >> {tmp_path}/log", [4, 5])
    assert list(checkpoints(tmp_path / "site")) == [4, 5]
    assert (tmp_path / "log").read_text().split() == [str(tmp_path / "home" / f"iter_000000{step}") for step in (4, 5)]


def test_a_copy_that_fails_is_told_and_changes_nothing_else(run, tmp_path, monkeypatch):
    said = run("echo no route >&2; false {}", [1])
    assert any("WARNING" in line and "exit code 1: no route" in line for line in said)
    monkeypatch.setattr(module.survey, "verify", lambda path: (0, ["a byte differs"]))
    said = run(tmp_path / "copy", [2])
    assert any("WARNING" in line and "a byte differs" in line for line in said)
    assert not checkpoints(tmp_path / "copy") and not list((tmp_path / "copy").glob(".tmp-*"))
    (tmp_path / "file").touch()
    assert any("WARNING" in line for line in run(tmp_path / "file", [3]))
    assert list(checkpoints(tmp_path / "home")) == [1, 2, 3]


@pytest.mark.sampled(2)
def test_a_manager_takes_a_checkpoint_of_another_folder_over(run, bucket, tmp_path, monkeypatch):
    run(None, [4, 5])
    home, said = checkpoints(tmp_path / "home"), []
    for place in (bucket, str(tmp_path / "here")):
        manager = CheckpointManager(schema.Checkpoint(save=place, keep_last=1), log=said.append)
        manager.save(3, pieces(3), {})
        manager.copy(home[4])
        home[5].rename(aside := home[5].with_name(".old-iter_0000005-91aa"))  # by a save that was killed
        manager.copy(aside)
        aside.rename(home[5])
        manager.close()
        assert list(checkpoints(location(place))) == [5] and read_tracker(location(place)) == 5
        with Reader(location(place) / "iter_0000005") as copy, Reader(home[5]) as wanted:
            assert not list(differences(copy, wanted))
    assert not any("WARNING" in line for line in said)
    monkeypatch.setattr(module.survey, "verify", lambda path: (0, ["a byte differs"]))
    manager = CheckpointManager(schema.Checkpoint(save=str(tmp_path / "here"), keep_last=1), log=said.append)
    manager.copy(home[4])
    manager.close()
    assert "WARNING" in said[-1] and "a byte differs" in said[-1] and list(checkpoints(tmp_path / "here")) == [5]


def test_retention_leaves_the_one_that_is_being_copied(tmp_path, monkeypatch):
    """Else a copy that takes longer than the time between two saves would never come to its end."""
    copy_file, begun, may_end = module._copy_synced, threading.Event(), threading.Event()

    def slow(source, target):
        begun.set()
        assert may_end.wait(60)
        return copy_file(source, target)

    monkeypatch.setattr(module, "_copy_synced", slow)
    said = []
    settings = schema.Checkpoint(save=str(tmp_path / "home"), save_copy=str(tmp_path / "copy"), keep_last=1)
    manager = CheckpointManager(settings, log=said.append)
    manager.save(1, pieces(1), {})
    assert begun.wait(60)
    manager.save(2, pieces(2), {})
    manager.save(3, pieces(3), {})
    assert list(checkpoints(tmp_path / "home")) == [1, 3]
    manager.close(copies=False)
    manager.close_copies(beat=may_end.set)  # a sign of life while it waits
    assert not any("WARNING" in line for line in said) and list(checkpoints(tmp_path / "copy")) == [3]
    assert [line.split()[1] for line in said if " copied " in line] == ["iter_0000001", "iter_0000003"]


def test_one_that_retention_has_taken_is_passed_over(tmp_path):
    said = []
    copies = Copies(str(tmp_path / "copy"), log=said.append)
    copies.add(tmp_path / "iter_0000009")
    copies.close()
    assert said == []


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--save s --save-copy s", "--save-copy s is --save itself"),
        ("--save-copy c", "--save-copy needs --save"),
        ("--save s --save-mirror scp_{}_far", "a command for each checkpoint is --save-copy"),
    ],
)
def test_settings_that_cannot_work(flags, words):
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data --vocab-size 9 --train-iters 1 --lr 1"
    assert words in " ".join(check(parse_pretrain(f"{shape} {flags}".split()), 1))
