# SPDX-License-Identifier: Apache-2.0
"""Read tables of texts and labels: .tsv as in GLUE (no quotes), .csv (quoted), .jsonl or .json (an object per line, or an
array of objects), .parquet and .arrow, or a folder of .txt files with an object per line, as in RACE.
"""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from megatron.data.file_formats import HEAD, TABLE_KINDS, TABLE_SUFFIXES, TableRows, detected
from megatron.errors import DataError

ENDINGS = (".jsonl", ".json", ".tsv", ".csv")  # in any case
SPOILT = 0.01  # share of rows that may have a wrong number of columns


class Row(NamedTuple):
    """A row of a table.

    place: index among all rows of the file, including those left out; where: start of the row ("line 3"); columns: by name,
    or by index from 0 for a list
    """

    place: int
    where: str
    columns: dict[Any, Any]


def read_table(path: Path, columns: Sequence[str] = (), wanted: Sequence[str] = ()) -> tuple[list[Row], list[str]]:
    """Read a table: (rows, notes on rows that are left out).

    columns: names of columns for a file without a header, that is, whose first line does not contain all of `wanted`
    Raises DataError for an invalid file, and names the line.
    """
    ending = path.suffix.lower()
    if ending in TABLE_SUFFIXES and not path.is_dir():
        return [Row(place, *row) for place, row in enumerate(_of_columns(path))], []
    if path.is_dir() or ending in (".json", ".jsonl"):
        rows = _in_folder(path) if path.is_dir() else _objects(path, _text(path))
        return [Row(place, *row) for place, row in enumerate(rows)], []
    text = _text(path)
    # Only .csv has quotes: in GLUE's .tsv, a quotation mark is text.
    lines = _quoted(path, text) if ending == ".csv" else _plain(text)
    table = list(lines)
    if not table:
        raise DataError(f"{path} is empty")
    header = [name.strip() for name in table[0][1]]
    if columns and not set(wanted) <= set(header):
        header, source = list(columns), f"{path}: columns"
    else:
        source, table = f"{path}, line {table[0][0]}: the header", table[1:]
    if twice := _twice(name for name in header if name):  # columns without a name are not read
        raise DataError(f"{source} names {twice!r} twice", "the second one would stand for both", "rename one of them")
    good = [
        Row(place, f"line {line}", dict(zip(header, cells)))
        for place, (line, cells) in enumerate(table)
        if len(cells) == len(header)
    ]
    bad = [(line, len(cells)) for line, cells in table if len(cells) != len(header)]
    return good, _spoilt(path, bad, len(table), len(header))


def text_of_file(path: object, what: str, do: Optional[str] = None) -> str:
    """The text of a file in UTF-8. Raises DataError, which begins with `what` and the reason. do: its advice"""
    try:
        return Path(str(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{what}: {getattr(error, 'strerror', None) or error}", do=do) from None


def _text(path: Path) -> str:
    try:
        # A lone "\r" is part of a text, not the end of a line.
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", str(error), "iconv -f ENCODING -t UTF-8 writes it so") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def _spoilt(path: Path, bad: list[tuple[int, int]], rows: int, columns: int) -> list[str]:
    """A note on rows with a wrong number of columns, which are left out. Raises DataError if there are too many."""
    if not bad:
        return []
    line, count = bad[0]
    if len(bad) > SPOILT * rows + 1:
        raise DataError(
            f"{path}, line {line}: {count} columns, where the header names {columns}",
            f"so it is with {len(bad)} of {rows} lines",
            "is it separated by tabs? A file with quotes is read as .csv",
        )
    return [
        f"{path}: {len(bad)} lines with another number of columns than the header are left out (first: line {line})"
    ]


def _plain(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row that is not empty, in a table without quotes."""
    return ((number, line.split("\t")) for number, line in enumerate(text.split("\n"), 1) if line)


def _quoted(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row that is not empty, in a table with quotes; a cell may span several lines."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # Python's own limit is 131,072 characters
    # Strict: otherwise an unclosed quotation mark puts all following text into one cell.
    reader, begin = csv.reader(io.StringIO(text, newline="\n"), strict=True), 1
    try:
        for cells in reader:
            if cells:
                yield begin, cells
            begin = reader.line_num + 1
    except csv.Error as error:
        if "new-line character" in str(error):
            raise DataError(
                f"{path}, line {reader.line_num}: a carriage return without a line feed, outside of quotation marks",
                do="quote the cell that it belongs to; where all lines end so, tr '\\r' '\\n' < FILE repairs them",
            ) from None
        raise DataError(
            f"{path}, line {begin}: {error} (line {reader.line_num})",
            "a cell that begins with a quotation mark ends with the next one, maybe many lines below",
            f'close the cell of line {begin}; write "" for a quotation mark inside one, and quote one with line breaks',
        ) from None


def _in_folder(path: Path) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(where, object) of each line of the .txt files in a folder, searched recursively, sorted by name."""
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise DataError(f"{path} is a folder without .txt files", do="give a file, or a folder of texts as RACE's")
    for file in files:
        for where, row in _objects(file, _text(file)):
            yield f"{file.relative_to(path)}, {where}", row


def _in_array(path: Path, text: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(where, columns) of each object or list in a JSON array."""
    items = json_in(text, str(path), "give an array of objects, or one object a line")
    for number, item in enumerate(items, 1):
        if not isinstance(item, (dict, list)):
            raise DataError(f"{path}, item {number}: {type(item).__name__}, no object", do="give an array of objects")
        yield f"item {number}", item if isinstance(item, dict) else dict(enumerate(item))


def _of_columns(path: Path) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(where, columns) of each row of a Parquet or Arrow file, without those that are null."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    kind = detected(head)
    if kind not in TABLE_KINDS:
        raise DataError(f"{path} holds neither Parquet nor Arrow", do="rename it, or copy or download it again")
    rows = TableRows(str(path), kind)
    lines = (line for part in iter(lambda: rows.read(0), b"") for line in part.splitlines())
    for number, line in enumerate(lines, 1):
        yield f"row {number}", {name: value for name, value in json.loads(line).items() if value is not None}


def _objects(path: Path, text: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(where, object) of each line that is not empty, or of each element of an array."""
    if text.lstrip().startswith("["):
        yield from _in_array(path, text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        row = json_in(line, f"{path}, line {number}", "give one object a line")
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {type(row).__name__}, no object", do="give one object a line")
        yield f"line {number}", row


class _NamedTwice(ValueError):
    """An object with a duplicate name, which Python would silently accept."""


def json_in(text: str, where: str, do: str) -> Any:
    """Parse a JSON text. Raises DataError for invalid JSON, duplicate names, and too deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_named_once)
    except _NamedTwice as error:
        raise DataError(
            f"{where}: an object has {error} twice", "the second one would stand for both", "rename one of them"
        ) from None
    except ValueError as error:
        raise DataError(f"{where}: not JSON", str(error), do) from None
    except RecursionError:
        raise DataError(
            f"{where}: lists or objects stand inside of each other, more deeply than can be read", do=do
        ) from None


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        raise _NamedTwice(repr(_twice(name for name, _ in pairs)))
    return columns


def _twice(names: Iterable[str]) -> Optional[str]:
    """The first duplicate name; None if there is none."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def is_number(word: str) -> bool:
    """Whether a word is a finite number."""
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def refuse_half_letters(text: str, where: str) -> None:
    """Raise DataError for half of a surrogate pair. JSON may contain one ("\\ud83d", a cut emoji); UTF-8 cannot."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {text[error.start : error.start + 1]!a} is half of a surrogate pair, which is no text",
            "an emoji was cut in two, perhaps",
            "write the whole one, or leave it out",
        ) from None


def refuse_many_lines(word: str, where: str) -> None:
    """Raise DataError for a tab or an end of line, which a cell of a table of predictions cannot contain."""
    if set("\t\n\r") & set(word):
        raise DataError(
            f"{where}: {word[:60]!r} has a tab or an end of line inside, and tables of predictions would be torn there",
            do="write it as one line without tabs",
        )


def text_in(value: Any, where: str) -> str:
    """The text of a cell. Raises DataError for other JSON values, such as null or a list."""
    if type(value) not in (str, int):
        raise DataError(
            f"{where}: {json.dumps(value, ensure_ascii=False)[:60]} stands where a text is wanted",
            do="give a string, or leave the row out",
        )
    refuse_half_letters(text := str(value), where)
    return text


def label_in(value: Any, where: str) -> str:
    """The label of a cell as text, "" if there is none. JSON's true and 1 become "true" and "1"."""
    if isinstance(value, (list, dict)):
        raise DataError(
            f"{where}: {json.dumps(value, ensure_ascii=False)[:60]} stands where a label is wanted",
            do="give one word or number",
        )
    if value is None or value != value:  # NaN: an empty cell of a table in memory
        return ""
    refuse_half_letters(word := str(value).strip(), where)
    return word.lower() if isinstance(value, bool) else word
