# SPDX-License-Identifier: Apache-2.0
"""Read shards in blocks, number documents over all shards, and write shards without some documents.

A document's number counts lines over all shards in their order, from 0, independent of the number of shards.
"""

import bisect
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.corpus.documents import DROPPED, SHARD, ShardWriter, decode, names_of
from megatron.data.json_input import find_sources, read_blocks
from megatron.errors import DataError

BLOCK = 1 << 21  # bytes of a shard that are processed together: much less than a task's memory, more than a document
FACTS = "facts.json"


def blocks_of_lines(path: Path, block_size: int = BLOCK) -> Iterator[list[bytes]]:
    """The lines of a shard in blocks, without their ends and without blank lines."""
    [source] = find_sources([str(path)])
    for block, _ in read_blocks(source, block_size):
        if lines := [line for line in block.split(b"\n") if line and not line.isspace()]:
            yield lines


def document_of(line: bytes) -> Optional[dict[str, Any]]:
    """The JSON object of a line, or None."""
    try:
        document = decode(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def text_of(line: bytes, key: str = "text") -> Optional[str]:
    """The text of a line's document, or None."""
    document = document_of(line)
    text = document.get(key) if document is not None else None
    return text if isinstance(text, str) else None


def encoded(text: str) -> bytes:
    """The text in UTF-8, with halves of surrogate pairs."""
    return text.encode("utf-8", "surrogatepass")


# ------------------------------------------------------------------------------------------------ numbers of documents


@dataclass(frozen=True)
class Numbering:
    """The document numbers of shards: shard `i` holds the numbers [starts[i], starts[i + 1])."""

    starts: np.ndarray  # [shards + 1], int64

    @classmethod
    def of(cls, counts: Iterable[int]) -> "Numbering":
        return cls(np.concatenate([[0], np.cumsum(list(counts), dtype=np.int64)]).astype(np.int64))

    @property
    def documents(self) -> int:
        return int(self.starts[-1])

    def by_shard(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(shard, places of its documents in `numbers`, their rows in the shard) for each shard that is met."""
        shard = np.searchsorted(self.starts, numbers, side="right") - 1
        order = np.argsort(shard, kind="stable")
        edges = np.flatnonzero(np.diff(shard[order])) + 1
        for places in np.split(order, edges) if len(order) else ():
            which = int(shard[places[0]])
            yield which, places, (numbers[places] - self.starts[which]).astype(np.int64)

    def place(self, number: int) -> tuple[int, int]:
        """(shard, row) of a document."""
        shard = bisect.bisect_right(self.starts, number) - 1
        return shard, int(number - self.starts[shard])


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    (folder / FACTS).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts in a task's folder. Raises DataError."""
    try:
        return json.loads((Path(folder) / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no folder of fingerprints", str(error), "give one that this suite wrote") from None


def numbering_of(folders: Sequence[Path]) -> Numbering:
    """The numbering of some shards, from the folders of their first phase."""
    return Numbering.of(read_facts(folder)["documents"] for folder in folders)


def text_sizes(folder: Path) -> np.ndarray:
    """Bytes of the text of each document of a shard, from the folder of a first phase, [documents]."""
    return np.fromfile(Path(folder) / "sizes.bin", "<u4")


def saved_below(folders: Sequence[str], name: str, phase: str) -> list[Path]:
    """Folders of a first phase for an earlier corpus: those below the given ones with a file of this name, sorted.

    Raises DataError if there is none.
    """
    result = []
    for folder in folders:
        below = sorted(path.parent for path in Path(folder).rglob(name))
        if not below:
            raise DataError(
                f"{folder}: holds no fingerprints", do=f"against: give the output folders of the phase {phase}"
            )
        result += below
    return result


# -------------------------------------------------------------------------------------------------------------- output


@dataclass
class Removed:
    """The removed documents of one shard, and the number of the document that each duplicates.

    similarity: of the two, where known; it may be below the threshold, where other documents connect them
    """

    rows: np.ndarray  # [removed], int64, ascending
    kept: np.ndarray  # [removed], int64
    similarity: Optional[np.ndarray] = None  # [removed]

    def to_bytes(self) -> bytes:
        return np.stack([self.rows, self.kept]).astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Removed":
        rows, kept = np.frombuffer(data, "<i8").reshape(2, -1)
        return cls(rows, kept)


class PieceFile:
    """Writes pieces into `<path>.bin`, and their ends into `<path>_ends.npy`."""

    def __init__(self, path: Path):
        self._path, self._file, self._ends = path, open(f"{path}.bin", "wb"), [0]

    def add(self, data: bytes) -> None:
        self._ends.append(self._ends[-1] + self._file.write(data))

    def __enter__(self) -> "PieceFile":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        np.save(f"{self._path}_ends.npy", np.array(self._ends, "<i8"))


def read_piece(path: Path, number: int) -> bytes:
    """Read a piece of a `PieceFile`."""
    start, end = np.load(f"{path}_ends.npy", mmap_mode="r")[number : number + 2].tolist()
    with open(f"{path}.bin", "rb") as file:
        file.seek(start)
        return file.read(end - start)


def copy_without(
    shard: Path,
    removed: Removed,
    sizes: np.ndarray,
    numbering: Numbering,
    names: Sequence[int | str],
    reason: str,
    output: Path,
) -> dict[str, Any]:
    """Write the kept lines of a shard, unchanged, and a note for each removed one. Returns counts.

    The notes, `dropped.jsonl`, contain row, id and url where the document has them, reason, the duplicated document (shard
    and row), and their similarity. sizes: bytes of each text of the shard, for the counts; names: of the shards in notes:
    numbers, or folders of fingerprints
    """
    gone = {row: number for number, row in enumerate(removed.rows.tolist())}
    with ShardWriter(output / SHARD, checksum=False) as kept, open(output / DROPPED, "wb") as notes:
        row = 0
        for lines in blocks_of_lines(shard):
            for line in lines:
                if row in gone:
                    of_shard, of_row = numbering.place(int(removed.kept[gone[row]]))
                    facts = dict(row=row, reason=reason, of_shard=names[of_shard], of_row=of_row)
                    if removed.similarity is not None:
                        facts["similarity"] = round(float(removed.similarity[gone[row]]), 4)
                    notes.write(json.dumps({**facts, **names_of(document_of(line) or {})}).encode() + b"\n")
                else:
                    kept.write_line(line)
                row += 1
    return fates(sizes, removed.rows, reason)


def fates(sizes: np.ndarray, dropped: np.ndarray, reason: str) -> dict[str, Any]:
    """Counts of documents and bytes of text before, after, and dropped. dropped: rows"""
    came, went = int(sizes.sum(dtype=np.int64)), int(sizes[dropped].sum(dtype=np.int64))
    return dict(
        documents_in=len(sizes),
        bytes_in=came,
        documents=len(sizes) - len(dropped),
        bytes=came - went,
        dropped={reason: dict(documents=len(dropped), bytes=went)},
    )
