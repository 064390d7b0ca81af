# SPDX-License-Identifier: Apache-2.0
"""The events of a run that its loop records: start, a disk that is nearly full, drift of replicas, end."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Optional

from megatron.checkpoint.first_launch import same_place
from megatron.errors import (
    CheckpointError,
    DataError,
    Failure,
    Locked,
    NumericsError,
    SettingsError,
    UsageError,
    exit_code,
    explain,
    in_a_line,
)
from megatron.guard.disk import shortage
from megatron.guard.supervisor_mark import SUPERVISOR, is_supervised
from megatron.settings import rank_env, schema
from megatron.settings.parse import said
from megatron.storage.durable import LOCK, WriterLock
from megatron.storage.urls import local_folder
from megatron.telemetry.event_rules import rule_of
from megatron.telemetry.events import QUIET, EventLog, read_events
from megatron.telemetry.notify import open_events

REFUSALS = (UsageError, SettingsError, DataError, CheckpointError)  # of what the user says or has


def record_start(run) -> None:
    """Record the start of a launch. run: `training.state.Run`"""
    ranks, first = run.context.mesh.world_size, run.state.iteration
    what = "evaluation" if run.config.batch.skip_train else "training"
    run.events.record(
        "start",
        f"{what} starts at iteration {first} of {run.train_iters} on {ranks} rank{'s' * (ranks > 1)}",
        iteration=first,
        ranks=ranks,
        resumed=run.saved_hooks is not None,
    )
    record_shortage(run.events, run.config.checkpoint, first)


def record_shortage(events: EventLog, settings: schema.Checkpoint, iteration: int) -> None:
    """Record the folders of checkpoints whose disk has no room for the next ones."""
    rule = rule_of(events.rules, "disk_nearly_full")
    for folder in filter(None, (settings.save, settings.save_mirror)) if events.active and not rule.off else ():
        if short := shortage(folder, rule.threshold):
            events.record(
                "disk_nearly_full",
                f"{short.folder}: {short.free:,} bytes are free, and the next {rule.threshold:g} checkpoints need "
                f"{short.needed:,}; free some space, or lower --keep-last",
                iteration=iteration,
                folder=short.folder,
                free=short.free,
                needed=short.needed,
            )


@contextlib.contextmanager
def recorded_drift(events: EventLog, iteration: int) -> Iterator[None]:
    """A context around a comparison of replicas that records an event if it raises NumericsError."""
    try:
        yield
    except NumericsError as error:
        why = str(error.why)
        events.record("replica_drift", f"{error.what}: {why}", iteration=iteration, why=why)
        raise


@contextlib.contextmanager
def recorded_refusal(config: schema.Config) -> Iterator[None]:
    """A context that records the end of a launch whose settings are refused before anything is started."""
    try:
        yield
    except Failure:
        if not config.parallel.print_topology and not _is_written(config.checkpoint.save):
            events = open_events(config.logging, config.checkpoint.save, active=rank_env.ranks().rank == 0)
            with (
                contextlib.suppress(Failure),
                recorded_end(events, same_place(config.checkpoint.load, config.checkpoint.save)),
            ):
                raise
        raise


def record_refused_words(argv: list[str], refused: UsageError) -> None:
    """Record the end of a launch whose command line cannot be understood, in the folder that it names, if that is there."""
    with contextlib.suppress(Exception):  # what is wrong may be anything; the message itself follows
        found = {name: one.value for name, one in said(argv).items()}
        looks = (
            found.get("dry_run") or found.get("preflight") or found.get("print_topology") or "--print-config" in argv
        )
        save = found.get("save")
        if looks or not save or not local_folder(save).is_dir() or _is_written(save):
            return
        known = {one.name for one in fields(schema.Logging)}
        logging = schema.Logging(**{name: value for name, value in found.items() if name in known})
        events = open_events(logging, save, active=rank_env.ranks().rank == 0)
        with contextlib.suppress(Failure), recorded_end(events, same_place(found.get("load"), save)):
            raise refused


def _is_written(save: Optional[str]) -> bool:
    """Whether another job writes into a folder: what happens to this one is no event of that."""
    if not save or not os.path.isdir(save):
        return False
    try:
        WriterLock(Path(save)).release()
    except (Locked, OSError):
        return True
    return False


@contextlib.contextmanager
def recorded_end(events: EventLog, resumes: bool) -> Iterator[None]:
    """A context that records the end of a launch that failed before its run was built, and sends the last events.

    The file of a run that has started and is not resumed stays as it is, and that of a finished run if the command was
    refused (exit codes 2 and 3). A folder that this launch made for a run that is refused, for its data too, is removed.
    """
    events.supervised = is_supervised
    made = events.active and bool(events.path) and not events.path.parent.exists()
    past = _past_of(events.path) if events.path else []
    resumed = resumes or SUPERVISOR in os.environ
    finished = bool(past) and past[-1]["event"] == "end" and past[-1].get("code") == 0 and not past[-1].get("why")
    another = not resumed and (finished or any(event["event"] == "start" for event in past))
    try:
        yield
    except BaseException as error:
        if not events.ended:
            another |= isinstance(error, Locked) or finished and isinstance(error, (UsageError, SettingsError))
            if another or not (events.path and events.path.parent.is_dir()):
                events.path = None  # the folder belongs to another job, or was not created yet
            elif (
                made
                and isinstance(error, REFUSALS)
                and SUPERVISOR not in os.environ
                and remove_claimed(events.path.parent)
            ):
                events.path = None
            record_end(events, exit_code(error), first_line(error))
        raise
    finally:
        events.close()


def remove_claimed(folder: Path) -> bool:
    """Remove a folder with nothing but the lock of this process, which is about to end. Whether it did"""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] in ([], [LOCK]):
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
            return True
    return False


def _past_of(path: Path) -> list[dict]:
    """The starts and ends of earlier launches in an events file."""
    try:
        return [event for event in read_events(path) if event["event"] in ("start", "end")]
    except OSError:
        return []


def record_end(
    events: EventLog, code: int, why: str, iteration: Optional[int] = None, train_iters: Optional[int] = None
) -> None:
    """Record the end of a launch. iteration: None if training has not started"""
    at = "before the first step" if iteration is None else f"after iteration {iteration} of {train_iters}"
    message = f"ended {at}" + (f" with exit code {code}" if code else "") + (f": {why}" if why else "")
    level = "info" if code in QUIET else "error"
    events.record("end", message, level=level, iteration=iteration, code=code, why=why)


def first_line(error: BaseException) -> str:
    """An error's message in a line, or its name.

    >>> first_line(MemoryError("cannot allocate 9 GB"))
    'out of memory'
    """
    return in_a_line(str(explain(error) or error)) or type(error).__name__
