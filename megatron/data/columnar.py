# SPDX-License-Identifier: Apache-2.0
"""Read the rows of Parquet and Arrow files as JSON lines, a batch at a time. Needs pyarrow.

    TableRows("train-00000-of-00002.parquet", "Parquet", ("text",)).read(1) -> b'{"text": "Once upon a time"}\\n...'
    dataset_files("wikitext")      files of a folder that `datasets.save_to_disk` wrote, or that the Hugging Face Hub has

A datasets folder is taken by its own list of files (state.json); of several splits, only train is.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.errors import DataError, did_you_mean

PARQUET, ARROW, ARROW_STREAM = KINDS = ("Parquet", "Arrow", "an Arrow stream")
SUFFIXES = (".parquet", ".arrow")
STATE, SPLITS = "state.json", "dataset_dict.json"  # of `Dataset.save_to_disk`, and of `DatasetDict.save_to_disk`
DESCRIPTIONS = (STATE, SPLITS, "dataset_info.json", "dataset_infos.json")  # JSON beside the rows that is no document
BATCH = 1024  # rows
SPLIT_OF_NAME = re.compile(r"(train|test|validation|valid|dev)(?:[-_.]|$)")


class TableRows:
    """A stream of JSON lines, one for each row. Memory does not depend on the number of rows.

    columns: those that lines have; None: all but binary ones
    """

    def __init__(self, path: str, kind: str, columns: Sequence[str] | None = None):
        self.path, self.columns, self.done, self.rows = path, columns, 0, 0
        self._lines = self._read(kind)

    def read(self, size: int) -> bytes:
        """The next bytes, of any number; b"" at the end. Raises DataError for damaged files and unknown columns."""
        return next(self._lines, b"")

    @property
    def share(self) -> float:
        """The part of the rows that was read; 0 if their number is not known."""
        return self.done / self.rows if self.rows else 0.0

    def _read(self, kind: str) -> Iterator[bytes]:
        pyarrow = _pyarrow(self.path, kind)
        try:
            for batch in self._parquet(pyarrow) if kind == PARQUET else self._arrow(pyarrow, kind):
                self.done += batch.num_rows
                if batch.num_rows:
                    yield b"".join(_line(row) for row in batch.to_pylist())
        except (pyarrow.ArrowInvalid, OSError) as error:
            do = "copy or download it again"
            raise DataError(f"{self.path}: {kind} is damaged or cut short", str(error)[:200], do) from None

    def _parquet(self, pyarrow) -> Iterator:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path) as file:
            self.rows, columns = file.metadata.num_rows, self._taken(file.schema_arrow)
            yield from file.iter_batches(BATCH, columns=columns)

    def _arrow(self, pyarrow, kind: str) -> Iterator:
        with pyarrow.OSFile(self.path) as file:
            if kind == ARROW_STREAM:
                batches = pyarrow.ipc.open_stream(file)
                columns = self._taken(batches.schema)
            else:
                opened = pyarrow.ipc.open_file(file)
                columns = self._taken(opened.schema)
                batches = map(opened.get_batch, range(opened.num_record_batches))
            for batch in batches:
                batch = batch.select(columns)
                for start in range(0, batch.num_rows, BATCH):
                    yield batch.slice(start, BATCH)

    def _taken(self, schema) -> list[str]:
        if self.columns is None:
            return [field.name for field in schema if "binary" not in str(field.type)]
        for column in self.columns:
            if column not in schema.names:
                raise DataError(
                    f"{self.path}: no column {column!r}{did_you_mean(column, schema.names)}",
                    f"its columns: {', '.join(schema.names[:12])}",
                    "name the one that has the text: --json-keys COLUMN",
                )
        return list(self.columns)


def _line(row: dict) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n"


def _pyarrow(path: str, kind: str):
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise DataError(
            f"{path} holds {kind}: reading it needs the package pyarrow", do="pip install pyarrow"
        ) from None
    return pyarrow


def dataset_files(folder: str) -> tuple[list[str], str]:
    """(files with rows below a folder, a sentence about those that are left out); ([], "") if it has none."""
    root = Path(folder)
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    found = [path for path in found if not path.name.startswith(".")]
    states = {path.parent: _listed(path) for path in root.rglob(STATE)}
    saved = [path for path in found if path.parent not in states]
    saved += [path for folder in sorted(states) for path in states[folder]]  # in its order, without cache-*.arrow
    return without_other_splits(root, saved)


def without_other_splits(root: Path, files: Sequence[Path]) -> tuple[list[str], str]:
    """(the files below a folder, without those of other splits if there is one of train; a sentence about the others)."""
    splits = {path: _split_of(path.relative_to(root)) for path in files}
    others = sorted({split for split in splits.values() if split not in ("", "train")})
    if "train" not in splits.values() or not others:
        return [str(path) for path in files], ""
    taken = [str(path) for path in files if splits[path] in ("", "train")]
    return taken, f"of several splits only train is taken ({', '.join(others)}: name the files, or their folder)"


def _listed(state: Path) -> list[Path]:
    """The files of a saved dataset, from its state.json."""
    try:
        said = json.loads(state.read_text(encoding="utf-8"))
        if said.get("_indices_data_files"):
            do = "dataset.flatten_indices().save_to_disk(...) writes the rows in their order"
            raise DataError(f"{state.parent}: a choice of rows that an older version of datasets has saved", do=do)
        return [state.parent / one["filename"] for one in said["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [path for path in state.parent.iterdir() if path.suffix in SUFFIXES]


def _split_of(path: Path) -> str:
    """The split that a file belongs to by its name, or by its folder's; "" if they say none.

    >>> _split_of(Path("data/train-00000-of-00002.parquet")), _split_of(Path("dev/data-00000-of-00001.arrow"))
    ('train', 'dev')
    """
    for name in (path.name, *reversed(path.parts[:-1])):
        if found := SPLIT_OF_NAME.match(name):
            return found[1]
    return ""
