# SPDX-License-Identifier: Apache-2.0
"""Whether a run may begin in the folder that `--load` and `--save` name both, which holds no checkpoint.

The first launch of a job has the command of all later ones, so a folder that has never held a checkpoint is a beginning.
One that has lost its checkpoints is not: a run that forgets everything must not look like a success. The tracker file
shows that there was one (each save writes it), and so does metrics.jsonl. Needs no torch.
"""

from pathlib import Path
from typing import Any, Optional

from megatron.checkpoint.storage import TRACKER
from megatron.errors import CheckpointError
from megatron.settings.schema import AUTO, Checkpoint
from megatron.storage.urls import location
from megatron.telemetry.run_record import records

FIRST_AUTO = 10  # steps before the first save of --save-interval auto, which measures what a save costs


def may_begin(settings: Checkpoint, metrics: Optional[Path] = None) -> bool:
    """Whether a run may start from nothing, as `--load` holds no checkpoint. metrics: its metrics.jsonl.

    Raises CheckpointError where the folder has held one, unless --auto-resume starts anew all the same.
    """
    if settings.auto_resume:
        return True
    if settings.finetune or settings.exit_on_missing_checkpoint or not same_place(settings.load, settings.save):
        return False
    if (location(settings.load) / "config.json").exists():  # a model of Hugging Face transformers
        return False
    found = traces(settings, metrics)
    if found:
        raise CheckpointError(
            f"{settings.load} holds no checkpoint, and there was one",
            "\n  ".join(found),
            "bring it back, or give another --save and --load; --auto-resume starts anew in this folder all the same",
        )
    return True


def same_place(one: Optional[str], other: Optional[str]) -> bool:
    """Whether two settings name one folder, or one prefix of an object store."""
    return bool(one and other) and location(one).resolve() == location(other).resolve()


def traces(settings: Checkpoint, metrics: Optional[Path] = None) -> list[str]:
    """What shows that there has been a checkpoint in `--save`, its mirror or its copies, one sentence each."""
    folders = [settings.save, settings.save_mirror, settings.save_copy]
    trackers = [location(folder) / TRACKER for folder in folders if folder and "{}" not in folder]
    found = [f"{path} is there: every save writes it" for path in trackers if path.exists()]
    told = saved_by(metrics, settings.save) if metrics and metrics.exists() else None
    return found + ([f"{metrics}: {told}"] if told else [])


def saved_by(metrics: Path, save: str) -> Optional[str]:
    """What of a run's records tells that it has saved into this folder; None: nothing does.

    A run that was killed before its first save has left steps, too; what counts are steps behind a save that was due.
    """
    launch: dict[str, Any] = {}  # `checkpoint` settings of the launch that the records belong to
    start, own, last = 0, True, 0
    for record in filter(None, records(metrics)):
        kind, iteration = record["kind"], int(record["iteration"])
        if kind == "run":
            launch = (record.get("config") or {}).get("checkpoint") or {}
            start, last = iteration, iteration
            own = _beside(metrics, save) or same_place(launch.get("save"), save)
            if own and iteration:
                return f"a run went on from iteration {iteration}"
        elif own and kind == "step" and iteration > _first_save(launch, start):
            return f"it was trained to iteration {iteration}, and a checkpoint was due before"
        elif own and kind == "end" and record.get("code") == 0 and max(last, iteration) > start:
            return f"a run ended at iteration {max(last, iteration)}, with a checkpoint"
        last = max(last, iteration) if kind == "step" else last
    return None


def _beside(metrics: Path, save: str) -> bool:
    """Whether a metrics file lies in the folder itself: then it is of it, also where the folder was moved."""
    return isinstance(location(save), Path) and metrics.resolve().parent == Path(location(save)).resolve()


def _first_save(launch: dict[str, Any], start: int) -> float:
    """The last iteration that may be behind a launch without a checkpoint on the disk."""
    if not launch:
        return 0  # nobody knows: steps are all that is left
    interval = launch.get("save_interval")
    if not launch.get("save") or not interval:
        return float("inf")  # one at the end alone
    first = start + FIRST_AUTO if interval == AUTO else (start // interval + 1) * interval
    if not launch.get("async_save"):
        return first
    return float("inf") if interval == AUTO else first + interval  # the second save waits for the first
