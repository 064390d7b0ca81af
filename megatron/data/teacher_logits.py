# SPDX-License-Identifier: Apache-2.0
"""A teacher's largest logits for the samples of a training, in files (`tools.teacher_logits` writes them).

    FOLDER/index.json              the settings on which samples and logits depend; sealed
    FOLDER/samples_0000000.logits  those of samples 0 to samples_per_file - 1 (storage/array_file.py)

A file appears when it is complete, so an interrupted tool continues with the next one. Samples have their numbers in the
dataset, which is built with the seed and the length of the index, whatever the student's. A digest of a sample's tokens
is compared when it is read.

Legend: s tokens of a sample, k logits of a token.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import xxhash

from megatron.errors import DataError, SettingsError
from megatron.storage.array_file import Pieces, read_arrays, write_arrays
from megatron.storage.durable import Damaged, read_sealed, replace_file, seal, storage_errors, whole_file

KIND, VERSION = "teacher's logits", 1
INDEX = "index.json"
FILE_BYTES = 256 << 20  # of a file, about
OPEN_FILES = 64


class Predictions(NamedTuple):
    """A teacher's predictions for tokens, [...]: ids and logits [..., k], the largest ones, fp32; log_sums [...] fp32: log
    sum exp of all logits / temperature.
    """

    ids: np.ndarray
    logits: np.ndarray
    log_sums: np.ndarray


@dataclass(frozen=True)
class StoredSettings:
    """The entries of an index. teacher, iteration: for messages alone; vocabulary: fingerprint of the tokenizer."""

    top_k: int
    temperature: float
    samples: int
    samples_per_file: int
    seq_length: int
    seed: int
    vocab_size: int
    vocabulary: Optional[str]
    reset_position_ids: bool
    reset_attention_mask: bool
    teacher: str
    iteration: int

    @property
    def complete(self) -> bool:
        """Whether all logits are stored."""
        return self.top_k >= self.vocab_size

    @property
    def starts(self) -> range:
        """The numbers of the first samples of all files."""
        return range(0, self.samples, self.samples_per_file)


def samples_of_file(top_k: int, seq_length: int, vocab_size: int) -> int:
    """The number of samples of a file of about `FILE_BYTES`."""
    return max(1, FILE_BYTES // (seq_length * (top_k * (id_type(vocab_size).itemsize + 4) + 4)))


def id_type(vocab_size: int) -> np.dtype:
    """The format of stored token ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def digest_of(tokens: np.ndarray) -> int:
    """The digest of a sample's tokens, those that the teacher reads."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int64).tobytes())


class LogitsStore:
    """A folder of a teacher's logits.

    Raises DataError for a folder without them.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.open = lru_cache(maxsize=OPEN_FILES)(self._open)
        try:
            _, entries = read_sealed(self.folder / INDEX)
            self.settings = StoredSettings(**{name: entries[name] for name in _names()})
        except (Damaged, KeyError) as error:
            raise DataError(
                f"{folder} holds no logits of a teacher",
                str(error),
                "store them: python -m megatron.tools.teacher_logits --load TEACHER --output FOLDER",
            ) from None

    @classmethod
    def create(cls, folder: str, settings: StoredSettings) -> "LogitsStore":
        """Begin a store, or continue one. Raises SettingsError for a store of other settings."""
        path = Path(folder)
        if (path / INDEX).exists():
            store = cls(folder)
            before, now = asdict(store.settings), asdict(settings)
            changed = [f"{name} {before[name]} is {value} now" for name, value in now.items() if before[name] != value]
            if changed:
                raise SettingsError(
                    f"--output {folder} holds logits of other settings: {', '.join(changed)}",
                    do="give the same settings to continue, or another --output",
                )
        else:
            with storage_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                replace_file(path / INDEX, seal(asdict(settings))[1])
        for left in path.glob(".*.tmp"):  # of an interrupted tool
            left.unlink(missing_ok=True)
        return cls(folder)

    def path(self, start: int) -> Path:
        """The file that begins with a sample."""
        return self.folder / f"samples_{start:07d}.logits"

    @property
    def missing(self) -> list[int]:
        """The first samples of the files that do not exist yet."""
        return [start for start in self.settings.starts if not self.path(start).exists()]

    def write(self, start: int, digests: Iterable[int], predictions: Predictions) -> None:
        """Write a file. predictions: [samples, s] tokens."""
        dtype = id_type(self.settings.vocab_size)
        arrays: Mapping[str, np.ndarray] = dict(
            digests=np.array(list(digests), np.uint64),
            ids=predictions.ids.astype(dtype).reshape(-1),
            logits=predictions.logits.astype(np.float32).reshape(-1),
            log_sums=predictions.log_sums.astype(np.float32).reshape(-1),
        )
        with whole_file(self.path(start)) as file:
            named = {name: Pieces.of(array) for name, array in arrays.items()}
            write_arrays(file.name, KIND, VERSION, dict(start=start), named)

    def _open(self, start: int):
        return read_arrays(self.path(start), KIND, VERSION).arrays

    def read(self, number: int, tokens: np.ndarray) -> Predictions:
        """The predictions for the tokens [s] of a sample. Raises DataError if it is not stored, or has other tokens."""
        s = self.settings
        if number >= s.samples:
            raise DataError(
                f"{self.folder} holds {s.samples:,} samples, and the run needs sample {number:,}",
                do="store more (--train-samples), or train less",
            )
        place, start = number % s.samples_per_file, number - number % s.samples_per_file
        if not self.path(start).exists():
            raise DataError(
                f"{self.path(start)} is missing: {len(self.missing)} of {len(s.starts)} files are",
                do="run megatron.tools.teacher_logits again: it continues",
            )
        arrays = self.open(start)
        if int(arrays["digests"][place]) != digest_of(tokens):
            raise DataError(
                f"sample {number:,} has other tokens than the one of which {self.folder} holds the teacher's logits",
                "the data, their split or the tokenizer differ from those of megatron.tools.teacher_logits",
                "give the same data, or store the teacher's logits for these",
            )
        rows = slice(place * s.seq_length, (place + 1) * s.seq_length)
        wide = slice(rows.start * s.top_k, rows.stop * s.top_k)
        ids, logits = (arrays[name][wide].reshape(s.seq_length, s.top_k) for name in ("ids", "logits"))
        return Predictions(ids.astype(np.int64), np.array(logits), np.array(arrays["log_sums"][rows]))


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(StoredSettings))
