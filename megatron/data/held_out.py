# SPDX-License-Identifier: Apache-2.0
"""Split your own text into a training file and a held-out file.

The text of a document decides its side, so equal documents are on the same side. If that would hold out fewer than FEWEST
documents, as with a single book, the last part of each document is held out instead.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from megatron.data.json_input import Source, read_texts
from megatron.data.origin import text_hash
from megatron.errors import DataError
from megatron.storage.durable import whole_file

FEWEST = 5  # documents; with fewer, a single odd one would dominate the evaluation


def hold_out(sources: list[Source], train: str, held_out: str, percent: float) -> dict[str, tuple[int, int]]:
    """Write both files atomically as JSON lines. Returns path -> (documents, bytes of text).

    The sources are read twice, a document at a time. Raises DataError for input without text.
    """
    hashes = sorted(text_hash(text) for text in read_texts(sources))
    count = round(len(hashes) * percent / 100)
    last = hashes[count - 1] if count >= FEWEST else None  # the largest hash that is held out
    counts = {train: (0, 0), held_out: (0, 0)}
    for path in counts:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(train) as train_file, whole_file(held_out) as held_out_file:
        files = {train: train_file, held_out: held_out_file}
        for text in read_texts(sources):
            if last is not None:
                parts = [(held_out if text_hash(text) <= last else train, text)]
            else:
                parts = zip((train, held_out), cut(text, percent), strict=True)
            for path, part in parts:
                if part.strip():
                    files[path].write(json.dumps(dict(text=part), ensure_ascii=False).encode() + b"\n")
                    documents, size = counts[path]
                    counts[path] = documents + 1, size + len(part.encode())
        if not counts[train][0] or not counts[held_out][0]:
            what = " ".join(source.path for source in sources)
            why = f"{counts[train][0]} documents to train on, {counts[held_out][0]} held out"
            raise DataError(f"{what}: too little text to hold out a part of it", why, "give more text")
    return counts


def cut(text: str, percent: float) -> Iterator[str]:
    """Split a text; the second part has about `percent` of it. Cuts at the end of a line if one is near, else at a space.

    >>> list(cut("one two\\nthree\\nfour five six", 40))
    ['one two\\nthree\\n', 'four five six']
    """
    place = round(len(text) * (1 - percent / 100))
    nearest = max(0, 2 * place - len(text))  # as much again, at most
    ends = (text.rfind(mark, nearest, place) + 1 for mark in "\n ")
    place = next(filter(None, ends), place)
    yield text[:place]
    yield text[place:]
