# SPDX-License-Identifier: Apache-2.0
"""The state of runs: of their metrics, events, checkpoints and their ranks' heartbeats. Needs no torch.

    [line] = look_at("runs/a")
    line.state, line.iteration, line.seconds_left

States: starting, running, stalled (no sign of life for longer than its steps take), done, stopped (in order before its
last step; it can be resumed), interrupted (by Ctrl-C), failed (with the reason), unknown (no metrics, and its last
checkpoint is not of its last step), unreadable (no run, or damaged; other runs are still shown).
"""

import socket
import statistics
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Optional

import numpy as np

from megatron.errors import Failure, Interrupted
from megatron.guard import processes
from megatron.guard.beat_files import Beat, read_beats
from megatron.guard.supervisor_mark import Mark, lost_supervisor
from megatron.settings.batch import total_iterations
from megatron.settings.schema import Checkpoint, Config, from_record
from megatron.storage.processes import exists
from megatron.storage.urls import UrlPath, location
from megatron.telemetry.events import QUIET, count_restarts, read_events, slow_now
from megatron.telemetry.figures import WIDE, shortened
from megatron.telemetry.history import History, read_end
from megatron.telemetry.run_folder import (
    METRICS,
    POINTER,
    Place,
    find_metrics,
    found_below,
    last_saved,
    last_snapshot,
    last_state,
    newest_checkpoint,
    nothing_at,
)

PATIENCE = 60.0  # seconds without a sign of life that are normal, even for short steps
START = 1800.0  # the same before the first step of a launch
UNREADABLE = "unreadable"


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
    snapshot: Optional[int] = None  # iteration of the newest snapshot in this machine's memory
    snapshot_age: Optional[float] = None
    slow: tuple[str, ...] = ()  # what is slow at present: ranks, data, stages, the network


def look_at(name: str) -> list[Line]:
    """The lines of a folder's runs. An unreadable run has a line with the reason."""
    try:
        return [_look(folder) for folder in folders([name])]
    except Failure as error:
        return [_unreadable(name, error.what)]


def without_duplicates(lines: list[Line]) -> list[Line]:
    """Keep each run once, even if both its own folder and a parent are named."""
    return list({Path(line.run).resolve(): line for line in reversed(lines)}.values())[::-1]


def _look(folder: Place) -> Line:
    try:
        return look(folder)
    except (Failure, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return _unreadable(str(folder), f"{type(error).__name__}: {error}")


def _unreadable(name: str, why: str) -> Line:
    return Line(name, UNREADABLE, shortened(why.removeprefix(f"{name}: "), WIDE), 0, *[None] * 6, restarts=0, age=0.0)


def folders(names: list[str]) -> list[Place]:
    """The folders of runs, at any depth below the names. Raises DataError if there are none."""
    runs = []
    for name in names:
        place = location(name)
        if find_metrics(place) or newest_checkpoint(name) is not None:
            inside = [place]
        elif isinstance(place, UrlPath):  # a listing of a whole bucket would take too long
            inside = sorted(path for path in place.glob("*") if _is_run(path))
        else:
            inside = [*found_below(place, lambda path: path if path.is_dir() and _is_run(path) else None)]
        if not inside:
            raise nothing_at(name, place)
        runs += inside
    return runs


def _is_run(folder: Place) -> bool:
    local = isinstance(folder, Path) and ((folder / METRICS).is_file() or (folder / POINTER).is_file())
    return local or newest_checkpoint(str(folder)) is not None


def look(folder: Place, now: Optional[float] = None) -> Line:
    """The current state of a run."""
    now = time.time() if now is None else now
    metrics = find_metrics(folder)
    metrics = metrics if isinstance(metrics, Path) else None
    history, events = (read_end(metrics), read_events(metrics)) if metrics else (History(), [])
    if metrics is None or not history.last and newest_checkpoint(str(folder)) is not None:
        return look_at_checkpoint(folder, now)
    launch, trained, last = history.run, history, history.last
    if not trained.steps.rows and last.get("kind") == "end":  # nothing was left to train
        trained = read_end(metrics, before=1)
    steps = trained.steps
    config = from_record(launch["config"]) if "config" in launch else None
    timed = np.flatnonzero(np.nan_to_num(steps["seconds"]))[-50:]
    seconds, losses = steps["seconds"][timed].tolist(), steps.known(trained.loss)
    iteration = int(last.get("iteration", 0))
    total = config and _total(config, launch.get("mesh") or {}, steps[int(timed[-1])] if len(timed) else {})
    state, why, age = alive(metrics, history, statistics.median(seconds or [0.0]), now)
    newest, lost = _end_or_restart(events, launch), _lost_supervisor(launch)
    failed = newest is not None and newest["event"] == "end" and _failed(newest.get("code"))
    if newest and newest["event"] == "restart" and state in ("ended", "failed") and not lost:
        state, why = "starting", str(newest["message"])
    elif failed or state == "ended":
        said = newest if failed else last
        code, why = int(said.get("code", 1)), str(said.get("why", ""))
        finished = total is not None and iteration >= total
        if code == Interrupted.code:
            state = "interrupted"
        else:
            state = "failed" if _failed(code) else "done" if finished else "stopped"
    if state != "done" and lost:
        why = ", ".join(filter(None, [why, f"its supervisor ({lost}) was killed: nobody restarts it"]))
    if history.interleaved:
        why = ", ".join(filter(None, [why, "several runs write to this metrics file: their records are interleaved"]))
    urgent = _urgent(events)
    samples = int(np.nan_to_num(steps["batch_size"])[timed].sum())
    left = (total - iteration) * statistics.fmean(seconds) if total and seconds and state == "running" else None
    checkpoint, written = _checkpoint(folder, config)
    snapshot, kept = _snapshot(folder, config) or (None, 0.0)
    return Line(
        str(folder),
        state,
        why,
        iteration,
        total,
        tokens_per_second=round(samples * config.model.seq_length / sum(seconds), 1) if seconds else None,
        loss=float(losses[-1]) if len(losses) else None,
        seconds_left=left and round(left, 1),
        checkpoint=checkpoint,
        checkpoint_age=round(now - written, 1) if written else None,
        restarts=count_restarts(events) if events else max(0, history.launches - 1),
        age=round(age, 1),
        warnings=sum(event["level"] == "warning" for event in urgent),
        errors=sum(event["level"] == "error" for event in urgent),
        last_event=urgent[-1] if urgent else None,
        snapshot=snapshot,
        snapshot_age=round(max(0.0, now - kept), 1) if kept else None,
        slow=tuple(slow_now(_newest(events))) if state in ("running", "stalled") else (),
    )


def _failed(code: Optional[int]) -> bool:
    return code not in (None, *QUIET)


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


def _lost_supervisor(launch: dict) -> Optional[Mark]:
    """The supervisor of a launch, if it was killed."""
    return lost_supervisor(Path(launch["supervisor"])) if launch.get("supervisor") else None


def look_at_checkpoint(folder: Place, now: float) -> Line:
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


def _checkpoint(folder: Place, config: Optional[Config]) -> tuple[Optional[int], float]:
    """(iteration of the newest checkpoint, time of writing): next to the metrics, or under `--save`."""
    save = config.checkpoint.save if config else None
    found = last_saved(str(folder)) or (last_saved(save) if save else None)
    return found or (None, 0.0)


def _snapshot(folder: Place, config: Optional[Config]) -> Optional[tuple[int, float]]:
    """(iteration, time of writing) of the newest snapshot in this machine's memory."""
    settings = config.checkpoint if config else Checkpoint()
    save = location(settings.save) if settings.save else folder
    return last_snapshot(folder, settings.non_persistent_local_ckpt_dir) or last_snapshot(
        save, settings.non_persistent_local_ckpt_dir
    )


def alive(metrics: Path, history: History, usual: float, now: float) -> tuple[str, str, float]:
    """(state, reason, seconds since the last sign of life); "ended" if the run itself has recorded how."""
    age, launch = now - _written(metrics), history.run
    if history.last.get("kind") == "end":
        return "ended", "", age
    beats, doing = _beats(launch), ""
    if beats:
        age = now - max(beat.at for beat in beats)
        lost = [beat for beat in beats if beat.ended or beat.ended is None and processes.is_gone(beat)]
        if lost:
            return "failed", f"rank {lost[0].rank}: {lost[0].why or 'killed'}", age
        doing = f"{beats[0].phase} of step {beats[0].step}"
    elif launch.get("host") == socket.gethostname() and launch.get("pid") and not exists(launch["pid"]):
        return "failed", "killed: it ended without a word", age
    started = bool(history.steps.rows) or history.last.get("kind") == "rewind"
    if age > (max(PATIENCE, 10 * usual) if started else START):
        return "stalled", doing, age
    return ("running" if started else "starting"), doing, age


def _beats(launch: dict) -> list[Beat]:
    """The heartbeat of each rank of this launch, if any."""
    folder = ((launch.get("config") or {}).get("guard") or {}).get("heartbeat_dir")
    return read_beats(Path(folder)) if folder and Path(folder).is_dir() else []


def _total(config, mesh: dict, at: dict) -> Optional[int]:
    """Steps of the whole run. at: a step, or the state after it: its number, and the number of consumed samples."""
    done = (at["iteration"], at["consumed_samples"]) if {"iteration", "consumed_samples"} <= at.keys() else (0, 0)
    try:
        return total_iterations(config.batch, int(mesh.get("replicate", 1)) * int(mesh.get("shard", 1)), *done)
    except (ValueError, TypeError):
        return None


def _written(path: Place) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
