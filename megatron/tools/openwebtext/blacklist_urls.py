# SPDX-License-Identifier: Apache-2.0
"""Filter lists of URLs: drop blacklisted, malformed and duplicate ones.

    python -m megatron.tools.openwebtext.blacklist_urls URLs/ clean_urls.txt

IN is a list (`.txt`, one URL a line; also .gz .bz2 .xz .zst), a `.zip` of lists, or a folder of them, searched recursively.
A dropped URL counts under the first reason that applies: its domain, its page, its ending, 8 letters or fewer, malformed,
duplicate. A recipe's filter `url: {blacklist: [FILES]}` has the same rules.
The order is kept. Nothing is fetched, and nothing unpacked to the disk. A list that is not fully readable is reported
at the end (exit code 4); its readable part is used.
"""

import lzma
import os
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import xxhash

from megatron.corpus.filters.url import LONGEST, AddressRules, read_lists
from megatron.corpus.lines import split
from megatron.data.file_formats import COMPRESSIONS, SUFFIXES
from megatron.data.json_input import Ahead, Source, compression_of, decompressed
from megatron.errors import DataError, Failure, SettingsError, run_main
from megatron.settings.positional import divide, expect, parse_one
from megatron.settings.schema import setting
from megatron.storage.durable import whole_file

PROG = "python -m megatron.tools.openwebtext.blacklist_urls"
LISTS = (".txt", *SUFFIXES)  # endings of files of a folder that are read, in addition to .zip
REASONS = dict(  # in the order of the checks
    listed_domain="of a domain of the list",
    listed_page="a page of the list",
    listed_ending="with an ending of the list",
    short="of 8 letters or fewer",
    malformed="malformed",
    duplicate="met before",
)


@dataclass(frozen=True)
class BlacklistOptions:
    """The blacklist, and the limit of a compressed list."""

    blacklist: Optional[str] = setting(
        "a list of domains, pages and endings in place of ours (its form: see blacklist.txt)", None
    )
    log_interval: int = setting("addresses between progress lines", 100_000)
    max_unpacked_gb: float = setting("a packed list that holds more is left there: a zip bomb", 64.0)


def main(argv: list[str]) -> None:
    """IN OUT: read the lists, write the URLs to keep, print the counts."""
    files, flags = divide(argv, BlacklistOptions)
    options = parse_one(flags, BlacklistOptions, f"{PROG} IN OUT", __doc__)
    source, target = expect(files, "IN OUT", PROG)
    if options.log_interval < 1 or options.max_unpacked_gb <= 0:
        raise SettingsError("--log-interval starts at 1, --max-unpacked-gb above 0")
    sift = Sift(options.blacklist or Path(__file__).with_name("blacklist.txt"))
    set_aside = sift_lists(source, Path(target), sift, options)
    print(f"FINAL | {sift.figures()}")
    if set_aside:
        what = f"{len(set_aside)} list{'s' * (len(set_aside) > 1)} could not be read whole"
        raise DataError(what, "\n  ".join(set_aside), f"mend or remove them; {target} has what could be read")


class Sift:
    """Decides for each URL why it is dropped. Remembers those that it keeps: about 100 bytes each."""

    def __init__(self, blacklist: str | Path):
        self._rules = AddressRules(read_lists([blacklist]))
        self._met: set[bytes] = set()
        self.counts = Counter(dict.fromkeys(("read", "kept", *REASONS), 0))

    def __call__(self, address: str) -> str:
        """The reason for dropping a URL, one of REASONS; "" to keep it."""
        reason = self._judge(address)
        self.counts["read"] += 1
        self.counts[reason or "kept"] += 1
        return reason

    def _judge(self, address: str) -> str:
        if reason := self._rules(address):
            return reason
        mark = xxhash.xxh3_128_digest(address.encode())
        if mark in self._met:
            return "duplicate"
        self._met.add(mark)
        return ""

    def figures(self) -> str:
        """All counts on a line, in the order of the checks."""
        dropped = " | ".join(f"{REASONS[name]}: {self.counts[name]:,}" for name in REASONS)
        return f"addresses: {self.counts['read']:,} | {dropped} | kept: {self.counts['kept']:,}"


def sift_lists(source: str, target: Path, sift: Sift, options: BlacklistOptions) -> list[str]:
    """Write the kept URLs of all lists to `target`, which appears when it is complete. Returns read errors.

    Raises DataError if there is no list.
    """
    paths = find_lists(source)
    set_aside = []
    with whole_file(target) as out:
        for path in paths:
            try:
                for address in addresses(path, options.max_unpacked_gb * 1e9):
                    if not sift(address):
                        out.write(address.encode() + b"\n")
                    if sift.counts["read"] % options.log_interval == 0:
                        print(f"PROGRESS | {sift.figures()}", flush=True)
            except Unreadable as error:
                set_aside.append(f"{path}: {error}")
    return set_aside


def find_lists(source: str) -> list[str]:
    """The list IN, or those of the folder IN, sorted. Links to folders are not followed, to avoid cycles."""
    if not os.path.isdir(source):
        if not os.path.exists(source):
            raise DataError(f"{source}: no such list or folder")
        return [source]
    paths = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(source)
        for name in names
        if name.lower().endswith((*LISTS, ".zip")) and not name.startswith(".")
    ]
    if not paths:
        raise DataError(f"{source}: the folder holds no lists", do=f"lists are *{' *'.join((*LISTS, '.zip'))}")
    return sorted(path for path in paths if os.path.isfile(path))


class Unreadable(Exception):
    """Raised for a list that is damaged, encrypted, or too large. The text says why."""


def addresses(path: str, most: float) -> Iterator[str]:
    """The URLs of a list, in order, without blank lines. most: limit of its unpacked bytes. Raises Unreadable."""
    try:
        with open(path, "rb") as raw:
            head = raw.peek(6)[:6]
            if not head.startswith(b"PK\x03\x04"):
                packed = compression_of(head) in COMPRESSIONS.values()
                stream = decompressed(raw, Source(path, 0, compression_of(head)))
                yield from _addresses(_Limited(stream, most if packed else float("inf")))
                return
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.is_dir():
                    with archive.open(member) as stream:
                        limited = _Limited(stream, most)
                        yield from _addresses(limited)
                        most = limited.left
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise Unreadable(f"damaged or locked: {error or type(error).__name__}") from None
    except (OSError, Failure) as error:  # bz2 and gzip raise OSError for bad data, zstd Failure
        raise Unreadable(str(error).splitlines()[0]) from None


class _Limited:
    """The blocks of a stream, up to a number of bytes. Raises Unreadable if there are more."""

    def __init__(self, stream, most: float):
        self._stream, self._most, self.left = Ahead(stream), most, most

    def __iter__(self) -> Iterator[bytes]:
        while data := self._stream.read(1 << 16):
            self.left -= len(data)
            if self.left < 0:
                raise Unreadable(f"it unpacks to more than {self._most / 1e9:,.3g} GB")
            yield data


def _addresses(blocks: Iterable[bytes]) -> Iterator[str]:
    """The stripped lines, without blank ones. A line that is too long or not UTF-8 becomes a malformed URL."""
    for line in split(blocks, LONGEST):
        if text := line.strip():
            yield text.decode("utf-8", errors="replace") if len(line) <= LONGEST else f"? {line[:64]!r}"


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
