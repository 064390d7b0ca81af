# SPDX-License-Identifier: Apache-2.0
"""Copies of finished checkpoints elsewhere (`--save-copy`): on another disk or site, or wherever a command takes them.

One thread of the first rank copies while training goes on. A copy that fails is told and changes nothing else.
"""

import contextlib
import os
import queue
import secrets
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from megatron.checkpoint import survey
from megatron.checkpoint.folder import TRACKER, clean, prune
from megatron.checkpoint.store import appear
from megatron.errors import Failure, StorageError
from megatron.storage.durable import WriterLock, replace_file, storage, sync_folder

BEAT = 1.0  # seconds between two signs of life while the last copy is waited for
PATH = "{}"  # of a command: where the checkpoint's directory belongs


class Copies:
    """Copies checkpoints into a folder, which can then be loaded from, or hands them to a command.

    where: a folder, or a command with `{}` in it. keep_last and retain_interval as in `Saver`, for a folder.
    """

    def __init__(
        self,
        where: str,
        *,
        keep_last: Optional[int] = None,
        retain_interval: Optional[int] = None,
        log: Callable[[str], None] = print,
    ):
        self.where, self.keep = where, (keep_last, retain_interval)
        self.log = log
        # What is being copied: retention leaves it for so long, else a slow copy would never end.
        self.present: Optional[Path] = None
        self._waiting: queue.Queue[Optional[Path]] = queue.Queue()
        self._lock: Optional[WriterLock] = None
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def add(self, checkpoint: Path) -> None:
        """Have a checkpoint copied. Returns at once."""
        self._waiting.put(checkpoint)

    def close(self, patience: Optional[float] = None, beat: Callable[[], None] = lambda: None) -> None:
        """Wait until all are copied, or for so many seconds. beat: called now and then while the wait is an open one."""
        self._waiting.put(None)
        while patience is None and self._thread.is_alive():
            beat()
            self._thread.join(BEAT)
        self._thread.join(patience)
        if self._thread.is_alive():
            self.log("WARNING: the last copy of a checkpoint was not finished; the one before it is complete")

    def _work(self) -> None:
        while (checkpoint := self._waiting.get()) is not None:
            started, self.present = time.perf_counter(), checkpoint
            try:
                if not checkpoint.is_dir():
                    continue  # retention was faster
                (self._hand_over if PATH in self.where else self._copy)(checkpoint)
            except (Failure, OSError) as problem:
                self.log(f"WARNING: {checkpoint} was not copied (--save-copy {self.where}): {problem}")
            else:
                self.log(f"  copied {checkpoint.name} to {self.where} ({time.perf_counter() - started:.2f} s)")
            finally:
                self.present = None
        if self._lock:
            self._lock.release()

    def _hand_over(self, checkpoint: Path) -> None:
        command = self.where.replace(PATH, shlex.quote(str(checkpoint)))
        done = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace")
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise StorageError(f"exit code {done.returncode}" + "".join(f": {line}" for line in last))

    def _copy(self, checkpoint: Path) -> None:
        folder = Path(self.where)
        with storage(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock or WriterLock(folder)
            clean(folder)
            temporary = folder / f".tmp-{checkpoint.name}-{secrets.token_hex(4)}"
            shutil.copytree(checkpoint, temporary, copy_function=_copy_synced)
            sync_folder(temporary)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            _, problems = survey.verify(temporary)
            if problems:
                raise StorageError("the copy is not what was copied", "\n  ".join(problems[:4]), "check the disk")
            with storage(folder):
                appear(temporary, folder / checkpoint.name)
                replace_file(folder / TRACKER, str(int(checkpoint.name.removeprefix("iter_"))).encode())
                clean(folder)
        prune(folder, *self.keep)


def _copy_synced(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return target
