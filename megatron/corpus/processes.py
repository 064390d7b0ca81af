# SPDX-License-Identifier: Apache-2.0
"""Processes that end together with their parent: spawned ones for work that may crash or hang, forked ones that share data.

pool = process_pool(1)
pool.submit(function, argument).result()      # BrokenProcessPool where the process died
end(pool)
for result in in_order(function, [(1,), (2,)], 8, Failure("a process was killed")): ...
"""

import contextlib
import multiprocessing
import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import starmap
from typing import Optional, TypeVar

from megatron.errors import Failure
from megatron.storage.processes import die_with_parent

Result = TypeVar("Result")


def process_pool(processes: int, memory: Optional[int] = None) -> ProcessPoolExecutor:
    """A pool of spawned processes: forked ones would inherit connections, and locks of threads.

    memory: limit of the address space of each, in bytes
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(os.getpid(), memory))


def in_order(work: Callable[..., Result], items: Iterable[tuple], processes: int, killed: Failure) -> Iterator[Result]:
    """`work(*item)` of each item, in their order, by forked processes, which share the data that `work` holds.

    At most two items per process are taken ahead. With one process, this one works. Raises `killed` where a process died.
    """
    if processes == 1:
        yield from starmap(work, items)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(os.getpid(), None, work)) as pool:
        waiting: deque = deque()
        try:
            for item in items:
                waiting.append(pool.submit(_work, *item))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise killed from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_HELD: dict[str, Callable] = {}  # of a process of `in_order`: its work, which is too large to come with each item


def _work(*item):
    return _HELD["work"](*item)


def _begin(parent: int, memory: Optional[int], work: Optional[Callable] = None) -> None:
    """Set limits on this process, and end it when its parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if memory:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if work:
        _HELD["work"] = work
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def end(pool: ProcessPoolExecutor) -> None:
    """Kill the processes."""
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
