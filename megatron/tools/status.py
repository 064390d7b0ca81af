# SPDX-License-Identifier: Apache-2.0
"""Show the state of runs, a line each: iteration, speed, time left, last checkpoint, and whether they are alive.

    python -m megatron.tools.status runs/*
    python -m megatron.tools.status --watch 10 runs/345M runs/1.3B

Sources are a run's metrics (metrics.jsonl in its folder, or at --metrics-file, which the folder names), its events and
checkpoints, and its ranks' heartbeats, if any. A folder that is not a run means all runs in it.
States: starting, running, stalled (no sign of life for longer than its steps take), done, stopped (in order before its
last step; it can be resumed), interrupted (by Ctrl-C), failed (with the reason), unknown (no metrics, and its last
checkpoint is not of its last step), unreadable (no run, or damaged; other runs are still shown).
"""

import json
import mmap
import os
import socket
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import DataError, Failure, Interrupted, Preempted, UsageError, run_main
from megatron.guard import processes
from megatron.guard.heartbeat import read_beats
from megatron.guard.resume_command import newest_checkpoint
from megatron.guard.supervisor_mark import Mark, lost_supervisor
from megatron.settings.batch import total_iterations
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import Config, from_record, setting
from megatron.storage.urls import UrlPath, local_folder, location
from megatron.telemetry import figures
from megatron.telemetry.events import count_restarts, read_events, slow_now
from megatron.telemetry.figures import WIDE, WIDTH, count, duration, sentence, several, shortened, since
from megatron.telemetry.run_folder import METRICS, POINTER, find_metrics, found_below, last_state
from megatron.telemetry.run_record import LAUNCH, count_launches

TAIL = 1 << 16  # bytes at the end of a metrics file that are read
PATIENCE = 60.0  # seconds without a sign of life that are normal, even for short steps
START = 1800.0  # the same before the first step of a launch


@dataclass(frozen=True)
class StatusOptions:
    """Options of the output."""

    json: bool = setting("print a JSON list instead of a table", False)
    watch: Optional[float] = setting("print again every so many seconds", None)
    wide: bool = setting("all columns, and names and reasons whole: lines may be longer than 80 columns", False)


@dataclass(frozen=True)
class Line:
    """The state of a run. Times in seconds; None: unknown."""

    run: str
    state: str
    why: str  # the reason for a failed, stopped or stalled run; for others, what its first rank is doing
    iteration: int
    iterations: Optional[int]
    tokens_per_second: Optional[float]
    loss: Optional[float]
    seconds_left: Optional[float]
    checkpoint: Optional[int]
    checkpoint_age: Optional[float]
    restarts: int
    age: Optional[float]  # seconds since the last sign of life
    warnings: int = 0  # events of this level in the newest launch
    errors: int = 0
    last_event: Optional[dict] = None  # the last warning or error of the newest launch, as in events.jsonl
    slow: tuple[str, ...] = ()  # what is slow at present: ranks, data, stages, the network


def main(argv: list[str]) -> None:
    """Print the state once, or repeatedly with --watch."""
    names, flags = divide(argv, StatusOptions)
    about = "Show the state of runs, a line each: FOLDER... are their --save folders, or any folders above them."
    asked = parse_one(flags, StatusOptions, f"{PROG} FOLDER ...", about)
    if not names:
        raise UsageError("which runs?", do=f"{PROG} FOLDER...")
    while True:
        lines = without_duplicates([line for name in names for line in look_at(name)])
        text = json.dumps([asdict(line) for line in lines], indent=1) if asked.json else table(lines, asked.wide)
        print(f"\033[H\033[J{text}" if asked.watch and os.isatty(1) else text, flush=True)
        if not asked.watch:
            break
        time.sleep(asked.watch)
    if lost := [f"{line.run}: {line.why}" for line in lines if line.state == UNREADABLE]:
        raise DataError(
            "; ".join(lost), "a run writes metrics.jsonl next to its checkpoints (--save), or to --metrics-file"
        )


PROG = "python -m megatron.tools.status"
UNREADABLE = "unreadable"


def look_at(name: str) -> list[Line]:
    """The lines of a folder's runs. An unreadable run has a line with the reason."""
    try:
        return [_look(folder) for folder in folders([name])]
    except Failure as error:
        return [_unreadable(name, error.what)]


def without_duplicates(lines: list[Line]) -> list[Line]:
    """Keep each run once, even if both its own folder and a parent are named."""
    return list({Path(line.run).resolve(): line for line in reversed(lines)}.values())[::-1]


def _look(folder: Path | UrlPath) -> Line:
    try:
        return look(folder)
    except (Failure, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return _unreadable(str(folder), f"{type(error).__name__}: {error}")


def _unreadable(name: str, why: str) -> Line:
    return Line(name, UNREADABLE, shortened(why.removeprefix(f"{name}: "), WIDE), 0, *[None] * 6, restarts=0, age=0.0)


def folders(names: list[str]) -> list[Path | UrlPath]:
    """The folders of runs, at any depth below the names. Raises DataError if there are none."""
    runs = []
    for name in names:
        place = location(name)
        if _metrics(place) or newest_checkpoint(name) is not None:
            inside = [place]
        elif isinstance(place, UrlPath):  # a listing of a whole bucket would take too long
            inside = sorted(path for path in place.glob("*") if _is_run(path))
        else:
            inside = [*found_below(place, lambda path: path if path.is_dir() and _is_run(path) else None)]
        if not inside:
            raise DataError(
                f"{name}: no metrics.jsonl in it, nor in a folder below it",
                "a run writes it next to its checkpoints (--save), or to --metrics-file",
            )
        runs += inside
    return runs


def _is_run(folder: Path | UrlPath) -> bool:
    local = isinstance(folder, Path) and ((folder / METRICS).is_file() or (folder / POINTER).is_file())
    return local or newest_checkpoint(str(folder)) is not None


def _metrics(folder: Path | UrlPath) -> Optional[Path]:
    """The metrics file of a run: of one in an object store, in its folder on this machine, if it is this run's."""
    if isinstance(folder, UrlPath):
        local = local_folder(str(folder))
        metrics = find_metrics(local) if local.is_dir() else None
        saves = metrics and ((read(metrics).launch.get("config") or {}).get("checkpoint") or {}).get("save")
        return metrics if saves and location(saves) == folder else None
    return folder if folder.suffix == ".jsonl" and folder.is_file() else find_metrics(folder)


def look(folder: Path | UrlPath, now: Optional[float] = None) -> Line:
    """The current state of a run."""
    now = time.time() if now is None else now
    metrics = _metrics(folder)
    launch, launches, records = read(metrics) if metrics else Recorded({}, 0, [])
    events = read_events(metrics) if metrics else []
    if metrics is None or not launch and not records and newest_checkpoint(str(folder)) is not None:
        return look_at_checkpoint(folder, now)
    config = from_record(launch["config"]) if "config" in launch else None
    steps = [record for record in records if record.get("kind") == "step" and record.get("seconds")]
    seconds = [step["seconds"] for step in steps[-50:]]
    iteration = int(([launch] + [record for record in records if "iteration" in record])[-1].get("iteration", 0))
    total = config and _total(config, launch.get("mesh") or {}, (steps or [{}])[-1])
    state, why, age = alive(metrics, launch, records, statistics.median(seconds or [0.0]), now)
    newest, lost = _end_or_restart(events, launch), _lost_supervisor(launch)
    failed = newest is not None and newest["event"] == "end" and newest["level"] == "error"
    if newest and newest["event"] == "restart" and state in ("ended", "failed") and not lost:
        state, why = "starting", str(newest["message"])
    elif failed or state == "ended":
        said = newest if failed else records[-1]
        code, why = int(said.get("code", 1)), str(said.get("why", ""))
        finished = total is not None and iteration >= total
        if code == Interrupted.code:
            state = "interrupted"
        else:
            state = "failed" if code not in (0, Preempted.code) else "done" if finished else "stopped"
    if state != "done" and lost:
        why = ", ".join(filter(None, [why, f"its supervisor ({lost}) was killed: nobody restarts it"]))
    if _interleaved(records):
        why = ", ".join(filter(None, [why, "several runs write to this metrics file: their records are interleaved"]))
    urgent = _urgent(events)
    samples = sum(step.get("batch_size", 0) for step in steps[-50:])
    left = (total - iteration) * statistics.fmean(seconds) if total and seconds and state == "running" else None
    checkpoint, written = _checkpoint(folder, config)
    return Line(
        str(folder),
        state,
        why,
        iteration,
        total,
        tokens_per_second=round(samples * config.model.seq_length / sum(seconds), 1) if seconds else None,
        loss=next((step["lm loss"] for step in reversed(steps) if step.get("lm loss") is not None), None),
        seconds_left=left and round(left, 1),
        checkpoint=checkpoint,
        checkpoint_age=round(now - written, 1) if written else None,
        restarts=count_restarts(events) if events else max(0, launches - 1),
        age=round(age, 1),
        warnings=sum(event["level"] == "warning" for event in urgent),
        errors=sum(event["level"] == "error" for event in urgent),
        last_event=urgent[-1] if urgent else None,
        slow=tuple(slow_now(_newest(events))) if state in ("running", "stalled") else (),
    )


def _urgent(events: list[dict]) -> list[dict]:
    """The warnings and errors since the newest launch began. Its end is part of its state."""
    return [event for event in _newest(events) if event["level"] in ("warning", "error") and event["event"] != "end"]


def _newest(events: list[dict]) -> list[dict]:
    """The events since the newest launch began."""
    starts = [place for place, event in enumerate(events) if event["event"] == "start"]
    return events[starts[-1] :] if starts else events


def _end_or_restart(events: list[dict], launch: dict) -> Optional[dict]:
    """The last word about the end of the newest launch, or of one after it that failed before it had metrics."""
    found = [event for event in _newest(events) if event["event"] in ("end", "restart")]
    try:
        began = datetime.fromisoformat(launch["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        began = 0.0
    return found[-1] if found and found[-1]["time"] >= began else None


def _interleaved(records: list[dict]) -> bool:
    """Whether steps do not follow each other, without a rollback in between."""
    order = [record for record in records if record.get("kind") in ("step", "rewind")]
    pairs = zip(order, order[1:])
    return any(one["kind"] == two["kind"] == "step" and two["iteration"] <= one["iteration"] for one, two in pairs)


def _lost_supervisor(launch: dict) -> Optional[Mark]:
    """The supervisor of a launch, if it was killed."""
    return lost_supervisor(Path(launch["supervisor"])) if launch.get("supervisor") else None


def look_at_checkpoint(folder: Path | UrlPath, now: float) -> Line:
    """The state of a run without metrics, from its last checkpoint."""
    checkpoint, written = _checkpoint(folder, None)
    state = last_state(str(folder)) or {}
    config = from_record(state["config"]) if "config" in state else None
    total = config and _total(config, state.get("mesh") or {}, state.get("state") or {})
    age = round(now - written, 1) if written else None
    return Line(
        str(folder),
        "done" if total is not None and checkpoint >= total else "unknown",
        "no metrics.jsonl: known from its last checkpoint",
        checkpoint,
        total,
        *[None] * 3,
        checkpoint=checkpoint,
        checkpoint_age=age,
        restarts=0,
        age=age,
    )


def _checkpoint(folder: Path | UrlPath, config: Optional[Config]) -> tuple[Optional[int], float]:
    """(iteration of the newest checkpoint, time of writing): next to the metrics, or under `--save`."""
    for place in (folder, location(config.checkpoint.save) if config and config.checkpoint.save else folder):
        iteration = newest_checkpoint(str(place))
        if iteration is not None:
            return iteration, _written(place / f"iter_{iteration:07d}" / "index.json")
    return None, 0.0


class Recorded(NamedTuple):
    """The end of a metrics file: the record of the newest launch, the number of launches, and the last records."""

    launch: dict
    launches: int
    records: list[dict]


def read(path: Path) -> Recorded:
    """The end of a metrics file of any length."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            at = text.rfind(LAUNCH)
            start = max(at, len(text) - TAIL, 0)
            tail, launch = text[start:], text[max(at, 0) : text.find(b"\n", max(at, 0)) + 1] if at >= 0 else b"{}"
            launches = count_launches(text)
    except (OSError, ValueError):  # missing or empty
        return Recorded({}, 0, [])
    records = [record for record in map(_record, tail.splitlines()) if record]
    return Recorded(_record(launch), launches, [record for record in records if record.get("kind") != "run"])


def _record(line: bytes) -> dict:
    try:
        record = json.loads(line)
        return record if isinstance(record, dict) else {}
    except ValueError:  # torn
        return {}


def alive(metrics: Path, launch: dict, records: list[dict], usual: float, now: float) -> tuple[str, str, float]:
    """(state, reason, seconds since the last sign of life); "ended" if the run itself has recorded how."""
    age = now - _written(metrics)
    if records and records[-1].get("kind") == "end":
        return "ended", "", age
    beats, doing = _beats(launch), ""
    if beats:
        age = now - max(_written(path) for _, path in beats)
        lost = [beat for beat, _ in beats if beat.ended or beat.ended is None and processes.is_gone(beat)]
        if lost:
            return "failed", f"rank {lost[0].rank}: {lost[0].why or 'killed'}", age
        doing = f"{beats[0][0].phase} of step {beats[0][0].step}"
    elif (
        launch.get("host") == socket.gethostname() and launch.get("pid") and not Path(f"/proc/{launch['pid']}").exists()
    ):
        return "failed", "killed: it ended without a word", age
    started = any(record.get("kind") == "step" for record in records)
    if age > (max(PATIENCE, 10 * usual) if started else START):
        return "stalled", doing, age
    return ("running" if started else "starting"), doing, age


def _beats(launch: dict) -> list[tuple]:
    """(heartbeat, its file) of each rank of this launch, if any."""
    folder = ((launch.get("config") or {}).get("guard") or {}).get("heartbeat_dir")
    beats = read_beats(Path(folder)) if folder and Path(folder).is_dir() else []
    return [(beat, Path(folder) / f"rank_{beat.rank:05d}.beat") for beat in beats]


def _total(config, mesh: dict, at: dict) -> Optional[int]:
    """Steps of the whole run. at: a step, or the state after it: its number, and the number of consumed samples."""
    done = (at["iteration"], at["consumed_samples"]) if {"iteration", "consumed_samples"} <= at.keys() else (0, 0)
    try:
        return total_iterations(config.batch, int(mesh.get("replicate", 1)) * int(mesh.get("shard", 1)), *done)
    except (ValueError, TypeError):
        return None


def _written(path: Path | UrlPath) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


URGENT = ("failed", "stalled", UNREADABLE, "interrupted", "stopped", "unknown", "starting", "running", "done")


def verdict(lines: list[Line]) -> str:
    """The number of runs in each state, urgent ones first."""
    states = Counter(line.state for line in lines)
    order = [*(state for state in URGENT if state in states), *(state for state in states if state not in URGENT)]
    counts = ", ".join(f"{states[state]} {state}" for state in order)
    return f"{several(len(lines), 'run')}: {counts if len(lines) > 1 else lines[0].state}" if lines else "no runs"


def table(lines: list[Line], wide: bool = False) -> str:
    """The verdict, and a table of the runs; reasons are below their run, or (wide) at the end of its line."""
    head = ["run", "state", "iteration", "done", "tokens/s", "loss", "left", "checkpoint"]
    rows, notes = [], []
    for line in lines:
        done = f"{min(1, line.iteration / line.iterations):.0%}" if line.iterations else "-"
        quiet = [f"{since(line.age)} ago"] * (line.state in QUIET)
        again = [several(line.restarts, "restart")] * (line.restarts > 0)
        notes.append(", ".join([*again, *filter(None, [line.why]), *quiet, *line.slow, *_alerts(line)]))
        rows.append(
            [
                line.run if wide or len(line.run) <= LONGEST else f"...{line.run[3 - LONGEST :]}",
                line.state,
                f"{line.iteration}/{line.iterations}" if line.iterations else str(line.iteration),
                done,
                _or(line.tokens_per_second, count),
                _or(line.loss, "{:.4f}".format),
                _or(line.seconds_left, duration),
                _or(line.checkpoint, str)
                + (f", {since(line.checkpoint_age)} ago" if line.checkpoint_age is not None else ""),
            ]
        )
    if wide:
        rows = [[*row, note] for row, note in zip(rows, notes)]
        return f"{verdict(lines)}\n{figures.table(rows, [*head, ''], LEFT, WIDE)}"
    titles, *texts = figures.table(rows, head, LEFT, WIDTH, spare=("done", "loss", "tokens/s")).splitlines()
    under = [[row, *([sentence(f"  {shortened(note, NOTE)}")] if note else [])] for row, note in zip(texts, notes)]
    return "\n".join([verdict(lines), titles, *(text for pair in under for text in pair)])


def _alerts(line: Line) -> list[str]:
    """The number of warnings and errors of a run, and the last one."""
    if line.last_event is None:
        return []
    counts = [several(count, word) for count, word in ((line.errors, "error"), (line.warnings, "warning")) if count]
    ago = since(max(0.0, time.time() - line.last_event["time"]))
    return [f"{' and '.join(counts)}, the last one {ago} ago: {line.last_event['message']}"]


QUIET = ("stalled", "failed", "stopped", "interrupted")
LEFT = (0, 1, 2, 8)  # columns of words
LONGEST, NOTE = 16, 2 * WIDTH  # characters of a run's name, and of the note below it


def _or(value: Optional[float], words, none: str = "-") -> str:
    return none if value is None else words(value)


if __name__ == "__main__":
    run_main(main)
