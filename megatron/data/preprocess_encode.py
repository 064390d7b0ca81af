# SPDX-License-Identifier: Apache-2.0
"""Encode a block of JSON lines into token arrays, for the workers of `preprocess.py`. No files, no processes."""

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron.data.contamination import Screen, Screening
from megatron.data.json_input import BadLine, parse_line, values_of
from megatron.data.origin import NO_ORIGINS, PIECE_SHIFT, origins_of, text_hash
from megatron.errors import DataError
from megatron.telemetry.host_memory import available_memory, resident_memory
from megatron.tokenizer.base import Tokenizer

try:
    from orjson import loads
except ImportError:  # three times slower, otherwise the same
    from json import loads

# Bytes by which the tokenizer's cache of words may grow a process. gigatoken's table doubles, so the peak is about three
# times this. 100 MB of web pages fill about 170 MB, and a full cache is three times as fast as an empty one.
LEAST_CACHE, MOST_CACHE = 64 << 20, 256 << 20
SEARCHED = 1 << 16  # characters of a block in which names of special tokens are searched


@dataclass
class EncodedDocuments:
    """Documents of one target (a JSON key, and a partition) in file order.

    tokens [n], lengths int32 [sequences], counts int32 [documents]: sequences of each document. origins [documents]: the
    position of each document in the block (`origin.py`), or empty.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    origins: np.ndarray

    @property
    def sizes(self) -> tuple[int, int, int]:
        return len(self.tokens), len(self.lengths), len(self.counts)


CRLF = b"\\r\\n"  # in a string of JSON


@dataclass
class Encoded:
    """An encoded block. `targets[key * partitions + residue]` holds the lines with number % partitions == residue,
    counted from the first line of the block. `rejected`: (line in the block, reason). `screening`: results of the search
    for evaluation sets, or None."""

    targets: list[EncodedDocuments]
    lines: int
    text_bytes: int
    rejected: list[tuple[int, str]]
    screening: Screening | None = None
    crlf: int = 0  # line ends of Windows inside texts
    named: list[int] = field(default_factory=list)  # see `SpecialNames`


@dataclass
class _Bin:
    pieces: list = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # line and piece of each document: see `origins_of`
    hashes: list[int] = field(default_factory=list)

    def documents(self, dtype: np.dtype, starts: np.ndarray | None) -> EncodedDocuments:
        """starts: offsets of the block's lines; None: no origins."""
        tokens = np.concatenate(self.pieces, dtype=dtype, casting="unsafe") if self.pieces else np.empty(0, dtype)
        origins = NO_ORIGINS if starts is None else origins_of(starts, self.lines, self.hashes)
        return EncodedDocuments(tokens, np.array(self.lengths, np.int32), np.array(self.counts, np.int32), origins)


class SpecialNames:
    """Counts texts with names of special tokens, which become text (without --parse-special).

    It searches the first SEARCHED characters of a block, so that it takes no time that can be measured.
    """

    def __init__(self, tokenizer: Tokenizer):
        ids = {} if tokenizer.parse_special else tokenizer.special_tokens
        self.names = sorted(ids, key=ids.get)
        self._find = re.compile(tokenizer.special_names).findall

    def count(self, texts: list[str]) -> list[int]:
        """Numbers of texts that were searched, of those with a name, and of those with each of `names`."""
        found: Counter[str] = Counter()
        searched, named, room = 0, 0, SEARCHED
        for text in texts if self.names else ():
            if room <= 0:
                break
            there = set(self._find(text[:room]))
            found.update(there)
            searched, named, room = searched + 1, named + bool(there), room - len(text)
        return [searched, named, *(found[name] for name in self.names)]


class BlockEncoder:
    """Encodes blocks of lines. `split`: text -> sentences, None to keep each text whole. `keeps_empty`: keep documents
    without tokens. `origins`: record the position of each document. `screen`: searches for evaluation sets."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        keys: list[str],
        dtype: np.dtype,
        append_eod: bool,
        split: Callable[[str], list[str]] | None = None,
        partitions: int = 1,
        keeps_empty: bool = True,
        cache_memory: int = MOST_CACHE,
        origins: bool = False,
        screen: Screen | None = None,
    ):
        self.origins, self.screen, self.special = origins, screen, SpecialNames(tokenizer)
        self._tokenizer, self._encode = tokenizer, tokenizer.document_encoder
        self._keeps_empty = keeps_empty
        self._cache_memory, self._memory_limit = cache_memory, None
        self._keys, self._dtype, self._split, self._partitions = keys, dtype, split, partitions
        self._eod = np.array([tokenizer.eod], dtype) if append_eod else None

    def __call__(self, block: bytes) -> Encoded:
        lines = io.BytesIO(block).readlines()  # each with its newline; five times as fast as `split`
        bins = [[_Bin() for _ in range(self._partitions)] for _ in self._keys]
        rejected, first = [], []
        screening = self.screen(self._readable(lines)) if self.screen else None
        for number, line in enumerate(lines):
            try:
                parts = screening.parts.get(number) if screening else None
                if parts is None:
                    parts = [(key, 0, value) for key, value in enumerate(self._values(line) or ())]
                documents = [(key, part, value, *self._document(value)) for key, part, value in parts]
            except BadLine as reason:
                rejected.append((number, str(reason)))
                continue
            except DataError as error:  # the tokenizer cannot take this text
                rejected.append((number, str(error)))
                continue
            for key, part, value, pieces, lengths in documents:
                if len(first) < 1000:
                    first.append(value if type(value) is str else "\n".join(value))
                bin = bins[key][number % self._partitions]
                bin.pieces += pieces
                bin.lengths += lengths
                if lengths or self._keeps_empty:
                    bin.counts.append(len(lengths))
                    if self.origins:
                        bin.lines.append(number + (part << PIECE_SHIFT))
                        bin.hashes.append(text_hash(value))
        self._bound_memory()
        starts = np.cumsum([0] + [len(line) for line in lines]) if self.origins else None
        targets = [bin.documents(self._dtype, starts) for row in bins for bin in row]
        named = self.special.count(first)
        return Encoded(targets, len(lines), len(block), rejected, screening, block.count(CRLF), named)

    def _readable(self, lines: list[bytes]) -> Iterator[tuple[int, list]]:
        """(number, texts) of each line with texts."""
        for number, line in enumerate(lines):
            with contextlib.suppress(BadLine):
                if values := self._values(line):
                    yield number, values

    def _bound_memory(self) -> None:
        """Drop the tokenizer's cache of words if the process has grown by `cache_memory` since the first block.

        Natural text seldom does that; random strings, hashes or base64 do within 100 MB.
        """
        memory = resident_memory()
        if self._memory_limit is None:
            self._memory_limit = memory + self._cache_memory
        elif memory > self._memory_limit:
            self._encode = None
            self._tokenizer.renew()
            self._encode = self._tokenizer.document_encoder
            self._memory_limit = max(self._memory_limit, resident_memory() + self._cache_memory // 2)

    def _values(self, line: bytes) -> list | None:
        """The texts of a line; None for a blank one. The tolerant parser decides on lines that the fast one rejects."""
        try:
            record = loads(line)
            values = [record[key] for key in self._keys]
        except Exception:
            return parse_line(line.removesuffix(b"\n"), self._keys)
        if all(type(value) is str for value in values) and type(record) is dict:
            return values
        return values_of(record, self._keys)

    def _document(self, value: str | list[str]) -> tuple[list, list[int]]:
        """(ids, lengths) of the sequences that are not empty; the end of document belongs to the last one."""
        if type(value) is str:
            texts = self._split(value) if self._split else (value,)
        else:
            texts = value
        pieces = [ids for text in texts if len(ids := self._encode(text))]
        lengths = [len(ids) for ids in pieces]
        if pieces and self._eod is not None:
            pieces.append(self._eod)
            lengths[-1] += 1
        return pieces, lengths


def cache_memory(processes: int) -> int:
    """Bytes per process for the tokenizer's cache of words: together an eighth of the free memory."""
    return min(max(int(available_memory()) // 8 // processes, LEAST_CACHE), MOST_CACHE)
