# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of several nodes: what touches the shared folder, who writes it, and what a supervisor sees elsewhere."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.guard import beat_files
from megatron.guard.attempt_watch import Effort
from megatron.guard.beat_files import (
    BeatReader,
    beat_path,
    in_memory,
    is_node_writer,
    memories_of,
    memory_of,
    read_beats,
)
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.processes import is_gone
from megatron.storage.processes import shared_memory, state

PROGRAM = """
import os, sys
from megatron.guard.heartbeat import Heartbeat
heartbeat = Heartbeat(sys.argv[1])
heartbeat.listen()
for step in range(1, 40):  # the first ones touch pages and fill caches
    if step == 3:
        os.write(1, b"begins")
    heartbeat.beat("data", step=step)
    for group in range(254):
        heartbeat.enter_group(f"dp group {group}")
        heartbeat.beat("F", op="F0")
os.write(1, b"ends")
heartbeat.close()
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_beats_of_the_training_thread_make_no_system_call_on_files(tmp_path, root):
    words = ["strace", "-f", "-o", str(tmp_path / "calls"), "-e", "trace=%file,%desc", sys.executable, "-c", PROGRAM]
    done = subprocess.run([*words, str(tmp_path / "beats")], cwd=root, capture_output=True, text=True, timeout=120)
    if "Operation not permitted" in done.stderr:
        pytest.skip("processes cannot be traced here")
    assert done.stdout == "beginsends", done.stderr
    lines = (tmp_path / "calls").read_text().splitlines()
    [first], [last] = (
        [n for n, line in enumerate(lines) if f'write(1, "{word}"' in line] for word in ("begins", "ends")
    )
    own = lines[first].split()[0]
    assert [line for line in lines[first + 1 : last] if line.split()[0] == own] == []


def test_the_training_thread_writes_nothing_while_it_beats(tmp_path):
    """The kernel's own count of write calls of a thread, and what Python opens under the shared folder."""
    heartbeat, opened, watching = Heartbeat(str(tmp_path)), [], [True]
    sys.addaudithook(
        lambda event, words: (
            watching[0]
            and event == "open"
            and str(words[0]).startswith(str(tmp_path))
            and opened.append(threading.current_thread().name)
        )
    )
    calls = Path(f"/proc/self/task/{threading.get_native_id()}/io")

    def written() -> int:
        return int(calls.read_text().split("syscw:")[1].split()[0])

    before = written()
    for step in range(1, 50):
        heartbeat.beat("data", step=step)
        heartbeat.enter_group("dp group 1")
    assert written() == before and opened == []
    [beat] = read_beats(tmp_path)
    assert (beat.step, beat.group, beat.count) == (49, "dp group 1", 50)
    watching[0] = False
    heartbeat.close()


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Start ranks of another machine: `node(0, 1, 2)` -> their processes."""
    monkeypatch.setattr(beat_files, "LOOK", 0.05)
    started = []

    def start(*ranks):
        for rank in ranks:
            pid = os.fork()
            if pid == 0:
                beat_files.machine = lambda: "another machine"
                heartbeat = Heartbeat(str(tmp_path), rank)
                heartbeat.listen()
                for step in range(10**6):
                    heartbeat.beat("F", step=step)
                    heartbeat.enter_group(f"dp group {rank}")
                    time.sleep(0.01)
            started.append(pid)
        return started

    yield start
    for pid in started:
        for number in (signal.SIGCONT, signal.SIGKILL):
            os.kill(pid, number)
        os.waitpid(pid, 0)
    for place in shared_memory().glob(f"{beat_files._prefix(tmp_path, 'another machine')}.*"):
        shutil.rmtree(place)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_rank_of_a_node_writes_for_all_and_another_goes_on_when_it_stops(node, tmp_path):
    """By the file of the node alone: nothing else is in the shared folder, and it is no longer than its ranks need."""
    pids = node(0, 1, 2)
    reader = BeatReader(tmp_path)
    wait_until(lambda: [beat.rank for beat in reader.read() if beat.step > 3] == [0, 1, 2])
    assert [path.name.split(".")[-1] for path in tmp_path.iterdir()] == ["beats"]
    assert [beat.group for beat in reader.read()] == ["dp group 0", "dp group 1", "dp group 2"]
    assert all(path.stat().st_size < 3 * 1024 for path in tmp_path.iterdir())
    os.kill(pids[0], signal.SIGSTOP)
    wait_until(lambda: state(pids[0]) == "T")
    time.sleep(0.3)
    stopped = reader.read()
    wait_until(lambda: all(now.count > was.count + 20 for was, now in zip(stopped[1:], reader.read()[1:], strict=True)))
    assert reader.read()[0].count <= stopped[0].count + 1 and not is_gone(reader.read()[0])
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: [is_gone(beat) for beat in reader.read()] == [False, True, False])


def test_a_rank_that_is_stopped_while_it_writes_does_not_keep_the_others_from_it(node, tmp_path):
    """It holds the lock of the node's file, and keeps it for as long as it is stopped."""
    node(0)
    reader = BeatReader(tmp_path)
    wait_until(lambda: [beat.rank for beat in reader.read() if beat.step > 3] == [0])
    [memory] = shared_memory().glob(f"{beat_files._prefix(tmp_path, 'another machine')}.*")
    with (memory / "writing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        [before] = reader.read()
        wait_until(lambda: reader.read()[0].count > before.count + 20)


def test_how_a_rank_elsewhere_ended_arrives_with_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(beat_files, "LOOK", 30.0)
    pid = os.fork()
    if pid == 0:
        beat_files.machine = lambda: "another machine"
        heartbeat = Heartbeat(str(tmp_path), 5)
        heartbeat.listen()
        heartbeat.beat("F", step=3)
        heartbeat.file[beat_files.BEAT :][:1]  # mapped until the end
        heartbeat._thread.join = lambda seconds: None  # it waits for its next look
        heartbeat.close(RuntimeError("the disk is full"), 6)
        os._exit(0)
    os.waitpid(pid, 0)
    [beat] = read_beats(tmp_path)
    assert (beat.rank, beat.step, beat.ended, beat.why) == (5, 3, 6, "the disk is full")


def test_the_lowest_rank_that_is_well_writes(tmp_path):
    now = time.monotonic()
    for rank, well in ((2, now - 100), (3, now), (5, now)):
        raw = b"{}".ljust(beat_files.BEAT) + f"{well:16.3f}".encode() + b" " * 64
        beat_path(tmp_path, rank).write_bytes(raw)
    assert [is_node_writer(tmp_path, rank) for rank in (2, 3, 5)] == [True, True, False]


def test_a_torn_message_of_a_node_leaves_the_last_whole_one(tmp_path):
    line = b'{"rank": 4, "host": "n7", "pid": 1, "born": 1, "count": %d, "phase": "F", "step": 2}\tdp group 1\n'
    reader, path = BeatReader(tmp_path), tmp_path / "node_n7.1.beats"
    path.write_bytes(line % 1 + b"end\n")
    assert [(beat.rank, beat.count, beat.group) for beat in reader.read()] == [(4, 1, "dp group 1")]
    path.write_bytes((line % 2)[:60])
    assert [beat.count for beat in reader.read()] == [1]
    path.write_bytes(line % 3 + b"end\n" + line % 1)  # the rest of a longer one before
    assert [beat.count for beat in reader.read()] == [3]


def test_which_folders_lie_in_memory(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:1 / /shm rw shared:2 - tmpfs tmpfs rw\n"
        "3 2 0:2 / /shm/net rw - nfs4 server:/net rw\n"
    )
    found = [in_memory(Path(name), mounts) for name in ("/shm/a", "/shm", "/shm/net/a", "/net", "/shmall")]
    assert found == [True, True, False, False, False] and not in_memory(tmp_path, tmp_path / "none")


def test_folders_in_memory_of_launchers_that_ended_are_removed(tmp_path):
    child = subprocess.Popen(["sleep", "60"])
    left = memory_of(tmp_path).with_name(f"{memory_of(tmp_path).name.rsplit('.', 2)[0]}.{child.pid}.1")
    left.mkdir()
    heartbeat = Heartbeat(str(tmp_path))
    child.kill()
    child.wait()
    assert not left.exists() and memories_of(tmp_path) == [heartbeat.memory]
    heartbeat.close()
    beat_files.clear(tmp_path)
    assert memories_of(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_work_that_takes_longer_begins_later(monkeypatch):
    """A look of 20 ms may come every four seconds, at half a percent of a core."""
    clock = dict(monotonic=0.0, thread_time=0.0)
    for name in clock:
        monkeypatch.setattr(time, name, lambda name=name: clock[name])
    effort, begun = Effort(0.005), []
    for tick in range(200):
        clock["monotonic"] = tick * 0.1
        if effort.may_begin():
            begun.append(clock["monotonic"])
            clock["thread_time"] += 0.02
    assert begun == pytest.approx([0.0, 4.1, 8.2, 12.3, 16.4], abs=0.11)


def message(folder, host, *ranks, machine="elsewhere", pid=1, age=0.0, name=None, **more):
    """A message of a node with the beats of some ranks, written `age` seconds ago."""
    path = folder / f"node_{name or host}.{pid}.beats"
    record = dict(host=host, machine=machine, born=1, count=1, phase="F", step=5, at=time.time() - age) | more
    lines = [json.dumps(dict(record, rank=rank, pid=pid + rank)).encode() + b"\tdp group 0" for rank in ranks]
    path.write_bytes(b"\n".join([*lines, b"end", b""]))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_supervisor_removes_the_messages_of_its_own_machine_and_old_ones(tmp_path):
    """Supervisors of several hosts share the folder: what the others need to see who is gone stays."""
    own = message(tmp_path, "n1", 0, machine=beat_files.machine())
    other, old = message(tmp_path, "n2", 1, age=40), message(tmp_path, "n3", 2, age=80)
    asked, stacks = tmp_path / "stop.wanted", tmp_path / "rank_00001.stacks"
    for path in (asked, stacks):
        path.touch()
    beat_files.clear(tmp_path)
    assert list(tmp_path.iterdir()) == [other] and not own.exists() and not old.exists()


def test_of_two_messages_of_a_rank_the_later_one_counts(tmp_path):
    """Whatever the names of the files: a spare host has taken the place of another."""
    message(tmp_path, "n9", 0, 1, age=30, step=7)
    message(tmp_path, "n2", 0, 1, step=8)
    assert [(beat.host, beat.step) for beat in read_beats(tmp_path)] == [("n2", 8)] * 2
    message(tmp_path, "n9", 0, 1, step=9, pid=1)
    assert [beat.host for beat in read_beats(tmp_path)] == ["n9"] * 2


def test_ranks_of_earlier_attempts_are_left_out(tmp_path):
    message(tmp_path, "n2", 0, 1, ended=7)
    earlier = {beat.process for beat in read_beats(tmp_path)}
    reader = BeatReader(tmp_path, earlier)
    assert len(earlier) == 2 and reader.read() == []
    message(tmp_path, "n2", 0, 1, pid=50, step=0, age=5)  # older by its clock
    assert [(beat.pid, beat.ended) for beat in reader.read()] == [(50, None), (51, None)]


def test_nodes_that_send_nothing_are_found(tmp_path):
    """One whose rank has ended is none: the others of it are ended by its launcher. This machine is seen otherwise."""
    for host, more in (("n1", dict(machine=beat_files.machine())), ("n2", {}), ("n3", {}), ("n4", dict(ended=7))):
        message(tmp_path, host, 2 * int(host[1]), name=host, **more)
    reader = BeatReader(tmp_path)
    reader.read()
    since = time.monotonic()
    message(tmp_path, "n3", 6, age=1)  # the same words, written again
    reader.read()
    [(beats, seconds)] = reader.silent_nodes(since)
    assert [(beat.rank, beat.host) for beat in beats] == [(4, "n2")] and 0 < seconds < 30
    assert reader.silent_nodes(since - 60) == []
