# SPDX-License-Identifier: Apache-2.0
"""The supervisor against jobs that die, hang, and are told to stop: small ones without torch, and one real one."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.errors import SettingsError, UsageError
from megatron.guard import attempt_watch
from megatron.guard.attempt_watch import AttemptWatch
from megatron.guard.beat_files import Beat, machine, read_beats
from megatron.guard.exits import Action, JobVerdict
from megatron.guard.failure_kinds import FailureKind
from megatron.guard.goodput import Attempt
from megatron.guard.processes import descendants, end_descendants, is_gone, signal_of_zombie
from megatron.guard.resume_command import COMMAND, newest_checkpoint
from megatron.guard.run_state import look
from megatron.guard.supervisor_mark import SUPERVISOR, Mark, lost_supervisor, read_mark
from megatron.storage.processes import die_with_parent, state
from megatron.telemetry.events import count_restarts, read_events
from megatron.tools import supervise
from megatron.tools.supervise import heartbeat_folder
from tests.guard.test_beat_files import message

pytestmark = pytest.mark.sampled(5)

# A job like torchrun's: ranks in sessions of their own, SIGTERM to the others when one fails, its exit code in the
# log. Faults come from the environment, as "what:rank:step", each happening once unless its name ends with "!".
JOB = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, os.environ["ROOT"])
from megatron.guard.command import value_of
from megatron.guard.beat_files import read_beats
from megatron.guard.heartbeat import Heartbeat
from megatron.storage.processes import die_with_parent

flags = sys.argv[1:]
save, ranks = Path(value_of(flags, "--save")), int(os.environ["RANKS"])
steps = int(value_of(flags, "--train-iters"))

def micro_batch():
    time.sleep(600)

def fault(heart, rank, step, start):
    for number, text in enumerate(filter(None, os.environ["FAULTS"].split())):
        what, at_rank, at_step = text.split(":")
        if what.startswith("resumed-") and not start:
            continue
        what = what.removeprefix("resumed-")
        marker = save / f"fault-{number}"
        if (rank, step) != (int(at_rank), int(at_step)) or (marker.exists() and not what.endswith("!")):
            continue
        marker.touch()
        what = what.rstrip("!")
        if what == "sleep":
            micro_batch()
        elif what.isdecimal():
            heart.close(RuntimeError("as the test wants it"), int(what))
            os._exit(int(what))
        else:
            os.kill(os.getpid(), getattr(signal, what))
            time.sleep(0.5)

def all_have_come_to(step):
    beats = read_beats(value_of(flags, "--heartbeat-dir"))
    return len(beats) == ranks and all(beat.step >= step or beat.ended is not None for beat in beats)

def work(rank):
    os.setsid()
    die_with_parent(signal.SIGKILL)
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(9))
    signal.signal(signal.SIGINT, lambda *_: stop.append(130))
    heart = Heartbeat(value_of(flags, "--heartbeat-dir"), rank)
    start = max([int(p.name[5:]) for p in save.glob("iter_*")], default=0) if value_of(flags, "--load") else 0
    for step in range(start + 1, steps + 1):
        heart.beat("data", step=step)
        fault(heart, rank, step, start)
        heart.beat("F", op="F0")
        time.sleep(0.01)
        heart.beat("reduce")
        while not all_have_come_to(step) and not (stop and lost.exists()):
            time.sleep(0.002)
        asked = bool(stop)  # once for this step: what comes later counts in the next one
        if asked and lost.exists():
            heart.close(RuntimeError("another rank is gone"), 7)
            os._exit(7)
        if rank == 0 and (step % 5 == 0 or asked):
            folder = save / f"iter_{step:07d}"
            folder.mkdir(exist_ok=True)
            (folder / "index.json").touch()
        if asked:
            heart.close(RuntimeError("asked to stop"), max(stop))
            os._exit(max(stop))
    heart.close()
    os._exit(0)

lost = save / "lost"
lost.unlink(missing_ok=True)
children = {}
for rank in range(ranks):
    pid = os.fork()
    if pid == 0:
        work(rank)
    children[pid] = rank
failed = False
while children:
    pid, status = os.wait()
    rank = children.pop(pid)
    code = os.waitstatus_to_exitcode(status)
    if code:
        failed = True
        if code not in (9, 130):
            lost.touch()
        print(f"  exitcode  : {code} (pid: {pid})", flush=True)
        for other in children:
            os.kill(other, signal.SIGTERM)
sys.exit(int(failed))
"""
FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --mock-data --vocab-size 9 --micro-batch-size 1 --lr 1 "
    "--global-batch-size 4 --save-interval 5"
).split()


class Supervised:
    """A supervisor at work on the job above."""

    def __init__(self, root, folder, faults, *settings, steps=30, ranks=2, flags=(), hang=60):
        self.save, self.beats = folder / "save", folder / "beats"
        self.save.mkdir()
        script = folder / "pretrain_job.py"
        script.write_text(JOB)
        launcher = folder / "launch"
        launcher.write_text('#!/bin/sh\nRANKS=${1#--nproc-per-node=}; export RANKS; shift\nexec "$@"\n')
        launcher.chmod(0o755)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron.tools.supervise",
                "--backoff",
                "0.05",
                "--poll",
                "0.02",
                *settings,
                "--hang-timeout",
                str(hang),
                "--start-timeout",
                "120",
                "--heartbeat-dir",
                str(self.beats),
                "--",
                str(launcher),
                f"--nproc-per-node={ranks}",
                sys.executable,
                str(script),
                *FLAGS,
                "--save",
                str(self.save),
                "--train-iters",
                str(steps),
                "--on-event",
                f"echo $EVENT >> {self.save}/heard",
                *flags,
            ],
            cwd=root,
            env={**os.environ, "ROOT": str(root), "FAULTS": faults},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )

    def end(self, timeout=200):
        """(exit code, what was said, the account). Nothing of the job is left."""
        said, _ = self.process.communicate(timeout=timeout)
        assert descendants(self.process.pid) == []
        assert all(map(is_gone, read_beats(self.beats))), said
        account = self.save / "supervise" / "goodput.json"
        return self.process.returncode, said, json.loads(account.read_text()) if account.exists() else None


@pytest.mark.sampled(5)
def test_killed_stopped_and_stuck_ranks_are_told_and_the_job_goes_on(root, memory_folder):
    """In memory: a rank that waits for a busy disk is silent too."""
    job = Supervised(root, memory_folder, "SIGKILL:1:8 SIGSTOP:0:13 sleep:1:18 SIGSEGV:0:23", hang=4)
    code, said, account = job.end()
    assert code == 0, said
    causes = [attempt["cause"] for attempt in account["attempts"]]
    assert causes == ["rank killed by SIGKILL", "hung", "hung", "rank killed by SIGSEGV", "finished"], said
    assert "is stopped by a signal (SIGSTOP), in the data loader" in said
    assert "in the data loader for" in said and "in micro_batch)" in said
    assert [attempt["first_step"] for attempt in account["attempts"]] == [1, 6, 11, 16, 21]
    assert account["steps"] == 30 and account["restarts"] == 4 and account["repeated_steps"] >= 4
    assert account["lost"]["standing still before it was noticed"] > 6
    assert account["productive"] + sum(account["lost"].values()) == pytest.approx(account["wall"], abs=0.05)
    events = read_events(job.save)
    assert [event["event"] for event in events] == (
        "restart hang restart hang restart restart restart_storm end".split()
    ), said
    assert [event["cause"] for event in events if event["event"] == "restart"] == causes[:-1]
    hang, storm, end = events[1], events[-2], events[-1]
    assert hang["level"] == "info" and hang["ranks"] and hang["seconds"] >= 4 and "(SIGSTOP)" in hang["message"]
    assert (storm["restarts"], storm["limit"], storm["level"]) == (4, 3, "error")
    assert (end["level"], end["code"], end["why"]) == ("info", 0, "finished") and end["account"]["restarts"] == 4
    assert {event["source"] for event in events} == {"supervisor"} and count_restarts(events) == 4
    assert heard(job) == ["restart"] * 4 + ["restart_storm", "end"], said  # once for each failure
    whys = [event["message"] for event in events if event["event"] == "restart"]
    here = socket.gethostname()
    assert f"first on rank 1 of {here}" in whys[0] and f"first on rank 0 of {here}" in whys[3]
    assert "hung: no word from rank 0" in whys[1] and "is stopped by a signal (SIGSTOP)" in whys[1]
    assert [event["rank"] for event in events if event["event"] == "restart"] == [1, None, None, 0]
    assert read_mark(job.save / "supervise" / "supervisor.json").ended == "finished"


def heard(job):
    """The kinds of events that --on-event was told."""
    return (job.save / "heard").read_text().split()


@pytest.mark.parametrize(
    "code, cause", [(2, "not understood"), (3, "settings"), (4, "data"), (5, "checkpoint"), (8, "not")]
)
def test_what_would_come_again_is_not_tried_again(code, cause, root, tmp_path):
    returned, said, account = Supervised(root, tmp_path, f"{code}!:1:3").end()
    assert returned == code and account["restarts"] == 0 and cause in account["outcome"], said
    (event,) = read_events(tmp_path / "save")
    assert (event["event"], event["level"], event["code"]) == ("end", "error", code) and cause in event["why"]
    assert "as the test wants it" in said and "as the test wants it" in event["why"]
    assert "as the test wants it" in event["message"] and account["attempts"][0]["why"] == "as the test wants it"


CUDA = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    "code, output, why",
    [
        (
            3,
            "error: 4 heads:\n  1. --tp 3 does not divide them\n  -> --tp 2\n",
            "4 heads: 1. --tp 3 does not divide them",
        ),
        (2, "[rank0]: error: --tpp: unknown flag\n", "--tpp: unknown flag"),
        (1, f"error: rank 1 raised an exception; the last 2 of its 9 calls:\n  a.py:1\nRuntimeError: {CUDA}\n", "Run"),
        (1, f"[rank1]: torch.AcceleratorError: {CUDA}\n\ntorch.x.ChildFailedError: pretrain_gpt.py\n", "torch.Acc"),
        (-6, f"error: another rank is gone\n  what():  {CUDA}\n", CUDA),
        (-9, f"error: another rank is gone\n  what():  {CUDA}\n", ""),  # the kill is the cause
        (1, "that was all\n", ""),
    ],
)
def test_what_a_rank_said_before_its_heartbeat_is_the_reason_everywhere(code, output, why, supervisor):
    """Status, events and the account give the reason of the last attempt, not that of the one before it."""
    supervisor.events.path = supervisor.logs / "events.jsonl"
    supervisor.events.record("start", "begins", iteration=0, ranks=2, resumed=False)
    supervisor.events.record("end", "ended", level="error", code=1, why="of the attempt before")
    record = dict(kind="end", iteration=2, code=1, why="of the attempt before")
    (supervisor.logs / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (dict(kind="run"), record))
    )
    supervisor.attempts = [Attempt(0, 2)]
    verdict = end_of(supervisor, 128 - code if code < 0 else code, [], output, supervisor.attempts[0])
    said = supervisor.attempts[0].why
    assert verdict.code == code and said.startswith(why) and bool(said) == bool(why)
    assert (CUDA in said) == (code in (1, -6) and bool(why))
    supervisor.record_restart(supervisor.attempts[0])
    assert look(supervisor.logs).state == "starting" and said in look(supervisor.logs).why
    supervisor.report(f"stopped: {verdict.cause}", verdict)
    restart, end = read_events(supervisor.logs)[-2:]
    assert restart["why"] == said and said in restart["message"] and said in end["message"] and said in end["why"]
    line = look(supervisor.logs)
    assert line.state == "failed" and line.why == end["why"] and "before" not in line.why
    assert said in (supervisor.logs / "goodput.json").read_text()


def test_checkpoints_are_counted_though_the_clock_goes_back(supervisor, monkeypatch):
    supervisor.save, supervisor.events.path = "save", supervisor.logs / "events.jsonl"
    supervisor.events.record("save", "of an earlier supervisor", iteration=1)
    supervisor.old_events = supervise.size_of(supervisor.events.path)
    now = time.time()
    for iteration, clock in ((2, now), (3, now - 7200), (4, now - 3600)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        supervisor.events.record("save", "checkpoint", iteration=iteration)
    assert supervisor.saved() == 3
    assert [event["iteration"] for event in read_events(supervisor.events.path)] == [1, 2, 3, 4]


def test_the_same_crash_three_times_stops(root, tmp_path):
    returned, said, account = Supervised(root, tmp_path, "SIGKILL!:1:8").end()
    assert returned == 128 + 9 and account["restarts"] == 2 and "3 times the same end after step" in said


@pytest.mark.parametrize(
    "faults, flags, code, said",
    [
        (
            "SIGKILL:1:8 resumed-3:0:6",
            "--node-check true",
            0,
            "restart 2 of 10 after step 5: command: settings cannot work (exit 3)",
        ),
        (
            "11:1:8 11:1:8",
            "--node-check true",
            11,
            "given up: HOST failed (its ranks lost their device), and nothing is",
        ),
        (
            "11:1:8",
            "--node-check 'test ! -e lost || (echo GPU 1: gone; exit 1)'",
            11,
            "given up: HOST failed (GPU 1: gone)",
        ),
        ("11!:1:8", "--node-check true --min-world-size 1", 0, "restart 2 of 10 without HOST, on 1 ranks after step"),
    ],
    ids=["cannot start", "no spare", "check", "fewer"],
)
def test_a_lost_device_is_the_nodes_fault(faults, flags, code, said, root, tmp_path):
    flags = shlex.split(flags.replace("lost", str(tmp_path / "save" / "lost")))
    returned, text, account = Supervised(root, tmp_path, faults, *flags, steps=14).end()
    assert returned == code, text
    *_, end = events = read_events(tmp_path / "save")
    words = " ".join(event["message"] for event in events) + text
    assert said.replace("HOST", socket.gethostname()) in words, text
    assert (end["rank"], end["rank_host"]) == ((1, socket.gethostname()) if code else (None, None))
    excluded = [event["nodes"] for event in events if event["event"] == "node_excluded"]
    assert excluded == [[socket.gethostname()]] * ("HOST" in said)
    assert heard_levels(events) == ["restart"] * account["restarts"] + ["end"], events


def heard_levels(events):
    """The events that are sent, by default: warnings, errors and the end."""
    return [event["event"] for event in events if event["level"] != "info" or event["event"] == "end"]


def test_the_budget_of_restarts_ends(root, tmp_path):
    faults = " ".join(f"7:0:{step}" for step in (7, 12, 17, 22))
    returned, _, account = Supervised(root, tmp_path, faults, "--max-restarts", "2").end()
    assert returned == 7 and account["restarts"] == 2 and "--max-restarts" in account["outcome"]


@pytest.mark.parametrize(
    "flags, layout",
    [("", "tp 1 pp 1"), ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "tp 2 pp 1")],
)
def test_a_job_that_loses_a_rank_again_and_again_goes_on_with_fewer(flags, layout, root, tmp_path):
    """4 samples a step cannot be shared by 3 ranks: 4 -> 2."""
    job = Supervised(root, tmp_path, "SIGKILL!:3:8", "--min-world-size", "2", ranks=4, flags=flags.split())
    returned, said, account = job.end()
    assert returned == 0 and f"continuing with 2 ranks instead of 4, at the same global batch: {layout}" in said, said
    assert [attempt["ranks"] for attempt in account["attempts"]] == [4, 4, 2]


@pytest.mark.parametrize(
    "number, code, outcome", [(signal.SIGTERM, 9, "preempted"), (signal.SIGINT, 130, "interrupted by Ctrl-C")]
)
def test_a_signal_to_the_supervisor_saves_and_ends_the_job(number, code, outcome, root, tmp_path):
    job = Supervised(root, tmp_path, "", steps=5000)
    while not (job.save / "iter_0000010").exists():
        assert job.process.poll() is None, job.end()
        time.sleep(0.02)
    job.process.send_signal(number)
    returned, said, account = job.end()
    assert (returned, account["outcome"]) == (code, outcome) and account["attempts"][0]["last_step"] >= 10, said
    assert newest_checkpoint(str(job.save)) >= account["attempts"][0]["last_step"]


def test_a_second_ctrl_c_to_the_supervisor_ends_the_job_at_once(root, tmp_path):
    job = Supervised(root, tmp_path, "sleep:0:3", steps=5000)
    while not any(beat.step == 3 for beat in read_beats(job.beats)):
        assert job.process.poll() is None, job.end()
        time.sleep(0.02)
    job.process.send_signal(signal.SIGINT)
    while "asked to save" not in job.process.stdout.readline():
        assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    returned, said, account = job.end(timeout=60)  # and not the --grace of 120 s
    assert returned == 130 and "SIGINT again" in said and account["outcome"] == "interrupted by Ctrl-C", said


def test_sigterm_before_the_first_step_exits_with_9_too(root, tmp_path):
    """There is nothing to save, but whoever puts preempted jobs back into a queue goes by the code."""
    job = Supervised(root, tmp_path, "", steps=5000)
    while "attempt 0" not in job.process.stdout.readline():
        assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    returned, said, account = job.end()
    assert returned == 9 and account["outcome"] == "preempted", said


def test_nothing_of_a_job_outlives_a_supervisor_that_is_killed(root, tmp_path):
    job = Supervised(root, tmp_path, "", steps=5000)
    while not (job.save / "iter_0000005").exists():
        assert job.process.poll() is None, job.end()
        time.sleep(0.02)
    pids = [beat.pid for beat in read_beats(job.beats)]
    job.process.kill()
    job.process.wait()
    deadline = time.monotonic() + 60
    while any(state(pid) not in ("", "Z") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2 and [state(pid) for pid in pids if state(pid) not in ("", "Z")] == []
    job.process.stdout.close()
    assert lost_supervisor(job.save / "supervise" / "supervisor.json").pid == job.process.pid


def test_the_next_supervisor_records_that_one_was_killed(supervisor, tmp_path):
    gone = replace(Mark.own(), pid=2**22 + 1, began=time.time() - 60)
    gone.write(tmp_path / "supervisor.json")
    supervisor.events.path = tmp_path / "events.jsonl"
    supervisor.leave_mark()
    supervisor.leave_mark()
    (event,) = read_events(tmp_path)
    assert event["event"] == "supervisor_lost" and str(gone.pid) in event["message"]
    assert read_mark(tmp_path / "supervisor.json").pid == os.getpid()


def test_mistakes_of_the_command_are_told(root):
    command = [sys.executable, "-m", "megatron.tools.supervise"]
    for words, code, text in (
        ([], 2, "is missing"),
        (["--"], 2, "no command"),
        (["--", "ls"], 3, "no training script"),
        (["--hang-timeot", "3", "--", "ls"], 2, "did you mean --hang-timeout"),
    ):
        found = subprocess.run([*command, *words], cwd=root, capture_output=True, text=True)
        assert found.returncode == code and text in found.stderr


@pytest.mark.parametrize(
    "flags, error, text",
    [
        ("--hang-timeout -1", SettingsError, "--hang-timeout -1.0 must be above 0"),
        ("--poll 0", SettingsError, "--poll 0.0 must be above 0"),
        ("--max-restarts -1", SettingsError, "--max-restarts -1 must be at least 0"),
        ("--same-step-limit 0", SettingsError, "--same-step-limit 0 must be at least 1"),
        ("", UsageError, "no-such-launcher: there is no such command"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_started(flags, error, text, monkeypatch):
    monkeypatch.setenv(COMMAND, "")  # what it leaves there is for its own children: taken back behind the test
    monkeypatch.delenv(COMMAND)
    with pytest.raises(error, match=text):
        supervise.main([*flags.split(), "--", "no-such-launcher", "pretrain_gpt.py"])


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setenv(SUPERVISOR, "")  # what it leaves there is for its own children: taken back after the test
    monkeypatch.delenv(SUPERVISOR)
    settings = supervise.SuperviseOptions(log_dir=str(tmp_path), heartbeat_dir=str(tmp_path / "beats"))
    made = supervise.Supervisor(settings, [sys.executable, "pretrain_job.py"])
    return made


def end_of(supervisor, returned, beats=(), output="", attempt=None, killed=None):
    """The verdict on an attempt that ended so."""
    watch = AttemptWatch(supervisor.limits, supervisor.beats, supervisor.traces, supervisor.events)
    watch.output, watch.returned, watch.beats = supervisor.logs / "none.log", returned, list(beats)
    watch.output.write_text(output)
    if killed:
        watch.note_killed(killed)
    return supervisor.close(attempt or Attempt(0, 2), watch)


def test_a_script_that_ends_with_0_does_not_hide_how_its_ranks_ended(supervisor):
    """As `torchrun ... | tee log` does."""

    def verdict(returned, *ended, output=""):
        beats = [Beat(rank, "host", 1, 1, 1, "F", 3, ended=code) for rank, code in enumerate(ended)]
        return end_of(supervisor, returned, beats, output)

    assert [verdict(0, *ended).action for ended in ((), (0, 0), (0, 1), (None, 0), (None, None))] == [Action.DONE] * 5
    assert verdict(0, 7, 5).code == 5 and verdict(0, 9, 9).action is Action.PREEMPTED
    assert verdict(0, None, 1).action is Action.RESTART and verdict(None).action is Action.RESTART
    early = "  exitcode  : 3 (pid: 4242)"  # before it came to a heartbeat
    assert verdict(0, output=early).code == 3 and verdict(0, 0, output=early).code == 0


@pytest.mark.parametrize(
    "returned, ended, code",
    [(137, (7, None), -9), (4, (), 4), (6, (7, None), 6), (1, (7, None), 7), (143, (9, 9), 9), (130, (130, 130), 130)],
)
def test_our_launcher_says_how_a_rank_ended_that_could_not(returned, ended, code, supervisor):
    beats = [Beat(rank, "host", 1, 1, 1, "F", 3, ended=own) for rank, own in enumerate(ended)]
    assert end_of(supervisor, returned, beats).code == code


@pytest.mark.parametrize(
    "ended, cause",
    [
        ((7, None), "rank killed by SIGKILL"),
        ((None, None), "rank killed by SIGKILL"),
        ((3, None), "settings cannot work (exit 3)"),  # its launcher has ended the other
        ((1, None), "failed (exit 1)"),
    ],
)
def test_a_kill_is_the_cause_though_the_launcher_was_ended_before_it_could_report(ended, cause, supervisor):
    """As when the other rank takes its time, and torchrun waits for it longer than the supervisor for torchrun."""
    beats = [
        Beat(rank, "host", 2**22 + rank, 1, 1, "F", 3, ended=own, machine=machine()) for rank, own in enumerate(ended)
    ]
    assert end_of(supervisor, 1, beats, killed=beats).cause == cause


@pytest.mark.parametrize("silent_for, by_itself, host", [(4.0, 7, "n3"), (4.0, 5, None), (1.0, 7, None)])
def test_a_host_without_a_word_is_the_cause(silent_for, by_itself, host, supervisor, monkeypatch):
    """If it was silent before others noticed, and none of them failed by itself: rank 1 was ended by its launcher."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    watch = AttemptWatch(supervisor.limits, supervisor.beats, supervisor.traces, supervisor.events)
    message(supervisor.beats, "n3", 4, 5)
    watch.reader.read()
    clock[0] += silent_for
    ended = [Beat(0, "n2", 9, 1, 1, "F", 3, ended=by_itself), Beat(1, "n2", 8, 1, 1, "F", 3, gone=True)]
    watch.beats, watch.killed, watch.ending_since = ended, {1: 0}, clock[0]
    watch._listen_for_nodes()
    watch.output, watch.returned = supervisor.logs / "none.log", 1
    watch.output.write_text("")
    verdict, first, why = watch.verdict()
    assert [beats[0].host for beats, _ in watch.silent_nodes] == [host] * bool(host)
    assert (verdict.kind, verdict.action, first.rank) == (
        (FailureKind.HOST, Action.RESTART, 4) if host
        else (FailureKind.DISK, Action.STOP, 0) if by_itself == 5
        else (FailureKind.HOST, Action.RESTART, 1)
    )  # fmt: skip
    assert bool(host) == why.startswith("no word from n3 for 6 s: it is gone, or cut off"), why
    assert clock[0] < 1000 + 7.0


def test_the_signal_that_killed_a_process_is_known_until_it_is_read():
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSEGV)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert signal_of_zombie(process.pid) == signal.SIGSEGV
    process.wait()
    assert signal_of_zombie(process.pid) == signal_of_zombie(os.getpid()) == 0


def test_commands_of_events_are_not_ended_with_the_job():
    others = descendants(os.getpid())  # servers of other tests
    keep, end = (subprocess.Popen(["sh", "-c", "sleep 60; true"]) for _ in range(2))
    assert end_descendants(os.getpid(), spared=lambda: {keep.pid, *others}) == []
    assert state(end.pid) in ("", "Z") and state(keep.pid) in ("S", "R")
    for pid in descendants(keep.pid):
        os.kill(pid, signal.SIGKILL)
    keep.kill()
    keep.wait()


def test_a_rank_may_be_silent_for_longer_where_nobody_knows_how_long_it_takes(supervisor):
    """A first save, or the wait for the one before; and all that comes before the first step ends."""

    def limit(**changed):
        return supervisor.limits.of(
            Beat(**(dict(rank=0, host="h", pid=1, born=1, count=1, phase="F", step=3, since=1) | changed))
        )

    assert [limit(), limit(usual=100.0), limit(phase="save"), limit(phase="save", usual=400.0)] == [
        300,
        500,
        1500,
        2000,
    ]
    assert limit(step=1) == 1800


@pytest.mark.parametrize("output", ["a reader that is gone", "none at all"])
def test_a_job_outlives_the_reader_of_its_supervisors_words(output, root, tmp_path):
    script = tmp_path / "pretrain_job.py"
    script.write_text(f"import pathlib\nprint('word ' * 9999)\npathlib.Path({str(tmp_path / 'done')!r}).touch()\n")
    words = ["-m", "megatron.tools.supervise", "--log-dir", str(tmp_path), "--", sys.executable, str(script)]
    read, write = os.pipe()
    os.close(read)
    close = (lambda: os.close(1)) if output == "none at all" else None
    found = subprocess.run(
        [sys.executable, *words], cwd=root, stdout=write, stderr=subprocess.PIPE, preexec_fn=close, timeout=200
    )
    os.close(write)
    assert (found.returncode, found.stderr) == (0, b"") and (tmp_path / "done").exists()
    assert json.loads((tmp_path / "goodput.json").read_text())["outcome"] == "finished"


def test_an_account_that_cannot_be_written_does_not_change_how_the_job_ended(supervisor, capsys):
    (supervisor.logs / "goodput.json").mkdir()
    assert supervisor.report("finished", JobVerdict(Action.DONE, "finished", 0)) == 0
    assert "finished after" in (said := capsys.readouterr().out) and "could not be written" in said


@pytest.mark.full
def test_the_oldest_rank_is_named_when_another_gives_up_before_the_supervisor_does(root, memory_folder):
    """--distributed-timeout-minutes below --hang-timeout: rank 0 ends with 7, rank 1 is stopped by a signal."""
    job = Supervised(root, memory_folder, "SIGSTOP:1:8 7:0:9")
    code, said, _ = job.end()
    assert code == 0
    assert re.search(r"rank 0 gave up waiting; the oldest word is that of rank 1, \d+ s ago\n", said), said
    assert re.search(r"rank 1 on \S+, pid \d+: is stopped by a signal \(SIGSTOP\), .*, step 8\b", said), said
    assert "attempt 0 ended: peer lost (exit 7)" in said


@pytest.mark.full
def test_a_real_job_with_a_stopped_rank_ends_with_the_bits_of_a_clean_run(root, run_ranks, memory_folder):
    import torch

    import pretrain_gpt
    from megatron.checkpoint.reader import Reader
    from tests.chaos.supervised import command, environment
    from tests.chaos.victim import Fault

    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 "
        "--lr 1e-2 --micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --train-iters 120 "
        "--save-interval 20 --keep-last 2"
    ).split()
    folder = memory_folder  # a rank that waits for a busy disk is silent too
    save = folder / "a"
    stop = Fault("forward", str(folder / "marker"), rank=1, step=31, action="SIGSTOP")  # of itself: no race with it
    job = subprocess.run(
        command([*flags, "--save", str(save)], folder, stop, launcher="megatron.tools.launch"),
        cwd=root,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=250,
    )
    said = job.stdout
    assert job.returncode == 0, said
    assert re.search(r"rank 1 on \S+, pid \d+: is stopped by a signal \(SIGSTOP\), .*, step 31\b", said), said
    assert re.search(r"rank 0 on \S+ waits in .* of (dp group 0|all ranks)", said), said
    run_ranks(2, lambda rank: pretrain_gpt.main([*flags, "--save", str(folder / "b")]))
    tensors = []
    for place in (save, folder / "b"):
        with Reader(place / "iter_0000120") as reader:
            tensors.append({name: reader.read(name) for name in reader.tensors})
    assert [name for name in tensors[1] if not torch.equal(tensors[0][name], tensors[1][name])] == []


@pytest.mark.sampled(10)
def test_a_launcher_that_does_not_notice_a_dead_rank_is_ended(root, tmp_path):
    """Its own end is no sign of success: the rank's death is what counts."""
    script = tmp_path / "pretrain_deaf.py"
    script.write_text(
        f"import os, signal, sys, time\nsys.path.insert(0, {str(root)!r})\n"
        "from megatron.guard.command import value_of\nfrom megatron.guard.heartbeat import Heartbeat\n"
        "if os.fork() == 0:\n"
        "    Heartbeat(value_of(sys.argv, '--heartbeat-dir')).beat('F', step=1)\n"
        "    time.sleep(0.3)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    command = [
        sys.executable,
        "-m",
        "megatron.tools.supervise",
        "--max-restarts",
        "0",
        "--log-dir",
        str(tmp_path),
        "--",
        sys.executable,
        str(script),
    ]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250)
    account = json.loads((tmp_path / "goodput.json").read_text())
    assert found.returncode not in (0, None) and account["attempts"][0]["cause"] != "finished", found.stdout
    assert account["wall"] < 200  # and not the ten minutes of the launcher
    watched = Path(re.search(r"watching (\S+),", found.stdout)[1])
    assert watched.name.startswith("heartbeats-") and not watched.exists()


def test_folders_of_killed_supervisors_are_removed_and_those_of_living_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # no /dev/shm
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    alive = heartbeat_folder()
    number = os.fork()
    if number == 0:
        heartbeat_folder()
        os._exit(0)
    os.waitpid(number, 0)
    assert len(list(tmp_path.iterdir())) == 2 and heartbeat_folder().exists()
    assert alive.exists() and len(list(tmp_path.iterdir())) == 2


def test_a_supervisor_that_could_not_look_counts_no_silence(monkeypatch):
    """A machine that stood still for an hour is no reason to end a job whose ranks stood still with it."""
    moments = iter([100.0, 100.4, 3700.0, 3700.5])
    monkeypatch.setattr(attempt_watch, "time", SimpleNamespace(monotonic=moments.__next__))
    clock = attempt_watch.Clock(most=1.0)
    assert [round(clock.look(), 3) for _ in range(3)] == [0.4, 1.4, 1.9]


REAL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --tensor-model-parallel-size 2"
).split()


@pytest.mark.full
def test_supervisor_status_and_report_agree_on_a_real_job_with_a_killed_rank(root, memory_folder):
    """The other tensor parallel rank waits for a save in the background that cannot end."""
    from megatron.tools import report
    from tests.chaos.supervised import command, environment
    from tests.chaos.victim import Fault

    folder, save = memory_folder, memory_folder / "a"
    kill = Fault("forward", str(folder / "marker"), rank=1, step=31, action="SIGKILL")
    flags = [*REAL, "--train-iters", "60", "--save-interval", "2", "--async-save", "--save", str(save)]
    job = subprocess.run(
        command(flags, folder, kill), cwd=root, env=environment(), text=True, stdout=-1, stderr=-2, timeout=250
    )
    assert job.returncode == 0, job.stdout
    account = json.loads((folder / "logs" / "goodput.json").read_text())
    assert [one["cause"] for one in account["attempts"]] == ["rank killed by SIGKILL", "finished"], job.stdout
    assert account["productive"] + sum(account["lost"].values()) == pytest.approx(account["wall"], abs=0.05)
    events, line = read_events(save), look(save)
    saves = sum(event["event"] == "save" for event in events)
    assert (account["steps"], account["restarts"], account["checkpoints"]) == (60, 1, saves)
    assert (line.state, line.iteration, line.restarts, line.checkpoint) == ("done", 60, 1, 60)
    steps = [json.loads(text) for text in (save / "metrics.jsonl").read_text().splitlines()]
    steps = [record["iteration"] for record in steps if record["kind"] == "step"]
    assert len(steps) == account["steps"] + account["repeated_steps"]
    text = re.sub(r"<[^>]+>", "|", report.build(save))
    for shown in (f"checkpoints||{saves}|", "restarts||1|", "steps||60|", "1 restart|", "60|"):
        assert shown in text, shown


@pytest.mark.full
def test_a_killed_supervisor_of_a_real_job_is_told(root, memory_folder):
    from tests.chaos.supervised import command, environment

    folder, save = memory_folder, memory_folder / "a"
    flags = [*REAL, "--train-iters", "100000", "--save-interval", "50", "--keep-last", "2", "--save", str(save)]
    flags += ["--on-event", f"echo $EVENT >> {folder}/heard"]
    job = subprocess.Popen(
        command(flags, folder), cwd=root, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: (save / "iter_0000050" / "index.json").exists(), job)
    job.kill()
    job.wait()
    wait_until(lambda: "end" in [event["event"] for event in read_events(save)])
    *_, lost, saved, end = read_events(save)
    assert sorted([lost["event"], saved["event"]]) == ["save", "supervisor_lost"] and end["code"] == 9
    assert str(job.pid) in (lost if lost["event"] == "supervisor_lost" else saved)["message"]
    wait_until(lambda: "end" in (folder / "heard").read_text())
    assert "supervisor_lost" in (folder / "heard").read_text().split()
    assert f"its supervisor (process {job.pid} on " in look(save).why
    wait_until(lambda: all(map(is_gone, read_beats(folder / "beats"))))


def wait_until(condition, job=None):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline and (job is None or job.poll() is None)
        time.sleep(0.05)


def test_restarts_that_other_hosts_record_do_not_count():
    """The supervisors of four hosts restart a job once: four records, and no storm."""
    own, recorded = dict(event="restart", host=socket.gethostname()), []
    past = [dict(event="restart", host=f"host{n}") for n in range(4)] + [own] * 3
    events = SimpleNamespace(rules={}, record=lambda kind, *words, **fields: recorded.append(kind))
    of = SimpleNamespace(
        attempts=[None],
        change="",
        settings=SimpleNamespace(max_restarts=10),
        events=events,
        delay=1.0,
        past_events=lambda since: past,
    )
    attempt = SimpleNamespace(
        code=7, last_step=3, ending_in_words="gone", cause="gone", failure="network", why=None, rank=None, host=""
    )
    for more in ([], [own], [dict(event="restart_storm")]):
        past += more
        supervise.Supervisor.record_restart(of, attempt)
    assert recorded == ["restart", "restart", "restart_storm", "restart"]
