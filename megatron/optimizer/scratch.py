# SPDX-License-Identifier: Apache-2.0
"""A temporary, unnamed file for state that does not stay in memory: planes of numbers. Needs no torch.

A step reads and writes the file in parts, with O_DIRECT if the file system supports it. The only memory needed is then
the caller's buffers. A mapping of the file would be simpler, but the kernel would decide how much of it stays in memory,
when dirty pages are written, and which other pages are evicted. Checkpoints and checks, which read the content a few
times in a run, do get a mapping.

The file has no name (or is unlinked immediately), so a kill -9 leaves nothing on the disk. Its space is allocated at the
start, so a full disk is reported then and not in the middle of training.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import StorageError

PAGE = 4096  # bytes: the unit of direct reads and writes
PART = 1 << 20  # elements of a plane per read or write, 4 MiB in fp32: larger ones measured no faster
SLOTS = 3  # parts in memory: one is read, one updated, one written


def part_size(elements: int) -> int:
    """Elements of the buffer through which a plane of `elements` elements is streamed: whole pages, even in bf16."""
    return min(PART, _up(elements * 2) // 2)


def buffer_bytes(elements: int, widths: Sequence[int]) -> int:
    """Bytes of memory to stream a state with planes of numbers of these bytes."""
    return SLOTS * sum(widths) * part_size(elements)


def file_bytes(elements: int, widths: Sequence[int]) -> int:
    """Bytes of a file with planes of numbers of these bytes."""
    return sum(widths) * (_up(2 * elements) // 2)


class Scratch:
    """A file of planes of `elements` numbers each, initially zero. widths: bytes of a number, for each plane."""

    def __init__(self, folder: str, widths: Sequence[int], elements: int):
        """Raises StorageError when the folder is missing, not writable or too full for the file."""
        self.folder, size = folder, file_bytes(elements, widths)
        self._starts = [file_bytes(elements, widths[:plane]) for plane in range(len(widths) + 1)]
        with _storage_errors(
            f"--nvme-offload-dir {folder} cannot take {size:,} bytes of optimizer state", Path(folder)
        ):
            self._file = tempfile.TemporaryFile(dir=folder, prefix="optimizer-state-", buffering=0)
            self._handle = self._file.fileno()
            os.posix_fallocate(self._handle, 0, size)
        self.direct = self._go_direct()

    def _go_direct(self) -> bool:
        """Bypass the page cache from now on. Returns whether the file system supports it."""
        before = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, before | os.O_DIRECT)
            with mmap.mmap(-1, PAGE) as page:
                os.preadv(self._handle, [page], 0)
        except (OSError, AttributeError):  # no O_DIRECT on this file system, or on this system
            fcntl.fcntl(self._handle, fcntl.F_SETFL, before)
            return False
        return True

    def read(self, plane: int, start: int, target: memoryview) -> None:
        """Fill `target` with a plane's bytes from `start` on. Address and `start` are multiples of PAGE."""
        self._move(os.preadv, "read from", plane, start, target)

    def write(self, plane: int, start: int, source: memoryview) -> None:
        """Write `source` to a plane from byte `start` on. Address and `start` are multiples of PAGE."""
        self._move(os.pwritev, "written to", plane, start, source)

    def _move(self, call, verb: str, plane: int, start: int, data: memoryview) -> None:
        at = self._starts[plane] + start
        with _storage_errors(f"optimizer state cannot be {verb} --nvme-offload-dir {self.folder}", Path(self.folder)):
            while data:
                done = call(self._handle, [data], at)
                if not done:
                    raise OSError(errno.EIO, "the file has become shorter")
                data, at = data[done:], at + done

    def map(self, plane: int) -> mmap.mmap:
        """Map a plane into memory, through the page cache, until the result is freed. Not for use during a step."""
        with _storage_errors(f"--nvme-offload-dir {self.folder}: a file cannot be mapped", Path(self.folder)):
            start, stop = self._starts[plane : plane + 2]
            return mmap.mmap(self._handle, stop - start, offset=start)


def _up(size: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-size // PAGE) * PAGE


@contextlib.contextmanager
def _storage_errors(what: str, folder: Path):
    """Turn an OSError into a StorageError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        free = f", {shutil.disk_usage(folder).free:,} bytes are free" if full else ""
        raise StorageError(
            what,
            f"{error.strerror or error}{free}",
            "free some space there, lower --nvme-offload-fraction, or give another --nvme-offload-dir"
            if full
            else "give a folder of a local disk that this user may write",
        ) from error
