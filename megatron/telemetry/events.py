# SPDX-License-Identifier: Apache-2.0
"""The events of a run in events.jsonl, next to metrics.jsonl: one JSON object per line.

    events = EventLog(events_path(metrics), log=console.log)
    events.record("spike", "loss 5 is 65.6 deviations above ...", iteration=40, what="loss", value=5.0)
    [event for event in read_events("runs/a") if event["level"] == "error"]

Every event starts with the same fields. The fields of its kind follow (`KINDS`):

    {"time": 1764220000.123, "event": "spike", "level": "warning", "iteration": 40, "rank": null, "host": "node7",
     "source": "run", "message": "loss 5 is ...", "what": "loss", "value": 5.0, ...}

`time` is in Unix seconds, `iteration` the number of finished steps (null: not known, for example before the start), `rank`
the rank that the event is about (null: all), `source` the writer: "run" (its first rank), "launcher" or "supervisor". The
file only grows, and all append whole lines to it. The reader skips a line that a crash has torn.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import Interrupted, Preempted
from megatron.telemetry.run_folder import find_events
from megatron.telemetry.run_record import as_json

QUIET = (0, Preempted.code, Interrupted.code)  # exit codes of runs that ended as requested
LEVELS = ("info", "warning", "error")  # in ascending order of urgency
COMMON = ("time", "event", "level", "iteration", "rank", "host", "source", "message")  # fields of every event


class EventKind(NamedTuple):
    """A kind of event: its level, its meaning, and its own fields."""

    level: str
    meaning: str
    fields: dict[str, str] = {}
    logged: bool = True  # a warning or an error is also a line of the log, unless that has one already


KINDS = {
    "start": EventKind(
        "info",
        "a launch starts to train",
        {"ranks": "number of ranks", "resumed": "whether it continues from a checkpoint"},
    ),
    "save": EventKind(
        "info",
        "a checkpoint was written, completely",
        {
            "seconds": "time that it took",
            "in_background": "whether training went on meanwhile",
            "folder": "--save, or the mirror",
            "bytes": "size of the checkpoint",
        },
    ),
    "save_failed": EventKind(
        "error",
        "a checkpoint could not be written, not even after --save-retries and to --save-mirror",
        {"why": "the reason", "in_a_row": "number of failed saves in a row, with this one"},
        logged=False,
    ),
    "unchanged_state": EventKind(
        "warning",
        "a checkpoint holds the weights, or moments, of the one before to the bit, although steps were made",
        {"kinds": "weights, or names of moments"},
    ),
    "snapshot_failed": EventKind(
        "warning",
        "no snapshot in memory, or no copy of it on other ranks; the one before is kept",
        {"why": "the reason"},
        logged=False,
    ),
    "snapshot_loaded": EventKind(
        "info",
        "a launch goes on from a snapshot in memory, which is not older than the newest checkpoint",
        {"parts": "number of ranks that wrote it", "fetched": "parts that the first rank's node had lost"},
    ),
    "end": EventKind(
        "info",
        "a launch or a supervised job ended; level error if its exit code is neither 0 nor 9, but info for a launch that a "
        "supervisor watches",
        {
            "code": "exit code",
            "why": "the reason, if it did not reach its last step",
            "failure": "its kind, of a supervised job",
            "rank_host": "machine of the rank that failed first",
            "account": "of a supervised job: seconds by cause, steps, restarts, checkpoints",
        },
        logged=False,
    ),
    "damaged_checkpoint": EventKind(
        "warning",
        "a damaged checkpoint, snapshot in memory or copy of a part of one was passed over",
        {"checkpoint": "its folder", "why": "what is damaged", "loaded": "iteration of the checkpoint that was loaded"},
    ),
    "repaired_checkpoint": EventKind(
        "warning",
        "lost or damaged files of a checkpoint were rebuilt from its parity files, before it was loaded",
        {"checkpoint": "its folder", "files": "their names"},
    ),
    "restart": EventKind(
        "warning",
        "the supervisor starts the job again",
        {
            "cause": "how the last attempt ended",
            "failure": "its kind: command, data, memory, device, network, disk, code, numerics, silent error, host",
            "why": "the message of the rank that failed first",
            "code": "its exit code",
            "rank_host": "its machine",
            "restarts": "number of restarts, with this one",
            "after": "seconds until it starts",
        },
        logged=False,
    ),
    "node_excluded": EventKind(
        "info",
        "the supervisor leaves out nodes that failed; the restart, or the end, reports it",
        {
            "nodes": "names of the nodes",
            "why": "what the check of the node, or the rank, said",
            "action": "spare, fewer, queue or none",
            "ranks": "number of ranks from now on",
        },
        logged=False,
    ),
    "restart_storm": EventKind(
        "error",
        "more restarts in an hour than the rule restarts_per_hour allows",
        {"restarts": "number within the hour", "limit": "of the rule"},
    ),
    "hang": EventKind(
        "info",
        "the supervisor ends the job because ranks give no sign of life; the restart, or the end, reports it",
        {"ranks": "the silent ranks", "seconds": "their silence"},
        logged=False,
    ),
    "no_step": EventKind(
        "error",
        "no step ended for many times the usual time",
        {"seconds": "since the last step", "median": "usual seconds of a step", "doing": "phase of the first rank"},
    ),
    "spike": EventKind(
        "warning",
        "loss or gradient norm far above its median",
        {
            "what": "loss, or gradient norm",
            "value": "its value",
            "median": "of the last steps",
            "score": "deviations above the median",
            "action": "continue, skip or rollback",
        },
    ),
    "rollback": EventKind(
        "warning", "training went back to a checkpoint after a spike", {"to": "its iteration"}, logged=False
    ),
    "skipped_step": EventKind(
        "warning",
        "a step made no update; level info if the loss scale of fp16 only adjusts itself",
        {"why": "the reason", "in_a_row": "number of such steps in a row, with this one"},
    ),
    "not_finite": EventKind(
        "error",
        "loss or gradient norm is not finite; level warning if the step is skipped",
        {"loss": "its value", "grad_norm": "its value", "action": "stop or skip"},
    ),
    "loss_above_guess": EventKind(
        "warning",
        "after the warm-up, the loss stays above that of a uniform guess, ln(vocabulary)",
        {"loss": "of the last step", "limit": "ln(vocabulary)", "steps": "number of steps in a row"},
    ),
    "high_grad_norm": EventKind(
        "warning",
        "the gradient norm is many times its median",
        {"value": "its value", "median": "of the last steps", "times": "their ratio"},
    ),
    "slow_steps": EventKind(
        "warning",
        "throughput stays far below its median",
        {
            "tokens_per_second": "of the last steps",
            "median": "of the steps before",
            "share": "their ratio",
            "steps": "number of slow steps",
        },
    ),
    "slow_rank": EventKind(
        "warning",
        "the others wait for one rank",
        {
            "phase": "in which it is slow",
            "seconds": "its time per step in this phase",
            "median": "that of the ranks that do the same work, or of the same rank before; null: there is none",
            "steps": "number of steps that were measured",
            "rank_host": "its machine",
        },
    ),
    "slow_stage": EventKind(
        "warning",
        "all ranks of a pipeline stage take longer than before, and other stages do not",
        {
            "stage": "its number",
            "seconds": "own time of its ranks per step",
            "median": "the same before",
            "steps": "number of steps that were measured",
        },
    ),
    "slow_network": EventKind(
        "warning",
        "all ranks wait longer for messages than before, and compute as before",
        {"seconds": "waited per step", "median": "the same before", "steps": "number of steps that were measured"},
    ),
    "recovered": EventKind(
        "info",
        "what was slow is so no longer",
        {
            "what": "kind of the earlier event",
            "stage": "of the pipeline, if one was slow",
            "folder": "whose disk was slow, if one was",
        },
    ),
    "slow_data": EventKind(
        "warning",
        "steps wait for their data",
        {
            "seconds": "waited per step",
            "step_seconds": "time of a step",
            "steps": "number of steps that were measured",
            "rank_host": "machine of the rank",
        },
    ),
    "slow_disk": EventKind(
        "warning",
        "writing a checkpoint took much longer than before",
        {
            "folder": "of the checkpoint",
            "bytes": "size of the checkpoint",
            "seconds": "until it was durable",
            "bytes_per_second": "their ratio",
            "median": "bytes per second of earlier saves; null: there are too few",
        },
    ),
    "supervisor_lost": EventKind(
        "error", "the supervisor of this job was killed: nobody restarts it", {"supervisor": "its process and machine"}
    ),
    "replica_drift": EventKind(
        "error", "ranks that should hold equal values do not", {"why": "which ones"}, logged=False
    ),
    "rerun": EventKind(
        "warning",
        "a step that was computed again (--rerun-mode) had other bits; level error if the run ends for it, info if a "
        "suspicious step had the same bits again",
        {
            "verdict": "transient, this device, memory, not repeatable, software or data, not transient, earlier devices",
            "rank_host": "machine of the rank",
            "where": "what differs first",
            "others": "other ranks of which it may be, or which it also concerns",
        },
    ),
    "disk_nearly_full": EventKind(
        "warning",
        "the disk of the checkpoints will not hold the next ones",
        {"folder": "on this disk", "free": "bytes", "needed": "bytes of the next checkpoints"},
    ),
    "validation_worse": EventKind(
        "warning",
        "the validation got worse several times in a row",
        {"figure": "name of the loss or metric", "values": "the last ones, oldest first", "times": "in a row"},
    ),
    "idle_experts": EventKind(
        "warning",
        "experts of a layer got no token in a step",
        {"layer": "its name", "experts": "their numbers", "mean": "tokens of an expert of the layer in this step"},
        logged=False,
    ),
    "messages_lost": EventKind(
        "warning",
        "events could not be sent to --webhook or --on-event",
        {"to": "webhook or command", "lost": "number since the last such event", "why": "the last reason"},
    ),
}

REPORTED_BY_SUPERVISOR = ("end", "no_step")  # of a run: its supervisor restarts it, or reports that it gave up


class EventLog:
    """Records the events of a run. Does nothing on ranks without `active`.

    path:      events.jsonl; None: no file
    log:       prints a line of the log
    listeners: called with each event, such as the sender of --webhook; they must return immediately
    rules:     kind -> `event_rules.EventRule`: its level, and whether it is switched off
    outboxes:  listeners to close with the log
    supervised: whether a supervisor reports the failures of the run (`REPORTED_BY_SUPERVISOR`)
    """

    def __init__(
        self,
        path: Optional[Path] = None,
        *,
        log: Callable[[str], None] = lambda text: None,
        listeners: Sequence[Callable[[dict], None]] = (),
        source: str = "run",
        active: bool = True,
    ):
        self.path, self.log, self.listeners, self.source, self.active = path, log, [*listeners], source, active
        self.host, self.rules, self.outboxes = socket.gethostname(), {}, []
        self.ended = False  # whether the event "end" was recorded
        self.supervised: Callable[[], bool] = lambda: False

    def record(
        self,
        kind: str,
        message: str,
        *,
        iteration: Optional[int] = None,
        rank: Optional[int] = None,
        level: Optional[str] = None,
        logged: Optional[bool] = None,
        **fields,
    ) -> None:
        """Record an event.

        message: one sentence
        level, logged: replace the values of the kind
        fields: as listed in `KINDS`
        """
        known, rule = KINDS[kind], self.rules.get(kind)
        assert fields.keys() <= known.fields.keys(), f"event {kind} has no fields {fields.keys() - known.fields.keys()}"
        if not self.active or (rule and rule.off):
            return
        level = (rule and rule.level) or level or known.level
        assert level in LEVELS, level
        loud = (known.logged if logged is None else logged) and level != "info"
        words = f"{'warning' if level == 'warning' else 'ERROR'}: {message}"
        quiet = kind in REPORTED_BY_SUPERVISOR and self.supervised()
        level = "info" if quiet else level
        self.ended = self.ended or kind == "end"
        common = (
            round(time.time(), 3),
            kind,
            level,
            iteration,
            rank,
            self.host,
            self.source,
            " ".join(message.split()),
        )
        event = as_json(dict(zip(COMMON, common, strict=True)) | fields)
        if loud:
            self.log(words)
        self._append(event)
        for listener in self.listeners:
            if not (quiet and listener in self.outboxes):
                listener(event)

    def processes(self) -> set[int]:
        """The processes that send events at the moment."""
        return {pid for outbox in self.outboxes for pid in outbox.processes()}

    def close(self, timeout: Optional[float] = None) -> None:
        """Wait until the outboxes have sent their events, at most `timeout` seconds (None: each outbox's own limit)."""
        for outbox in self.outboxes:
            outbox.close(*([] if timeout is None else [timeout]))

    def _append(self, event: dict) -> None:
        if self.path is None:
            return
        try:
            append_line(self.path, json.dumps(event, ensure_ascii=False))
        except OSError as error:  # training continues without the file when the disk is full
            self.log(f"warning: {self.path} is no longer written: {error}")
            self.path = None


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, so that lines of several processes do not mix. Starts a new line after a torn one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, b"\n" * torn + line.encode() + b"\n")
    finally:
        os.close(file)


def read_events(place: Path, after: int = 0) -> list[dict]:
    """The events of a run in the order of writing; none if it has no events file.

    Not in order of time: clocks of machines differ, and may be set back.
    place: its folder, metrics or events file; after: bytes of the file to leave out
    """
    try:
        text = find_events(Path(place)).read_bytes()
    except FileNotFoundError:
        return []
    return list(parse_events(text[after:]))


def parse_events(text: bytes) -> Iterator[dict]:
    """The events of a part of the file. Torn and foreign lines are skipped; kinds of later versions are kept."""
    for line in text.splitlines():
        try:
            event = json.loads(line)
            _ = event["time"] + 0.0, event["level"], event["message"], event["event"]
        except (ValueError, KeyError, TypeError):
            continue
        yield dict.fromkeys(COMMON) | event


def slow_now(events: Iterable[dict]) -> list[str]:
    """What is slow at the end of these events of one launch, in a few words each.

    >>> slow = dict(event="slow_rank", rank=3, phase="forward")
    >>> slow_now([slow, dict(event="slow_data", rank=None)])
    ['rank 3 is slow (forward)', 'all ranks wait for data']
    >>> slow_now([slow, dict(event="recovered", rank=3, what="slow_rank")])
    []
    """
    slow = {}
    for event in events:
        kind, rank, stage, folder = event["event"], event.get("rank"), event.get("stage"), event.get("folder")
        key = kind, rank, stage, folder
        if kind == "slow_rank":
            slow[key] = f"rank {rank} is slow ({event.get('phase')})"
        elif kind == "slow_data":
            slow[key] = "all ranks wait for data" if rank is None else f"rank {rank} waits for its data"
        elif kind == "slow_stage":
            slow[key] = f"stage {stage} of the pipeline is slow"
        elif kind == "slow_network":
            slow[key] = "the network is slow"
        elif kind == "slow_disk":
            slow[key] = f"the disk of {folder} is slow"
        elif kind == "recovered":
            slow.pop((event.get("what"), rank, stage, folder), None)
    return list(slow.values())


def count_restarts(events: Iterable[dict]) -> int:
    """The number of restarts of a run after a failure: by a supervisor, or by hand.

    A supervisor's restart counts also if that attempt never came to train. A launch after one that ended in order, or that
    was asked to stop, continues the run and is no restart.

    >>> count_restarts([{"event": kind} for kind in ("start", "restart", "start", "start")])
    2
    >>> count_restarts([{"event": "start"}, {"event": "end", "code": 0}, {"event": "start"}])
    0
    """
    restarts, failed, announced = 0, False, False
    for event in events:
        if event["event"] == "restart":
            restarts, announced = restarts + 1, True
        elif event["event"] == "start":
            restarts += failed and not announced
            failed, announced = True, False  # until its end says otherwise
        elif event["event"] == "end":
            failed = event.get("code") not in QUIET
    return restarts
