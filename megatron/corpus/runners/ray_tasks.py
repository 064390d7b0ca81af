# SPDX-License-Identifier: Apache-2.0
"""Run tasks on a Ray cluster (`pip install '.[scale]'`), or on one that Ray starts on this machine.

Only tasks and outcomes pass through Ray; files are on the file system that all nodes share. Ray retries a task three times
when its worker or node dies; the agenda retries a task that fails.

`RAY_ADDRESS` is the address of a cluster. Its nodes and this driver need the same RAY_AUTH_MODE (and RAY_AUTH_TOKEN_PATH):
an earlier `ray.init()` on a machine may have left a token.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Optional

from megatron.corpus.agenda import MOST_ATTEMPTS, Agenda, TaskOutcome, child_threads, execute
from megatron.corpus.plan import CorpusTask
from megatron.storage.ray_cluster import connect, import_ray

WINDOW = 4  # tasks in flight per core: enough to keep it busy, few enough for the driver's memory
WAIT = 1.0  # seconds


def run_ray(agenda: Agenda, output: Path, workers: Optional[int] = None, task_memory: int = 0) -> None:
    """Run all tasks of an agenda that can run. workers: cores, where Ray is started here; task_memory: bytes per task"""
    ray = import_ray("--runner ray")
    ours = not ray.is_initialized()
    if ours:
        connect(ray, workers)
    remote = ray.remote(_remote_execute).options(
        num_cpus=1, max_retries=MOST_ATTEMPTS - 1, retry_exceptions=False, memory=_asked(ray, task_memory)
    )
    flying: dict = {}
    try:
        while not agenda.over:
            cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
            while len(flying) < WINDOW * cores and (task := agenda.take()):
                flying[remote.remote(task, str(output.absolute()), os.getcwd())] = task
            ready, _ = ray.wait(list(flying), num_returns=1, timeout=WAIT)
            for one in ready:
                agenda.finish(_outcome(ray, one, flying.pop(one), agenda))
            agenda.on_change(agenda)
    finally:
        for one in flying:
            with suppress(Exception):
                ray.cancel(one, force=True)
        if ours:
            ray.shutdown()


def _asked(ray, task_memory: int) -> Optional[int]:
    """Memory to request per task, at most that of a node: else no task would ever run."""
    most = max((node["Resources"].get("memory", 0) for node in ray.nodes() if node["Alive"]), default=0)
    return min(task_memory, int(most)) or None


def _remote_execute(task: CorpusTask, output: str, folder: str) -> TaskOutcome:
    """Body of a task on a node, in the driver's working directory, since options may have relative paths."""
    child_threads()
    with suppress(OSError):
        os.chdir(folder)
    return execute(task, Path(output))


def _outcome(ray, one, task: CorpusTask, agenda: Agenda) -> TaskOutcome:
    """The outcome of a task. One whose workers died four times has had all its attempts."""
    try:
        return ray.get(one)
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
        agenda.failures[task.folder] = [words] * (MOST_ATTEMPTS - 1)
        return TaskOutcome(task.folder, f"its worker died {MOST_ATTEMPTS} times ({words})")
