# SPDX-License-Identifier: Apache-2.0
"""Whose it is: locks, leases, heartbeats and half-written files name a process, and only its own machine knows its number.

Another machine's process may have the number of one here that lives, of one that has ended, or this one's own.
"""

import errno
import fcntl
import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.corpus import commit
from megatron.data import index_cache
from megatron.errors import Locked
from megatron.guard import beat_files, processes, run_state
from megatron.guard.beat_files import Beat
from megatron.storage import durable, lease
from megatron.storage.durable import WriterLock, whole_file
from megatron.storage.lease import Lease
from megatron.storage.processes import process_start_ticks
from megatron.storage.urls import location
from megatron.telemetry.history import History
from megatron.telemetry.lanes_drawing import RankLanes
from megatron.tools import supervise


@pytest.fixture(scope="module")
def pids():
    """Numbers of processes here: this one, one that waits, one that has ended, one that has and was not waited for."""

    def child(body):
        pid = os.fork()
        if pid == 0:
            try:
                body()
            finally:
                os._exit(0)
        return pid

    waits, ended, zombie = child(signal.pause), child(int), child(int)
    os.waitpid(ended, 0)
    os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
    yield SimpleNamespace(own=os.getpid(), waits=waits, ended=ended, zombie=zombie)
    os.kill(waits, signal.SIGKILL)
    for pid in (waits, zombie):
        os.waitpid(pid, 0)


# ---- leases in an object store ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pid, ended", [("own", False), ("waits", False), ("ended", True)])
def test_a_lease_has_ended_with_a_process_of_this_machine_alone(pid, ended, pids, monkeypatch):
    pid = getattr(pids, pid)
    here = lease._machine()
    assert here and len(here.split()[0]) == 36 and here.endswith(os.readlink("/proc/self/ns/pid"))
    assert lease._has_ended(dict(machine=here, pid=pid)) == ended
    boot, namespace = here.split()
    for machine in (f"{boot} pid:[1]", f"{boot[::-1]} {namespace}", "", None, here.upper()):
        assert not lease._has_ended(dict(machine=machine, pid=pid))
    assert not lease._has_ended(dict(pid=pid))
    for odd in (str(pid), 0, -pid, None, True, float(pid)):
        assert not lease._has_ended(dict(machine=here, pid=odd))
    monkeypatch.setattr(lease, "_machine", lambda: "")  # which cannot be told: two that cannot are not the same
    assert not lease._has_ended(dict(machine="", pid=pid))


class Clock:
    """Time that passes when somebody sleeps; `at`: moments -> what happens then."""

    def __init__(self, at=()):
        self.now, self.at = 0.0, sorted(dict(at).items())

    def sleep(self, seconds):
        self.now += seconds
        while self.at and self.at[0][0] <= self.now:
            self.at.pop(0)[1]()

    def patch(self, monkeypatch):
        stand_in = SimpleNamespace(
            monotonic=lambda: self.now, sleep=self.sleep, strftime=lease.time.strftime, gmtime=lease.time.gmtime
        )
        monkeypatch.setattr(lease, "time", stand_in)


def holder_of(pid, machine="elsewhere", token="theirs", renewals=0):
    content = dict(owner=f"process {pid} on there", token=token, pid=pid, machine=machine, renewals=renewals)
    return json.dumps(content).encode()


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
@pytest.mark.parametrize(
    "pid, machine, waited", [("ended", None, 0.0), ("ended", "elsewhere", 60.0), ("own", "elsewhere", 60.0)]
)
def test_a_lease_of_another_machine_is_waited_for(pid, machine, waited, bucket, pids, monkeypatch):
    """A minute without a renewal, whatever process has that number here; one of this machine that has ended is no wait."""
    folder, clock, said = location(bucket), Clock(), []
    (folder / ".lock").write_bytes(holder_of(getattr(pids, pid), machine or lease._machine()))
    clock.patch(monkeypatch)
    own = Lease(folder, said.append)
    assert waited <= clock.now <= waited + 3 and len(said) == bool(waited)
    assert all("process" in line and "waiting up to 60 s" in line for line in said)
    own.check()
    own.release()
    assert not (folder / ".lock").exists()


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_lease_that_is_renewed_is_anothers(bucket, pids, monkeypatch):
    folder = location(bucket)
    path = folder / ".lock"
    path.write_bytes(holder_of(pids.ended))
    Clock({59.0: lambda: path.write_bytes(holder_of(pids.ended, renewals=1))}).patch(monkeypatch)
    with pytest.raises(Locked, match="being written by another job") as caught:
        Lease(folder)
    assert f"held by process {pids.ended} on there" in str(caught.value)
    assert json.loads(path.read_bytes())["renewals"] == 1


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_lease_that_was_taken_over_is_left_alone(bucket):
    """Also by a process with this one's number and machine, as after a restart in a container: tokens tell them apart."""
    folder = location(bucket)
    own = Lease(folder)
    own.check()
    theirs = holder_of(os.getpid(), lease._machine())
    (folder / ".lock").write_bytes(theirs)
    with pytest.raises(Locked, match="taken over by another job"):
        own.check()
    own.release()
    assert (folder / ".lock").read_bytes() == theirs
    (folder / ".lock").unlink()
    again = Lease(folder)
    (folder / ".lock").unlink()
    with pytest.raises(Locked, match="held by an unknown process"):
        again.check()
    again.release()


# ---- locks of files --------------------------------------------------------------------------------------------------


def in_a_child(body) -> str:
    """What `body()` returns in a forked process."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(body()).encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as told:
        return told.read()


def test_a_folder_has_one_writer(tmp_path):
    """A child that outlives its parent does not hold the parent's lock, and what a dead holder wrote holds nothing."""
    (tmp_path / ".lock").write_text(f"process {os.getppid()} on {socket.gethostname()}\n")
    lock = WriterLock(tmp_path)
    # Read in a child: a process that closes a file has no record locks on it any more.
    assert in_a_child((tmp_path / ".lock").read_text) == f"process {os.getpid()} on {socket.gethostname()}\n"
    said = in_a_child(lambda: WriterLock(tmp_path) and "held")
    assert said.startswith("Locked: ") and f"held by process {os.getpid()} on {socket.gethostname()}" in said
    lock.release()
    lock.release()
    assert in_a_child(lambda: WriterLock(tmp_path) and "held") == "held"


@pytest.mark.parametrize("number, told", [(errno.ENOLCK, "held"), (errno.EACCES, "Locked"), (errno.EIO, "OSError")])
def test_a_lock_that_is_refused_is_anothers_and_one_that_cannot_be_is_not(number, told, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable.fcntl, "lockf", refuse)
    assert in_a_child(lambda: WriterLock(tmp_path) and "held").startswith(told)


@pytest.mark.parametrize("write", ["whole_file", "lanes"])
def test_two_machines_write_one_file_with_the_same_number(write, tmp_path, monkeypatch):
    """Ranks in containers have the same numbers on each machine: neither takes the other's half-written file."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "a"
    if write == "whole_file":
        with whole_file(path) as first:
            first.write(b"first")
            with whole_file(path) as second:
                second.write(b"second, longer")
            assert path.read_bytes() == b"second, longer"
        assert path.read_bytes() == b"first"
    else:
        lanes, replace = RankLanes(0, (1, 2), 0, []), os.replace

        def another_writes_meanwhile(*names):
            monkeypatch.setattr(os, "replace", replace)
            lanes.write(path)
            replace(*names)

        monkeypatch.setattr(os, "replace", another_writes_meanwhile)
        monkeypatch.setattr(Path, "replace", lambda aside, target: another_writes_meanwhile(aside, target))
        lanes.write(path)
        assert json.loads(path.read_text())["iterations"] == [1, 2]
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


# ---- caches, attempts and heartbeats ---------------------------------------------------------------------------------


def test_a_half_built_index_is_dead_with_its_process_here_alone(pids):
    here = socket.gethostname()
    dead = lambda owner: index_cache._is_dead(owner)
    assert dead(f"{here}:{pids.ended}") and not dead(f"{here}:{pids.waits}")
    assert dead(f"{here}:{pids.own}")  # of an earlier process with this number: this one builds one at a time
    for pid in (pids.ended, pids.waits, pids.own):
        assert not dead(f"elsewhere:{pid}") and not dead(f"{here}.elsewhere:{pid}") and not dead(str(pid))
    assert not dead(f"{here}:") and not dead(f"{here}:x")


def test_an_attempt_is_dead_with_its_process_here_alone(pids, tmp_path):
    here = socket.gethostname()
    start = process_start_ticks(pids.waits)
    rows = [  # process, host -> gone
        (f"{pids.waits}-{start}", here, False),
        (f"{pids.waits}-{int(start) - 1}", here, True),  # an earlier process with that number
        (f"{pids.ended}-{start}", here, True),
        (f"{pids.zombie}-{Path(f'/proc/{pids.zombie}/stat').read_text().rpartition(')')[2].split()[19]}", here, True),
        *((f"{pid}-{start}", "elsewhere", False) for pid in (pids.waits, pids.ended, pids.zombie)),
    ]
    for process, host, gone in rows:
        assert commit.is_gone(process, host) == gone
        attempt = tmp_path / f".tmp-task.{process}.abcdef01.{host}"
        attempt.mkdir(exist_ok=True)
        assert commit._alive(attempt) == (not gone)


def test_a_rank_is_gone_with_its_process_here_alone(pids):
    machine = beat_files.machine()
    beat = lambda pid, born=None, at=machine, ended=None: Beat(
        0, "n", pid, process_start_ticks(pid) if born is None else born, 1, "F", 1, machine=at, ended=ended
    )
    born = process_start_ticks(pids.waits)
    rows = [  # beat -> gone, alive here
        (beat(pids.waits), False, True),
        (beat(pids.waits, born - 1), True, False),
        (beat(pids.ended, born), True, False),
        (beat(pids.zombie), True, False),
        (beat(pids.waits, ended=0), False, False),
        *((beat(pid, born, "elsewhere"), False, False) for pid in (pids.waits, pids.ended, pids.zombie)),
    ]
    for one, gone, alive in rows:
        assert (processes.is_gone(one), processes.alive_here(one)) == (gone, alive), one


def test_heartbeats_of_killed_supervisors_of_this_machine_are_removed(pids, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise.os, "access", lambda path, how: False)
    monkeypatch.setattr(supervise.tempfile, "gettempdir", lambda: str(tmp_path))
    here = beat_files.machine().replace("/", "-")
    born = process_start_ticks(pids.waits)
    stays = {  # name -> whether it stays
        f"heartbeats-{here}.{pids.waits}.{born}.aaaa": True,
        f"heartbeats-{here}.{pids.waits}.{born - 1}.aaaa": False,
        f"heartbeats-{here}.{pids.ended}.{born}.aaaa": False,
        f"heartbeats-elsewhere.{pids.ended}.{born}.aaaa": True,
        f"heartbeats-{here}-1.{pids.ended}.{born}.aaaa": True,
        "heartbeats-of-mine": True,
    }
    for name in stays:
        (tmp_path / name).mkdir()
    own = supervise.heartbeat_folder()
    left = {path.name for path in tmp_path.iterdir()} - {own.name}
    assert left == {name for name, stay in stays.items() if stay}
    assert own.name.startswith(f"heartbeats-{here}.{os.getpid()}.{process_start_ticks(os.getpid())}.")


@pytest.mark.parametrize("pid, host, state", [("ended", "here", "failed"), ("ended", "there", "running")])
def test_the_status_of_a_run_on_another_machine(pid, host, state, pids, tmp_path, monkeypatch):
    """It has no process here, and that says nothing."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    launch = dict(host=socket.gethostname() if host == "here" else "elsewhere", pid=getattr(pids, pid))
    history = History(run=launch)
    history.add([b'{"kind": "step", "iteration": 1}'])
    found = run_state.alive(metrics, history, 1.0, metrics.stat().st_mtime)
    assert found[0] == state


def test_the_lock_of_a_cache_goes_with_its_holder(tmp_path):
    """flock: the kernel's, so the name of a dead holder in the file holds nothing."""
    path = tmp_path / "lock"
    path.write_text(f"process {os.getpid()} on elsewhere")
    with open(path, "a+") as lock:
        assert durable.try_lock(lock)
        index_cache._note_owner(lock)
        assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}"

        def other():
            with open(path, "a+") as theirs:
                return durable.try_lock(theirs), index_cache._owner(theirs)

        assert in_a_child(other) == str((False, f"process {os.getpid()} on {socket.gethostname()}"))
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert in_a_child(other).startswith("(True")
