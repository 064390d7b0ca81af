# SPDX-License-Identifier: Apache-2.0
"""The worker processes of preprocessing. They write their results to files in input order, without a parent in between.

The input is cut into numbered blocks of whole lines. A *lane* is a series of blocks with its own files. If several workers
share a lane, a worker waits for the turn of its encoded block, reserves its place (counters in shared memory) and passes
the turn on; the writes themselves are concurrent. No token passes through a pipe, and the result is deterministic.
"""

import collections
import contextlib
import itertools
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron.data.contamination import Screening
from megatron.data.json_input import Source, read_blocks, read_lines
from megatron.data.preprocess_encode import BlockEncoder, Encoded
from megatron.data.workspace import Workspace, write_at
from megatron.errors import DataError

BLOCK = 1 << 20  # bytes of text: about 10 ms of work
WAITING = 4  # encoded blocks that a worker keeps until their turn
FRAME = struct.Struct("<qqqqq")  # header of a block in the pipe: number, source, bytes, position in the file, start
# Of a target: tokens, tokens per sequence, sequences per document, origins
KINDS = (".bin", ".lengths", ".counts", ".origins")


class Shared:
    """Counters in shared memory.

    totals int64 [lanes, targets, 3]: tokens, sequences, documents reserved so far. lines int64 [lanes].
    progress int64 [workers, 6]: documents, bytes of text, tokens, bytes of input, rejected lines, line ends of Windows.
    named int64 [workers, 2 + names]: of `preprocess_encode.SpecialNames`.
    ngrams int64 [keys, n-grams]: occurrences of each n-gram of an index. screened int64 [keys, 2]: texts with n-grams,
    documents that remain of them.
    """

    def __init__(self, context, lanes: int, targets: int, workers: int, keys: int = 1, ngrams: int = 0, names: int = 0):
        sizes = [4, lanes, lanes * targets * 3, workers * 6, workers * (2 + names)]
        memory = np.frombuffer(mmap.mmap(-1, 8 * sum(sizes)), np.int64)
        head, self.lines, totals, progress, named = np.split(memory, np.cumsum(sizes)[:-1])
        self.totals = totals.reshape(lanes, targets, 3)
        self.progress, self.named = progress.reshape(workers, 6), named.reshape(workers, 2 + names)
        counts = np.frombuffer(mmap.mmap(-1, 8 * keys * (ngrams + 2)), np.int64).reshape(keys, ngrams + 2)
        self.screened, self.ngrams = counts[:, :2], counts[:, 2:]
        self._task, self.turn, self.source, self.source_lines = (head[i : i + 1] for i in range(4))
        self.lock, self.read_lock = context.Lock(), context.Lock()
        self.parent = os.getpid()

    def take(self) -> int:
        """Take the next task; returns its number."""
        with self.lock:
            self._task += 1
            return int(self._task[0]) - 1


@dataclass
class TextBlock:
    """A block of whole lines: block `number` of its lane, from byte `start` of source file `source`."""

    lane: int
    number: int
    source: int
    data: bytes
    input_bytes: int
    start: int = 0


class Ranges:
    """Uncompressed files, divided by byte ranges: any worker takes any block. One lane."""

    def __init__(self, sources: list[Source], block_size: int = BLOCK):
        self.sources, self.block_size = sources, block_size
        self.ends = np.cumsum([-(-source.size // block_size) for source in sources])
        self.lanes, self.most_workers = 1, int(self.ends[-1])

    def blocks(self, shared: Shared) -> Iterator[TextBlock]:
        opened, file = None, None
        while (number := shared.take()) < self.ends[-1]:
            index = int(np.searchsorted(self.ends, number, "right"))
            source = self.sources[index]
            if opened != index:
                if file is not None:
                    file.close()
                opened, file = index, open(source.path, "rb", buffering=0)
            start = (number - int(self.ends[index - 1] if index else 0)) * self.block_size
            stop = min(start + self.block_size, source.size)
            place, data = read_lines(file, start, stop)
            yield TextBlock(0, number, index, data, stop - start, place)


class Files:
    """Compressed files, which must be read from their start: a worker takes a whole file. One lane per file."""

    def __init__(self, sources: list[Source], block_size: int = BLOCK):
        self.sources, self.block_size = sources, block_size
        self.order = sorted(range(len(sources)), key=lambda index: -sources[index].size)  # the longest first
        self.lanes = self.most_workers = len(sources)

    def blocks(self, shared: Shared) -> Iterator[TextBlock]:
        while (task := shared.take()) < len(self.order):
            lane, before, at = self.order[task], 0, 0
            for number, (data, position) in enumerate(read_blocks(self.sources[lane], self.block_size)):
                yield TextBlock(lane, number, lane, data, position - before, at)
                before, at = position, at + len(data)


class Feed:
    """Input that a single process reads: it sends blocks through a pipe, and idle workers take them. One lane."""

    def __init__(self, sources: list[Source], block_size: int = BLOCK):
        self.sources, self.block_size = sources, block_size
        self.lanes, self.most_workers = 1, 1 << 20
        self.receive, self.send = os.pipe()
        self._blocks = self._read()

    def read(self) -> Iterator[TextBlock]:
        """The blocks, for the process that reads the input."""
        return self._blocks

    def peek(self) -> list[bytes]:
        """The lines of the first block; `read` returns the block again."""
        head = list(itertools.islice(self._blocks, 1))
        self._blocks = itertools.chain(head, self._blocks)
        return [block.data for block in head]

    def _read(self) -> Iterator[TextBlock]:
        number = 0
        for index, source in enumerate(self.sources):
            before = at = 0
            for data, position in read_blocks(source, self.block_size):
                yield TextBlock(0, number, index, data, position - before, at)
                number, before, at = number + 1, position, at + len(data)

    def blocks(self, shared: Shared) -> Iterator[TextBlock]:
        os.close(self.send)
        while True:
            with shared.read_lock:  # one worker reads a whole block
                header = self._receive(FRAME.size)
                if not header:
                    return
                number, source, size, input_bytes, start = FRAME.unpack(header)
                data = self._receive(size)
            yield TextBlock(0, number, source, data, input_bytes, start)

    def _receive(self, size: int) -> bytes:
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            count = os.readv(self.receive, [view[done:]])
            if count == 0:
                return b""
            done += count
        return bytes(buffer)


class Worker:
    """A worker process: takes a block, encodes it, and writes it to the lane's files in its turn."""

    def __init__(
        self,
        index: int,
        source_of_blocks,
        encoder: BlockEncoder,
        shared: Shared,
        workspace: Workspace,
        partitions: int,
        stop_on_bad_line: bool,
        head: int = 0,
    ):
        """head: bytes to reserve before the tokens of a file."""
        self.blocks, self.encode, self.shared, self.workspace = source_of_blocks, encoder, shared, workspace
        self.partitions, self.stop_on_bad_line, self.head = partitions, stop_on_bad_line, head
        self.progress, self.named = shared.progress[index], shared.named[index]
        self.lane, self.files = None, contextlib.ExitStack()

    def run(self) -> None:
        waiting = collections.deque()
        for block in self.blocks.blocks(self.shared):
            if os.getppid() != self.shared.parent:
                os._exit(1)  # the parent was killed
            waiting.append((block, self.encode(block.data)))
            block.data = b""
            while waiting and (len(waiting) > WAITING or self._has_turn(waiting[0][0])):
                self._put(*waiting.popleft())
        while waiting:
            self._put(*waiting.popleft())
        self.files.close()

    def _has_turn(self, block: TextBlock) -> bool:
        with self.shared.lock:
            return self.blocks.lanes > 1 or self.shared.turn[0] == block.number

    def _put(self, block: TextBlock, encoded: Encoded) -> None:
        while not self._has_turn(block):
            time.sleep(0.001)
            if os.getppid() != self.shared.parent:
                os._exit(1)
        if self.lane != block.lane:
            self._open(block.lane)
        sizes = np.array([documents.sizes for documents in encoded.targets], np.int64)  # [targets, 3]
        with self.shared.lock:
            first_line = self._count_lines(block, encoded)
            shift = int(self.shared.lines[block.lane]) % self.partitions
            self.shared.lines[block.lane] += encoded.lines
            targets = [self._target(index, shift) for index in range(len(sizes))]
            places = self.shared.totals[block.lane, targets]  # a copy: [targets, 3]
            self.shared.totals[block.lane, targets] += sizes
            if encoded.rejected:
                self._reject(block, encoded, first_line)
            if encoded.screening and encoded.screening.matches:
                self._note_contaminated(block, encoded.screening, first_line)
            self.shared.turn[0] = block.number + 1
        for documents, target, (token, sequence, document) in zip(encoded.targets, targets, places.tolist()):
            tokens, lengths, counts, *origins = self.numbers[target]
            write_at(tokens, documents.tokens, self.head + token * documents.tokens.itemsize)
            write_at(lengths, documents.lengths, sequence * documents.lengths.itemsize)
            write_at(counts, documents.counts, document * documents.counts.itemsize)
            if origins:
                documents.origins["file"] = block.source
                documents.origins["place"] += np.uint64(block.start)
                write_at(origins[0], documents.origins.view(np.uint8), document * documents.origins.itemsize)
        documents = int(sizes[: self.partitions, 2].sum())
        tokens, rejected = int(sizes[:, 0].sum()), len(encoded.rejected)
        self.progress += [documents, encoded.text_bytes, tokens, block.input_bytes, rejected, encoded.crlf]
        self.named += encoded.named

    def _target(self, index: int, shift: int) -> int:
        """The target of lines with local residue `index % partitions` in a block whose first line has residue `shift`."""
        key, residue = divmod(index, self.partitions)
        return key * self.partitions + (residue + shift) % self.partitions

    def _count_lines(self, block: TextBlock, encoded: Encoded) -> int:
        """Number of lines of this file before the block. Blocks of a lane arrive in order."""
        if self.blocks.lanes > 1:
            return int(self.shared.lines[block.lane])
        if self.shared.source[0] != block.source:
            self.shared.source[0], self.shared.source_lines[0] = block.source, 0
        self.shared.source_lines += encoded.lines
        return int(self.shared.source_lines[0]) - encoded.lines

    def _reject(self, block: TextBlock, encoded: Encoded, first_line: int) -> None:
        """Write bad lines to the lane's list, or raise DataError for the first one with --on-bad-line stop."""
        path = self.blocks.sources[block.source].path
        path = "stdin" if path == "-" else path
        if self.stop_on_bad_line:
            line, reason = encoded.rejected[0]
            do = "repair the line, or drop --on-bad-line stop to set bad lines aside"
            raise DataError(f"{path}, line {first_line + line + 1}: {reason}", "nothing was written", do)
        records = [dict(file=path, line=first_line + line + 1, reason=reason) for line, reason in encoded.rejected]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with open(self.workspace.path(f"{block.lane}.rejected"), "a", encoding="utf-8", errors="replace") as file:
            file.write(text)

    def _note_contaminated(self, block: TextBlock, screening: Screening, first_line: int) -> None:
        """Add matches of evaluation sets to the counters and to the lane's list."""
        for key, (ngrams, counts) in screening.ngrams.items():
            self.shared.ngrams[key, ngrams] += counts
        path = self.blocks.sources[block.source].path
        rows = []
        for row in screening.matches:
            self.shared.screened[row["key"]] += [1, row.get("pieces", 1)]
            row = dict(row, line=first_line + row["line"] + 1)
            rows.append(json.dumps(dict(file="stdin" if path == "-" else path, **row), ensure_ascii=False) + "\n")
        with open(self.workspace.path(f"{block.lane}.contaminated"), "a", encoding="utf-8", errors="replace") as file:
            file.writelines(rows)

    def _open(self, lane: int) -> None:
        """Open the files of a lane; all workers of a shared lane open the same ones."""
        self.files.close()
        self.lane, self.numbers = lane, []
        for target in range(self.shared.totals.shape[1]):
            kinds = KINDS if self.encode.origins else KINDS[:-1]
            paths = [self.workspace.path(f"{lane}-{target}{kind}") for kind in kinds]
            numbers = [os.open(path, os.O_CREAT | os.O_WRONLY, 0o644) for path in paths]
            self.numbers.append(numbers)
            for number in numbers:
                self.files.callback(os.close, number)
