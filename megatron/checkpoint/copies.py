# SPDX-License-Identifier: Apache-2.0
"""Copies of finished checkpoints: on another disk or site, or made by a command (`--save-copy`), and in Hugging Face's
format (`--save-hf`).

A thread of rank 0 copies while training continues. A copy that fails is only logged.
"""

import contextlib
import os
import queue
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import xxhash

from megatron.checkpoint import survey
from megatron.checkpoint.backends import INDEX, CheckpointPath, appear, backend_of
from megatron.checkpoint.folder import TRACKER, clean, prune
from megatron.errors import Failure, StorageError
from megatron.settings import rank_env
from megatron.storage.durable import storage_errors, sync_folder
from megatron.storage.urls import UrlPath, location

BEAT = 1.0  # seconds between two heartbeats while waiting for the last copy
_NICE = 10  # training has priority over an export
_PART = 1 << 26  # bytes that are copied at a time
PATH = "{}"  # in a command: the placeholder of the checkpoint's directory


class Copies:
    """Copies checkpoints into a folder from which they can be loaded, or passes them to a command.

    where: a folder, or a command that contains `{}`. keep_last and retain_interval as in `Saver`, for a folder.
    copy:  another way to copy a checkpoint to `where`; flag: the one that asked for it
    every: only checkpoints at multiples of this iteration
    """

    def __init__(
        self,
        where: str,
        *,
        keep_last: Optional[int] = None,
        retain_interval: Optional[int] = None,
        log: Callable[[str], None] = print,
        copy: Optional[Callable[[CheckpointPath, str], None]] = None,
        flag: str = "--save-copy",
        every: int = 1,
    ):
        self.where, self.keep, self.flag, self.every = where, (keep_last, retain_interval), flag, every
        self._make = partial(copy, where=where) if copy else self._run_command if PATH in where else self._copy
        self.log = log
        # The checkpoint being copied: retention spares it, or a slow copy would never finish.
        self.present: Optional[CheckpointPath] = None
        self._waiting: queue.Queue[Optional[CheckpointPath]] = queue.Queue()
        self._lock: Any = None  # of the folder, from the first copy on
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def add(self, checkpoint: CheckpointPath) -> None:
        """Queue a checkpoint for copying, if it is its turn. Returns immediately."""
        if _iteration(checkpoint) % self.every == 0:
            self._waiting.put(checkpoint)

    def close(self, timeout: Optional[float] = None, beat: Callable[[], None] = lambda: None) -> None:
        """Wait until all copies are done, or for `timeout` seconds. beat: called as a heartbeat if there is no timeout."""
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
                    continue  # deleted by retention
                self._make(checkpoint)
            except (Failure, OSError) as problem:
                self.log(f"WARNING: {checkpoint} was not copied ({self.flag} {self.where}): {problem}")
            else:
                self.log(f"  copied {checkpoint.name} to {self.where} ({time.perf_counter() - started:.2f} s)")
            finally:
                self.present = None
        if self._lock:
            self._lock.release()

    def _run_command(self, checkpoint: CheckpointPath) -> None:
        _run(["sh", "-c", self.where.replace(PATH, shlex.quote(str(checkpoint)))])

    def _copy(self, checkpoint: CheckpointPath) -> None:
        folder = location(self.where)
        with storage_errors(folder):
            self._lock = self._lock or backend_of(folder).claim(folder, self.log)
            self._lock.check()
            clean(folder)
        copy_checkpoint(checkpoint, folder)
        prune(folder, *self.keep)


def _run(words: list[str], env: Optional[dict[str, str]] = None) -> None:
    """Run a command in a session of its own, which Ctrl-C does not reach. Raises StorageError with its last line."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", start_new_session=True, env=env)
    if done.returncode:
        last = [line for line in (done.stderr or done.stdout).strip().splitlines() if not line.startswith("  ")][-1:]
        raise StorageError(f"exit code {done.returncode}" + "".join(f": {line}" for line in last))


def export_to_hf(checkpoint: CheckpointPath, where: str) -> None:
    """Write a checkpoint's model and tokenizer to a folder `iter_...` of `where` in Hugging Face's format (`to-hf`).

    It appears when it is complete. It is not compared with the checkpoint by running both, which would take the memory of
    two models beside the training. Raises StorageError if the export fails.
    """
    final = Path(where) / f"iter_{_iteration(checkpoint):07d}"
    temporary = final.with_name(f".tmp-{final.name}-{secrets.token_hex(4)}")
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(f".tmp-{final.name}-*"):  # of a killed run
        shutil.rmtree(left, ignore_errors=True)
    alone = {name: value for name, value in os.environ.items() if name not in rank_env.TORCHRUN}
    words = ["nice", "-n", str(_NICE), sys.executable, "-m", "megatron.tools.checkpoint", "to-hf"]
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        _run([*words, str(checkpoint), str(temporary), "--unchecked"], alone | {"CUDA_VISIBLE_DEVICES": ""})
        with storage_errors(final):
            appear(temporary, final)
            for old in final.parent.glob(f".old-{final.name}-*"):
                shutil.rmtree(old)


def copy_checkpoint(checkpoint: CheckpointPath, folder: CheckpointPath) -> None:
    """Copy a checkpoint into another folder, from which it can be loaded. Only for the holder of that folder's lock.

    Raises StorageError when the copy differs from the original.
    """
    (_upload if isinstance(folder, UrlPath) else _copy_folder)(checkpoint, folder, _iteration(checkpoint))


def _copy_folder(checkpoint: CheckpointPath, folder: Path, iteration: int) -> None:
    """Copy a checkpoint to a file system: to a temporary name, with fsync and checksums, then renamed."""
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
            raise StorageError("the copy differs from the original", "\n  ".join(problems[:4]), "check the disk")
        with storage_errors(folder):
            appear(temporary, final)
            _track(folder, iteration)
            clean(folder)


def _upload(checkpoint: CheckpointPath, folder: UrlPath, iteration: int) -> None:
    """Copy a checkpoint to an object store. index.json comes last, after every byte was read back and compared."""
    final, store = folder / f"iter_{iteration:07d}", backend_of(folder)
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
            raise StorageError(f"{target} differs from the original", do="check the object store")
    store.publish(final, final, (checkpoint / INDEX).read_bytes(), sizes, [])
    _track(folder, iteration)


def _parts(path: CheckpointPath, size: int) -> Iterator[bytes]:
    """Read a file or object of `size` bytes part by part."""
    if isinstance(path, UrlPath):
        yield from (path.read_range(at, min(_PART, size - at)) for at in range(0, size, _PART))
        return
    with open(path, "rb") as file:
        while part := file.read(_PART):
            yield part


def _iteration(checkpoint: CheckpointPath) -> int:
    """The iteration of a checkpoint, also of one that was set aside (`.old-iter_...`)."""
    return int(re.search(r"iter_(\d+)", checkpoint.name)[1])


def _track(folder: CheckpointPath, iteration: int) -> None:
    """Write an iteration to the tracker of `folder`."""
    backend_of(folder).replace(folder / TRACKER, str(iteration).encode())


def _copy_synced(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return target
