# SPDX-License-Identifier: Apache-2.0
"""Read the items of an evaluation set from a file of JSON or plain text.

    {"text": ...}                   each object is an item, on one line or several
    [{"text": ...}, "a text"]       each element is an item
    {"data": [{"text": ...}]}       each element is an item, if the object has no text and one list of objects
    plain text                      each line is an item

The content decides the format, not the name. A mix of both is an error: read as plain text, a damaged JSON file would
match almost nothing in a corpus that contains it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Optional

from megatron.data.json_input import BYTE_ORDER_MARK, damage_as_data_error, find_sources, read_streams
from megatron.errors import DataError

_BEGINS_LIKE_JSON = re.compile(r"""\s*(\[[\s\[]*["'{]|\{\s*["'])""")
_SPACE = re.compile(r"\s*")


def read_items(path: str, keys: Optional[Sequence[str]] = None) -> Iterator[list[str]]:
    """The items of a file, each a list of texts.

    keys: keys of the texts of an object (default: "text", or all texts of an object without it)
    Raises DataError for a missing file, a mix of JSON and plain text, or an object without text.
    """
    for source in find_sources([path]):
        with damage_as_data_error(source.path):
            for part, _ in read_streams(replace(source, text=False)):
                data = b"".join(iter(partial(part.read, 1 << 20), b"")).removeprefix(BYTE_ORDER_MARK)
                yield from _items(_text_of(data, source.path), source.path, keys)


def _text_of(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8: {error.reason}", do="convert it (iconv -t UTF-8)") from None


def _items(text: str, path: str, keys: Optional[Sequence[str]]) -> Iterable[list[str]]:
    values, wrong = _json_values(text)
    if wrong is None:
        return _json_items(values, path, keys)
    if _BEGINS_LIKE_JSON.match(text) or any(map(_is_object, text.split("\n"))):
        line, reason = wrong
        raise DataError(
            f"{path}, line {line}: {reason}",
            "the file is not plain text, whose lines are items: other parts of it are JSON",
            'mend that line; a line of plain text becomes JSON as {"text": ...}',
        )
    return ([line] for line in text.split("\n") if line.strip())


def _json_values(text: str) -> tuple[list[tuple[int, Any]], Optional[tuple[int, str]]]:
    """([(first line, JSON object, list or text)], (line, reason) of the first error or None)."""
    decode, values, line, counted = json.JSONDecoder().raw_decode, [], 1, 0
    at = _SPACE.match(text).end()
    while at < len(text):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decode(text, at)
        except (ValueError, RecursionError) as error:
            place = f" (line {error.lineno})" if getattr(error, "lineno", line) != line else ""
            return values, (line, f"not JSON: {getattr(error, 'msg', error)}{place}")
        if not isinstance(value, (dict, list, str)):
            return values, (line, f"{value!r} is no object")
        values.append((line, value))
        at = _SPACE.match(text, at).end()
    return values, None


def _is_object(line: str) -> bool:
    if not line.lstrip().startswith("{"):
        return False
    try:
        return bool(json.loads(line))
    except (ValueError, RecursionError):
        return False


def _json_items(values: list[tuple[int, Any]], path: str, keys: Optional[Sequence[str]]) -> Iterator[list[str]]:
    for line, value in values:
        elements = _elements(value, keys)
        for number, element in enumerate(elements, 1):
            texts = _texts_of(element, keys)
            if not texts:
                which = f", item {number} of {len(elements)}" if len(elements) > 1 else ""
                wanted = f"text under {' or '.join(keys)}" if keys else "text"
                known = (
                    f"its keys are {', '.join(list(element)[:8])}" if isinstance(element, dict) and element else None
                )
                raise DataError(f"{path}, line {line}{which}: no JSON object with a {wanted}", known)
            yield texts


def _elements(value: Any, keys: Optional[Sequence[str]]) -> list:
    """The items in a JSON value: the value itself, or the elements of a list, which may be in an object."""
    if isinstance(value, dict) and not _texts_of(value, keys or ["text"]):
        lists = [one for one in value.values() if isinstance(one, list) and any(isinstance(row, dict) for row in one)]
        return lists[0] if len(lists) == 1 else [value]
    return value if isinstance(value, list) else [value]


def _texts_of(item: Any, keys: Optional[Sequence[str]]) -> list[str]:
    """The texts of an item; of an object, those under `keys`."""
    if keys is None and isinstance(item, dict):
        keys = ["text"] if isinstance(item.get("text"), str) else list(item)
    if keys is None:
        return list(_all_texts(item))
    return [text for key in keys for text in _all_texts(item.get(key))] if isinstance(item, dict) else []


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _all_texts(one)
