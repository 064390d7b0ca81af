# SPDX-License-Identifier: Apache-2.0
"""Stacks of ranks that stand still: from this machine, from another one, with and without py-spy."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from megatron.guard import beat_files, evidence
from megatron.guard.beat_files import STOP, Beat, ask, clear, machine, read_beats
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.stacks import explain
from megatron.storage.processes import state


def micro_batch():
    time.sleep(600)


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Start a process with a heartbeat that hangs where the data come from: `rank(0, elsewhere=True)`."""
    monkeypatch.setattr(beat_files, "LOOK", 0.05)
    monkeypatch.setattr(evidence, "LOOK", 0.2)
    started = []

    def start(number, elsewhere=False):
        pid = os.fork()
        if pid == 0:
            if elsewhere:
                beat_files.machine = lambda: "another machine"
            signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
            own = Heartbeat(str(tmp_path), number)
            own.listen()
            own.enter_group("dp group 1")
            own.beat("data", step=17)
            micro_batch()
        started.append(pid)
        while not any(beat.rank == number and beat.phase == "data" for beat in read_beats(tmp_path)):
            assert state(pid) not in ("Z", "")
            time.sleep(0.005)
        return pid

    yield start
    for pid in started:
        for number in (signal.SIGCONT, signal.SIGKILL):
            os.kill(pid, number)
        os.waitpid(pid, 0)


def _told(folder, spy=None):
    beats = read_beats(folder)
    return explain(evidence.standstills(beats, folder, {beat.rank: 74.0 for beat in beats}))


def test_ranks_here_and_elsewhere_say_where_they_are(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "SPY", ("no-such-program",))
    rank(0)
    rank(1, elsewhere=True)
    assert [beat.group for beat in read_beats(tmp_path)] == ["dp group 1"] * 2
    [line] = _told(tmp_path)
    assert line.startswith("2 ranks (0-1): in the data loader for 74 s, step 17 (test_evidence.py:")
    assert line.endswith("in micro_batch)")


def test_who_does_not_answer_is_told(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "SPY", ("no-such-program",))
    monkeypatch.setattr(evidence, "WRITING", 0.5)
    for number, elsewhere in enumerate((False, True)):
        pid = rank(number, elsewhere)
        os.kill(pid, signal.SIGSTOP)
        while state(pid) != "T":
            time.sleep(0.005)
    here, elsewhere = _told(tmp_path)
    assert "rank 0" in here and "is stopped by a signal (SIGSTOP), in the data loader for 74 s" in here
    assert "rank 1" in elsewhere and "does not answer: stopped, frozen, or its machine is cut off" in elsewhere


def test_a_rank_elsewhere_can_be_asked_to_stop(rank, tmp_path):
    pid = rank(0, elsewhere=True)
    ask(tmp_path, STOP)
    deadline = time.monotonic() + 60
    while state(pid) != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(pid) == "Z"
    clear(tmp_path)
    assert not (tmp_path / STOP).exists() and read_beats(tmp_path)[0].machine != machine()


def test_a_spy_is_believed_and_one_that_fails_is_replaced(rank, tmp_path, monkeypatch):
    pid = rank(0)
    frames = (
        '[{"name": "seen", "filename": "/x/a.py", "line": 3}, {"name": "<module>", "filename": "/x/b.py", "line": 1}]'
    )
    spy = tmp_path / "spy"
    spy.write_text(f'#!/bin/sh\necho \'[{{"pid": {pid}, "os_thread_id": {pid}, "frames": {frames}}}]\'\n')
    spy.chmod(0o755)
    monkeypatch.setattr(evidence, "SPY", (str(spy),))
    assert _told(tmp_path) == [
        f"rank 0 on {os.uname().nodename}: in the data loader for 74 s, step 17 (a.py:3 in seen)"
    ]
    spy.write_text("#!/bin/sh\necho not permitted; exit 1\n")
    assert "in micro_batch)" in _told(tmp_path)[0]


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_py_spy_sees_a_stopped_process(rank, tmp_path):
    pid = rank(0)
    os.kill(pid, signal.SIGSTOP)
    if not evidence.spy(read_beats(tmp_path)):
        pytest.skip("py-spy may not look into processes here")
    assert "SIGSTOP" in _told(tmp_path)[0] and "in micro_batch)" in _told(tmp_path)[0]


def test_a_rank_that_has_ended_is_no_riddle(tmp_path):
    beat = Beat(3, "n7", 1, 1, 5, "F", 2, machine="another machine", ended=7)
    assert "is gone" in explain(evidence.standstills([beat], tmp_path, {}))[0]


def test_a_request_for_stacks_that_comes_late_does_not_end_the_rank(tmp_path):
    """A supervisor asks while the rank closes its heartbeat."""
    lines = [
        "import os, signal, sys",
        "from megatron.guard.heartbeat import Heartbeat",
        "beat = Heartbeat(sys.argv[1])",
        "beat.close()",
        "os.kill(os.getpid(), signal.SIGUSR2)",
        "print('alive')",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines), str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "alive\n", done
