# SPDX-License-Identifier: Apache-2.0
"""Durable files: complete or absent, with checksums against damage, and locked for one writer at a time.

A small file is *sealed*: JSON that begins with the checksum of all following bytes, so that a flipped, missing or added
byte is noticed before anything is parsed. A file or folder is renamed to its final name after all of its contents have
reached the disk. Errors of the operating system become `StorageError`s with the space that was needed.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import xxhash

from megatron.errors import CheckpointError, DataError, Failure, Locked, StorageError
from megatron.storage.urls import UrlPath

_SEALED_LIMIT = 1 << 31  # an index of this size would describe petabytes: refuse instead of reading it
_SEAL = '{{"checksum": "{}"'
_SEAL_LENGTH = len(_SEAL.format("0" * 32))
_AWAY = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN)  # of network file systems that are unreachable
_NO_FOLDER_SYNC = (errno.EINVAL, errno.EOPNOTSUPP)  # of fsync on a folder: some network and user space file systems
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without advisory locks
SAY_EVERY = 10.0  # seconds between messages of a waiting process


class Damaged(CheckpointError):
    """Missing or changed bytes in a checkpoint. Another checkpoint may still be good."""


def unreadable(path: Path, error: OSError, what: str = "") -> Failure:
    """The error to raise for a file that cannot be read: Damaged, or StorageError where a later try may succeed.

    A later try may succeed where the process lacks handles or memory, or the file system is unreachable for a while.
    what: the part of the file that was read
    """
    message = f"{path} cannot be read{what and f' in {what}'}: {error.strerror}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError(message, do="raise the limit of open files: ulimit -n 65536")
    return StorageError(message) if error.errno in (errno.ENOMEM, *_AWAY) else Damaged(message)


def checksum(data) -> str:
    """The 128-bit xxh3 of a buffer, in hex: 20 GB/s on one core; detects accidents, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


# ---------------------------------------------------------------------------------------------------- sealed JSON


def seal(content: dict[str, Any]) -> tuple[str, bytes]:
    """(checksum, file content) of a dict as sealed JSON, with one line for each entry of its dicts."""
    rows = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            entries = ",\n".join(f"  {json.dumps(str(name))}: {json.dumps(entry)}" for name, entry in value.items())
            rows.append(f"{json.dumps(key)}: {{\n{entries}\n}}")
        else:
            rows.append(f"{json.dumps(key)}: {json.dumps(value)}")
    body = "".join([*(f",\n{row}" for row in rows), "\n}\n"]).encode()
    mark = checksum(body)
    return mark, _SEAL.format(mark).encode() + body


def read_sealed(path: Path) -> tuple[str, dict[str, Any]]:
    """(checksum, content) of a sealed JSON file. Raises Damaged when it is absent, truncated, changed or not sealed."""
    try:
        return _unseal(path)
    except Damaged:
        if not isinstance(path, UrlPath):
            raise
        return _unseal(path)  # a second download may be good


def _unseal(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        size = path.stat().st_size
        if not path.is_file() or size > _SEALED_LIMIT:
            raise Damaged(f"{path} is not a regular file of reasonable size ({size:,} bytes)")
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    mark = checksum(raw[_SEAL_LENGTH:])
    if raw[:_SEAL_LENGTH] != _SEAL.format(mark).encode():
        raise Damaged(f"{path} is damaged: its {size:,} bytes do not have the checksum that they begin with")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is not JSON: {error}") from None
    content.pop("checksum")
    return mark, content


# ---------------------------------------------------------------------------------------------------- durable names


def sync_folder(folder: Path) -> None:
    """Make the names in a folder (created, renamed, deleted) durable, where its file system supports that."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and flush it to the disk. Its name is durable after `sync_folder`."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write or replace a small file atomically: even after a power loss it has the old content or the new."""
    aside = path.with_name(f".tmp-{path.name}")
    write_synced(aside, content)
    os.replace(aside, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def storage_errors(path: Path, needed: Optional[int] = None):
    """A context that turns an OSError on writing `path` into a StorageError with the bytes needed and the bytes free."""
    try:
        yield
    except OSError as error:
        if isinstance(path, UrlPath):
            raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
        at = next((folder for folder in (path, *path.parents) if os.path.exists(folder)), Path("/"))
        try:
            free = f"{shutil.disk_usage(at).free:,} bytes free in {at}"
        except OSError:
            free = f"free space of {at} unknown"
        space = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not os.path.isdir(at) and error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise StorageError(
                f"{path}: cannot be written: {at} is a file, not a folder", do="give another path"
            ) from error
        why = f"{needed:,} bytes needed, {free}" if needed is not None else free if space else None
        do = (
            "free some space, or write elsewhere (a training with --keep-last N keeps fewer checkpoints)"
            if space
            else "check that the folder may be written, and that all nodes share it"
        )
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}", why, do) from error


def check_output(flag: str, path: str | Path) -> None:
    """Raise StorageError if a file cannot be written there: before the work, and not after it. Leaves nothing behind."""
    path = Path(path)
    if path.is_dir():
        raise StorageError(f"{flag} {path}: is a folder", do="give the name of a file")
    at = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    with storage_errors(path), tempfile.TemporaryDirectory(prefix=".tmp-", dir=at):
        pass


def require_space(path: Path, needed: int) -> None:
    """Raise StorageError when the file system has fewer than `needed` bytes free."""
    with storage_errors(path, needed):
        if shutil.disk_usage(path).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---------------------------------------------------------------------------------------------------- one writer


@contextlib.contextmanager
def whole_file(path: str | Path):
    """A file that replaces `path` when the context ends without an error; until then the old file stays."""
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder", do="give the name of a file")
    # Another process may be writing the same file; on another machine it may have the same number.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with storage_errors(path):
        try:
            with open(aside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)


LOCK = ".lock"  # the file of a `WriterLock`


class WriterLock:
    """A lock of the one process that writes into a folder. The kernel drops it when the process ends, even by kill -9.

    A record lock (`lockf`) and not `flock`: forked children that outlive a killed writer do not inherit it, and NFS
    supports it. It does not exclude threads of one process: open one per folder. Without effect on file systems that have
    no locks.
    """

    def __init__(self, folder: Path):
        """Raises Locked when another process writes into `folder`."""
        path = folder / LOCK
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            holder = os.read(self._handle, 200).decode(errors="replace").strip() or "an unknown process"
            os.close(self._handle)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            do = "use another --save, or end that job first"
            raise Locked(f"{folder} is being written by another job", f"held by {holder}", do) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def check(self) -> None:
        """Do nothing: a kernel lock cannot be lost. A `Lease` can."""

    def release(self) -> None:
        """Release the lock. May be called again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def try_lock(file) -> bool:
    """Whether this process now holds the `flock` of an open file, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (*_NO_LOCKS, errno.EINVAL, errno.EAGAIN, errno.EACCES):
            raise
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def wait_for_lock(
    file, what: Callable[[], str], log: Callable[[str], None], done: Callable[[], bool] = lambda: False
) -> bool:
    """Wait for the `flock` of an open file; the kernel releases it when its holder dies. False: `done()` was True first.

    what: for messages, what is waited for
    """
    started, said = time.monotonic(), 0.0
    while not try_lock(file):
        if done():
            return False
        waited = time.monotonic() - started
        if waited - said >= SAY_EVERY:
            said = waited
            log(f"waiting for {what()} ({waited:.0f} s so far)")
        time.sleep(min(0.02 + waited / 10, 0.5))
    return True


@contextlib.contextmanager
def locked_folder(folder: Path, target: Path, other: str):
    """A folder for unfinished files of `target`, which one process may have at a time; it is removed at the end.

    What a killed process left in it is removed first. other: the kind of process that may have it, for Locked
    """
    with storage_errors(target):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = WriterLock(folder)
        except Locked as error:
            raise Locked(f"{target} is being written by another {other}", error.why, "give another --output") from None
        try:
            for path in folder.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
