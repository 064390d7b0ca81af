# SPDX-License-Identifier: Apache-2.0
"""Stream the lines of a file, compressed or not, in bounded memory.

for line in lines("corpus.jsonl.zst", most=64 << 20): ...       # bytes, without the newline
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.data.json_input import Ahead, Source, damage_as_data_error, decompressed, opened
from megatron.errors import DataError

BLOCK = 1 << 18  # bytes read at a time


def lines(path: str | Path, most: int) -> Iterator[bytes]:
    """Each line, including blank ones; the last one needs no newline. `-`: stdin.

    most: maximal bytes of a line. Raises DataError for a longer one, and for damaged or truncated compressed data.
    """
    for number, line in enumerate(split(blocks(path), most), 1):
        if len(line) > most:
            what = f"{path}: line {number} is longer than {most / 1e6:,.0f} MB"
            raise DataError(what, do="are these lines of text? give more --memory-gb if they are")
        yield line


def split(stream: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The lines of a stream of blocks. Lines longer than `most` bytes are cut to `most` + 1."""
    rest, size, cut = [], 0, False  # pieces of an incomplete line; cut: its beginning was yielded already
    for block in stream:
        *ended, last = block.split(b"\n")
        for line in ended:
            if not cut:
                yield b"".join([*rest, line])[: most + 1]
            rest, size, cut = [], 0, False
        if cut:
            continue
        rest.append(last)
        size += len(last)
        if size > most:
            yield b"".join(rest)[: most + 1]
            rest, size, cut = [], 0, True
    if size:
        yield b"".join(rest)


def blocks(path: str | Path) -> Iterator[bytes]:
    """The decompressed bytes of a file in blocks of at most BLOCK. Raises DataError if they are damaged."""
    source = Source(str(path), 0, None)
    with opened(source) as raw, damage_as_data_error(source.path):
        stream = Ahead(decompressed(raw, source))
        while block := stream.read(BLOCK):
            yield block
