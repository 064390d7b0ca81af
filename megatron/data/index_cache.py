# SPDX-License-Identifier: Apache-2.0
"""A cache of arrays that one process builds and all processes map into memory.

One process builds while the others wait for a file, never inside a collective: a build may take minutes, and collectives
time out. An entry is a folder of `.npy` files and an `index.json` with the key, shapes and checksums. It is written to a
temporary folder and renamed, so an entry that exists is complete.

The lock is `flock`: the kernel releases it when its owner dies, and a waiting process takes over. On file systems without
locks, several processes may build the same entry; the first rename wins, and all results are equal.

In a job of several ranks the first one comes first, and tells the others what it used (`JobMaps`,
`training/shared_maps.py`): they hash nothing, and where they have folders of their own, they build nothing.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.errors import StorageError
from megatron.storage.durable import Damaged, checksum, read_sealed, seal, sync_folder, wait_for_lock, write_synced
from megatron.storage.processes import exists

Arrays = dict[str, np.ndarray]
Say = Callable[[str], None]


@dataclass
class UsedEntry:
    """An entry that the first rank used, and its arrays, where they are at hand.

    folder: "" for the cache of the job, which may be another folder on another node
    facts:  what the other ranks can compare without hashing: the key without hashes, and samples of what is hashed
    """

    folder: str
    name: str
    facts: dict
    key: dict
    arrays: Optional[Arrays] = None
    used: bool = False


@dataclass
class JobMaps:
    """The entries that the first rank of a job used, in order: it records them, and the others are told.

    cache: --data-cache-path of this rank
    """

    records: bool
    cache: Optional[str] = None
    entries: list[UsedEntry] = field(default_factory=list)

    @contextlib.contextmanager
    def at_work(self) -> Iterator["JobMaps"]:
        """A context in which `cached_arrays` records, or uses, these entries."""
        token = _JOB.set(self)
        try:
            yield self
        finally:
            _JOB.reset(token)

    def folder_of(self, entry: UsedEntry) -> Path:
        """Where an entry lies for this rank."""
        return Path(entry.folder or self.cache or "")

    def place(self, folder: Path) -> str:
        """The word for a folder that other ranks understand."""
        return "" if self.cache and folder == Path(self.cache) else str(folder)

    def take(self, folder: Path, name: str, facts: dict) -> Optional[UsedEntry]:
        """The next entry of this description; None if the first rank used none."""
        for entry in () if self.records else self.entries:
            if not entry.used and (entry.folder, entry.name, entry.facts) == (self.place(folder), name, facts):
                entry.used = True
                return entry
        return None


_JOB: ContextVar[Optional[JobMaps]] = ContextVar("maps of the job", default=None)
_NUMBERS = re.compile("[<|][iuf][1248]")  # dtypes of arrays


def cached_arrays(
    folder: Path,
    name: str,
    key: dict,
    build: Callable[[], Arrays],
    *,
    log: Say,
    required: bool = False,
    names: Collection[str] = (),
    hashed: Callable[[], dict] = dict,
    sample: Any = None,
) -> Arrays:
    """The arrays of `build()`, memory-mapped from the cache in `folder` if they are there and valid.

    `key`: everything the arrays depend on (JSON values); `name`: start of the entry's file name, for readers.
    `names`: arrays that an entry must have.
    `required`: raise StorageError if the folder cannot be written; otherwise log it and keep the arrays in memory.
    `hashed`: the part of the key that takes time; `sample`: a value that differs if that does, most often.
    """
    job = _JOB.get()
    facts = json.loads(_canonical(dict(key, sample=sample))) if job else {}
    told = job.take(folder, name, facts) if job else None
    if told is None:
        key = key | hashed()
    elif told.arrays is not None and not set(names).difference(told.arrays):
        return told.arrays
    else:
        key = told.key
    arrays = _cached(folder, name, key, build, log, required, names)
    if job and job.records:
        job.entries.append(UsedEntry(job.place(folder), name, facts, json.loads(_canonical(key)), arrays))
    return arrays


def entry_path(folder: Path, name: str, key: dict) -> Path:
    """The folder of an entry."""
    return folder / f"{name}-{hashlib.sha256(_canonical(key).encode()).hexdigest()[:16]}"


def _cached(folder: Path, name: str, key: dict, build, log: Say, required: bool, names: Collection[str]) -> Arrays:
    entry = entry_path(folder, name, key)
    arrays, _ = load(entry, key, names)
    if arrays is not None:
        return arrays
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(f"{entry}.lock", "a+") as lock:
            return _build_or_wait(entry, key, names, build, lock, log)
    except OSError as error:
        if required:
            raise StorageError(
                f"{folder}: cannot keep index maps here: {error.strerror or error}",
                do="give a --data-cache-path that can be written",
            ) from error
        log(f"index maps of {name} stay in memory: {folder}: {error.strerror or error} (--data-cache-path keeps them)")
        return build()


def load(entry: Path, key: dict, names: Collection[str] = ()) -> tuple[Optional[Arrays], Optional[str]]:
    """(arrays, None) for a valid entry, (None, reason) for a damaged one, (None, None) if there is none."""
    if not (entry / "index.json").exists():
        return None, "index.json is missing" if entry.is_dir() else None
    try:
        _, index = read_sealed(entry / "index.json")
        if index["key"] != json.loads(_canonical(key)):
            return None, "it was built from something else"
        arrays = {name: _map(entry, name, facts) for name, facts in index["arrays"].items()}
        missing = [name for name in names if name not in arrays]
        return (None, f"it has no {missing[0]}") if missing else (arrays, None)
    except (Damaged, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, str(error) if isinstance(error, (Damaged, ValueError)) else f"{type(error).__name__}: {error}"


def _map(entry: Path, name: str, facts: dict) -> np.ndarray:
    """Map an array from the end of its `.npy` file, with dtype and shape from index.json."""
    dtype, shape, path = facts["dtype"], facts["shape"], entry / f"{name}.npy"
    if not (name.isidentifier() and _NUMBERS.fullmatch(dtype) and all(type(n) is int and n >= 0 for n in shape)):
        raise ValueError(f"index.json says impossible things of {name!r}")
    start = path.stat().st_size - math.prod(shape) * np.dtype(dtype).itemsize
    if start < 0:
        raise ValueError(f"{name}.npy is cut short")
    array = np.memmap(path, dtype, "r", start, tuple(shape)).view(np.ndarray)  # np.memmap makes each look-up slow
    if checksum(_bytes(array)) != facts["checksum"]:
        raise ValueError(f"{name}.npy does not match its checksum")
    return array


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _build_or_wait(entry: Path, key: dict, names: Collection[str], build, lock, log: Say) -> Arrays:
    """Build the entry under the lock, or wait for the process that holds it."""
    seen = _stamp(entry)
    builders = lambda: f"index maps {entry.name}: {_owner(lock)} builds them"
    while not wait_for_lock(lock, builders, log, done=lambda seen=seen: _stamp(entry) != seen):
        seen = _stamp(entry)
        arrays, _ = load(entry, key, names)
        if arrays is not None:
            return arrays
    try:
        arrays, damage = load(entry, key, names)  # another process may have built it
        if arrays is None:
            if damage:
                log(f"index maps {entry} are damaged and built again: {damage}")
            _note_owner(lock)
            _store(entry, key, build())
            arrays, damage = load(entry, key, names)
            if arrays is None:
                raise OSError(errno.EIO, f"what was just written reads back wrong ({damage})")
        return arrays
    finally:
        try:
            fcntl.flock(lock, fcntl.LOCK_UN)
        except OSError:
            pass  # a file system without locks


def _store(entry: Path, key: dict, arrays: Arrays) -> None:
    """Write an entry with checksums to a temporary folder, and rename it into place."""
    for stale in entry.parent.glob(f"{entry.name}.building-*"):  # from builders that died
        if _is_dead(stale.name.rpartition("-")[2]):
            shutil.rmtree(stale, ignore_errors=True)
    aside = entry.with_name(f"{entry.name}.building-{socket.gethostname()}:{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        facts = {}
        for name, array in arrays.items():
            array = np.ascontiguousarray(array)
            with open(aside / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            facts[name] = dict(dtype=array.dtype.str, shape=list(array.shape), checksum=checksum(_bytes(array)))
        write_synced(aside / "index.json", seal(dict(key=json.loads(_canonical(key)), arrays=facts))[1])
        sync_folder(aside)
        if entry.exists():
            # Without locks, another process may have built it first. Other nodes may have mapped its files, and on a
            # network file system they would lose deleted files immediately.
            if load(entry, key)[0] is not None:
                return
            shutil.rmtree(entry)  # damaged
        try:
            aside.rename(entry)
        except OSError:
            if not entry.exists():  # else another process built it first, on a file system without locks
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _note_owner(lock) -> None:
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()


def _owner(lock) -> str:
    lock.seek(0)
    return lock.read() or "another process"


def _is_dead(owner: str) -> bool:
    """Whether `host:pid` names a process of this host that has ended."""
    host, _, pid = owner.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    return not exists(int(pid)) or int(pid) == os.getpid()


def _stamp(entry: Path):
    """A value that changes when the entry is replaced."""
    try:
        status = os.stat(entry / "index.json")
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _canonical(key: dict) -> str:
    return json.dumps(key, sort_keys=True)
