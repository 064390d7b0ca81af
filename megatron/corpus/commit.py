# SPDX-License-Identifier: Apache-2.0
"""Commit the folder of a task's files: complete with a receipt, or absent. No locks.

An attempt writes into a temporary folder next to the target, flushes every file to the disk, writes the receipt (names,
sizes and digests of the files, counts, versions) last, and renames the folder. Two attempts of one task write equal bytes:
the second one discards its own. Leftovers of killed attempts are recognized by their names, and removed.

Digests of a plan's input files are cached by size, modification time and inode. A file that changed less
than two seconds before it was read is not cached: its time might not show a later change.
"""

import contextlib
import errno
import json
import os
import platform
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import xxhash

from megatron import __version__
from megatron.errors import DataError, Failure
from megatron.mpu.cpu_threads import cores
from megatron.storage.durable import read_sealed, replace_file, seal, sync_folder, write_synced
from megatron.storage.processes import process_start_ticks, state
from megatron.telemetry.host_memory import most_resident_memory

RECEIPT = "receipt.json"
PIECE = 8 << 20
STALE = 24 * 3600.0  # seconds without a change after which an attempt of another machine counts as dead
_THERE = (errno.EEXIST, errno.ENOTEMPTY)


def on_step(step: str) -> None:
    """Called before each step of a commit. Does nothing; tests replace it by a kill."""


def commit(folder: Path, fill: Callable[[Path], Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Have `fill` write files into an empty folder, which then appears as `folder`. Returns its receipt.

    fill:  folder -> counts
    about: further contents of the receipt: the task
    Raises the errors of `fill`, without a folder. An existing complete folder does not change.
    """
    if done := read_receipt(folder):
        return done
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.parent / f".tmp-{folder.name}.{_attempt()}"
    work.mkdir()
    try:
        started, core, opened = time.perf_counter(), core_seconds(), files_opened()
        forget_peak()
        on_step("fill")
        counts = fill(work)
        on_step("sync")
        content = dict(about) | dict(counts=counts, files=_synced(work), versions=versions())
        took = dict(seconds=round(time.perf_counter() - started, 3), core_seconds=round(core_seconds() - core, 3))
        needed = dict(memory=most_resident_memory(), opened=files_opened() - opened)
        content["attempt"] = dict(took, **needed, host=socket.gethostname())
        on_step("receipt")
        write_synced(work / RECEIPT, seal(content)[1])
        sync_folder(work)
        return _publish(work, folder, content)
    except BaseException:
        discard(work)
        raise


def _publish(work: Path, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Rename the folder; return the receipt of another attempt if that was faster."""
    while True:
        on_step("rename")
        try:
            os.rename(work, folder)
            break
        except OSError as error:
            if error.errno not in _THERE:
                raise
        other = read_receipt(folder)
        if other is None:
            discard(folder)  # no receipt, or other files
        elif other["files"] != content["files"]:
            names = sorted(other["files"].keys() | content["files"].keys())
            what = ", ".join(name for name in names if other["files"].get(name) != content["files"].get(name))
            do = "its code depends on more than its inputs (a clock, random numbers, the order of a set): fix that"
            raise DataError(f"{folder}: two attempts wrote different bytes ({what})", do=do)
        else:
            discard(work)
            return other
    on_step("sync parent")
    sync_folder(folder.parent)
    on_step("end")
    return content


def _synced(folder: Path) -> dict[str, list]:
    """Flush all files of a folder to the disk: name -> [size, digest]."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        if path.is_symlink():
            raise DataError(f"{path}: a task leaves files, not links")
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest(path)]
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
    return files


def digest(path: Path | str) -> str:
    """The 128-bit xxh3 of a file, in hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            state.update(piece)
    return state.hexdigest()


def read_receipt(folder: Path, whole: bool = False) -> Optional[dict[str, Any]]:
    """The receipt of a folder that has all its files; None otherwise. whole: also verify the bytes"""
    try:
        content = read_sealed(folder / RECEIPT)[1]
        for name, (size, mark) in content["files"].items():
            if (folder / name).stat().st_size != size or whole and digest(folder / name) != mark:
                return None
    except (OSError, Failure, KeyError, TypeError, ValueError):
        return None
    return content


def core_seconds() -> float:
    """Core seconds of this process and its ended children so far."""
    return sum(os.times()[:4])


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def files_opened() -> int:
    """Number of files opened by this process since the first call: the load on a shared file system."""
    if not _OPENED:
        _OPENED.append(0)
        sys.addaudithook(_on_event)
    return _OPENED[0]


def _on_event(event: str, arguments: tuple) -> None:
    if event == "open":
        _OPENED[0] += 1


_OPENED: list[int] = []


def versions() -> dict[str, str]:
    """Versions on which the written bytes depend."""
    import zstandard

    return dict(megatron=__version__, python=platform.python_version(), zstd=".".join(map(str, zstandard.ZSTD_VERSION)))


# ---------------------------------------------------------------------------------------------------- dead attempts


def discard(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a process still writing there fails and commits no partial result."""
    aside = folder.parent / f".dead-{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_dead_attempts(parent: Path) -> int:
    """Remove the temporary folders of attempts whose process is gone. Returns their number."""
    removed = 0
    for path in parent.iterdir() if parent.is_dir() else ():
        if path.name.startswith(".dead-"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(".tmp-") and not _alive(path):
            discard(path)
            removed += 1
    return removed


def _attempt() -> str:
    """A unique name of an attempt, with its process: <process>-<its start>.<unique>.<host>"""
    process, host = this_process()
    return f"{process}.{uuid.uuid4().hex[:8]}.{host}"


def this_process() -> list[str]:
    """[<number>-<start>, host]: no other process has both."""
    return [f"{os.getpid()}-{process_start_ticks(os.getpid())}", socket.gethostname()]


def is_gone(process: str, host: str) -> bool:
    """Whether a process of this machine has ended; False for processes of other machines."""
    number, _, start = process.partition("-")
    ended = state(int(number)) in ("", "Z") or str(process_start_ticks(int(number))) != start
    return host == socket.gethostname() and ended


def _alive(path: Path) -> bool:
    try:
        process, _, host = path.name.removeprefix(".tmp-").split(".", 3)[1:]
        if host == socket.gethostname():
            return not is_gone(process, host)
        newest = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
    except (OSError, ValueError):  # another kind of name, or it has just gone
        return False
    return time.time() - newest < STALE


RACY = 2_000_000_000  # nanoseconds: the coarsest time of a file system that is in use (FAT)
FILE = "digests.json"


class Digests:
    """Digests by path, cached in the output folder."""

    def __init__(self, output: Path, log: Callable[[str], None] = lambda line: None):
        self.output, self.log = output, log
        self.known: dict[str, list] = {}
        self.changed = False
        self._named: dict[str, list[str]] = {}  # text of an option -> the digest of the file that it names, if any

    def __enter__(self) -> "Digests":
        try:
            self.known = json.loads((self.output / FILE).read_text())
        except (OSError, ValueError):
            self.known = {}
        return self

    def __exit__(self, *_) -> None:
        if self.changed and self.output.is_dir():
            replace_file(self.output / FILE, json.dumps(self.known).encode())

    def ahead(self, paths: list[str]) -> None:
        """Compute missing digests, several at a time."""
        missing = [path for path in dict.fromkeys(map(os.path.abspath, paths)) if self._cached(path) is None]
        size = sum(os.stat(path).st_size for path in missing)
        if size > 1 << 30:
            self.log(f"reading {size / 1e9:.1f} GB of input once for its digests")
        with ThreadPoolExecutor(min(8, cores())) as pool:
            list(pool.map(self.of, missing))

    def of(self, path: str) -> str:
        """The digest of a file, or of all files of a folder with their names. Raises DataError if there is none."""
        path = os.path.abspath(path)
        if os.path.isdir(path):
            inside = sorted(file for file in Path(path).rglob("*") if file.is_file())
            return "/".join(f"{file.relative_to(path)}={self.of(str(file))}" for file in inside)
        if cached := self._cached(path):
            return cached
        try:
            status, now = os.stat(path), time.time_ns()
            mark = digest(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
        if now - status.st_mtime_ns > RACY:
            self.known[path] = [status.st_size, status.st_mtime_ns, status.st_ino, mark]
            self.changed = True
        return mark

    def _cached(self, path: str) -> str | None:
        known = self.known.get(path)
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
        return known[3] if known and known[:3] == [status.st_size, status.st_mtime_ns, status.st_ino] else None

    def of_option_files(self, options: Any) -> list[str]:
        """Digests of the files named in options, such as word lists and vocabularies. Other texts have none."""
        if isinstance(options, Mapping):
            return [mark for name in sorted(options) for mark in self.of_option_files(options[name])]
        if isinstance(options, (list, tuple)):
            return [mark for one in options for mark in self.of_option_files(one)]
        if not isinstance(options, str):
            return []
        if options not in self._named:  # tasks of a phase have the same options: check their files once
            self._named[options] = [self.of(options)] if _is_path(options) else []
        return self._named[options]


def _is_path(word: str) -> bool:
    """Whether a text is the path of a file, or of a folder with several parts; "." and "/" are punctuation."""
    if not 0 < len(word) < 4096 or "\0" in word:
        return False
    return os.path.isfile(word) or os.sep in word.strip("./") and os.path.isdir(word)
