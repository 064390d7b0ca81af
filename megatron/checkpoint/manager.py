# SPDX-License-Identifier: Apache-2.0
"""Checkpoint saves of a run: in the background (--async-save), with retries (--save-retries), to a mirror as fallback.

    save(iteration) -> wait for the last save -> copy the pieces to CPU memory -> training continues
                                                   \\-> a thread: write, retry, mirror; ends durable or failed

The thread runs the same `Saver` as a save in the foreground. Its ranks communicate through a key-value store
(`store_all_gather_object`), because training uses the collectives. Every rank gets the same outcome, so all count the same
failures and stop at the same step. It is a thread and not a forked process: writes, checksums and copies release the
interpreter, page-locked memory does not survive a fork, and a copied page table slows down training's next writes.
"""

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.all_ranks import AllGatherObject, alone
from megatron.checkpoint.backends import CheckpointPath
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.copies import Copies, copy_checkpoint, export_to_hf
from megatron.checkpoint.first_launch import FIRST_AUTO
from megatron.checkpoint.folder import Saver, prune
from megatron.checkpoint.interval import best_interval, goodput
from megatron.checkpoint.store import LiveSum, Piece, StablePiece, live_sums
from megatron.errors import Failure, Locked, PeerLost, StorageError
from megatron.mpu.transfer import page_locked
from megatron.settings import schema
from megatron.storage.durable import Damaged, storage_errors
from megatron.storage.urls import location
from megatron.telemetry.disk_speed import DiskSpeed
from megatron.telemetry.events import EventLog

RETRY_AFTER = 2.0  # seconds; doubles with each further try
_ALIGN = 64
_NICE = 10  # training has priority over the writer


class SaveOutcome(NamedTuple):
    """The outcome of a save: its path, or the failure."""

    iteration: int
    path: Optional[Path]
    failure: Optional[Failure]


class CheckpointManager:
    """Writes the checkpoints of a run, as set by `--save` and related flags. All ranks call each method together."""

    def __init__(
        self,
        settings: schema.Checkpoint,
        *,
        rank: int = 0,
        all_gather_object: AllGatherObject = alone,
        log: Callable[[str], None] = print,
        events: Optional[EventLog] = None,
        quiet: bool = False,
    ):
        """quiet: no line for a checkpoint that was saved

        all_gather_object: for saves in the background, one that a thread may use concurrently with collectives.

        Raises StorageError when the folder cannot be written, Locked when another job writes into it.
        """
        self.settings, self.rank, self.all_gather_object, self.log = settings, rank, all_gather_object, log
        self._quiet, self._events = quiet, events or EventLog(active=False)
        self._disk_speed = DiskSpeed(self._events)
        self._mirror: Optional[Saver] = None
        self._copies: list[Copies] = []
        self._saver = self._open(settings.save)
        if settings.save_copy and rank == 0:
            keep = dict(keep_last=settings.keep_last, retain_interval=settings.save_retain_interval)
            self._copies.append(Copies(settings.save_copy, **keep, log=log))
        if settings.save_hf and rank == 0:
            every = settings.save_hf_interval or 1
            self._copies.append(Copies(settings.save_hf, copy=export_to_hf, flag="--save-hf", every=every, log=log))
        self._snapshot = Snapshot()
        self._thread: Optional[threading.Thread] = None
        self._outcome: Optional[SaveOutcome] = None
        self._failures: list[SaveOutcome] = []  # consecutive ones
        self._fatal: Optional[BaseException] = None
        # For --save-interval auto: the next save; step and time of the last; seconds that its thread wrote.
        self._due_at, self._trained_from, self._writing = 0, (0, 0.0), 0.0

    def due(self, iteration: int) -> bool:
        """Whether `--save-interval` requires a checkpoint after this step. Call it after each step."""
        interval = self.settings.save_interval
        if interval != schema.AUTO:
            return bool(interval) and iteration % interval == 0
        if not self._due_at:
            self._due_at, self._trained_from = iteration + FIRST_AUTO, (iteration, time.perf_counter())
        return iteration >= self._due_at

    def save(self, iteration: int, pieces: Iterable[Piece], state: dict[str, Any]) -> float:
        """Write a checkpoint, or start to write it in the background. Returns the seconds for which training stalled.

        pieces and state as in `Saver.save`; both may change after this returns, also during a save in the background.
        Raises StorageError after `--max-failed-saves` consecutive failures, and CheckpointError when pieces do not form
        whole tensors.
        """
        started = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - started  # not part of a save's cost: a longer interval avoids it
        pieces, background = list(pieces), self.settings.async_save
        live = live_sums(pieces, on_cpu=background)  # before any copy
        if background:
            try:
                pieces = self._snapshot.take(pieces)
            except (MemoryError, RuntimeError) as problem:
                self.log(
                    f"WARNING: no memory to save in the background, training waits: {str(problem).splitlines()[0]}"
                )
                background = False
        if self.settings.async_save:  # also on a rank without memory: all ranks communicate in the same order
            stall = time.perf_counter() - started
            # before the thread starts, which uses the same all_gather_object
            self._schedule_next(iteration, stall - waited + (0.0 if background else self._writing))
            self._thread = threading.Thread(target=self._work, args=(iteration, pieces, state, live, True), daemon=True)
            self._thread.start()
            if not background:
                self.wait()
                return time.perf_counter() - started
            self.log(f"  requested checkpoint at iteration {iteration:7d} (training stalled for {stall * 1e3:.0f} ms)")
            return stall
        self._work(iteration, pieces, state, live, False)
        self._count_outcome()
        stall = time.perf_counter() - started
        self._schedule_next(iteration, stall - waited)
        return stall

    def copy(self, checkpoint: CheckpointPath) -> None:
        """Copy a checkpoint of another folder into this one. Rank 0 copies, the others wait. A failure is only logged."""
        if self.rank == 0:
            folder = location(self.settings.save)
            try:
                with storage_errors(folder):
                    copy_checkpoint(checkpoint, folder)
                prune(folder, self.settings.keep_last, self.settings.save_retain_interval)
            except (Failure, OSError) as problem:
                self.log(f"WARNING: {checkpoint} was not copied to {folder}: {problem}")
        self.all_gather_object(None)

    def wait(self, timeout: Optional[float] = None) -> None:
        """Wait for a save in the background. Raises the errors of `save`.

        timeout: seconds after which to give up, for when other ranks are gone.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                self.log("WARNING: the last checkpoint was not finished; the one before it is complete")
                return
            self._thread = None
            self._count_outcome()

    def close(self, timeout: Optional[float] = None, copies: bool = True) -> None:
        """Wait for the last save and release the folder. Raises StorageError when that save failed.

        timeout: as in `wait`; if given, failures are logged and not raised, because the caller is handling another one.
        copies: also wait for copies; otherwise call `close_copies`.
        """
        try:
            self.wait(timeout)
            if self._failures and timeout is None:
                raise self._failures[-1].failure
        except Failure as failure:
            if timeout is None:
                raise
            self.log(f"WARNING: {failure}")
        finally:
            for saver in (self._saver, self._mirror):
                if saver:
                    saver.close()
            for one in self._copies if copies else ():
                one.close(timeout)

    def close_copies(self, beat: Callable[[], None]) -> None:
        """Wait for the last copies, which rank 0 makes. Other ranks need not wait. beat: called as a heartbeat."""
        for one in self._copies:
            one.close(beat=beat)

    # ------------------------------------------------------------------------------------------------ inside

    def _open(self, folder: str) -> Saver:
        return Saver(
            location(folder),
            keep_last=self.settings.keep_last,
            retain_interval=self.settings.save_retain_interval,
            rank=self.rank,
            all_gather_object=self.all_gather_object,
            in_use=lambda: [one.present for one in self._copies],
            log=self.log,
            verified=self.settings.verify_saves,
            parity=self.settings.save_parity,
        )

    def _schedule_next(self, iteration: int, stall: float) -> None:
        """With `--save-interval auto`, choose the step of the next save, the same on all ranks."""
        if self.settings.save_interval != schema.AUTO:
            return
        since, at = self._trained_from
        a_step = (time.perf_counter() - at - stall) / max(1, iteration - since)
        stall, a_step, writing = map(max, zip(*self.all_gather_object((stall, a_step, self._writing))))
        hours = self.settings.mean_time_to_interruption
        seconds = max(best_interval(stall, hours * 3600), writing)
        steps = max(1, round(seconds / max(a_step, 1e-6)))
        self._due_at, self._trained_from = iteration + steps, (iteration, time.perf_counter())
        cost = 1 - goodput(seconds, stall, hours * 3600)
        self.log(
            f"  next checkpoint in {steps} steps = {seconds:.0f} s: a save stalls {stall:.3f} s, an interruption "
            f"is expected every {hours:g} h, both together cost {cost:.2%}"
        )

    def _work(
        self, iteration: int, pieces: list[Piece], state: dict[str, Any], live: Mapping[str, LiveSum], background: bool
    ) -> None:
        """Run one save with all its retries, and store the outcome for `_count_outcome`."""
        if background and hasattr(os, "setpriority"):
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # on Linux: for this thread only
            except OSError:
                pass
        started = time.perf_counter()
        try:
            path, failure = self._try(iteration, pieces, state, live)
        except BaseException as error:  # a thread's exception would be lost
            self._fatal = error
            return
        seconds = time.perf_counter() - started
        self._outcome = SaveOutcome(iteration, path, failure)
        self._writing = seconds if background else 0.0
        if path is not None:
            when = f"durable after {seconds:.2f} s" if background else f"{seconds:.2f} s"
            if not self._quiet:
                self.log(f"  successfully saved checkpoint at iteration {iteration:7d} to {path} ({when})")
            saver = self._saver if path.parent == self._saver.folder else self._mirror
            size, writing = saver.last_write
            self._events.record(
                "save",
                f"the checkpoint of iteration {iteration} was written to {path}",
                iteration=iteration,
                seconds=round(seconds, 3),
                in_background=background,
                folder=str(path.parent),
                bytes=size,
            )
            if saver.unchanged:
                self._events.record(
                    "unchanged_state",
                    f"iteration {iteration}: {', '.join(saver.unchanged)} are, to the bit, those of the save before",
                    iteration=iteration,
                    kinds=saver.unchanged,
                )
            self._disk_speed.judge(str(path.parent), iteration, size, writing)
            for one in self._copies:
                one.add(path)

    def _try(
        self, iteration: int, pieces: list[Piece], state: dict[str, Any], live: Mapping[str, LiveSum]
    ) -> tuple[Optional[Path], Optional[Failure]]:
        """(path, None), or (None, failure) if all tries failed. The same on every rank."""
        tries, failure = 1 + self.settings.save_retries, None
        for number in range(1, tries + 1):
            try:
                return self._saver.save(iteration, pieces, state, live), None
            except (StorageError, Damaged) as problem:
                failure = problem
                self.log(
                    f"WARNING: checkpoint at iteration {iteration} was not saved (try {number} of {tries}): {problem}"
                )
                if number < tries:
                    time.sleep(RETRY_AFTER * 2 ** (number - 1))
        if self.settings.save_mirror:
            try:
                self._mirror = self._mirror or self._open(self.settings.save_mirror)
                return self._mirror.save(iteration, pieces, state, live), None
            except (StorageError, Damaged, Locked) as problem:
                failure = problem
                self.log(f"WARNING: it was not saved to --save-mirror either: {problem}")
        return None, failure

    def _count_outcome(self) -> None:
        """Count the outcome of the last save, and raise after too many consecutive failures."""
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            raise fatal
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        if outcome.failure is None:
            self._failures.clear()
            return
        self._failures.append(outcome)
        count, limit = len(self._failures), self.settings.max_failed_saves
        self._events.record(
            "save_failed",
            f"the checkpoint of iteration {outcome.iteration} is lost: {outcome.failure}",
            iteration=outcome.iteration,
            why=outcome.failure.what,
            in_a_row=count,
        )
        self.log(
            f"WARNING: CHECKPOINT AT ITERATION {outcome.iteration} IS LOST: save {count} in a row that failed; "
            f"training ends at {limit} (--max-failed-saves)"
        )
        if count >= limit:
            failure = outcome.failure
            what = f"{count} saves in a row failed, the last: {failure.what}" if count > 1 else failure.what
            self._failures.clear()
            raise StorageError(what, failure.why, failure.do)


class Snapshot:
    """Copies of pieces in CPU memory, which is allocated once and reused by every save."""

    def __init__(self):
        self._memory: Optional[torch.Tensor] = None

    def take(self, pieces: list[Piece]) -> list[Piece]:
        """Copy the pieces' tensors, except those of `StablePiece`s. Valid until the next call."""
        sizes = [0 if isinstance(piece, StablePiece) else piece.tensor.nbytes for piece in pieces]
        starts = [0, *itertools.accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]
        on_gpu = any(piece.tensor.is_cuda for piece in pieces)
        if self._memory is None or self._memory.numel() != starts[-1]:
            self._memory = None  # free the old memory first
            self._memory = page_locked(starts[-1]) if on_gpu else torch.empty(starts[-1], dtype=torch.uint8)
        copies = []
        for piece, start in zip(pieces, starts):
            if isinstance(piece, StablePiece):
                copies.append(piece)
                continue
            own = self._memory[start : start + piece.tensor.nbytes].view(piece.tensor.dtype).view(piece.box.extent)
            own.copy_(piece.tensor.detach(), non_blocking=on_gpu)
            copies.append(piece._replace(box=Box(*piece.box), tensor=own))
        if on_gpu:
            torch.cuda.synchronize()
        return copies


def store_all_gather_object(store, rank: int, size: int, timeout: float) -> AllGatherObject:
    """An `AllGatherObject` over a `torch.distributed` key-value store, for a thread that runs next to collectives.

    Ranks poll for answers, so nothing blocks the store. Rank 0 collects and distributes them: traffic grows linearly with
    the number of ranks. Every rank calls it equally often.
    Raises PeerLost when an answer does not arrive within `timeout` seconds.
    """
    if size == 1:
        return alone
    numbers = itertools.count()

    def take(key: str, who: str) -> Any:
        deadline, pause = time.monotonic() + timeout, 0.002
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise PeerLost(f"{who} did not answer the checkpoint writers for {timeout:.0f} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)
        return pickle.loads(store.get(key))

    def all_gather_object(value: Any) -> list:
        number = next(numbers)
        if rank != 0:
            store.set(f"{number}/{rank}", pickle.dumps(value))
            return take(f"{number}/all", "rank 0")
        answers = [value, *(take(f"{number}/{other}", f"rank {other}") for other in range(1, size))]
        store.set(f"{number}/all", pickle.dumps(answers))
        for key in [f"{number}/{other}" for other in range(1, size)] + [f"{number - 1}/all"] * (number > 0):
            store.delete_key(key)  # all have answered, so all have read the last result
        return answers

    return all_gather_object
