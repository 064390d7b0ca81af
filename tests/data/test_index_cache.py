# SPDX-License-Identifier: Apache-2.0
"""Several processes at one cache: one builds, the others wait, and take over from a builder that died."""

import errno
import fcntl
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from megatron.data import index_cache
from megatron.data.index_cache import cached_arrays
from megatron.storage import durable

fork = multiprocessing.get_context("fork")


def quiet(text):
    pass


def ask(folder, log, seconds=0.0, die_at=None, say=quiet):
    """Ask for an entry; leave a line in `log` when it has to be built. die_at: a file whose coming ends the builder."""

    def build():
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        if die_at:
            while not die_at.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return dict(squares=np.arange(1000) ** 2)

    arrays = cached_arrays(folder, "squares", dict(n=1000), build, log=say)
    assert arrays["squares"][31] == 961
    return arrays


def builds(log) -> int:
    return len(log.read_text().splitlines())


def test_one_builds_and_the_others_wait(tmp_path):
    log = tmp_path / "log"
    workers = [fork.Process(target=ask, args=(tmp_path / "cache", log, 0.3)) for _ in range(5)]
    [worker.start() for worker in workers]
    [worker.join(100) for worker in workers]
    assert [worker.exitcode for worker in workers] == [0] * 5 and builds(log) == 1


def test_a_builder_that_died_is_replaced(tmp_path, monkeypatch):
    log, heard, said = tmp_path / "log", tmp_path / "heard", []
    monkeypatch.setattr(durable, "SAY_EVERY", 0.1)
    first = fork.Process(target=ask, args=(tmp_path / "cache", log, 0.0, heard))
    first.start()
    while not log.exists():
        assert first.is_alive()
        time.sleep(0.01)

    def say(text):
        said.append(text)
        heard.touch()

    ask(tmp_path / "cache", log, say=say)
    first.join(100)
    assert first.exitcode == -signal.SIGKILL and builds(log) == 2
    assert f"process {first.pid} on " in said[0]


def test_what_a_dead_builder_left_is_swept_up(tmp_path):
    ask(tmp_path / "cache", tmp_path / "log")
    (entry,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    ended = fork.Process(target=int)
    ended.start(), ended.join()
    host = index_cache.socket.gethostname()
    left = [
        entry.with_name(f"{entry.name}.building-{owner}") for owner in (f"{host}:{ended.pid}", f"elsewhere:{ended.pid}")
    ]
    [folder.mkdir() for folder in left]
    (entry / "index.json").unlink()
    ask(tmp_path / "cache", tmp_path / "log")
    assert [folder.exists() for folder in left] == [False, True]  # another host's builder may be alive


def test_without_locks_everybody_may_build(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    workers = [fork.Process(target=ask, args=(tmp_path / "cache", tmp_path / "log", 0.1)) for _ in range(4)]
    [worker.start() for worker in workers]
    [worker.join(100) for worker in workers]
    assert [worker.exitcode for worker in workers] == [0] * 4
    count = builds(tmp_path / "log")
    ask(tmp_path / "cache", tmp_path / "log")
    assert builds(tmp_path / "log") == count


def test_without_locks_what_a_quicker_builder_made_stays(tmp_path, monkeypatch):
    """Other nodes may have mapped it, and a network file system takes the pages of a deleted file from them."""

    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    def slow():
        cached_arrays(tmp_path, "squares", {}, quick, log=quiet)  # as on another node
        made.append(next(tmp_path.glob("squares-*/index.json")).stat().st_ino)
        return quick()

    def quick():
        return dict(squares=np.arange(9) ** 2)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    made = []
    assert cached_arrays(tmp_path, "squares", {}, slow, log=quiet)["squares"][3] == 9
    assert [path.stat().st_ino for path in tmp_path.glob("squares-*/index.json")] == made
    assert not list(tmp_path.glob("*.building-*"))


def test_a_failing_build_leaves_nothing(tmp_path):
    def fail():
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        cached_arrays(tmp_path, "x", {}, fail, log=quiet)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    said = []
    ask(tmp_path, tmp_path / "log", say=said.append)
    assert "stay in memory" in said[0] and "No space left" in said[0]
    with pytest.raises(index_cache.StorageError, match="No space left"):
        cached_arrays(tmp_path, "x", {}, lambda: dict(a=np.zeros(3)), log=quiet, required=True)
