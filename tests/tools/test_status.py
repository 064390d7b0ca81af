# SPDX-License-Identifier: Apache-2.0
"""What megatron.tools.status says of runs in every state that a run can be in."""

import json
import os
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron.errors import DataError, UsageError
from megatron.guard import run_state
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.run_state import folders, look
from megatron.guard.supervisor_mark import Mark
from megatron.storage.durable import seal
from megatron.telemetry import run_folder
from megatron.telemetry.events import EventLog
from megatron.tools.status import main

CONFIG = dict(
    model=dict(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=16),
    guard=dict(heartbeat_dir=None),
    batch=dict(train_iters=100, micro_batch_size=2, global_batch_size=8),
)
ENDED = 2**22 + 1  # no process has such a number
NOW = time.time()


@pytest.fixture
def run(tmp_path):
    """Write a run's folder: `run(records..., age=seconds since the last of them, beats=folder)`."""

    def write(*records, age=1.0, pid=None, iteration=0, beats=None, launches=1, name="a", **more):
        folder = tmp_path / name
        (folder / "iter_0000020").mkdir(parents=True)
        (folder / "iter_0000020" / "index.json").touch()
        config = {**CONFIG, "guard": dict(heartbeat_dir=beats and str(beats)), "checkpoint": dict(save=str(folder))}
        launch = dict(
            kind="run",
            iteration=iteration,
            host=socket.gethostname(),
            pid=pid or os.getpid(),
            config=config,
            mesh=dict(pp=1, replicate=1, shard=2, cp=1, tp=1),
            **more,
        )
        lines = [json.dumps(record) for record in [launch] * launches + list(records)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        os.utime(folder / "metrics.jsonl", (NOW - age,) * 2)
        return folder

    return write


def step(iteration, seconds=0.5):
    return dict(kind="step", iteration=iteration, batch_size=8, seconds=seconds, **{"lm loss": 10.0 - iteration / 100})


def end(code, why=""):
    return dict(kind="end", iteration=30, code=code, why=why)


STEPS = [step(n) for n in range(1, 31)]


def test_a_run_that_goes_on(run):
    line = look(run(*STEPS, launches=3), now=NOW)
    assert (line.state, line.iteration, line.iterations, line.restarts, line.checkpoint) == ("running", 30, 100, 2, 20)
    assert (line.tokens_per_second, line.seconds_left, line.loss) == (8 * 16 / 0.5, 35.0, 9.7)


def test_a_fine_tuning_has_the_loss_of_its_task(run):
    steps = [{name.removeprefix("lm "): value for name, value in one.items()} for one in STEPS]
    assert run_state.look(run(*steps)).loss == 9.7


def test_the_newest_snapshot_in_memory_is_said_if_no_checkpoint_is_newer(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "shared_memory", lambda: tmp_path / "shm")
    folder, memory = run(*STEPS, end(1, "rank 3: lost")), tmp_path / "shm" / "megatron-snapshots-5f0c91aa3b7e"
    assert look(folder, now=NOW).snapshot is None
    (folder / "memory_snapshots.json").write_bytes(seal(dict(memory="5f0c91aa3b7e", starts={}))[1])
    assert look(folder, now=NOW).snapshot is None
    for iteration in (15, 25):
        (memory / f"iter_{iteration:07d}-91aa3b7e").mkdir(parents=True)
        os.utime(memory / f"iter_{iteration:07d}-91aa3b7e", (NOW - 30,) * 2)
    line = look(folder, now=NOW)
    assert (line.snapshot, line.snapshot_age, line.checkpoint) == (25, 30.0, 20)
    main([str(folder)])
    assert "a snapshot of iteration 25 is in memory, " in " ".join(capsys.readouterr().out.split())
    (memory / "iter_0000025-91aa3b7e").rmdir()
    main([str(folder)])
    assert "in memory" not in capsys.readouterr().out  # the checkpoint is newer
    (folder / "memory_snapshots.json").write_text("{")
    assert look(folder, now=NOW).snapshot is None


def test_a_start_with_nothing_left_to_train_hides_no_figures(run):
    folder = run(*STEPS, step(100), end(0))
    first = look(folder, now=NOW)
    text = (folder / "metrics.jsonl").read_text()
    again = text.splitlines()[0] + "\n" + json.dumps(end(0) | dict(iteration=100)) + "\n"
    (folder / "metrics.jsonl").write_text(text + again)
    second = look(folder, now=NOW)
    assert (second.loss, second.tokens_per_second) == (first.loss, first.tokens_per_second) == (9.0, 8 * 16 / 0.5)
    assert (second.state, second.iteration, second.restarts) == ("done", 100, 1)


@pytest.mark.parametrize(
    "records, more, state, why",
    [
        ([], dict(iteration=20), "starting", ""),
        ([], dict(age=4000.0), "stalled", ""),
        (STEPS, dict(age=50.0), "running", ""),
        (STEPS, dict(age=70.0), "stalled", ""),
        ([step(n, 30.0) for n in range(1, 9)], dict(age=200.0), "running", ""),  # steps of half a minute
        (STEPS, dict(pid=ENDED), "failed", "killed"),
        ([*STEPS, end(8, "iteration 31: loss nan")], {}, "failed", "loss nan"),
        ([*STEPS, end(9, "signal caught")], dict(age=9e4, pid=ENDED), "stopped", "signal caught"),
        ([*STEPS, end(0)], {}, "stopped", ""),
        ([step(100), dict(kind="end", iteration=100, code=0, why="")], dict(pid=ENDED), "done", ""),
        ([*STEPS, dict(kind="rewind", iteration=20)], {}, "running", ""),
    ],
)
def test_states_of_a_run_without_heartbeats(records, more, state, why, run):
    line = look(run(*records, **more), now=NOW)
    assert line.state == state and why in line.why
    assert line.iteration == (records[-1]["iteration"] if records else more.get("iteration", 0))


def test_heartbeats_say_more(run, tmp_path):
    folder = run(*STEPS, age=500.0, beats=tmp_path / "beats", pid=ENDED)
    heartbeats = [Heartbeat(str(tmp_path / "beats"), rank) for rank in range(2)]
    for heartbeat in heartbeats:
        heartbeat.beat("evaluate", step=31)
    line = look(folder)
    assert (line.state, line.why) == ("running", "evaluate of step 31") and line.age < 100
    line = look(folder, now=time.time() + 300)
    assert (line.state, line.why) == ("stalled", "evaluate of step 31")
    heartbeats[1].close(RuntimeError("disk is full"), 6)
    line = look(folder)
    assert (line.state, line.why) == ("failed", "rank 1: disk is full")
    heartbeats[0].close()


def test_long_torn_and_missing_files(run, tmp_path):
    folder = run(*[step(n) for n in range(1, 2000)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "iterat')
    assert look(folder).iteration == 1999
    assert [path.name for path in folders([str(tmp_path)])] == ["a"]
    (folder / "metrics.jsonl").write_text("")
    line = look(folder)
    assert (line.iteration, line.iterations, line.checkpoint) == (20, None, 20)
    with pytest.raises(DataError, match="nowhere: no such folder\n  -> name the --save folders"):
        folders([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: no metrics.jsonl"):
        folders([str(tmp_path / "empty")])


def test_the_command_prints_a_line_a_run(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_state, "time", SimpleNamespace(time=lambda: NOW))
    run(*STEPS, name="one")
    run(*STEPS, end(4, "the file is gone"), name="two")
    main([str(tmp_path)])
    verdict, titles, one, two, why = capsys.readouterr().out.splitlines()
    assert verdict == "2 runs: 1 failed, 1 running" and why == "  the file is gone, 1 s ago"
    assert titles.split() == ["run", "state", "iteration", "tokens/s", "loss", "left", "checkpoint"]
    assert one.split()[1:] == "running 30/100 256 9.7000 0:00:35 20,".split() + one.split()[-3:]
    assert one.startswith("...") and one.split()[0].endswith("/one") and two.split()[1] == "failed"
    main(["--wide", str(tmp_path)])
    _, _, one, two = capsys.readouterr().out.splitlines()
    assert one.startswith(f"{tmp_path / 'one'}  running") and two.endswith("the file is gone, 1 s ago")
    main(["--json", str(tmp_path / "two")])
    [found] = json.loads(capsys.readouterr().out)
    assert found["state"] == "failed" and found["checkpoint"] == 20
    with pytest.raises(UsageError, match="which runs"):
        main(["--json"])


def test_a_bad_folder_hides_no_other(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_state, "time", SimpleNamespace(time=lambda: NOW))
    run(*STEPS, name="good")
    damaged = run(*STEPS, name="damaged")
    launch = json.loads((damaged / "metrics.jsonl").read_text().splitlines()[0])
    launch["config"]["model"] = 3
    (damaged / "metrics.jsonl").write_text(json.dumps(launch) + "\n")
    names = [str(tmp_path / name) for name in ("nowhere", "damaged", "good")]
    with pytest.raises(DataError, match="nowhere: no such folder; .*damaged: .*\n.*\n.*-> name the --save") as caught:
        main(names)
    assert "good" not in str(caught.value)
    told = capsys.readouterr().out
    assert told.startswith("3 runs: 2 unreadable, 1 running\n") and "30/100" in told
    assert "no such folder" in told
    with pytest.raises(DataError):
        main(["--json", *names])
    assert [line["state"] for line in json.loads(capsys.readouterr().out)] == ["unreadable", "unreadable", "running"]


def test_what_a_supervisor_restarted_says_so_under_its_run(run, capsys, monkeypatch):
    monkeypatch.setattr(run_state, "time", SimpleNamespace(time=lambda: NOW))
    main([str(run(*STEPS, launches=3))])
    assert capsys.readouterr().out.splitlines()[-1] == "  2 restarts"


def test_a_run_is_counted_once_and_is_never_more_than_done(run, capsys):
    folder = run(*(step(n) for n in range(1, 134)), dict(kind="end", iteration=133, code=0, why=""))
    main(["--wide", str(folder.parent), str(folder)])
    said = capsys.readouterr().out
    assert said.startswith("1 run: ") and " 100% " in said and "133%" not in said


def test_warnings_of_the_newest_launch_are_told(run, capsys):
    folder = run(*STEPS)
    log = EventLog(folder / "events.jsonl")
    log.record("start", "one", iteration=0)
    log.record("spike", "of a launch before", iteration=10)
    log.record("restart", "killed", iteration=12)
    log.record("start", "two", iteration=10)
    line = look(folder)
    assert (line.restarts, line.warnings, line.errors, line.last_event) == (1, 0, 0, None)
    log.record("high_grad_norm", "gradient norm 9 is high", iteration=20)
    log.record("no_step", "no step has ended for 99 s", iteration=30)
    line = look(folder)
    assert (line.warnings, line.errors, line.last_event["event"]) == (1, 1, "no_step")
    main([str(folder)])
    said = " ".join(capsys.readouterr().out.split())
    assert "1 restart" in said and "1 error and 1 warning, the last one 0 s ago: no step has ended for 99 s" in said


def test_what_is_slow_now_is_told(run, capsys):
    folder = run(*STEPS, age=0)
    os.utime(folder / "metrics.jsonl")
    log = EventLog(folder / "events.jsonl")
    log.record("slow_rank", "of a launch before", iteration=1, rank=7, phase="forward")
    log.record("start", "two", iteration=10)
    assert look(folder).slow == ()
    log.record("slow_rank", "rank 1 is slow ...", iteration=20, rank=1, phase="backward")
    log.record("slow_stage", "stage 2 ...", iteration=25, stage=2)
    log.record("slow_data", "all ranks wait ...", iteration=25)
    assert look(folder).slow == (
        "rank 1 is slow (backward)",
        "stage 2 of the pipeline is slow",
        "all ranks wait for data",
    )
    main([str(folder)])
    assert "rank 1 is slow (backward), stage 2 of the pipeline is slow" in " ".join(capsys.readouterr().out.split())
    log.record("recovered", "rank 1 ...", iteration=30, rank=1, what="slow_rank")
    log.record("recovered", "stage 2 ...", iteration=30, stage=2, what="slow_stage")
    assert look(folder).slow == ("all ranks wait for data",)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(end(0)) + "\n")
    assert look(folder).slow == ()  # it has ended


def test_a_killed_supervisor_shows(run, tmp_path):
    path = tmp_path / "supervisor.json"
    folder = run(*STEPS, supervisor=str(path))
    assert look(folder).why == ""
    Mark.own().write(path)
    assert look(folder).why == ""
    replace(Mark.own(), pid=ENDED).write(path)
    assert (
        look(folder).why == f"its supervisor (process {ENDED} on {socket.gethostname()}) was killed: nobody restarts it"
    )
    elsewhere = replace(Mark.own(), pid=7, host="node7", machine="another")
    elsewhere.write(path)
    assert look(folder).why == ""
    os.utime(path, (time.time() - 500,) * 2)
    assert "(process 7 on node7) was killed" in look(folder).why
    assert (
        "signal caught, its supervisor"
        in look(run(*STEPS, end(9, "signal caught"), supervisor=str(path), name="b")).why
    )
    assert "supervisor" not in look(run(step(100), end(0) | dict(iteration=100), supervisor=str(path), name="c")).why
    replace(elsewhere, ended="finished").write(path)
    assert look(folder).why == ""


def test_runs_that_write_to_one_file_are_called_interleaved(run):
    assert "interleaved" in look(run(step(1), step(2), step(1), step(3), step(2))).why
    assert look(run(step(1), step(2), dict(kind="rewind", iteration=0), step(1), name="b")).why == ""


def test_a_run_in_an_object_store(tmp_path, monkeypatch, capsys):
    """Its metrics are on the machine where it runs; elsewhere its checkpoints are known."""
    import fsspec

    monkeypatch.chdir(tmp_path)
    store = fsspec.filesystem("memory")
    state = dict(config=CONFIG, mesh=dict(replicate=1, shard=2), state=dict(iteration=100, consumed_samples=800))
    for name, content in (("index.json", "{}"), ("state.json", json.dumps(state))):
        store.pipe(f"/status/runs/a/iter_0000100/{name}", content.encode())
    for name in ("memory://status/runs/a", "memory://status/runs"):
        [line] = [look(folder) for folder in folders([name])]
        assert (line.run, line.state, line.checkpoint, line.iterations) == ("memory://status/runs/a", "done", 100, 100)
        assert line.age < 100 and line.checkpoint_age < 100
    launch = dict(kind="run", iteration=0, config={**CONFIG, "checkpoint": dict(save="memory://status/runs/a")})
    records = [launch, step(100), dict(kind="end", iteration=100, code=0, why="")]
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    main(["memory://status/runs/a"])
    said = capsys.readouterr().out
    assert said.startswith("1 run: done") and "100/100" in said and " d ago" not in said
    [line] = [look(folder) for folder in folders(["memory://status/runs/a"])]
    assert (line.loss, line.checkpoint, line.state) == (9.0, 100, "done")
    store.rm("/status", recursive=True)


@pytest.mark.parametrize(
    "codes, restarts", [([0], 0), ([9], 0), ([130], 0), ([None], 1), ([1], 1), ([0, 1, 9], 1), ([3, None], 2)]
)
def test_a_launch_after_one_that_ended_in_order_is_no_restart(run, codes, restarts):
    """codes: of the launches before the last one; None: killed without a word, 9: asked to stop, 130: Ctrl-C."""
    folder = run(*STEPS, launches=len(codes) + 1)
    log = EventLog(folder / "events.jsonl")
    for code in codes:
        log.record("start", "one", iteration=0)
        if code is not None:
            log.record("end", "ended", code=code)
    log.record("start", "the last one", iteration=10)
    assert look(folder).restarts == restarts
