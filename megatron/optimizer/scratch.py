# SPDX-License-Identifier: Apache-2.0
"""A temporary, unnamed file for state that is kept off the host's memory: planes of fp32 numbers. Needs no torch.

A step reads and writes it in parts, past the page cache where the file system lets us (O_DIRECT): the memory that this
takes is then the buffers of whoever asks, and no more. A mapping of the file would be simpler, and would leave to the
kernel how much of it stays in memory, when dirty pages are written, and which pages of others go for them. Whoever wants
the content outside a step, a few times in a run (checkpoints, checks), gets such a mapping all the same.

The file has no name from the start (or loses it at once), so that nothing of it is left behind a kill -9, and its space
is taken at the start, so that a full disk is found there and not in the middle of training.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from pathlib import Path

from megatron.errors import StorageError

PAGE = 4096  # bytes: the unit of direct reads and writes
PART = 1 << 20  # elements of a plane that move at a time, 4 MiB: measured, larger ones are no faster
SLOTS = 3  # parts in memory: one arrives, one is updated, one leaves


def part_size(elements: int) -> int:
    """Elements of the buffer that a plane of as many is moved through."""
    return min(PART, _up(elements * 4) // 4)


def buffer_bytes(elements: int, planes: int) -> int:
    """Memory that it takes to stream state: `planes` numbers of each element."""
    return 4 * SLOTS * planes * part_size(elements)


def file_bytes(elements: int, planes: int) -> int:
    """Bytes of a file with so many planes."""
    return planes * _up(4 * elements)


class Scratch:
    """A file of `planes` planes of `elements` fp32 numbers each, all zero at first."""

    def __init__(self, folder: str, planes: int, elements: int):
        """Raises StorageError when the folder is missing, cannot be written or has no space for all of it."""
        self.folder, self.plane, size = folder, _up(4 * elements), file_bytes(elements, planes)
        with _told(f"--nvme-offload-dir {folder} cannot take {size:,} bytes of optimizer state", Path(folder)):
            self._file = tempfile.TemporaryFile(dir=folder, prefix="optimizer-state-", buffering=0)
            self._handle = self._file.fileno()
            os.posix_fallocate(self._handle, 0, size)
        self.direct = self._go_direct()

    def _go_direct(self) -> bool:
        """Pass the page cache by from now on, if that works here."""
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
        """Fill `target`, bytes at a multiple of PAGE, with a plane's bytes from `start` on, another one."""
        self._move(os.preadv, "read from", plane, start, target)

    def write(self, plane: int, start: int, source: memoryview) -> None:
        """The opposite of `read`."""
        self._move(os.pwritev, "written to", plane, start, source)

    def _move(self, call, verb: str, plane: int, start: int, data: memoryview) -> None:
        at = self.plane * plane + start
        with _told(f"optimizer state cannot be {verb} --nvme-offload-dir {self.folder}", Path(self.folder)):
            while data:
                done = call(self._handle, [data], at)
                if not done:
                    raise OSError(errno.EIO, "the file has become shorter")
                data, at = data[done:], at + done

    def map(self, plane: int) -> mmap.mmap:
        """A plane as memory, through the page cache, for as long as the result is kept. No step may be under way."""
        with _told(f"--nvme-offload-dir {self.folder}: a file cannot be mapped", Path(self.folder)):
            return mmap.mmap(self._handle, self.plane, offset=plane * self.plane)


def _up(size: int) -> int:
    """A number of bytes as whole pages."""
    return -(-size // PAGE) * PAGE


@contextlib.contextmanager
def _told(what: str, folder: Path):
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
