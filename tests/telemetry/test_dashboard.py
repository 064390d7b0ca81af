# SPDX-License-Identifier: Apache-2.0
"""What the dashboard reads and sends. Its page in a browser: test_dashboard_page.py."""

import json
import math
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from megatron.errors import DataError, Failure, SettingsError, UsageError
from megatron.guard.run_state import look_at
from megatron.storage.urls import location
from megatron.telemetry.curves import Curve, running_mean, thinned
from megatron.telemetry.dashboard.runs import PARTS, Runs, View
from megatron.telemetry.history import History, read_end, read_history
from megatron.telemetry.report_facts import subtitle
from megatron.telemetry.tail import PART, Tail
from megatron.tools import dashboard

ROOT = Path(__file__).resolve().parent.parent.parent


def step(iteration: int, loss=2.0, **more) -> dict:
    given = {"lm loss": loss, "learning_rate": 1e-3, "grad_norm": 1.5, "seconds": 0.5, "tokens_per_second": 1000.0}
    return dict(kind="step", iteration=iteration, consumed_samples=4 * iteration, **{**given, **more})


def launch(iteration: int = 0, **more) -> dict:
    config = dict(
        model=dict(num_layers=2, hidden_size=8, num_attention_heads=1, seq_length=16),
        batch=dict(micro_batch_size=2, global_batch_size=8, train_iters=20),
    )
    return (
        dict(kind="run", iteration=iteration, time="2026-01-05T10:00:00+00:00", mesh=dict(pp=1), config=config) | more
    )


def lines(*records: dict) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in records]


def write(folder: Path, *records: dict, mode: str = "ab") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", mode) as file:
        file.write(b"".join(lines(*records)))
    return folder


# -- reading a file that grows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["disk", "object store"])
def test_a_growing_file_is_read_line_by_line(where, tmp_path):
    chance, text = random.Random(3), b"".join(b"%d %s\n" % (n, b"x" * (n % 50)) for n in range(300))
    path = tmp_path / "file" if where == "disk" else location(f"memory://{tmp_path.name}/file")
    tail, found, at = Tail(path), [], 0
    assert tail.read() == ([], False)  # no file yet
    while at < len(text):
        at += chance.randrange(1, 400)  # ends anywhere: most last lines are torn
        path.write_bytes(text[:at])
        new, again = tail.read()
        assert not again and all(line.endswith(b"\n") for line in new)
        found += new
        assert tail.read() == ([], False)  # nothing came since
    assert b"".join(found) == text


def test_parts_of_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.telemetry.tail.PART", 1000)
    text = [b"%d\n" % n for n in range(2000)]
    (tmp_path / "file").write_bytes(b"".join(text[:700]) + b"z" * 2500 + b"\n" + b"".join(text[700:]))
    tail, found = Tail(tmp_path / "file"), []
    while not found or tail.share < 1:
        new, again = tail.read()
        assert not again and sum(map(len, new)) <= 1000 < PART
        found += new
    assert [line for line in found if b"z" not in line and line != b"\n"] == text


def test_long_lines_that_follow_each_other_come_whole(tmp_path, monkeypatch):
    """Up to a part's size; what is read again of the last line takes no room of the next one."""
    monkeypatch.setattr("megatron.telemetry.tail.PART", 1000)
    lines = [letter * size + b"\n" for letter, size in ((b"a", 999), (b"b", 600), (b"c", 999), (b"d", 3), (b"e", 999))]
    (tmp_path / "file").write_bytes(b"".join(lines))
    tail, found = Tail(tmp_path / "file"), []
    while not found or tail.share < 1:
        found += tail.read()[0]
    assert found == lines


@pytest.mark.parametrize("other", [b"1\n2\n", b"1\n2\nother\n", b"other lines\n" * 9, b""])
def test_a_replaced_file_is_read_again(other, tmp_path):
    (tmp_path / "file").write_bytes(b"1\n2\n3\n4\n")
    tail = Tail(tmp_path / "file")
    tail.read()
    (tmp_path / "file").write_bytes(other)
    assert tail.read() == (other.splitlines(keepends=True), True)
    with open(tmp_path / "file", "ab") as file:
        file.write(b"more\n")
    assert tail.read() == ([b"more\n"], False)


# -- the records that count ----------------------------------------------------------------------------------------------


def random_records(seed: int) -> list[dict]:
    """Launches, rewinds, steps and evaluations as a run with crashes writes them."""
    chance, records, at = random.Random(seed), [launch()], 0
    for _ in range(400):
        kind = chance.random()
        if kind < 0.03:
            at = max(0, at - chance.randrange(40))
            records.append(launch(at) if kind < 0.015 else dict(kind="rewind", iteration=at))
        elif kind < 0.08:
            records.append({"kind": "eval", "split": "validation", "iteration": at, "lm loss": chance.random()})
        elif kind < 0.1:
            records.append(dict(kind="memory", iteration=at, bytes=chance.randrange(1 << 40)))
        else:
            at += 1
            more = {"balance": chance.random()} if chance.random() < 0.3 else {}
            records.append(step(at, chance.choice([chance.random(), None]), **more))
    return records


def counted(records: list[dict]) -> tuple[list[dict], list[dict]]:
    """(steps, evaluations) that count: those that no later launch or rewind takes back."""
    steps, evals = [], []
    for record in records:
        if record["kind"] in ("run", "rewind"):
            for undone in (steps, evals):
                while undone and undone[-1]["iteration"] > record["iteration"]:
                    undone.pop()
        elif record["kind"] in ("step", "eval"):
            (steps if record["kind"] == "step" else evals).append(record)
    return steps, evals


@pytest.mark.parametrize("seed", range(5))
def test_the_same_records_count_in_a_whole_file_and_a_growing_one(seed, tmp_path):
    text, chance = lines(*random_records(seed)), random.Random(seed)
    text.insert(chance.randrange(len(text)), b'{"kind": "step", "itera\n')
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(text))
    history, growing, at = read_history(tmp_path / "metrics.jsonl"), History(), 0
    while at < len(text):
        growing.add(text[at : at + 7])
        at += 7
    steps, evals = counted(random_records(seed))
    for found in (history, growing):
        for name in ("iteration", "lm loss", "balance", "consumed_samples"):
            expected = [math.nan if step.get(name) is None else step[name] for step in steps]
            np.testing.assert_array_equal(found.steps[name], expected)
        assert found.evals == evals and found.damaged_lines == 1
    assert (growing.starts, growing.run) == (history.starts, history.run)
    known = [{name: value for name, value in step.items() if name != "kind" and value is not None} for step in steps]
    assert list(history.steps) == known and history.steps[-1] == known[-1]


def test_the_end_of_a_long_file_tells_of_its_newest_launch(tmp_path, monkeypatch):
    folder = write(tmp_path / "a", launch(), *(step(n) for n in range(1, 100)), launch(50, host="new"))
    write(folder, *(step(n) for n in range(51, 400)))
    whole = read_history(folder / "metrics.jsonl")
    for room in (200, 5_000, 1 << 20):
        monkeypatch.setattr("megatron.telemetry.history.TAIL", room)
        end = read_end(folder / "metrics.jsonl")
        assert (end.run, end.last, end.launches) == (whole.run, whole.last, 2) and end.interleaved == 0
        assert end.steps[-1] == whole.steps[-1] and end.steps.rows <= 350
    assert not read_end(tmp_path / "missing").last


# -- curves --------------------------------------------------------------------------------------------------------------


def test_thinning_keeps_the_extremes_of_every_pixel():
    chance = np.random.default_rng(0)
    x, y = np.cumsum(chance.exponential(size=50_000)), chance.normal(size=50_000)
    y[31_234] = 99.0  # one step of many
    thin = thinned(Curve(x, y, y), 300)
    assert len(thin.x) <= 600 and (np.diff(thin.x) >= 0).all() and 99.0 in thin.y
    pixel = np.minimum(((x - x[0]) / (x[-1] - x[0]) * 300).astype(int), 299)
    drawn = np.minimum(((thin.x - x[0]) / (x[-1] - x[0]) * 300).astype(int), 299)
    for n in range(300):
        assert y[pixel == n].min() == thin.y[drawn == n].min() and y[pixel == n].max() == thin.y[drawn == n].max()
    assert set(zip(thin.x, thin.smooth, strict=True)) <= set(zip(x, y, strict=True))  # as it is at these places
    few = Curve(x[:500], y[:500])
    assert thinned(few, 300) is few


def test_a_running_mean_is_that_of_the_last_steps():
    """At each step; a value that is far away counts in its own window alone, and no mean leaves the range of the values."""
    values = np.random.default_rng(1).normal(size=200)
    values[20] = 1e30
    means = running_mean(values, 10)
    for at in range(200):
        assert means[at] == pytest.approx(values[max(0, at - 9) : at + 1].mean())
    np.testing.assert_allclose(running_mean(values, 1), values)
    falling = np.linspace(9.0, 7.0, 50)
    means = running_mean(falling, 16)
    assert means.min() >= 7.0 and means[-1] == pytest.approx(falling[-16:].mean())


def test_axes(tmp_path):
    history = History()
    history.add(lines(launch(), *(step(n, n / 2) for n in range(1, 5))))
    assert history.axis("samples").tolist() == [4, 8, 12, 16]
    assert history.axis("tokens").tolist() == [64, 128, 192, 256]
    assert history.axis("time").tolist() == [0.5, 1.0, 1.5, 2.0]
    history.add(lines(launch(2), step(3, 9.0)))
    assert history.axis("time").tolist() == [0.5, 1.0, 1.5] and history.curve("lm loss", "tokens").y.tolist() == [
        0.5,
        1,
        9,
    ]
    history.add(lines({"kind": "eval", "split": "validation", "iteration": 2, "lm loss": 7.0, "final": False}))
    history.add(lines({"kind": "eval", "split": "validation", "iteration": 2, "lm loss": 8.0, "final": True}))
    assert [part.tolist() for part in history.evaluation("lm loss", "tokens")[:2]] == [[128], [7.0]]


def test_a_part_of_the_axis_comes_with_a_point_beyond_each_end():
    history = History()
    history.add(lines(launch(), *(step(n, float(n)) for n in range(1, 101))))
    assert history.curve("lm loss", between=(40, 44)).x.tolist() == [39, 40, 41, 42, 43, 44, 45]
    assert history.curve("lm loss", between=(-5, 2)).x.tolist() == [1, 2, 3]
    assert len(history.curve("lm loss", between=(500, 600)).x) <= 1


def test_losses_that_are_not_finite_are_left_out():
    history = History()
    history.add(lines(launch(), step(1, 1.0), step(2, None), step(3, 3.0)))
    curve = history.curve("lm loss", window=2)
    assert curve.x.tolist() == [1, 3] and np.isfinite(curve.smooth if curve.smooth is not None else curve.y).all()


def test_two_runs_in_one_file_are_drawn_in_the_order_of_the_axis():
    history = History()
    history.add(lines(launch(), step(1), step(2), step(1), step(3), step(2)))
    assert history.curve("lm loss").x.tolist() == [1, 1, 2, 2, 3]


# -- runs ----------------------------------------------------------------------------------------------------------------


def watched(*names, **more) -> Runs:
    runs = Runs([str(name) for name in names], **more)
    while runs.refresh():
        pass
    return runs


def test_curves_of_several_runs(tmp_path):
    evaluation = {"kind": "eval", "split": "validation", "iteration": 1, "lm loss": 3.5}
    write(tmp_path / "run2", launch(), step(1, 3.0), step(2, 2.0), dict(kind="memory", iteration=2, bytes=5e9))
    write(tmp_path / "run10", launch(), step(1, 4.0), evaluation)
    write(tmp_path / "run11", launch())  # no step yet
    runs = watched(tmp_path)
    told = [(run["name"], run["iteration"], run["loss"]) for run in runs.summaries()]
    assert told == [("run2", 2, 2.0), ("run10", 1, 4.0), ("run11", 0, None)]
    charts = {chart["title"]: chart for chart in runs.charts(runs.ids, View("tokens"))}
    assert list(charts)[:2] == ["Loss", "Throughput of all ranks"] and "MFU" not in charts
    drawn = [
        (curve["run"], curve["kind"], curve["x"].tolist(), curve["y"].tolist()) for curve in charts["Loss"]["curves"]
    ]
    assert drawn == [("0", "steps", [64, 128], [3, 2]), ("1", "steps", [64], [4]), ("1", "validation", [64], [3.5])]
    memory = charts["Peak memory of rank 0"]["curves"]
    assert [(curve["x"].tolist(), curve["y"].tolist()) for curve in memory if len(curve["x"])] == [([128], [5e9])]
    assert [chart["title"] for chart in runs.charts(["1"], View())] == list(charts)[:5]
    assert runs.charts(["2"], View()) == runs.charts(["9"], View()) == []


def test_expert_parallel_ranks_are_counted_once(tmp_path):
    mesh = dict(pp=1, replicate=1, shard=4, cp=1, tp=1, ep=2, etp=1)  # torchrun --nproc-per-node 4, ep 2
    folder = write(tmp_path / "a", launch(mesh=mesh), step(1))
    (run,) = watched(tmp_path).summaries()
    assert "4 ranks" in str(run) and "8 ranks" not in str(run)
    assert "dp 4 \u00b7 ep 2" in subtitle(read_history(folder / "metrics.jsonl"))


def test_files_of_metrics_beside_each_other(tmp_path):
    for name, loss in (("a", 3.0), ("b", 4.0)):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(lines(launch(), step(1, loss))))
    write(tmp_path / "c", launch(), step(1, 5.0))
    named = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c" / "metrics.jsonl"]
    runs = watched(*named, look=lambda place: look_at(str(place))[0])
    told = [(run["name"], run["loss"], run["iterations"]) for run in runs.summaries()]
    assert told == [("a.jsonl", 3.0, 20), ("b.jsonl", 4.0, 20), ("c", 5.0, 20)]


def test_runs_are_found_at_any_depth_and_data_is_none(tmp_path, capsys):
    """As in runs/ after README: a run, a folder of runs, and texts and samples beside them. Status finds the same."""
    write(tmp_path / "runs" / "b" / "deep" / "run10", launch(), step(1))
    write(tmp_path / "runs" / "b" / "deep" / "run2", launch(), step(1))
    write(tmp_path / "runs" / "a", launch(), step(1))
    write(tmp_path / "runs" / "a" / "inside", launch(), step(1))  # of the same run, such as a copy
    write(tmp_path / "runs" / ".hidden", launch(), step(1))
    (tmp_path / "runs" / "own").mkdir()
    (tmp_path / "runs" / "own" / "train.jsonl").write_text('{"text": "a"}\n' * 470)
    (tmp_path / "runs" / "events.jsonl").write_text('{"time": 1, "event": "x", "level": "info", "message": "m"}\n')
    (tmp_path / "runs" / "c.jsonl").write_bytes(b"".join(lines(launch(), step(1))))  # --metrics-file runs/c.jsonl
    (tmp_path / "runs" / "b" / "circle").symlink_to(tmp_path / "runs")
    names = [run["name"] for run in watched(tmp_path / "runs").summaries()]
    assert names == ["a", "run2", "run10", "c.jsonl"]
    found = [Path(line.run).relative_to(tmp_path / "runs") for line in look_at(str(tmp_path / "runs"))]
    assert found == [Path("a"), Path("b/deep/run2"), Path("b/deep/run10")]
    with pytest.raises(DataError, match="no metrics.jsonl in it, nor in a folder below it"):
        watched(tmp_path / "runs" / "own")


def test_a_run_is_followed_through_a_restart_and_new_runs_appear(tmp_path):
    write(tmp_path / "a", launch(), *(step(n, 1.0) for n in range(1, 11)))
    runs = watched(tmp_path)
    assert not runs.refresh()
    with open(tmp_path / "a" / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "step", "iteration": 11, "lm')  # killed while it wrote
    assert not runs.refresh()
    with open(tmp_path / "a" / "metrics.jsonl", "ab") as file:
        file.write(b"\n" + b"".join(lines(launch(6), step(7, 5.0))))
    assert runs.refresh()
    [chart] = [chart for chart in runs.charts(runs.ids, View()) if chart["title"] == "Loss"]
    assert chart["curves"][0]["x"].tolist() == [1, 2, 3, 4, 5, 6, 7] and chart["curves"][0]["y"].tolist() == [1] * 6 + [
        5
    ]
    summary = runs.summaries()[0]
    assert (summary["restarts"], summary["damaged_lines"], summary["iteration"]) == (1, 1, 7)
    write(tmp_path / "b", launch(), step(1))
    runs.refresh(now=1e12)
    assert [run["name"] for run in runs.summaries()] == ["a", "b"]


def test_events_are_those_of_events_jsonl_else_of_the_metrics(tmp_path):
    metrics = [
        launch(),
        step(1),
        step(2),
        dict(kind="spike", iteration=2, time="2026-01-05T11:00:00+00:00", why="far above"),
    ]
    write(tmp_path / "a", *metrics)
    write(tmp_path / "b", *metrics)
    event = dict(time=1.0, event="slow_rank", level="warning", iteration=1, rank=3, message="rank 3 is slow")
    (tmp_path / "b" / "events.jsonl").write_text(json.dumps(event) + "\n{torn")
    runs = watched(tmp_path)
    told = [(event["run"], event["event"], event["at"], event["message"]) for event in runs.events(runs.ids, "samples")]
    assert told == [
        ("0", "spike", 8.0, "far above"),
        ("0", "start", 4.0, "training starts at iteration 0"),
        ("1", "slow_rank", 4.0, "rank 3 is slow"),
    ]


def test_ranks_over_time(tmp_path):
    chance = np.random.default_rng(2)
    times = chance.uniform(1, 2, size=(2 * PARTS, 3))
    records = [
        dict(kind="timers", iteration=n + 1, steps=1, seconds={"forward": dict(min=1, max=2, ranks=row.tolist())})
        for n, row in enumerate(times)
    ]
    write(tmp_path / "a", launch(), *(one for n, record in enumerate(records) for one in (step(n + 1), record)))
    runs = watched(tmp_path)
    found = runs.ranks("0")
    assert found["names"] == ["forward"] and found["x"].tolist() == list(range(2, 2 * PARTS + 1, 2))
    means = (times[::2] + times[1::2]) / 2
    np.testing.assert_allclose(found["values"], means.T, rtol=1e-6)
    others = [np.delete(means, rank, axis=1).mean(1) for rank in range(3)]  # of two, the mean is the median
    np.testing.assert_allclose(found["excess"], means.T / others - 1, rtol=1e-4, atol=1e-6)
    assert watched(write(tmp_path / "b", launch(), step(1))).ranks("0")["names"] == []


def test_of_many_ranks_those_that_differ_most_are_shown(tmp_path):
    forward = [1.0] * 100
    forward[77] = 1.5
    write(
        tmp_path / "a",
        launch(),
        dict(kind="ranks", iteration=5, steps=5, seconds=dict(forward=forward, waiting=[0.0] * 100)),
    )
    found = watched(tmp_path).ranks("0")
    assert len(found["rows"]) == 32 and 77 in found["rows"] and found["all_rows"] == 100
    assert found["values"][found["rows"].index(77)].tolist() == [1.5]


def test_ranks_of_a_run_that_is_resumed_on_others(tmp_path):
    def ranks(iteration, forward, waiting):
        return dict(kind="ranks", iteration=iteration, steps=5, seconds=dict(forward=forward, waiting=waiting))

    records = [launch(), ranks(5, [1, 2], [1, 0]), ranks(10, [3, 4], [1, 0]), launch(5), ranks(10, [5, 6], [3, 1])]
    runs = watched(write(tmp_path / "a", *records))
    found = runs.ranks("0")
    assert (found["names"], found["name"]) == (["own time", "forward", "waiting"], "own time")
    assert (found["x"].tolist(), found["values"].tolist()) == ([5, 10], [[1, 5], [2, 6]])
    assert runs.ranks("0", "waiting")["values"].tolist() == [[1, 3], [0, 1]]
    write(tmp_path / "a", launch(10), ranks(15, [7, 7, 9], [0, 0, 0]))
    runs.refresh()
    assert runs.ranks("0")["values"].tolist() == [[7], [7], [9]] and runs.ranks("0")["x"].tolist() == [15]


def test_loads_of_experts_over_time(tmp_path):
    def loads(iteration, *layers):
        return dict(kind="experts", iteration=iteration, loads={f"blocks.{n}": own for n, own in enumerate(layers)})

    records = [
        launch(),
        step(5),
        loads(5, [6, 2], [4, 4]),
        loads(10, [8, 0], [4, 4]),
        launch(5),
        loads(10, [0, 0], [1, 3]),
    ]
    runs = watched(write(tmp_path / "a", *records))
    found = runs.experts("0")
    assert (found["names"], found["name"], found["x"].tolist()) == (["blocks.0", "blocks.1"], "blocks.0", [5, 10])
    assert found["values"].tolist() == [[6, 0], [2, 0]] and found["excess"].tolist() == [[0.5, 0], [-0.5, 0]]
    assert runs.experts("0", "blocks.1")["excess"].tolist() == [[0, -0.5], [0, 0.5]]
    assert runs.summaries()[0]["has_experts"] and not runs.summaries()[0]["has_ranks"]


def test_runs_of_an_object_store(tmp_path):
    url = f"memory://{tmp_path.name}/runs"
    (location(url) / "a" / "metrics.jsonl").write_bytes(b"".join(lines(launch(), step(1, 3.0))))
    runs = watched(url)
    assert [(run["name"], run["loss"]) for run in runs.summaries()] == [("a", 3.0)]
    (location(url) / "a" / "metrics.jsonl").write_bytes(b"".join(lines(launch(), step(1, 3.0), step(2, 2.5))))
    assert not runs.refresh()  # a store is not asked every second
    runs.refresh(now=1e12)
    assert runs.summaries()[0]["loss"] == 2.5


def test_a_run_that_cannot_be_read_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    write(tmp_path / "a", launch(), step(1))
    write(tmp_path / "b", launch(), step(1))
    runs = Runs([str(tmp_path)])
    monkeypatch.setattr(runs.runs["0"].tail, "read", lambda: open(tmp_path))
    while runs.refresh():
        pass
    assert "Is a directory" in runs.summaries()[0]["error"] and runs.summaries()[1]["iteration"] == 1


# -- the command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make, what", [(lambda path: None, "no such folder"), (Path.mkdir, "no metrics.jsonl in it")])
def test_a_folder_without_runs_is_named(make, what, tmp_path):
    make(tmp_path / "runs")
    with pytest.raises(DataError, match=f"{tmp_path}/runs: {what}") as error:
        dashboard.main([str(tmp_path / "runs"), "--port", "0"])
    assert error.value.code == 4


def test_mistakes_are_named(tmp_path, monkeypatch):
    write(tmp_path, launch())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(SettingsError, match=f"--port {port}: another process listens on this port of 127.0.0.1"):
            dashboard.main([str(tmp_path), "--port", port])
    with pytest.raises(SettingsError, match="--host 192.0.2.1 --port 0: cannot listen there"):
        dashboard.main([str(tmp_path), "--port", "0", "--host", "192.0.2.1"])
    with pytest.raises(UsageError, match="--port 70000: ports are from 1 to 65535"):
        dashboard.main([str(tmp_path), "--port", "70000"])
    with pytest.raises(UsageError, match="which runs?"):
        dashboard.main([])
    monkeypatch.setattr(dashboard, "PACKAGES", ("starlette", "no_such_package"))
    with pytest.raises(Failure, match="the dashboard needs no_such_package"):
        dashboard.main([str(tmp_path)])


@contextmanager
def served(*names):
    """The address of a dashboard in a process of its own."""
    command = [sys.executable, "-m", "megatron.tools.dashboard", *map(str, names), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0], process
    finally:
        process.kill()
        process.communicate()


def get(url: str, **headers) -> dict:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return json.load(answer)


def news(stream) -> dict:
    """The next message of server-sent events."""
    while not (line := stream.readline()).startswith(b"data: "):
        assert line
    return json.loads(line.removeprefix(b"data: "))


def test_the_server(tmp_path):
    """Values as JSON, news when a file grows, no access from elsewhere, an end by Ctrl-C."""
    pytest.importorskip("uvicorn")
    write(tmp_path / "a", launch(), step(1, 3.0))
    with served(tmp_path) as (url, process):
        with urllib.request.urlopen(f"{url}api/live", timeout=30) as stream:
            first = news(stream)
            while first["runs"][0]["iteration"] < 1:
                first = news(stream)
            write(tmp_path / "a", step(2, 2.5))
            second = news(stream)
            assert second["version"] > first["version"] and second["runs"][0]["iteration"] == 2
        assert get(f"{url}api/runs")["runs"][0]["loss"] == 2.5
        answer = get(f"{url}api/charts?run=0&axis=samples&window=4")["charts"]
        assert answer[0]["curves"][0]["x"] == [4, 8] and answer[0]["curves"][0]["y"] == [3, 2.5]
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"dashboard.js" in page.read() and "default-src 'self'" in page.headers["content-security-policy"]
        for wrong in ("axis=weeks", "width=wide", "from=1&to=nan"):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                get(f"{url}api/charts?run=0&{wrong}")
        with pytest.raises(urllib.error.HTTPError, match="400"):  # a site whose name leads to this machine
            get(f"{url}api/runs", Host="example.org")
        with urllib.request.urlopen(f"{url}api/live", timeout=30) as stream:
            news(stream)
            process.send_signal(signal.SIGINT)  # while a page is open
            _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_labels_of_an_axis_have_one_format():
    """By node, with the page's own functions."""
    script = (ROOT / "megatron/telemetry/dashboard/page/dashboard.js").read_text(encoding="utf-8")
    named = [re.search(rf"^function {name}\(.*?^}}", script, re.M | re.S)[0] for name in ("count", "ticks", "tick")]
    axes = [[0, 5e-4, 1e-3, 1.5e-3], [0.002, 0.004], [1e-4, 1e-2, 10], [0, None, 7.5]]
    asked = f"console.log(JSON.stringify({json.dumps(axes)}.map((axis) => ticks(axis, ''))))"
    done = subprocess.run(["node", "-e", "\n".join([*named, asked])], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        ["0", "5e-4", "1e-3", "1.5e-3"],
        ["0.002", "0.004"],
        ["1e-4", "1e-2", "1e1"],
        ["0", "", "7.5"],
    ]
