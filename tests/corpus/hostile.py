# SPDX-License-Identifier: Apache-2.0
"""Inputs that somebody made to break things, by a seeded generator: `case(seed)` is always the same file.

A case is a file with the number of documents that have to come out of it and of lines that have to be set aside, or with
the words of a refusal. Between hostile lines stand good ones, which have to survive.
"""

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from dataclasses import dataclass

import zstandard

GOOD = json.dumps(dict(text="This is a good sentence of English, and it has to survive whatever stands around it."))


@dataclass(frozen=True)
class Hostile:
    """refused: a part of the message with which the whole file is turned down; None where it is read."""

    name: str
    data: bytes
    documents: int = 0
    rejected: int = 0
    refused: str | None = None


def case(seed: int) -> Hostile:
    chance = random.Random(seed)
    return chance.choice(FILES)(chance)


# ---------------------------------------------------------------------------------------------------- lines


def noise(chance, size=200):
    """Bytes without line ends that are no UTF-8."""
    return bytes(chance.choice([*range(10), *range(11, 256)]) for _ in range(chance.randrange(1, size))) + b"\xff"


def cut_json(chance):
    return GOOD[: chance.randrange(1, len(GOOD) - 1)].encode()


def nested(chance):
    depth = chance.choice((2_000, 100_000))
    return random.Random(depth).choice((b'{"text": ' + b"[" * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth))


REJECTED = (
    noise,
    cut_json,
    nested,
    lambda chance: b'{"text": "' + noise(chance) + b'"}',
    lambda chance: json.dumps(dict(text=chance.choice((None, 3, 1.5, True, {}, ["a", 1], {"a": "b"}, ["a"])))).encode(),
    lambda chance: json.dumps(dict(body="no text")).encode(),
    lambda chance: json.dumps(chance.choice(([], "text", 3, None, True, [dict(text="a")]))).encode(),
    lambda chance: b'{"text": "\\ud800 half of a pair"}',
    lambda chance: b'{"text": "This is an English text with an address.", "url": "\\udfff"}',
    lambda chance: b'{"text": "This is an English text with a key.", "\\ud83d": 1}',
    lambda chance: b"\0" * chance.randrange(1, 500),
    lambda chance: b'{"text": "raw \0 byte"}',
    lambda chance: b'{"text": "one"} {"text": "two"}',
    lambda chance: b'{"text": "a", "n": ' + b"9" * 10_000 + b"}",
    lambda chance: b"\xef\xbb\xbf{}",
    lambda chance: b'{"text": "' + b"x" * (1 << 20) + b'"}',  # longer than the limit of the test
    lambda chance: b"'text': 'single quotes'",
    lambda chance: b"<html>&a;&a;&a;</html>",
)
KEPT = (
    lambda chance: b'{"text": "This text has an escaped \\u0000 byte, and goes on for some words in English."}',
    lambda chance: b'{"text": "This is a text beside a number that is none, in English.", "n": NaN, "m": 1e999}',
    lambda chance: b'{"text": "gone", "text": "This is the second text of the same key, and it is English."}',
    lambda chance: b'{"text": "This line ends in a carriage return, as some lines of English text do."}\r',
    lambda chance: (
        b'{"text": "This is a text beside a nested value, in English.", "a": ' + b"[" * 90 + b"]" * 90 + b"}"
    ),
    lambda chance: GOOD.encode(),
)
BLANK = (lambda chance: b"", lambda chance: b"  \t ", lambda chance: b"\r")
LIMIT = 1 << 20  # bytes of the longest line in the tests


def lines(chance):
    """(bytes, documents, rejected) of hostile, blank and good lines in any order."""
    found, documents, rejected = [], 0, 0
    for _ in range(chance.randrange(1, 6)):
        kind = chance.choice((REJECTED, REJECTED, KEPT, BLANK))
        found += [chance.choice(kind)(chance), GOOD.encode()]
        documents += 1 + (kind is KEPT)
        rejected += kind is REJECTED
    return b"\n".join(found) + chance.choice((b"", b"\n")), documents, rejected


# ---------------------------------------------------------------------------------------------------- files


def plain(chance):
    data, documents, rejected = lines(chance)
    if data.startswith((b"PK\3\4", b"BZh")):  # noise that says it is something else
        return plain(chance)
    return Hostile("lines.jsonl", GOOD.encode() + b"\n" + data, documents + 1, rejected)


def empty(chance):
    return chance.choice(
        (Hostile("empty.jsonl", b""), Hostile("blank.jsonl", b"\n\n \n"), Hostile("mark.jsonl", b"\xef\xbb\xbf"))
    )


PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def packed(chance):
    suffix = chance.choice(list(PACK))
    data, documents, rejected = lines(chance)
    return Hostile(f"lines.jsonl{suffix}", PACK[suffix](GOOD.encode() + b"\n" + data), documents + 1, rejected)


def cut_off(chance):
    """Compressed data that ends too early."""
    suffix = chance.choice(list(PACK))
    data = PACK[suffix]((GOOD + "\n").encode() * 500 + noise(chance, 4000))
    return Hostile(f"cut.jsonl{suffix}", data[: chance.randrange(len(data) // 2, len(data) - 13)], refused="damaged")


def misnamed(chance):
    suffix, other = chance.sample(list(PACK), 2)
    return Hostile(f"lines.jsonl{suffix}", PACK[other](GOOD.encode()), refused="not what its name says")


def no_lines(chance):
    """Archives and tables that hold no lines."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("../../outside.jsonl", b"0" * 1_000_000)
    head = chance.choice((archive.getvalue(), b"PAR1" + noise(chance), b"7z\xbc\xaf\x27\x1c" + noise(chance)))
    return Hostile("lines.jsonl", head, refused="not JSON lines")


def bomb(chance):
    """Much out of little: one endless line, or very many blank ones."""
    size = 1 << chance.choice((21, 23))
    data = chance.choice((b'{"text": "' + b"a" * size, b"\n" * size, b"[" * size, b"\0" * size))
    suffix = chance.choice((".gz", ".zst", ".bz2"))
    bad = 0 if data[:1] == b"\n" else 1
    if data[:1] == b"\0":  # as an empty tar archive begins
        return Hostile(f"zeros.jsonl{suffix}", PACK[suffix](data), refused="not what its name says")
    return Hostile(f"bomb.jsonl{suffix}", PACK[suffix](data + b"\n" + GOOD.encode()), 1, bad)


def archive(chance):
    """A tar archive with names that point out of it, links and devices."""
    stream = io.BytesIO()
    data, documents, rejected = lines(chance)
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in ("../../outside.jsonl", "/tmp/outside.jsonl", "a/../../b.jsonl"):
            info = tarfile.TarInfo(name)
            info.size = len(data) + 1
            tar.addfile(info, io.BytesIO(data + b"\n"))
        for name, kind in (
            ("link.jsonl", tarfile.SYMTYPE),
            ("hard.jsonl", tarfile.LNKTYPE),
            ("pipe.jsonl", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    return Hostile("lines.tar", stream.getvalue(), 3 * documents, 3 * rejected)


FILES = (plain,) * 6 + (packed, packed, empty, cut_off, misnamed, no_lines, bomb, archive)
