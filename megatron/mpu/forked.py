# SPDX-License-Identifier: Apache-2.0
"""Start several ranks on this machine in a fraction of a second: `run_ranks(4, function)` calls `function(rank)` on four.

Workers are forked from this process after it has imported torch, so two ranks start in about 0.2 s instead of several
seconds. This is safe because torch runs on one thread here: there is no thread pool that a fork could lose. One thread
also makes results deterministic. For tests and for checks such as `verify_layout`.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait

from megatron.errors import Failure, explain, with_place
from megatron.storage.processes import die_with_parent


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the text has the traceback of the rank that failed first.

    failure: the exception of that rank as a `megatron.errors.Failure`, if `explain` can convert it
    brief:   the text in one line, with file and line of the exception
    """

    def __init__(self, text: str, failure: Failure | None = None, brief: str = ""):
        super().__init__(text)
        self.failure, self.brief = failure, brief or text


def run_ranks(world_size: int, function, *args, timeout: float = 120, backend: str = "gloo") -> list:
    """Call `function(rank, *args)` on `world_size` forked ranks of an initialized process group.

    Returns the results in rank order, which must be picklable; `function` may be a closure.
    Raises RankFailed with the traceback of the rank that failed first. No process outlives the call, even if
    this process is killed.
    """
    import torch.distributed  # imported here once, not by every worker after its fork

    torch.set_num_threads(1)

    # The rendezvous is a file. A TCP store needs a server thread: in this process it would make forks unsafe, and in
    # rank 0 its start races with its clients (one start in twenty took 5 s longer).
    meeting = tempfile.NamedTemporaryFile(prefix="ranks-", delete=False)
    meeting.close()
    _flush()
    caller = os.getpid()
    workers: dict[Connection, tuple[int, int]] = {}  # connection for its answer -> (rank, pid)
    try:
        for rank in range(world_size):
            receive, send = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                die_with(caller)
                receive.close()
                _worker(rank, world_size, meeting.name, send, backend, timeout, function, args)
            send.close()
            workers[receive] = rank, pid
        return _collect(workers, timeout)
    finally:
        os.unlink(meeting.name)
        for receive, (_, pid) in workers.items():
            receive.close()
            for number in (signal.SIGCONT, signal.SIGKILL):  # a stopped process is killed only once it may run
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, where it can; exit now if it has ended already."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def renew_threads() -> None:
    """Reset torch's thread pool, which a fork loses, in a forked process before it starts threads."""
    import torch

    torch.set_num_threads(1)


def _worker(rank, world_size, meeting, send, backend, timeout, function, args) -> None:
    """Body of one forked rank: join the group, call, answer, and exit without running this program's exit handlers."""
    gc.freeze()  # a collection would touch, and so copy, all inherited memory
    import datetime

    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # do not ask the resolver for this host's name
    faulthandler.disable()
    renew_threads()
    try:
        patience = datetime.timedelta(seconds=timeout)
        store = dist.FileStore(meeting, world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=patience)
        result = function(rank, *args)
        answer = pickle.dumps((True, result))
        _flush()  # before the answer: after all answers the parent kills the ranks
        send.send_bytes(answer)
        if dist.is_initialized():
            # Exit together: a rank that closes its connections early breaks a slower peer's last collective.
            with contextlib.suppress(Exception):
                dist.barrier()
    except BaseException as error:
        _flush()
        with contextlib.suppress(OSError):
            texts = traceback.format_exc(), explain(error), with_place(error)
            send.send_bytes(pickle.dumps((False, (time.monotonic(), *texts))))
    finally:
        os._exit(0)


def _flush() -> None:
    """Flush stdout and stderr."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # a broken pipe; a closed stream
            stream.flush()


def _collect(workers: dict, timeout: float) -> list:
    """Wait for every rank's answer. After a failure wait 0.5 s for others, then raise the earliest one."""
    results, failures = {}, {}
    deadline = time.monotonic() + timeout
    open_ends = dict(workers)
    while open_ends:
        ready = wait(list(open_ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receive in ready:
            rank, _ = open_ends.pop(receive)
            try:
                good, value = pickle.loads(receive.recv_bytes())
            except EOFError:
                died = "the process died without a message (killed, or aborted in C++)"
                good, value = False, (time.monotonic(), died, None, died)
            if good:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + 0.5)
    if failures:
        rank, (_, text, failure, brief) = min(failures.items(), key=lambda item: item[1][0])
        raise RankFailed(f"rank {rank} of {len(workers)} failed first:\n{text}", failure, f"rank {rank}: {brief}")
    if open_ends:
        silent = sorted(rank for rank, _ in open_ends.values())
        raise RankFailed(f"ranks {silent} of {len(workers)} did not answer within {timeout} s")
    return [results[rank] for rank in range(len(workers))]
