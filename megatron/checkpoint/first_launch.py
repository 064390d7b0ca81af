# SPDX-License-Identifier: Apache-2.0
"""Decides whether a new run may start when `--load` and `--save` are the same folder and it holds no checkpoint.

The first launch of a job has the same command as all later ones, so a folder that never held a checkpoint starts a new run.
A folder that lost its checkpoints does not: restarting from zero must not look like a success. The tracker file, which
each save writes, and metrics.jsonl show that there was a checkpoint. Needs no torch.
"""

from pathlib import Path
from typing import Any, Optional

from megatron.checkpoint.backends import TRACKER
from megatron.errors import CheckpointError
from megatron.settings.schema import AUTO, Checkpoint
from megatron.storage.urls import location
from megatron.telemetry.run_record import records

FIRST_AUTO = 10  # steps before the first save of --save-interval auto, which measures the cost of a save


def may_begin(settings: Checkpoint, metrics: Optional[Path] = None) -> bool:
    """Whether a new run may start although `--load` holds no checkpoint. metrics: the path of metrics.jsonl.

    Raises CheckpointError when the folder has held one, unless --auto-resume allows a new run.
    """
    if settings.auto_resume:
        return True
    if settings.finetune or settings.exit_on_missing_checkpoint or not same_place(settings.load, settings.save):
        return False
    if (location(settings.load) / "config.json").exists():  # a model of Hugging Face transformers
        return False
    evidence = traces(settings, metrics)
    if evidence:
        raise CheckpointError(
            f"{settings.load} holds no checkpoint, and there was one",
            "\n  ".join(evidence),
            "restore it, or give another --save and --load; --auto-resume starts a new run in this folder",
        )
    return True


def same_place(one: Optional[str], other: Optional[str]) -> bool:
    """Whether two settings name one folder, or one prefix of an object store."""
    return bool(one and other) and location(one).resolve() == location(other).resolve()


def traces(settings: Checkpoint, metrics: Optional[Path] = None) -> list[str]:
    """The evidence that `--save`, its mirror or its copies held a checkpoint, one sentence each."""
    folders = [settings.save, settings.save_mirror, settings.save_copy]
    trackers = [location(folder) / TRACKER for folder in folders if folder and "{}" not in folder]
    evidence = [f"{path} exists: every save writes it" for path in trackers if path.exists()]
    record = save_on_record(metrics, settings.save) if metrics and metrics.exists() else None
    return evidence + ([f"{metrics}: {record}"] if record else [])


def save_on_record(metrics: Path, save: str) -> Optional[str]:
    """The evidence in a run's records that it saved into this folder, or None.

    A run that was killed before its first save has recorded steps too. Only steps after a save was due are evidence.
    """
    launch: dict[str, Any] = {}  # `checkpoint` settings of the present launch
    start, own, last = 0, True, 0
    for record in filter(None, records(metrics)):
        kind, iteration = record["kind"], int(record["iteration"])
        if kind == "run":
            launch = (record.get("config") or {}).get("checkpoint") or {}
            start, last = iteration, iteration
            own = _in_folder(metrics, save) or same_place(launch.get("save"), save)
            in_memory = launch.get("non_persistent_save_interval")  # it may have resumed from there
            if own and iteration and not in_memory:
                return f"a run resumed from iteration {iteration}"
        elif own and kind == "step" and iteration > _first_save(launch, start):
            return f"it was trained to iteration {iteration}, and a checkpoint was due before"
        elif own and kind == "end" and record.get("code") == 0 and max(last, iteration) > start:
            return f"a run ended at iteration {max(last, iteration)}, with a checkpoint"
        last = max(last, iteration) if kind == "step" else last
    return None


def _in_folder(metrics: Path, save: str) -> bool:
    """Whether a metrics file is in the folder itself: then it belongs to it even if the folder was moved."""
    return isinstance(location(save), Path) and metrics.resolve().parent == Path(location(save)).resolve()


def _first_save(launch: dict[str, Any], start: int) -> float:
    """The last iteration that a launch may have reached without a checkpoint on the disk."""
    if not launch:
        return 0  # unknown: any step is evidence
    interval = launch.get("save_interval")
    if not launch.get("save") or not interval:
        return float("inf")  # only one at the end
    first = start + FIRST_AUTO if interval == AUTO else (start // interval + 1) * interval
    if not launch.get("async_save"):
        return first
    return float("inf") if interval == AUTO else first + interval  # the second save waits for the first
