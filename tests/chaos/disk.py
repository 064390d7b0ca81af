# SPDX-License-Identifier: Apache-2.0
"""Every change that code makes below a folder, seen before it happens: to note it, to refuse it, or to die of it.

    with watched(folder, before=notes.append):
        Saver(folder).save(...)

`before(change)` is called for each create, write, truncate, fsync, mkdir, rename, unlink and rmdir. It may raise OSError,
which the code then gets as if from the system, or return how many bytes of a write are let through (a disk that is
almost full). It works in this process and in those that it forks, for changes made by Python: `os`, `open`, `pathlib`,
`shutil`, numpy's files. Needs no torch.
"""

import builtins
import contextlib
import fcntl
import io
import os
import pathlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Optional
from unittest import mock

_FLAGS = dict(r=0, w=os.O_CREAT | os.O_TRUNC, a=os.O_CREAT | os.O_APPEND, x=os.O_CREAT | os.O_EXCL)


class Change(NamedTuple):
    """One change. Paths are relative to the watched folder; "." is the folder itself.

    at:    offset of a write, new size of a truncate
    """

    kind: str
    path: str
    target: str = ""
    at: int = 0
    data: bytes = b""


Before = Callable[[Change], Optional[int]]


@contextlib.contextmanager
def watched(folder: Path, before: Before, *, sync: bool = False) -> Iterator[None]:
    """Call `before` for every change below `folder` while the block runs.

    sync: let fsync reach the disk; without it fsync is only told, which is much faster and as good for a model.
    """
    hand = _Hand(folder, before, sync)
    with contextlib.ExitStack() as stack:
        for name in (
            "open",
            "write",
            "pwrite",
            "truncate",
            "ftruncate",
            "fsync",
            "fdatasync",
            "rename",
            "replace",
            "unlink",
            "remove",
            "mkdir",
            "rmdir",
            "copy_file_range",
        ):
            if hasattr(os, name):
                stack.enter_context(mock.patch.object(os, name, getattr(hand, name)))
        stack.enter_context(mock.patch.object(builtins, "open", hand.open_file))
        stack.enter_context(mock.patch.object(io, "open", hand.open_file))
        old_pathlib = getattr(pathlib, "_normal_accessor", None)  # Python 3.10 keeps functions of its own
        for name in ("open", "rename", "replace", "unlink", "mkdir", "rmdir") if old_pathlib else ():
            function = hand.open_file if name == "open" else getattr(hand, name)
            stack.enter_context(mock.patch.object(old_pathlib, name, function))
        yield


class _Hand:
    """What stands in for the functions of `os`, under their names."""

    def __init__(self, folder: Path, before: Before, sync: bool):
        self.folder, self.before, self.sync = os.path.realpath(folder), before, sync
        names = (
            "open write pwrite truncate ftruncate fsync fdatasync rename replace unlink remove mkdir rmdir "
            "copy_file_range"
        ).split()
        self.os = {name: getattr(os, name) for name in names if hasattr(os, name)}
        self.real_open = builtins.open

    # ---- where

    def _name(self, path, folder=None) -> Optional[str]:
        """The path relative to the folder; None when it is elsewhere."""
        path = os.fsdecode(path)
        if folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return self._relative(os.path.abspath(path))

    def _held(self, handle: int) -> Optional[str]:
        """The same for an open file; None too when it has no name any more."""
        return self._relative(os.readlink(f"/proc/self/fd/{handle}"))

    def _relative(self, path: str) -> Optional[str]:
        if path == self.folder:
            return "."
        inside = path.startswith(self.folder + "/") and not path.endswith(" (deleted)")
        return path[len(self.folder) + 1 :] if inside else None

    # ---- names

    def _named(self, kind: str, function: str, path, *args, dir_fd=None, **options):
        name = self._name(path, dir_fd)
        exists = os.path.lexists(path) if dir_fd is None else True
        if name is not None and exists == (kind != "mkdir"):  # else it fails by itself
            self.before(Change(kind, name))
        return self.os[function](path, *args, dir_fd=dir_fd, **options)

    def unlink(self, path, **options):
        return self._named("unlink", "unlink", path, **options)

    def remove(self, path, **options):
        return self._named("unlink", "remove", path, **options)

    def rmdir(self, path, **options):
        return self._named("rmdir", "rmdir", path, **options)

    def mkdir(self, path, mode=0o777, **options):
        return self._named("mkdir", "mkdir", path, mode, **options)

    def rename(self, source, target, **options):
        return self._rename("rename", source, target, **options)

    def replace(self, source, target, **options):
        return self._rename("replace", source, target, **options)

    def _rename(self, function, source, target, **options):
        names = self._name(source), self._name(target)
        if None not in names and os.path.lexists(source):
            self.before(Change("rename", *names))
        return self.os[function](source, target, **options)

    # ---- content

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        name = None if isinstance(path, int) else self._name(path, dir_fd)
        if name is not None and flags & (os.O_CREAT | os.O_TRUNC):
            exists = os.path.lexists(path)
            if not exists and flags & os.O_CREAT:
                self.before(Change("create", name))
            elif exists and flags & os.O_TRUNC and not flags & os.O_EXCL:
                self.before(Change("truncate", name))
        return self.os["open"](path, flags, mode, dir_fd=dir_fd)

    def write(self, handle, data):
        at = None if self._held(handle) is None else os.lseek(handle, 0, os.SEEK_CUR)
        if at is not None and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_APPEND:
            at = os.fstat(handle).st_size
        return self.os["write"](handle, self._let_through(handle, data, at))

    def pwrite(self, handle, data, offset):
        return self.os["pwrite"](handle, self._let_through(handle, data, offset), offset)

    def copy_file_range(self, source, target, count, offset_src=None, offset_dst=None):
        if self._held(target) is None:
            return self.os["copy_file_range"](source, target, count, offset_src, offset_dst)
        return self.pwrite(target, os.pread(source, count, offset_src), offset_dst)

    def _let_through(self, handle, data, at):
        """What of `data` is to be written."""
        name = self._held(handle)
        if name is None:
            return data
        data = memoryview(data).cast("B")
        allowed = self.before(Change("write", name, at=at, data=bytes(data)))
        return data if allowed is None else data[:allowed]

    def truncate(self, path, length):
        name = self._held(path) if isinstance(path, int) else self._name(path)
        if name is not None:
            self.before(Change("truncate", name, at=length))
        return self.os["truncate"](path, length)

    def ftruncate(self, handle, length):
        return self.truncate(handle, length)

    def fsync(self, handle):
        handle = handle if isinstance(handle, int) else handle.fileno()
        name = self._held(handle)
        if name is not None:
            self.before(Change("fsync", name))
        if self.sync or name is None:
            self.os["fsync"](handle)

    fdatasync = fsync

    def open_file(
        self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None
    ):
        """`open`: files that are written get a raw layer that asks before each write."""
        reading = not set(mode) & set("wax+")
        if isinstance(file, int) or opener or reading or self._name(file) is None:
            return self.real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        (kind,) = set(mode) & set("rwax")
        handle = self.open(file, _FLAGS[kind] | (os.O_RDWR if "+" in mode else os.O_WRONLY) | os.O_CLOEXEC, 0o666)
        raw = _Raw(self, handle, "+" in mode)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return _Buffered(buffered)
        return io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline, line_buffering=buffering == 1)


class _Raw(io.RawIOBase):
    """An open file that writes through a `_Hand`."""

    def __init__(self, hand: _Hand, handle: int, readable: bool):
        self._hand, self._handle, self._readable = hand, handle, readable

    def fileno(self) -> int:
        return self._handle

    def readable(self) -> bool:
        return self._readable

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        return os.readv(self._handle, [buffer])

    def write(self, data) -> int:
        return self._hand.write(self._handle, data)

    def seek(self, offset, whence=os.SEEK_SET) -> int:
        return os.lseek(self._handle, offset, whence)

    def truncate(self, size=None) -> int:
        size = os.lseek(self._handle, 0, os.SEEK_CUR) if size is None else size
        self._hand.truncate(self._handle, size)
        return size

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._handle)


class _Buffered:
    """A buffered file that numpy does not take for one of the system's, whose handle it would write to by itself."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __iter__(self):
        return iter(self._file)
