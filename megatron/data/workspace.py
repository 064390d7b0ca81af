# SPDX-License-Identifier: Apache-2.0
"""Atomic outputs: written to a temporary folder, synced to disk, renamed at the end.

with Workspace("corpus") as workspace:      # creates corpus.partial/ and locks the prefix
    ... write workspace.path("0.bin") and workspace.path("0.idx") ...
    publish(workspace, "0", "corpus_text_document")
"""

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path

from megatron.data.manifest import write_manifest
from megatron.errors import Locked, StorageError
from megatron.storage.durable import sync_folder

NOT_WRITABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
    errno.ENOENT,
    errno.ENOTDIR,
)


class Workspace:
    """The temporary folder `<prefix>.partial`, locked by one process and removed at the end, also after an error.

    A killed run leaves the folder; the next run with this prefix takes it over and empties it.
    Raises Locked if another process works on the prefix, StorageError if the folder cannot be written.
    """

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.folder = Path(f"{prefix}.partial")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def __enter__(self) -> "Workspace":
        with contextlib.ExitStack() as stack:  # releases the lock if the rest fails
            try:
                self._lock = self._acquire()
                stack.callback(os.close, self._lock)
                for leftover in self.folder.iterdir():
                    if leftover.name != "lock":
                        leftover.unlink()
            except OSError as error:
                raise storage_error(error, self.folder) from None
            stack.pop_all()
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _acquire(self) -> int:
        """Open and lock the lock file. Retries if the previous owner removed it meanwhile."""
        path = self.folder / "lock"
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                do = "wait for it to end, or give another --output-prefix"
                raise Locked(f"another job is writing {self.prefix}", f"it holds {path}", do) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                    raise
            if path.exists() and os.stat(path).st_ino == os.fstat(lock).st_ino:
                return lock
            os.close(lock)


def storage_error(error: OSError, path) -> OSError | StorageError:
    """A StorageError with advice if the disk is full, read-only or failing; `error` itself otherwise."""
    if error.errno not in NOT_WRITABLE:
        return error
    do = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or give an --output-prefix on another disk")
    reason = error.strerror or str(error)
    return StorageError(
        f"cannot write {error.filename or path}: {reason}", do=do.get(error.errno, "check the --output-prefix")
    )


def publish(workspace: Workspace, name: str, final: str, endings: tuple[str, ...] = (".bin", ".idx")) -> None:
    """Rename `<name>.bin`, `<name>.idx` and their checksums from the workspace to their final names, the index last.

    An older index is removed first, so that an .idx never describes another .bin.
    """
    write_manifest(workspace.path(name), workspace.path(name + ".sums.json"))
    for suffix in (endings[-1], ".sums.json"):
        Path(final + suffix).unlink(missing_ok=True)
    for suffix in (*endings, ".sums.json"):
        os.replace(workspace.path(name + suffix), final + suffix)
    sync_folder(Path(final).parent)


def append_file(target: int, path: str, start: int = 0, stop: int | None = None) -> int:
    """Append bytes [start, stop) of a file to the open file `target`, inside the kernel if possible.

    Returns the number of bytes.
    """
    source = os.open(path, os.O_RDONLY)
    try:
        stop = os.fstat(source).st_size if stop is None else stop
        position = start
        while position < stop:
            copied = _copy(source, target, position, min(stop - position, 1 << 30))
            if copied == 0:
                raise StorageError(
                    f"{path}: ends at {position} bytes instead of {stop}", "it changed while it was read"
                )
            position += copied
        return stop - start
    finally:
        os.close(source)


def _copy(source: int, target: int, position: int, count: int) -> int:
    """Copy up to `count` bytes to the end of `target`. copy_file_range shares blocks if the file system supports it."""
    end = os.lseek(target, 0, os.SEEK_END)
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, count, position, end)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
                raise
    return write_at(target, os.pread(source, min(count, 8 << 20), position), end)


def write_at(target: int, data, offset: int) -> int:
    """Write all bytes of a buffer at `offset`; returns their number."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(target, view[done:], offset + done)
    return done
