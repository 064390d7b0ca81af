# SPDX-License-Identifier: Apache-2.0
"""Token files that are not memory-mapped: read by `pread`, or by ranges of an object in a store.

    tokens = FileBin("corpus_text_document.bin", np.dtype("<u2"))  # as `indexed.map_bin` is called
    tokens[1000:1010]                                              # ten ids

A `RangedBin` reads an object in blocks of BLOCK bytes, and keeps those it has read in a sparse file, which all ranks of a
machine share:

    corpus_text_document.bin           as long as the object; only blocks that were read take space
    corpus_text_document.bin.blocks    uint32 of each block: its CRC-32, 0 for a block that is not there

A block is written before its CRC, and compared with it at each reading. So after a kill, a crash of the machine or damage
to the disk a block is there or is read again. If the disk gets full, blocks are read and not kept.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatron.data.indexed import opened_file, whole_tokens
from megatron.errors import DataError
from megatron.storage.urls import UrlPath

BLOCK = 1 << 16  # bytes: a sample of 8,192 tokens in int32 is half of one, or reaches into two
MOST = 1 << 24  # bytes of one request
REQUESTS = 8  # requests of one sample at a time
KEPT_FREE = 1 << 30  # bytes of the disk that the blocks leave free
CHECKED_EVERY = 60.0  # seconds between looks at whether the object is still the same
MARKS = ".blocks"


class FileBin:
    """Tokens of a file that is read by `pread`: for file systems on which page faults are slow (--no-mmap-bin-files)."""

    def __init__(self, path: str, dtype: np.dtype, at: int = 0, count: int | None = None):
        self.path, self.dtype, self.at = path, np.dtype(dtype), at
        self.file = opened_file(path)
        self.count = whole_tokens(path, os.fstat(self.file.fileno()).st_size - at, dtype) if count is None else count

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def __getitem__(self, tokens: slice) -> np.ndarray:
        start, stop, step = tokens.indices(self.count)
        assert step == 1, "tokens are read in their order"
        data = self.read(self.at + start * self.dtype.itemsize, max(stop - start, 0) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype)

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The tokens of several ranges."""
        return [self[start:stop] for start, stop in ranges]

    def read(self, at: int, size: int) -> bytes:
        """Bytes [at, at + size) of the file. Raises DataError if it was cut short since it was opened."""
        data = _pread(self.file.fileno(), size, at)
        if len(data) < size:
            raise DataError(f"{self.path}: cut short while it was read", do="copy it again")
        return data


class RangedBin(FileBin):
    """Tokens of an object in a store. path: of the sparse file; source, mark: the object and its ETag when it was opened.

    Threads and processes of a machine that need the same blocks wait for the one that reads them.
    """

    def __init__(
        self,
        path: str,
        dtype: np.dtype,
        at: int = 0,
        count: int | None = None,
        *,
        source: UrlPath,
        mark: str,
        log: Callable[[str], None] = lambda text: None,
    ):
        super().__init__(path, dtype, at, count)
        self.source, self.mark, self.log = source, mark, log
        self.size = self.at + self.nbytes
        self.out = os.open(path, os.O_RDWR)
        self.marks = np.memmap(path + MARKS, "<u4", "r+") if self.size else np.zeros(0, "<u4")
        self.locks = opened_file(path + MARKS, "r+b")
        self.reading: set[int] = set()  # blocks, by threads of this process
        self.changed = threading.Condition()
        self.pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="ranges")
        self.keeps, self.checked = True, time.monotonic()

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        if len(ranges) < 2:
            return super().read_all(ranges)
        return list(self.pool.map(lambda bounds: self[slice(*bounds)], ranges))

    def read(self, at: int, size: int) -> bytes:
        first, stop = at // BLOCK, -(-(at + size) // BLOCK)
        data = bytearray(self._kept(first, stop))
        for start, end in self._missing(first, stop, data):
            data[(start - first) * BLOCK : (end - first) * BLOCK] = self._fetched(start, end)
        begin = at - first * BLOCK
        return memoryview(data)[begin : begin + size]

    def _kept(self, first: int, stop: int) -> bytes:
        """The blocks [first, stop) as the sparse file has them, zeros for those that it lacks."""
        return _pread(self.file.fileno(), min(stop * BLOCK, self.size) - first * BLOCK, first * BLOCK)

    def _missing(self, first: int, stop: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Runs of the blocks [first, stop) that are not whole in `data`, none larger than a request."""
        view, start = memoryview(data), None
        for block in range(first, stop + 1):
            part = view[(block - first) * BLOCK :][:BLOCK]
            lost = block < stop and (not self.marks[block] or self.marks[block] != _mark(part))
            if start is not None and (not lost or (block - start) * BLOCK >= MOST):
                yield start, block
                start = None
            if lost and start is None:
                start = block

    def _fetched(self, start: int, stop: int) -> bytes:
        """The blocks [start, stop), from the store unless another thread or process has kept them meanwhile."""
        with self._alone(start, stop):
            data = bytearray(self._kept(start, stop))
            for first, end in self._missing(start, stop, data):
                part = self._requested(first, end)
                data[(first - start) * BLOCK : (end - start) * BLOCK] = part
                self._keep(first, part)
        return data

    def _requested(self, first: int, stop: int) -> bytes:
        at, size = first * BLOCK, min(stop * BLOCK, self.size) - first * BLOCK
        part = self.source.read_range(at, size)
        if time.monotonic() - self.checked > CHECKED_EVERY or len(part) != size:
            if self.source.stat().mark != self.mark or len(part) != size:
                raise DataError(
                    f"{self.source} was replaced while it was read",
                    do="start again: the samples are those of the new one",
                )
            self.checked = time.monotonic()
        return part

    def _keep(self, first: int, part: bytes) -> None:
        """Write blocks, then their marks. Without space they are not kept, which is logged once."""
        try:
            if shutil.disk_usage(Path(self.path).parent).free < KEPT_FREE + len(part):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            view, written = memoryview(part), 0
            while written < len(part):
                written += os.pwrite(self.out, view[written:], first * BLOCK + written)
        except OSError as error:
            if self.keeps:
                self.log(
                    f"{self.path}: {error.strerror}: from here on, samples are read from {self.source} and not kept"
                )
            self.keeps = False
            return
        for block, at in enumerate(range(0, len(part), BLOCK), first):
            self.marks[block] = _mark(view[at : at + BLOCK])

    @contextlib.contextmanager
    def _alone(self, start: int, stop: int):
        """Only this thread of this machine requests the blocks [start, stop), as far as the file system has locks."""
        blocks = set(range(start, stop))
        with self.changed:
            self.changed.wait_for(lambda: not blocks & self.reading)
            self.reading |= blocks
        try:
            # Record locks are the process's: EDEADLK may come from two threads of it, and costs a second request.
            with contextlib.suppress(OSError):
                fcntl.lockf(self.locks, fcntl.LOCK_EX, stop - start, start)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(self.locks, fcntl.LOCK_UN, stop - start, start)
            with self.changed:
                self.reading -= blocks
                self.changed.notify_all()


def make_sparse(path: Path, size: int) -> None:
    """Create the sparse file of an object of so many bytes, and its marks."""
    for name, length in ((path, size), (path.with_name(path.name + MARKS), marks_size(size))):
        with open(name, "wb") as file:
            file.truncate(length)


def marks_size(size: int) -> int:
    """Bytes of the marks of an object of so many bytes."""
    return 4 * -(-size // BLOCK)


def _mark(part) -> int:
    return zlib.crc32(part) or 1


def _pread(file: int, size: int, at: int) -> bytes:
    """Bytes [at, at + size) of a file, fewer only at its end. One call of the system reads up to 2 GiB."""
    data = os.pread(file, size, at)
    while len(data) < size and (more := os.pread(file, size - len(data), at + len(data))):
        data += more
    return data
