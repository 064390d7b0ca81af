# SPDX-License-Identifier: Apache-2.0
"""Records in runs sorted by a 64-bit key, and reading of key ranges from the folders of many tasks.

The folder of a task: facts.json with the lengths of its runs, and for each column a file, run after run; the column
`keys` is sorted within each run. A reader takes the records of a range of keys from every run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.corpus.duplicates.shards import read_facts, write_facts
from megatron.errors import DataError

KEYS = 1 << 64
KEY = "keys"


class RunWriter:
    """Adds runs to the files of a folder. columns: name -> type of number, in addition to the keys"""

    def __init__(self, folder: Path, columns: Mapping[str, str]):
        self._folder, self._columns = folder, {KEY: "<u8", **columns}
        self._runs: list[int] = []
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in self._columns}

    def add(self, keys: np.ndarray, **columns: np.ndarray) -> None:
        order = np.argsort(keys, kind="stable")
        for name, values in {KEY: keys, **columns}.items():
            self._files[name].write(values[order].astype(self._columns[name], copy=False))
        self._runs.append(len(keys))

    def close(self, **facts: Any) -> None:
        for file in self._files.values():
            file.close()
        write_facts(self._folder, dict(facts, runs=self._runs, columns=self._columns))


class RunReader:
    """The runs of many folders."""

    def __init__(self, folders: Sequence[Path]):
        self.facts = [read_facts(folder) for folder in folders]
        self._folders = [Path(folder) for folder in folders]

    def count(self, first: int, last: int) -> int:
        """Number of records with first <= key <= last."""
        return sum(stop - start for _, start, stop in self._parts(first, last))

    def read(self, first: int, last: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(folder of each record, columns) of these records, in the order of the folders."""
        parts = list(self._parts(first, last))
        owners = np.repeat([number for number, _, _ in parts], [stop - start for _, start, stop in parts])
        columns = self.facts[0]["columns"] if self.facts else {KEY: "<u8"}
        values = {
            name: np.concatenate(
                [np.zeros(0, kind), *(self._column(number, name)[start:stop] for number, start, stop in parts)]
            )
            for name, kind in columns.items()
        }
        return owners.astype(np.int64), values

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(folder, first record, end) of each run that has records in the range."""
        for number, facts in enumerate(self.facts):
            keys, at = self._column(number, KEY), 0
            for length in facts["runs"]:
                run = keys[at : at + length]
                start = at + int(np.searchsorted(run, np.uint64(first)))
                stop = at + int(np.searchsorted(run, np.uint64(last), "right"))
                if start < stop:
                    yield number, start, stop
                at += length

    def _column(self, number: int, name: str) -> np.ndarray:
        path, kind = self._folders[number] / f"{name}.bin", self.facts[number]["columns"][name]
        records = sum(self.facts[number]["runs"])
        if not records:
            return np.zeros(0, kind)
        if path.stat().st_size != records * np.dtype(kind).itemsize:
            raise DataError(f"{path}: does not hold {records:,} records", do="remove its folder and run again")
        return np.memmap(path, kind, "r")


def partition_of_keys(number: int, of: int) -> tuple[int, int]:
    """[first, end) of the keys of a partition."""
    return KEYS * number // of, KEYS * (number + 1) // of


def fitting_ranges(count: Callable[[int, int], int], first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide keys [first, end) into ranges (first, last) of at most `most` records, or of one key."""
    if count(first, end - 1) <= most or end - first == 1:
        yield first, end - 1
        return
    middle = (first + end) // 2
    yield from fitting_ranges(count, first, middle, most)
    yield from fitting_ranges(count, middle, end, most)
