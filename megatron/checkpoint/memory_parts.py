# SPDX-License-Identifier: Apache-2.0
"""Parts of snapshots in the memory of a node: files of tensors, each with a record that has checksums of all its bytes.

    FOLDER/iter_0000040-5f0c91aa/held_by_00001/shard_00000.safetensors   rank 0's part of the snapshot, kept by rank 1
                                               shard_00000.json          its record, sealed; written last
                                 loaded/                                 the same as a checkpoint, for `Reader`

The number behind the iteration tells saves of one iteration apart: parts of two saves never form a snapshot. A part
without a record is one whose rank was killed while it wrote. Nothing here communicates: `memory_snapshots` does.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.checkpoint.backends import INDEX
from megatron.checkpoint.index import ShardFile, differing_blocks
from megatron.checkpoint.store import LiveSum, Piece, file_name, index_of, merge, write_file
from megatron.errors import Failure
from megatron.storage.durable import Damaged, read_sealed, seal, write_synced

_SAVE = re.compile(r"iter_(\d{7,})-([0-9a-f]{8})")
_HELD = re.compile(r"held_by_(\d{5,})")
_RECORD = re.compile(r"shard_(\d{5,})\.json")
LOADED = "loaded"


class SaveId(NamedTuple):
    """A save of a snapshot: its iteration, and a number that no other save has."""

    iteration: int
    number: str

    def folder(self, memory: Path) -> Path:
        return memory / f"iter_{self.iteration:07d}-{self.number}"

    def __str__(self) -> str:
        return f"the snapshot of iteration {self.iteration}"


@dataclass(frozen=True)
class MemoryPart:
    """A copy of a rank's part of a snapshot. writer: the rank whose part it is; holder: the rank that keeps this copy"""

    memory: Path
    save: SaveId
    writer: int
    holder: int

    @property
    def file(self) -> Path:
        return self.save.folder(self.memory) / f"held_by_{self.holder:05d}" / file_name(self.writer)

    @property
    def record_file(self) -> Path:
        return self.file.with_suffix(".json")

    def write(
        self,
        pieces: Iterable[Piece],
        world: int,
        state: Mapping[str, Any],
        live: Mapping[str, LiveSum] = MappingProxyType({}),
    ) -> None:
        """Write the pieces, then the record. state: of the run, the same in all parts. live: as in `write_file`"""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = write_file(self.file, pieces, live=live)
        own = dict(iteration=self.save.iteration, number=self.save.number, writer=self.writer, world=world)
        write_synced(self.record_file, seal({**own, "size": written.size, **written.entries, "state": dict(state)})[1])

    def record(self) -> dict[str, Any]:
        """The record. Raises Damaged if it is not whole, or of another part."""
        _, record = read_sealed(self.record_file)
        named = (record.get("iteration"), record.get("number"), record.get("writer"))
        if named != (*self.save, self.writer):
            raise Damaged(f"{self.record_file} is the record of another part: {named}")
        return record

    def verify(self) -> dict[str, Any]:
        """Read every byte, and return the record. Raises Damaged at the first block that does not have its checksum."""
        record = self.record()
        try:
            ((name, entry),) = record["files"].items()
            if name != self.file.name:
                raise Damaged(f"{self.record_file} is the record of {name}")
            sums = {key: sums for tensor in record["tensors"].values() for *_, key, sums in tensor["boxes"]}
            file = ShardFile(self.file, entry["bytes"], entry["header"])
            if file.entries.keys() != sums.keys():
                raise Damaged(f"{self.file} does not hold what its record lists")
            for problem in differing_blocks(file, record["block"], sums, 1, 0):
                raise Damaged(problem)
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{self.record_file} is no record of a part: {error!r}") from None
        return record

    def remove(self) -> None:
        """Remove it, the record first: a part without one is not looked at again."""
        for path in (self.record_file, self.file):
            path.unlink(missing_ok=True)


def parts_in(memory: Path) -> Iterator[MemoryPart]:
    """The parts that have a record, whole or not."""
    for folder in _entries(memory):
        if match := _SAVE.fullmatch(folder.name):
            save = SaveId(int(match[1]), match[2])
            for held in _entries(folder):
                if holder := _HELD.fullmatch(held.name):
                    for path in _entries(held):
                        if writer := _RECORD.fullmatch(path.name):
                            yield MemoryPart(memory, save, int(writer[1]), int(holder[1]))


def saves_in(memory: Path) -> list[SaveId]:
    """The saves with a folder, whole or not."""
    matches = [_SAVE.fullmatch(path.name) for path in _entries(memory)]
    return [SaveId(int(match[1]), match[2]) for match in matches if match]


def remove_save(memory: Path, save: SaveId) -> None:
    """Remove all parts of a save from this node's memory."""
    shutil.rmtree(save.folder(memory), ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def assemble(memory: Path, save: SaveId, records: Iterable[Mapping[str, Any]], here: Iterable[MemoryPart]) -> Path:
    """Make a folder that `Reader` reads as a checkpoint, of the records of all writers and the whole parts that are here.

    Files of other nodes are missing in it. Raises Damaged if the parts do not form whole tensors.
    """
    records = sorted(records, key=lambda record: record["writer"])
    folder = save.folder(memory) / LOADED
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in here:
        if not (folder / part.file.name).exists():
            os.link(part.file, folder / part.file.name)
    try:
        index = merge(records)
        content, _ = index_of(folder, index, {**records[0]["state"], "iteration": save.iteration})
    except (Failure, LookupError, TypeError, ValueError) as error:
        raise Damaged(f"{save} is not whole: {error}") from None
    write_synced(folder / INDEX, content)
    return folder
