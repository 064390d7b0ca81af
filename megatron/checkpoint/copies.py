# SPDX-License-Identifier: Apache-2.0
"""Copies of finished checkpoints elsewhere (`--save-copy`): on another disk or site, or wherever a command takes them.

One thread of the first rank copies while training goes on. A copy that fails is told and changes nothing else.
"""

import contextlib
import os
import queue
import re
import secrets
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import xxhash

from megatron.checkpoint import survey
from megatron.checkpoint.folder import TRACKER, clean, prune
from megatron.checkpoint.storage import INDEX, CheckpointPath, appear, storage_of
from megatron.errors import Failure, StorageError
from megatron.storage.durable import storage_errors, sync_folder
from megatron.storage.urls import UrlPath, location

BEAT = 1.0  # seconds between two signs of life while the last copy is waited for
_PART = 1 << 26  # bytes that are copied at a time
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
        self.present: Optional[CheckpointPath] = None
        self._waiting: queue.Queue[Optional[CheckpointPath]] = queue.Queue()
        self._lock: Any = None  # of the folder, once there was something to copy
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def add(self, checkpoint: CheckpointPath) -> None:
        """Have a checkpoint copied. Returns at once."""
        self._waiting.put(checkpoint)

    def close(self, timeout: Optional[float] = None, beat: Callable[[], None] = lambda: None) -> None:
        """Wait until all are copied, or for so many seconds. beat: called now and then while the wait is an open one."""
        self._waiting.put(None)
        while timeout is None and self._thread.is_alive():
            beat()
            self._thread.join(BEAT)
        self._thread.join(timeout)
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

    def _hand_over(self, checkpoint: CheckpointPath) -> None:
        command = self.where.replace(PATH, shlex.quote(str(checkpoint)))
        done = subprocess.run(  # in a session of its own, which Ctrl-C does not reach
            command, shell=True, capture_output=True, text=True, errors="replace", start_new_session=True
        )
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise StorageError(f"exit code {done.returncode}" + "".join(f": {line}" for line in last))

    def _copy(self, checkpoint: CheckpointPath) -> None:
        folder = location(self.where)
        with storage_errors(folder):
            self._lock = self._lock or storage_of(folder).claim(folder, self.log)
            self._lock.check()
            clean(folder)
        copy_checkpoint(checkpoint, folder)
        prune(folder, *self.keep)


def copy_checkpoint(checkpoint: CheckpointPath, folder: CheckpointPath) -> None:
    """Copy a checkpoint into another folder, which loads it then. Only for the holder of that folder's lock. Raises
    StorageError where the copy is not what was copied.
    """
    (_upload if isinstance(folder, UrlPath) else _copy_folder)(checkpoint, folder, _iteration(checkpoint))


def _copy_folder(checkpoint: CheckpointPath, folder: Path, iteration: int) -> None:
    """Copy a checkpoint to a file system: aside, synced, every byte compared, renamed."""
    final = folder / f"iter_{iteration:07d}"
    with storage_errors(folder):
        temporary = folder / f".tmp-{final.name}-{secrets.token_hex(4)}"
        if isinstance(checkpoint, UrlPath):
            temporary.mkdir()
            for path in checkpoint.iterdir():
                path.download(temporary / path.name)
        else:
            shutil.copytree(checkpoint, temporary, copy_function=_copy_synced)
        sync_folder(temporary)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        _, problems = survey.verify(temporary)
        if problems:
            raise StorageError("the copy is not what was copied", "\n  ".join(problems[:4]), "check the disk")
        with storage_errors(folder):
            appear(temporary, final)
            _track(folder, iteration)
            clean(folder)


def _upload(checkpoint: CheckpointPath, folder: UrlPath, iteration: int) -> None:
    """Copy a checkpoint to an object store. Its index.json comes last, when every byte was read back and is as it was."""
    final, store = folder / f"iter_{iteration:07d}", storage_of(folder)
    if (final / INDEX).exists():  # of an earlier run: the files have the same names
        store.remove(final)
    sizes = {}
    for source in checkpoint.iterdir():
        if source.name == INDEX:
            continue
        target, sizes[source.name] = final / source.name, source.stat().st_size
        before, after = xxhash.xxh3_128(), xxhash.xxh3_128()
        with target.writer(sizes[source.name]) as file:
            for part in _parts(source, sizes[source.name]):
                before.update(part)
                file.write(part)
        for part in _parts(target, sizes[source.name]):
            after.update(part)
        if after.digest() != before.digest():
            raise StorageError(f"{target} is not what was copied", do="check the object store")
    store.publish(final, final, (checkpoint / INDEX).read_bytes(), sizes, [])
    _track(folder, iteration)


def _parts(path: CheckpointPath, size: int) -> Iterator[bytes]:
    """A file or object of `size` bytes, part by part."""
    if isinstance(path, UrlPath):
        yield from (path.read_range(at, min(_PART, size - at)) for at in range(0, size, _PART))
        return
    with open(path, "rb") as file:
        while part := file.read(_PART):
            yield part


def _iteration(checkpoint: CheckpointPath) -> int:
    """Of one that was set aside (`.old-iter_...`), too."""
    return int(re.search(r"iter_(\d+)", checkpoint.name)[1])


def _track(folder: CheckpointPath, iteration: int) -> None:
    """Have the tracker of `folder` name an iteration."""
    storage_of(folder).replace(folder / TRACKER, str(iteration).encode())


def _copy_synced(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return target
