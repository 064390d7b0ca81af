# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any line of a save, and power loss at any rename: a complete checkpoint is always there.

A forked child counts the lines that it executes in megatron/checkpoint and kills itself at a given one; lines lie between
all system calls, so every state of the folder that a crash can leave is met. Kills at random times hit the calls too.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import megatron.checkpoint
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.state import TRACKER, Saver, checkpoints, restore
from megatron.checkpoint.store import Piece

PACKAGE = str(Path(megatron.checkpoint.__file__).parent)


def pieces_of(value, size=6):
    return [
        Piece(name, (size,), Box.whole((size,)), torch.full((size,), float(value))) for name in ("weight", "moment")
    ]


@pytest.fixture
def memory_folder():
    """A folder in memory where there is one: kills need no disk, and hundreds of saves are slow on a busy one."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


def prepare(folder):
    """Iterations 1 and 2, whose tensors are full of their number."""
    folder.mkdir()
    with Saver(folder) as saver:
        for iteration in (1, 2):
            saver.save(iteration, pieces_of(iteration), {})
    return folder


def killed_at_line(count, work):
    """Fork a child that does `work` and kills itself at line `count`; True when it was killed, False when it finished."""
    child = os.fork()
    if child == 0:
        left = count

        def trace(frame, event, argument):
            nonlocal left
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            if event == "line":
                left -= 1
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            work()
            sys.settrace(None)
            os._exit(0)
        except BaseException:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def surviving(folder):
    """(iteration, value) that a new run would start from."""
    wanted = pieces_of(-1)
    found = restore(folder, wanted)
    (value,) = {float(value) for piece in wanted for value in piece.tensor}
    return found.state["iteration"], value


SCENES = {  # what is saved, and what may be found afterwards
    "a new checkpoint": (3, 3, None, {(2, 2.0), (3, 3.0)}),
    "with retention": (3, 3, 1, {(2, 2.0), (3, 3.0)}),
    "over the newest": (2, 22, None, {(2, 2.0), (2, 22.0)}),
    "over the newest, alone": (2, 22, 1, {(2, 2.0), (2, 22.0)}),
}


@pytest.mark.parametrize("scene", SCENES)
def test_a_kill_at_any_line_loses_nothing(memory_folder, scene):
    iteration, value, keep_last, allowed = SCENES[scene]

    def save():
        with Saver(folder, keep_last=keep_last) as saver:
            saver.save(iteration, pieces_of(value), {})

    line, seen = 1, set()
    while True:
        folder = prepare(memory_folder / f"{line}")
        killed = killed_at_line(line, save)
        found = surviving(folder)
        assert found in allowed, f"killed at line {line}"
        seen.add(found)
        if not killed:
            break
        with Saver(folder) as saver:  # the next run cleans up, and can save
            assert not list(folder.glob(".tmp*")) and not list(folder.glob(".old*"))
            assert surviving(folder) == found
            saver.save(9, pieces_of(9), {})
        assert surviving(folder) == (9, 9.0)
        line += 4  # each fourth line, to stay within seconds
    assert seen == allowed and line > 100


def test_kills_at_random_times_lose_nothing(memory_folder):
    folder, dice, newest = prepare(memory_folder / "folder"), random.Random(5), 2
    big, limit, kills = 1 << 18, 0.02, 0
    with Saver(folder) as saver:
        saver.save(newest, pieces_of(newest, big), {})
    while kills < 25 or newest < 5:
        child = os.fork()
        if child == 0:
            with Saver(folder, keep_last=2) as saver:
                for iteration in range(newest + 1, newest + 1000):
                    saver.save(iteration, pieces_of(iteration, big), {})
            os._exit(0)
        time.sleep(dice.uniform(0, limit))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wanted = pieces_of(-1, big)
        found = restore(folder, wanted).state["iteration"]
        assert found >= newest and all((piece.tensor == found).all() for piece in wanted)
        limit *= 0.8 if found > newest else 1.3  # about one save in the time, on any machine
        newest, kills = found, kills + 1


def test_nothing_gets_its_name_before_the_disk_has_it(tmp_path, monkeypatch):
    """The power-loss model: what is renamed, and the names before it, were fsynced after their last change."""
    synced, order = {}, []
    fsync = os.fsync

    def look(path):
        return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()

    def noted_fsync(handle):
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced[path] = look(path)

    def checked(rename):
        def checked_rename(source, target, **options):
            source, target = Path(source), Path(target)
            if not target.name.startswith((".tmp", ".old")):
                for path in [source, *(source.rglob("*") if source.is_dir() else [])]:
                    assert synced.get(path) == look(path), f"{path} is not on the disk when {target} appears"
                if target.name == TRACKER:
                    assert "iter_0000001" in synced[target.parent], "the tracker is ahead of its checkpoint"
                order.append(target.name)
            rename(source, target, **options)

        return checked_rename

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", checked(os.rename))
    monkeypatch.setattr(os, "replace", checked(os.replace))
    with Saver(tmp_path) as saver:
        saver.save(1, pieces_of(1), {})
    assert order == ["iter_0000001", TRACKER]
    assert TRACKER in synced[tmp_path] and list(checkpoints(tmp_path)) == [1]
