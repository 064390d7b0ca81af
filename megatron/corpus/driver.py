# SPDX-License-Identifier: Apache-2.0
"""A run from its recipe to the final files, by any runner; and what can be said of it while it goes on and afterwards.

<output>/plan.json      the tasks of the last run        tasks/        their folders
<output>/status.json    how far it is                    quarantine/   tasks that are given up, with the reason
<output>/final/         the corpus: shards 00000.jsonl.zst ..., or text_document.bin and .idx, and manifest.json
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megatron.corpus.agenda import Agenda, folders_done, read_quarantine
from megatron.corpus.commit import RECEIPT, read_receipt, remove_dead_attempts, this_process
from megatron.corpus.figures import summed
from megatron.corpus.plan import LIST, LISTS, TASKS, CorpusPlan, save_lists
from megatron.corpus.summary import became_of
from megatron.errors import DataError
from megatron.storage.durable import replace_file, storage_errors, sync_folder

STATUS = "status.json"
FINAL = "final"
MANIFEST = "manifest.json"
AFTER = 1.0  # seconds between two versions of the status
Runner = Callable[[Agenda, Path], None]


@dataclass
class CorpusProgress:
    """How far a run is, by phase: [done, all], and how fast."""

    phases: dict[str, list[int]]
    running: int
    quarantined: dict[str, str]
    seconds: float
    seconds_left: Optional[float] = None
    state: str = "running"
    at: float = field(default_factory=time.time)
    driver: list[str] = field(default_factory=this_process)

    @property
    def done(self) -> int:
        return sum(done for done, _ in self.phases.values())

    @property
    def total(self) -> int:
        return sum(total for _, total in self.phases.values())


def run(
    plan: CorpusPlan,
    output: Path,
    runner: Runner,
    report: Callable[[CorpusProgress], None] = lambda progress: None,
    whole: bool = False,
) -> CorpusProgress:
    """Do what is left of a plan, and put the final files in their place.

    whole: what is there is compared byte by byte with its receipt first. Raises DataError where tasks were set aside: all
    that does not need them is done; and where no document is left, with what became of them.
    """
    with storage_errors(output):
        (output / TASKS).mkdir(parents=True, exist_ok=True)
        save_lists(plan, output)
    _remove_dead(plan, output)
    agenda = Agenda(plan, output, whole=whole)
    reporter = _Reporter(agenda, output, report)
    agenda.on_change = reporter
    reporter(agenda, at_once=True)
    state = "stopped"
    try:
        with storage_errors(output):
            runner(agenda, output)
            _remove_dead(plan, output)
            state = "failed"
            if not agenda.left:
                _refuse_empty(plan, output)
                publish_final(plan, output)
                state = "done"
    finally:
        reporter(agenda, at_once=True, state=state)
    if agenda.left:
        raise set_aside_error(plan, output, agenda.quarantined, len(agenda.blocked()))
    return reporter.progress


def _remove_dead(plan: CorpusPlan, output: Path) -> None:
    for phase in plan.phases:
        remove_dead_attempts(output / TASKS / phase)


def _refuse_empty(plan: CorpusPlan, output: Path) -> None:
    folders = list(plan.phases.values())[-1]
    if not any(read_receipt(output / TASKS / folder)["counts"].get("documents", 1) for folder in folders):
        counts = "\n  ".join(became_of(counts_by_phase(plan, output)))
        raise DataError(f"{output}: no document is left", counts, "change the recipe or its input; final/ is as it was")


def set_aside_error(plan: CorpusPlan, output: Path, quarantined: dict[str, str], blocked: int) -> DataError:
    """What to say of a run that has done all it could."""
    told = [f"{plan.tasks[folder].about}: {reason}" for folder, reason in sorted(quarantined.items())]
    more = f"\n  and {len(told) - 10} more" * (len(told) > 10)
    if not told:
        return DataError(f"{output}: {blocked} tasks are missing", do="run the same command again")
    return DataError(
        f"{len(told)} of {len(plan.tasks)} tasks failed 4 times and are set aside:\n  " + "\n  ".join(told[:10]) + more,
        f"{blocked} tasks that need them are left undone; all else is done" if blocked else "all else is done",
        "mend or leave out what they read, then run the same command again; the reasons are in "
        f"{output / 'quarantine'}",
    )


class _Reporter:
    """Tells how far a run is, to a function and to `status.json`, at most once a second."""

    def __init__(self, agenda: Agenda, output: Path, report: Callable[[CorpusProgress], None]):
        self.output, self.report = output, report
        self.totals = {name: len(set(folders)) for name, folders in agenda.plan.phases.items()}
        self.started, self.last = time.time(), 0.0
        self.before = len(agenda.done)
        self.progress: CorpusProgress = CorpusProgress({}, 0, {}, 0.0)

    def __call__(self, agenda: Agenda, at_once: bool = False, state: str = "running") -> None:
        now = time.time()
        if now - self.last < AFTER and not at_once:
            return
        self.last = now
        phases = {name: [agenda.done_by_phase[name], total] for name, total in self.totals.items()}
        fresh = len(agenda.done) - self.before
        left = (now - self.started) / fresh * agenda.left if fresh else None
        words = {agenda.plan.tasks[folder].about: reason for folder, reason in agenda.quarantined.items()}
        self.progress = CorpusProgress(phases, len(agenda.running), words, now - self.started, left, state)
        self.report(self.progress)
        with storage_errors(self.output):
            replace_file(self.output / STATUS, json.dumps(vars(self.progress)).encode())


# ---------------------------------------------------------------------------------------------------- final files


def publish_final(plan: CorpusPlan, output: Path) -> Path:
    """Put the final files under names in their order, as further names of the tasks' files: no byte is copied."""
    final, aside = output / FINAL, output / f".final-{uuid.uuid4().hex}"
    wanted = _final_files(plan, output)
    mark = dict(plan=plan.id, files={name: list(entry[1:]) for name, entry in wanted.items()})
    try:
        if json.loads((final / MANIFEST).read_text()) == mark and _same_files(final, wanted):
            return final
    except (OSError, ValueError):
        pass
    for old in output.glob(".final-*"):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, (path, *_) in wanted.items():
        _link(path, aside / name)
    (aside / MANIFEST).write_text(json.dumps(mark, indent=1))
    sync_folder(aside)
    if final.exists():
        os.rename(final, output / f".final-old-{uuid.uuid4().hex}")
    os.rename(aside, final)
    sync_folder(output)
    for old in output.glob(".final-*"):
        shutil.rmtree(old, ignore_errors=True)
    return final


def _same_files(final: Path, wanted: dict[str, tuple]) -> bool:
    """Whether the names in `final` stand for the tasks' files of today: a damaged one may have been made again."""
    return all((final / name).exists() and os.path.samefile(final / name, wanted[name][0]) for name in wanted)


def _final_files(plan: CorpusPlan, output: Path) -> dict[str, tuple]:
    """Name in `final` -> (path, size, digest), in order."""
    found = {}
    digits = max(5, len(str(len(plan.final))))
    several = len(plan.final) > 1
    for number, path in enumerate(plan.final):
        folder, _, shard = path.partition("/")[2].partition("/")
        folder = output / TASKS / path.split("/")[0] / folder
        receipt = read_receipt(folder)
        if receipt is None:
            raise DataError(f"{folder}: its files are gone", do="run the same command again")
        if shard:
            found[f"{number:0{digits}}.jsonl.zst"] = (folder / shard, *receipt["files"][shard])
        else:
            for name, facts in receipt["files"].items():
                found[f"{number:02}-{name}" if several else name] = (folder / name, *facts)
    return found


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # a file system without hard links
        os.symlink(os.path.relpath(path, name.parent), name)


# ---------------------------------------------------------------------------------------------------- looking


def counts_by_phase(plan: CorpusPlan, output: Path) -> dict[str, dict[str, Any]]:
    """What the tasks of each phase have counted, summed over its tasks; a task that stands there twice counts twice.

    Beside it `tasks`, those that are done, and `seconds` of a core.
    """
    found = {}
    for phase, folders in plan.phases.items():
        receipts = {folder: read_receipt(output / TASKS / folder) for folder in dict.fromkeys(folders)}
        rows = [receipts[folder] for folder in folders if receipts[folder]]
        found[phase] = summed(row["counts"] for row in rows)
        found[phase]["seconds"] = round(sum(row["attempt"]["core_seconds"] for row in rows), 3)
        found[phase]["tasks"] = len(rows)
    return found


@dataclass(frozen=True)
class Missing:
    """What `check` finds: tasks without a result, results whose bytes differ from their receipts, and tasks given up."""

    missing: list[str]
    damaged: list[str]
    quarantined: dict[str, str]


def check(plan: CorpusPlan, output: Path, whole: bool = True) -> Missing:
    """Compare what is there with the plan and the receipts. whole: every byte, not only sizes."""
    missing, damaged = [], []
    done = folders_done(plan.tasks, output, whole)
    for folder in plan.tasks:
        if folder not in done:
            (damaged if (output / TASKS / folder / RECEIPT).exists() else missing).append(folder)
    return Missing(missing, damaged, read_quarantine(output, plan))


def clean(plan: CorpusPlan, output: Path) -> tuple[int, int]:
    """Remove results that the plan does not ask for, and what dead attempts left: (folders, bytes)."""
    folders, size = 0, 0
    for path in sorted((output / TASKS).glob("*/*")):
        name = f"{path.parent.name}/{path.name}"
        if name in plan.tasks or path.name.startswith((".tmp-", ".dead-")):
            continue
        size += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        folders += 1
        shutil.rmtree(path)
    for parent in (output / TASKS).glob("*"):
        folders += remove_dead_attempts(parent)
        if not any(parent.iterdir()):
            parent.rmdir()
    for path in (output / LISTS).glob("*.json"):
        if LIST + path.stem not in plan.lists:
            path.unlink()
    return folders, size
