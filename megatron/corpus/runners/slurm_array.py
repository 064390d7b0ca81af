# SPDX-License-Identifier: Apache-2.0
"""Run tasks as SLURM job arrays: one array per phase, each after the previous one.

Array task i of n runs the tasks of its phase with hash mod n == i (`work_on`, by `corpus_array.sbatch`), in the processes
of the local runner. A task that fails four times is quarantined on the disk, and the array task still succeeds, so that
`afterok` lets the next phase run the tasks that do not need it. Tasks lost by killed jobs are submitted again by the
waiting command, or by running the same command again.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from megatron.corpus.agenda import MOST_ATTEMPTS, Agenda, TaskOutcome, folders_done, read_quarantine
from megatron.corpus.plan import CorpusPlan
from megatron.corpus.runners.local import run_local
from megatron.errors import Failure, SettingsError

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "slurm" / "corpus_array.sbatch"
POLL = 2.0  # seconds between checks of the queue


def part_of(task_id: str, parts: int) -> int:
    """The part of its phase that a task belongs to.

    >>> part_of("00ff", 7)
    3
    """
    return int(task_id, 16) % parts


def work_on(
    plan: CorpusPlan, output: Path, phase: str, part: int, parts: int, workers: int, memory: Optional[int] = None
) -> None:
    """Run the tasks of a part of a phase that can run, and quarantine those that fail repeatedly."""
    if phase not in plan.phases:
        raise SettingsError(f"--phase {phase}: the plan has none of this name", do=f"it has: {', '.join(plan.phases)}")
    only = [folder for folder in plan.tasks if plan.tasks[folder].phase == phase]
    given_up = read_quarantine(output, plan)
    only = [f for f in only if part_of(plan.tasks[f].id, parts) == part and f not in given_up]
    agenda = Agenda(plan, output, only)
    print(f"{phase}, part {part} of {parts}: {agenda.left} of {len(only)} tasks to do", flush=True)
    run_local(agenda, output, workers, memory)
    for folder, reason in agenda.quarantined.items():
        print(f"set aside: {plan.tasks[folder].about}: {reason}", flush=True)


def run_slurm(
    agenda: Agenda, output: Path, arrays: int, flags: Sequence[str] = (), memory_gb: float = 0, wait: bool = True
) -> None:
    """Submit the remaining tasks, wait, and submit tasks lost by jobs again, up to four times. arrays: tasks of an array

    Raises Failure with `wait=False`: the jobs are submitted, and nothing is done yet.
    """
    if not shutil.which("sbatch"):
        raise SettingsError("--runner slurm needs sbatch", do="run it on a node where jobs are submitted")
    if not SCRIPT.exists():
        raise SettingsError(f"--runner slurm needs {SCRIPT}", do="run it from the source tree, not from the wheel")
    for _ in range(MOST_ATTEMPTS):
        before = agenda.left
        jobs = submit(agenda, output, arrays, flags, memory_gb)
        if not jobs:
            break
        print(f"submitted: jobs {', '.join(jobs)}", flush=True)
        if not wait:
            raise Failure(
                f"{len(jobs)} arrays are submitted, and not waited for (--no-wait)",
                do="run the same command when they have ended, to check and continue; `status` shows the progress",
            )
        _wait_for(jobs, agenda, output)
        _update(agenda, output)
        if agenda.left == before and not agenda.quarantined:
            print("the jobs have ended, and nothing was done: see the logs of the arrays", flush=True)
    agenda.ready.clear()


def submit(agenda: Agenda, output: Path, arrays: int, flags: Sequence[str], memory_gb: float) -> list[str]:
    """Submit an array for each phase with remaining tasks, each after the previous one. Returns the job ids."""
    given_up = set(agenda.quarantined) | set(read_quarantine(output, agenda.plan))
    jobs: list[str] = []
    (output / "logs").mkdir(parents=True, exist_ok=True)
    for phase, folders in agenda.plan.phases.items():
        left = [folder for folder in set(folders) if folder not in agenda.done and folder not in given_up]
        if not left:
            continue
        parts = min(arrays, len(left))
        words = ["sbatch", "--parsable", f"--array=0-{parts - 1}", f"--job-name=corpus-{phase}"]
        words += [f"--output={output.absolute() / 'logs'}/%x-%A_%a.log", *flags]
        words += [f"--dependency=afterok:{jobs[-1]}", "--kill-on-invalid-dep=yes"] if jobs else []
        words += [str(SCRIPT), str(output.absolute()), phase, str(parts), f"{memory_gb:g}"]
        env = os.environ | {"CORPUS_ROOT": str(ROOT)}  # the jobs may start in any folder
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        if done.returncode:
            raise Failure(f"sbatch ended with code {done.returncode}", done.stderr.strip()[:500], " ".join(words))
        jobs.append(done.stdout.strip().split(";")[0])
    return jobs


def _wait_for(jobs: list[str], agenda: Agenda, output: Path) -> None:
    """Wait until none of these jobs is in the queue."""
    while _queued(jobs):
        _update(agenda, output)
        time.sleep(POLL)


def _queued(jobs: list[str]) -> bool:
    done = subprocess.run(
        ["squeue", "--noheader", "--format=%i", f"--jobs={','.join(jobs)}"], capture_output=True, text=True
    )
    if done.returncode == 0:
        return bool(done.stdout.strip())
    return "Invalid job id" not in done.stderr  # a job that ended long ago; otherwise ask again


def _update(agenda: Agenda, output: Path) -> None:
    """Record the finished and quarantined tasks of the jobs so far."""
    for folder in folders_done(agenda.wanted - agenda.done, output):
        agenda.quarantined.pop(folder, None)
        agenda.finish(TaskOutcome(folder))
    agenda.quarantined.update(read_quarantine(output, agenda.plan))
    agenda.on_change(agenda)
