# SPDX-License-Identifier: Apache-2.0
"""Processes for work that may die or hang: started afresh, within limits, and gone when their parent is.

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
    """Processes that hold nothing of this one: forked ones would have its connections, and locks of its threads.

    memory: bytes of address space that each may take
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(os.getpid(), memory))


def _begin(parent: int, memory: Optional[int]) -> None:
    """Set limits on this process, and let it not outlive a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    if memory:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    end_with(parent)


def end_with(parent: int) -> None:
    """End this process when the one that started it was killed without a chance to stop it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end(pool: ProcessPoolExecutor) -> None:
    """Stop the processes, whatever they do."""
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
