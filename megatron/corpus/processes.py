# SPDX-License-Identifier: Apache-2.0
"""Processes for work that may crash or hang: spawned, with a memory limit, and ended together with their parent.

pool = process_pool(1)
pool.submit(function, argument).result()      # BrokenProcessPool where the process died
end(pool)
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Optional


def process_pool(processes: int, memory: Optional[int] = None) -> ProcessPoolExecutor:
    """A pool of spawned processes: forked ones would inherit connections, and locks of threads.

    memory: limit of the address space of each, in bytes
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(os.getpid(), memory))


def _begin(parent: int, memory: Optional[int]) -> None:
    """Set limits on this process, and end it when its parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    if memory:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    end_with(parent)


def end_with(parent: int) -> None:
    """Start a thread that ends this process when its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end(pool: ProcessPoolExecutor) -> None:
    """Kill the processes."""
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
