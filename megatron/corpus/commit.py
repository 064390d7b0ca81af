# SPDX-License-Identifier: Apache-2.0
"""The folder of a task's files: whole and with a receipt, or not there. No locks.

An attempt writes into a temporary folder of its own beside the target, brings every file to the disk, writes the receipt
(names, sizes and digests of the files, counts, versions) last, and renames the folder. Two attempts of one task write
equal bytes: whoever comes second drops its own. What killed attempts leave is found by its name, and removed.
"""

import contextlib
import errno
import os
import platform
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

import xxhash

from megatron import __version__
from megatron.errors import DataError, Failure
from megatron.storage.durable import read_sealed, seal, sync_folder, write_synced

RECEIPT = "receipt.json"
PIECE = 8 << 20
STALE = 24 * 3600.0  # seconds without a change after which an attempt of another machine counts as dead
_THERE = (errno.EEXIST, errno.ENOTEMPTY)


def on_step(step: str) -> None:
    """Called before each step of a commit. Does nothing: tests put a kill in its place."""


def commit(folder: Path, fill: Callable[[Path], Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """Have `fill` write files into an empty folder, which then appears as `folder`. Returns its receipt.

    fill:  folder -> counts
    about: what the receipt says besides: which task this is
    Raises what `fill` raises, and then nothing has appeared. Where the folder is there already it is left alone.
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
        needed = dict(memory=peak_memory(), opened=files_opened() - opened)
        content["attempt"] = dict(took, **needed, host=socket.gethostname())
        on_step("receipt")
        write_synced(work / RECEIPT, seal(content)[1])
        sync_folder(work)
        return _publish(work, folder, content)
    except BaseException:
        discard(work)
        raise


def _publish(work: Path, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Give the folder its name; where another attempt was faster, its receipt counts."""
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
            discard(folder)  # no receipt, or files that are not those of it
        elif other["files"] != content["files"]:
            names = sorted(other["files"].keys() | content["files"].keys())
            what = ", ".join(name for name in names if other["files"].get(name) != content["files"].get(name))
            do = "its code reads something beside its inputs (a clock, random numbers, the order of a set): mend that"
            raise DataError(f"{folder}: two attempts wrote different bytes ({what})", do=do)
        else:
            discard(work)
            return other
    on_step("sync parent")
    sync_folder(folder.parent)
    on_step("end")
    return content


def _synced(folder: Path) -> dict[str, list]:
    """Bring all files of a folder to the disk: name -> [size, digest]."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        if path.is_symlink():
            raise DataError(f"{path}: a task leaves files, not links")
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        found[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest(path)]
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
    return found


def digest(path: Path | str) -> str:
    """The 128-bit xxh3 of a file, in hex."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            state.update(piece)
    return state.hexdigest()


def read_receipt(folder: Path, whole: bool = False) -> Optional[dict[str, Any]]:
    """The receipt of a folder that has all its files; None otherwise. `whole`: the bytes are read and compared, too."""
    try:
        content = read_sealed(folder / RECEIPT)[1]
        for name, (size, mark) in content["files"].items():
            if (folder / name).stat().st_size != size or whole and digest(folder / name) != mark:
                return None
    except (OSError, Failure, KeyError, TypeError, ValueError):
        return None
    return content


def core_seconds() -> float:
    """What this process and its children that have ended have had of a core so far."""
    return sum(os.times()[:4])


def peak_memory() -> int:
    """Bytes that this process held at most since `forget_peak`, mapped files included; 0 where nobody tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return 0


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def files_opened() -> int:
    """How many files this process has opened since the first call: what a shared file system has to answer."""
    if not _OPENED:
        _OPENED.append(0)
        sys.addaudithook(_on_event)
    return _OPENED[0]


def _on_event(event: str, arguments: tuple) -> None:
    if event == "open":
        _OPENED[0] += 1


_OPENED: list[int] = []


def versions() -> dict[str, str]:
    """What else decides about bytes."""
    import zstandard

    return dict(megatron=__version__, python=platform.python_version(), zstd=".".join(map(str, zstandard.ZSTD_VERSION)))


# ---------------------------------------------------------------------------------------------------- dead attempts


def discard(folder: Path) -> None:
    """Remove a folder that nobody wants. It is renamed first: whoever still writes there fails, and commits no half."""
    aside = folder.parent / f".dead-{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)


def remove_dead_attempts(parent: Path) -> int:
    """Remove the temporary folders of attempts whose process is gone. Returns how many there were."""
    removed = 0
    for path in parent.iterdir() if parent.is_dir() else ():
        if path.name.startswith(".dead-"):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(".tmp-") and not _alive(path):
            discard(path)
            removed += 1
    return removed


def _attempt() -> str:
    """A name that no other attempt has, and that says whose it is: <process>-<its start>.<unique>.<host>"""
    process, host = this_process()
    return f"{process}.{uuid.uuid4().hex[:8]}.{host}"


def this_process() -> list[str]:
    """[<number>-<start>, host]: no other process has both."""
    return [f"{os.getpid()}-{_start_of(os.getpid())}", socket.gethostname()]


def is_gone(process: str, host: str) -> bool:
    """Whether a process of this machine has ended. Of those of another one nothing is known: False."""
    number, _, start = process.partition("-")
    return host == socket.gethostname() and _start_of(int(number)) != start


def _alive(path: Path) -> bool:
    try:
        process, _, host = path.name.removeprefix(".tmp-").split(".", 3)[1:]
        if host == socket.gethostname():
            return not is_gone(process, host)
        newest = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
    except (OSError, ValueError):  # no name of ours, or it has just gone
        return False
    return time.time() - newest < STALE


def _start_of(process: int) -> str:
    """When a process began, in ticks since the boot: numbers of processes come again. "" where there is none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state == "Z" else rest[18]
