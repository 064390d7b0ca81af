# SPDX-License-Identifier: Apache-2.0
"""Several ranks on this machine in a fraction of a second: `run_ranks(4, function)` calls `function(rank)` on four.

Workers are forked from this process after it has imported torch, so two ranks start in about 0.2 s where a fresh
interpreter each would need several. This is safe because torch runs on one thread here: no thread pool exists that a
fork could lose. One thread also makes results repeatable bit by bit. For tests and for checks such as `verify_layout`.
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


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the text holds the traceback of the rank that failed first.

    failure: what that rank raised, where it is one of `megatron.errors` or can be told as one.
    brief:   the text in one line, with the file and the line of what it raised
    """

    def __init__(self, text: str, failure: Failure | None = None, brief: str = ""):
        super().__init__(text)
        self.failure, self.brief = failure, brief or text


def run_ranks(world_size: int, function, *args, timeout: float = 120, backend: str = "gloo") -> list:
    """Call `function(rank, *args)` on `world_size` forked ranks of an initialised process group.

    Returns what each rank returned, in rank order (anything that pickles; closures are fine as `function`).
    Raises RankFailed with the traceback of the rank that failed first. No process outlives the call.
    """
    import torch.distributed  # imported here once, not by every worker after its fork

    torch.set_num_threads(1)

    # The ranks meet in a file. A TCP store would have to be served by a thread: in this process it would not be safe
    # to fork, and in rank 0 its start races with its clients (seen: one start in twenty took 5 s longer).
    meeting = tempfile.NamedTemporaryFile(prefix="ranks-", delete=False)
    meeting.close()
    _flush()
    workers: dict[Connection, tuple[int, int]] = {}  # where its answer comes from -> (rank, pid)
    try:
        for rank in range(world_size):
            receive, send = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
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


def renew_threads() -> None:
    """In a forked process, before it has threads: two that find torch's pool lost in the fork break each other."""
    import torch

    torch.set_num_threads(1)


def _worker(rank, world_size, meeting, send, backend, timeout, function, args) -> None:
    """Body of one forked rank: join the group, call, answer, and leave without running this program's exit handlers."""
    gc.freeze()  # what is inherited: memory that a collection looks at is copied
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
        _flush()  # before the answer: who has all answers ends what is left of the ranks
        send.send_bytes(answer)
        if dist.is_initialized():
            # Leave together: a rank that tears its connections down early breaks a slower peer's last collective.
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
    """Let everybody see what this process has printed."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it; it is closed
            stream.flush()


def _collect(workers: dict, timeout: float) -> list:
    """Wait for every rank's answer; at the first failure give the others a moment, then report the earliest one."""
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
                died = "the process died without a word (killed, or aborted in C++)"
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
