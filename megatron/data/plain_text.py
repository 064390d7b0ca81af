# SPDX-License-Identifier: Apache-2.0
"""Convert plain text to JSON lines: a file is one document, or several documents between separators.

    PlainText(stream, "poems.txt", "blank-line").read(1 << 18) -> b'{"text": "Roses are red,"}\\n{"text": "violets ...'

Documents are streamed, so memory does not depend on their length.
"""

import codecs
import functools
import json
import re
import sys
from collections.abc import Iterator

from megatron.errors import DataError

BLANK_LINE = "blank-line"
SEPARATOR_HELP = "what parts the documents of a .txt: blank-line, or a text (default: a file is one document)"
BLOCK = 1 << 18  # bytes read at a time
_SPACE_AHEAD = re.compile(r"(?:[^\S\n]*\n)+")  # blank lines before a document


class PlainText:
    """A stream of JSON lines, one for each document of a plain text.

    separator: `blank-line` (one or more of them), or a text in which \\n is the end of a line and \\t a tab. Blank lines
    before a document and white space at its end count as part of the separator. Without a separator, the file is one
    document, unchanged. Documents of white space are left out. Reading raises DataError for text that is not UTF-8,
    for binary data, and for files without text.
    """

    def __init__(self, stream, path: str, separator: str | None = None):
        """stream: only needs `read`; path: for messages"""
        texts = _decoded(stream, path)
        self._lines = _as_lines(_separated(texts, path, separator) if separator else _whole(texts, path))

    def read(self, size: int) -> bytes:
        """The next bytes, of any number; b"" at the end."""
        return next(self._lines, b"")


def _decoded(stream, path: str) -> Iterator[str]:
    decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
    while True:
        data = stream.read(BLOCK)
        if (zero := data.find(b"\0")) >= 0:
            line += data.count(b"\n", 0, zero)
            why = "text has no byte of zero, but as UTF-16"
            raise DataError(f"{path}, line {line}: binary data", why, "give text in UTF-8, or leave the file out")
        try:
            yield decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            why = f"byte 0x{error.object[error.start]:02x}: {error.reason}"
            do = "convert it, for example: iconv -f LATIN1 -t UTF-8"
            raise DataError(f"{path}, line {line}: not UTF-8", why, do) from None
        if not data:
            return
        line += data.count(b"\n")


def _whole(texts: Iterator[str], path: str) -> Iterator[tuple[str, bool]]:
    """(a part of the one document, whether the document ends there)."""
    held, has_text = "", False  # white space at the start: there may be no text after it
    for text in texts:
        held, has_text = held + text, has_text or bool(text.strip())
        if has_text:
            yield held, False
            held = ""
    if not has_text:
        raise _empty(path)
    yield "", True


def _separated(texts: Iterator[str], path: str, separator: str) -> Iterator[tuple[str, bool]]:
    """(a part of a document, whether the document ends there)."""
    blank, separator = separator == BLANK_LINE, separator.replace("\\n", "\n").replace("\\t", "\t")
    pattern = re.compile(r"\n(?:[^\S\n]*\n)+" if blank else re.escape(separator))
    overlap = 0 if blank else len(separator) - 1  # characters at the end that may begin a separator
    held, is_open, occurs, has_text = "", False, False, False

    def begun(piece: str) -> str:
        return piece if is_open or not (ahead := _SPACE_AHEAD.match(piece)) else piece[ahead.end() :]

    for text in texts:
        *ended, rest = pattern.split(held + text)
        occurs = occurs or bool(ended)
        for piece in ended:
            piece = begun(piece).rstrip()
            if piece or is_open:
                yield piece, True
            is_open, has_text = False, has_text or bool(piece)
        # Hold back a possible start of a separator, and white space, which counts only if more text follows.
        part = rest[: len(rest) - overlap].rstrip() if len(rest) > overlap else ""
        held = rest[len(part) :]
        if part:
            yield begun(part), False
            is_open = has_text = True
    if last := begun(held).rstrip():
        yield last, True
    elif is_open:
        yield "", True
    elif not has_text:
        raise _empty(path)
    if not occurs:
        note(f"{path}: the separator {separator!r} does not occur in it: the file is one document")


def _empty(path: str) -> DataError:
    return DataError(f"{path}: there is no text in it", do="leave it out, or copy it again")


def _as_lines(parts: Iterator[tuple[str, bool]]) -> Iterator[bytes]:
    """JSON lines of documents given in parts."""
    is_open = False
    for text, ends in parts:
        head, tail = '{"text": "' * (not is_open), '"}\n' * ends
        if piece := head + json.dumps(text, ensure_ascii=False)[1:-1] + tail:  # b"" would end the stream
            yield piece.encode()
        is_open = not ends


@functools.cache
def note(words: str) -> None:
    """Print a note on stderr, once even if the file is read several times."""
    print(f"note: {words}", file=sys.stderr, flush=True)
