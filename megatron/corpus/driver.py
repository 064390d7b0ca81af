# SPDX-License-Identifier: Apache-2.0
"""Run a plan to its final files with any runner; report its progress and check its results.

<output>/plan.json      the tasks of the last run        tasks/        their folders
<output>/status.json    its progress                     quarantine/   tasks that failed repeatedly, with the reason
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
from megatron.corpus.counts import removed_lines, summed
from megatron.corpus.plan import LIST, LISTS, TASKS, CorpusPlan, save_lists
from megatron.errors import DataError
from megatron.storage.durable import replace_file, storage_errors, sync_folder

STATUS = "status.json"
FINAL = "final"
MANIFEST = "manifest.json"
AFTER = 1.0  # seconds between two updates of the status
Runner = Callable[[Agenda, Path], None]


@dataclass
class CorpusProgress:
    """Progress of a run by phase, as [done, all], and its speed."""

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
    """Run the remaining tasks of a plan, and publish the final files.

    whole: first compare existing results byte by byte with their receipts. Raises DataError where tasks failed, after all
    tasks that do not need them; and where no document is left, with the reasons.
    """
    with storage_errors(output):
        (output / TASKS).mkdir(parents=True, exist_ok=True)
        save_lists(plan, output)
    _remove_dead(plan, output)
    agenda = Agenda(plan, output, whole=whole)
    reporter = _Reporter(agenda, output, report)
    agenda.on_change = reporter
    reporter(agenda, force=True)
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
        reporter(agenda, force=True, state=state)
    if agenda.left:
        raise set_aside_error(plan, output, agenda.quarantined, len(agenda.blocked()))
    return reporter.progress


def _remove_dead(plan: CorpusPlan, output: Path) -> None:
    for phase in plan.phases:
        remove_dead_attempts(output / TASKS / phase)


def _refuse_empty(plan: CorpusPlan, output: Path) -> None:
    folders = list(plan.phases.values())[-1]
    if not any(read_receipt(output / TASKS / folder)["counts"].get("documents", 1) for folder in folders):
        why = "\n  ".join(removed_lines(counts_by_phase(plan, output)))
        raise DataError(f"{output}: no document is left", why, "change the recipe or its input; final/ is unchanged")


def set_aside_error(plan: CorpusPlan, output: Path, quarantined: dict[str, str], blocked: int) -> DataError:
    """The error of a run that ended with failed tasks."""
    failed = [f"{plan.tasks[folder].about}: {reason}" for folder, reason in sorted(quarantined.items())]
    more = f"\n  and {len(failed) - 10} more" * (len(failed) > 10)
    if not failed:
        return DataError(f"{output}: {blocked} tasks are missing", do="run the same command again")
    return DataError(
        f"{len(failed)} of {len(plan.tasks)} tasks failed 4 times and are set aside:\n  "
        + "\n  ".join(failed[:10])
        + more,
        f"{blocked} tasks that need them are not done; all others are" if blocked else "all others are done",
        f"repair or leave out their input, then run the same command again; the reasons are in {output / 'quarantine'}",
    )


class _Reporter:
    """Reports the progress of a run to a function and to `status.json`, at most once a second."""

    def __init__(self, agenda: Agenda, output: Path, report: Callable[[CorpusProgress], None]):
        self.output, self.report = output, report
        self.totals = {name: len(set(folders)) for name, folders in agenda.plan.phases.items()}
        self.started, self.last = time.time(), 0.0
        self.before = len(agenda.done)
        self.progress: CorpusProgress = CorpusProgress({}, 0, {}, 0.0)

    def __call__(self, agenda: Agenda, force: bool = False, state: str = "running") -> None:
        now = time.time()
        if now - self.last < AFTER and not force:
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
    """Publish the final files under numbered names, as hard links to the tasks' files without a copy."""
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
    """Whether the names in `final` are the tasks' present files: a damaged one may have been rebuilt."""
    return all((final / name).exists() and os.path.samefile(final / name, wanted[name][0]) for name in wanted)


def _final_files(plan: CorpusPlan, output: Path) -> dict[str, tuple]:
    """Name in `final` -> (path, size, digest), in order."""
    files = {}
    digits = max(5, len(str(len(plan.final))))
    several = len(plan.final) > 1
    for number, path in enumerate(plan.final):
        folder, _, shard = path.partition("/")[2].partition("/")
        folder = output / TASKS / path.split("/")[0] / folder
        receipt = read_receipt(folder)
        if receipt is None:
            raise DataError(f"{folder}: its files are gone", do="run the same command again")
        if shard:
            files[f"{number:0{digits}}.jsonl.zst"] = (folder / shard, *receipt["files"][shard])
        else:
            for name, facts in receipt["files"].items():
                files[f"{number:02}-{name}" if several else name] = (folder / name, *facts)
    return files


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # a file system without hard links
        os.symlink(os.path.relpath(path, name.parent), name)


# ---------------------------------------------------------------------------------------------------- results


def counts_by_phase(plan: CorpusPlan, output: Path) -> dict[str, dict[str, Any]]:
    """The counts of each phase, summed over its tasks; a task listed twice counts twice.

    In addition `tasks`, the number of those that are done, and `seconds` of a core.
    """
    counts = {}
    for phase, folders in plan.phases.items():
        receipts = {folder: read_receipt(output / TASKS / folder) for folder in dict.fromkeys(folders)}
        rows = [receipts[folder] for folder in folders if receipts[folder]]
        counts[phase] = summed(row["counts"] for row in rows)
        counts[phase]["seconds"] = round(sum(row["attempt"]["core_seconds"] for row in rows), 3)
        counts[phase]["tasks"] = len(rows)
    return counts


@dataclass(frozen=True)
class Missing:
    """The result of `check`: tasks without a result, results that differ from their receipts, and quarantined tasks."""

    missing: list[str]
    damaged: list[str]
    quarantined: dict[str, str]


def check(plan: CorpusPlan, output: Path, whole: bool = True) -> Missing:
    """Compare the results on disk with the plan and the receipts. whole: every byte, not only sizes"""
    missing, damaged = [], []
    done = folders_done(plan.tasks, output, whole)
    for folder in plan.tasks:
        if folder not in done:
            (damaged if (output / TASKS / folder / RECEIPT).exists() else missing).append(folder)
    return Missing(missing, damaged, read_quarantine(output, plan))


def clean(plan: CorpusPlan, output: Path) -> tuple[int, int]:
    """Remove results that are not in the plan, and leftovers of dead attempts: (folders, bytes)."""
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
