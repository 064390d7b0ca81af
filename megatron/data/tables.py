# SPDX-License-Identifier: Apache-2.0
"""Tables of texts and labels: .tsv as GLUE has it (no quotes), .csv (quoted), .jsonl or .json (an object a line)."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.errors import DataError

ENDINGS = (".jsonl", ".json", ".tsv", ".csv")  # in capitals, too
SPOILT = 0.01  # of the rows that may have another number of columns than the header


class Row(NamedTuple):
    """place: from 0, among all rows of the file, also those that are left out; line: of the file, where it begins."""

    place: int
    line: int
    columns: dict[str, Any]


def read_table(path: Path, columns: Sequence[str] = (), wanted: Sequence[str] = ()) -> tuple[list[Row], list[str]]:
    """(rows, notes of what was left out).

    columns: of a file whose first line does not name `wanted`, and is a row then.
    Raises DataError for what cannot be read, naming the line.
    """
    try:
        # A lone "\r" is part of a text: as the end of a line it would leave half of one.
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8", str(error), "iconv -f ENCODING -t UTF-8 writes it so") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    ending = path.suffix.lower()
    if ending in (".json", ".jsonl"):
        return [Row(place, *found) for place, found in enumerate(_objects(path, text))], []
    # Without quotes where it is no .csv: in GLUE a quotation mark is text.
    lines = _quoted(path, text) if ending == ".csv" else _plain(text)
    table = list(lines)
    if not table:
        raise DataError(f"{path} is empty")
    header = [name.strip() for name in table[0][1]]
    if columns and not set(wanted) <= set(header):
        header = list(columns)
    else:
        table = table[1:]
    good = [
        Row(place, line, dict(zip(header, cells)))
        for place, (line, cells) in enumerate(table)
        if len(cells) == len(header)
    ]
    bad = [(line, len(cells)) for line, cells in table if len(cells) != len(header)]
    return good, _spoilt(path, bad, len(table), len(header))


def _spoilt(path: Path, bad: list[tuple[int, int]], rows: int, columns: int) -> list[str]:
    """A note of rows that are left out, (line, columns) each. Raises DataError where they are too many for an accident."""
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
    """(line, cells) of each row that is not empty."""
    return ((number, line.split("\t")) for number, line in enumerate(text.split("\n"), 1) if line)


def _quoted(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """As `_plain`, of text with quotes, where a cell may have several lines."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # Python's own limit is 131,072 characters
    # Strict: otherwise a quotation mark that nobody closes takes all that follows into one cell.
    reader, begin = csv.reader(io.StringIO(text, newline="\n"), strict=True), 1
    try:
        for cells in reader:
            if cells:
                yield begin, cells
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begin}: {error} (line {reader.line_num})",
            "a cell that begins with a quotation mark ends with the next one, maybe many lines below",
            f'close the cell of line {begin}; write "" for a quotation mark inside one, and quote one with line breaks',
        ) from None


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) of each line that is not empty."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON", str(error), "give one object a line") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: {type(row).__name__}, no object", do="give one object a line")
        yield number, row


def text_in(value: Any, where: str) -> str:
    """A cell's text. Raises DataError for what JSON may have in its place: Python has words for null and lists, too."""
    if type(value) not in (str, int):
        raise DataError(
            f"{where}: {json.dumps(value, ensure_ascii=False)[:60]} stands where a text is wanted",
            do="give a string, or leave the row out",
        )
    return str(value)


def label_in(value: Any, where: str) -> str:
    """A cell's label as a word, "" where there is none; JSON has true and 1 where others have "true" and "1"."""
    if isinstance(value, (list, dict)):
        raise DataError(
            f"{where}: {json.dumps(value, ensure_ascii=False)[:60]} stands where a label is wanted",
            do="give one word or number",
        )
    if value is None or value != value:  # NaN is what tables in memory have for an empty cell
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()
