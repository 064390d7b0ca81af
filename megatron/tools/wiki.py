# SPDX-License-Identifier: Apache-2.0
"""Extract the plain text of a wiki dump's articles, into folders as WikiExtractor writes them.

    python -m megatron.tools.wiki enwiki-latest-pages-articles.xml.bz2 --output text --json --workers 8

text/AA/wiki_00, wiki_01 ... hold lines {"id", "revid", "url", "title", "text"}; preprocess_data.py --input text takes them.
Redirects, namespaces not in --namespaces and pages without text are left out. The folder appears when it is complete,
with the same bytes for any --workers. megatron/corpus/wikitext.py documents what a text keeps of a page.
"""

import bz2
import html
import itertools
import json
import os
import re
import signal
import string
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from megatron.corpus.processes import end, process_pool
from megatron.corpus.wikidump import END, BadPages, DumpSite, WikiDump, WikiPage, pages_of
from megatron.corpus.wikitext import WikiSite, plain_text
from megatron.errors import DataError, MissingPackage, SettingsError, no_such_file, run_main
from megatron.mpu.cpu_threads import cores
from megatron.settings.positional import divide, expect, parse_one
from megatron.settings.schema import setting
from megatron.storage.durable import locked_folder, sync_folder
from megatron.telemetry.figures import size

PROG = "python -m megatron.tools.wiki"
SECONDS = 20  # limit for a page: broken markup can take time quadratic in its length
PIECES_AHEAD = 4  # queued pieces per worker
SHOWN = 5  # titles of pages set aside that are printed


@dataclass(frozen=True)
class WikiOptions:
    """Options of the extraction. The first five have WikiExtractor's names."""

    output: str = setting("folder of the texts (-o)", "text")
    bytes: str = setting("size of a file (-b): a number, or with K, M or G; 0: a file for each article", "1M")
    compress: bool = setting("pack the files by bzip2 (-c)", False)
    json: bool = setting("whether files hold lines of JSON or, with --no-json, <doc> elements", True)
    namespaces: str = setting("numbers of the namespaces that are taken: 0,14 (-ns)", "0")
    workers: Optional[int] = setting("processes (default: one per core)", None, "--processes")
    lists: bool = setting("whether items of lists are text, too", True)
    min_text_length: int = setting("articles of fewer characters are left out", 1)
    templates: Optional[str] = setting("accepted; templates are not expanded", None)
    quiet: bool = setting("no progress lines (-q)", False)


LETTERS = {"-o": "--output", "-b": "--bytes", "-c": "--compress", "-ns": "--namespaces", "-q": "--quiet"}


def main(argv: list[str]) -> None:
    """DUMP: extract."""
    files, flags = divide([word for word in argv if word != "--no-templates"], WikiOptions, letters=LETTERS)
    options = parse_one(flags, WikiOptions, f"{PROG} DUMP", __doc__)
    [dump] = expect(files, "DUMP", PROG)
    file_bytes(options.bytes)
    if options.workers is not None and options.workers < 1 or not re.fullmatch(r"\d+(,\d+)*", options.namespaces):
        raise SettingsError("--workers starts at 1; --namespaces are numbers with commas between them")
    if not os.path.exists(dump):
        raise DataError(f"{dump}: {no_such_file(dump)}", do=f"{PROG} enwiki-latest-pages-articles.xml.bz2")
    try:
        import mwparserfromhell  # noqa: F401  # checked before anything is written
    except ImportError as error:
        do = "pip install '.[corpus]' (or mwparserfromhell)"
        raise MissingPackage("dumps of wikis need the package mwparserfromhell", str(error), do) from None
    start = time.perf_counter()
    counts, set_aside = extract(dump, options)
    seconds = time.perf_counter() - start
    left_out = " | ".join(f"{name}: {counts[name]:,}" for name in LEFT_OUT if counts[name])
    speed = f"{size(counts['bytes'] / seconds)}/s"
    print(f"{counts['articles']:,} articles in {options.output} | {left_out or 'nothing left out'} | {speed}")
    for title in set_aside[:SHOWN]:
        print(f"set aside: {title}", file=sys.stderr)


LEFT_OUT = ("redirects", "namespace", "empty", "unparsed")  # reasons, in the order of the summary


def file_bytes(text: str) -> int:
    """`1M` -> 1048576. Raises SettingsError."""
    match = re.fullmatch(r"(\d+)([kKmMgG]?)", text)
    if not match:
        raise SettingsError(f"--bytes {text}: a number is wanted, or one with K, M or G")
    return int(match[1]) << dict(k=10, m=20, g=30).get(match[2].lower(), 0)


def extract(dump: str, options: WikiOptions) -> tuple[Counter, list[str]]:
    """Write the folder. Returns counts, and the titles of unreadable pages with reasons."""
    target = Path(options.output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"--output {target} is there and not empty", do="give another one, or remove it")
    aside = target.with_name(f".{target.name}.partial")
    counts, set_aside = Counter(), []
    with locked_folder(aside, target, "command"):
        with closing(ArticleFiles(aside, file_bytes(options.bytes), options.compress)) as files:
            for texts, counted, titles in _all_pieces(dump, options):
                counts.update(counted)
                set_aside += titles
                for text in texts:
                    files.write(text)
                if not options.quiet and counts["articles"] // 10_000 > (counts["articles"] - len(texts)) // 10_000:
                    print(f"{counts['articles']:,} articles", flush=True)
        (aside / ".lock").unlink()
        if target.exists():
            target.rmdir()
        os.replace(aside, target)
        sync_folder(target.parent)
    return counts, set_aside


class ArticleFiles:
    """Writes articles to AA/wiki_00 ... AA/wiki_99, AB/wiki_00 ...; a file that an article does not fit in is closed."""

    def __init__(self, folder: Path, size: int, compress: bool):
        self._folder, self._size, self._compress = folder, size, compress
        self._names, self._file, self._written = (f"{a}/wiki_{n:02}" for a in folders() for n in range(100)), None, 0

    def write(self, text: str) -> None:
        """Write one article."""
        data = text.encode()
        if self._file is None or self._written + len(data) > self._size:
            self.close()
            self._file, self._written = self._open(), 0
        self._file.write(data)
        self._written += len(data)

    def _open(self):
        path = self._folder / next(self._names)
        path.parent.mkdir(exist_ok=True)
        return bz2.open(f"{path}.bz2", "wb") if self._compress else open(path, "wb")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def folders() -> Iterator[str]:
    """Yield names of folders: AA, AB ... ZZ, AAA ...

    >>> names = [name for name, _ in zip(folders(), range(677))]
    >>> [names[n] for n in (0, 1, 26, 675, 676)]
    ['AA', 'AB', 'BA', 'ZZ', 'AAA']
    """
    for width in itertools.count(2):
        yield from map("".join, itertools.product(string.ascii_uppercase, repeat=width))


# ---- pieces of the dump, in processes ------------------------------------------------------------------------------------

Extracted = tuple[list[str], Counter, list[str]]  # articles as written; counts; titles set aside


@dataclass
class _Task:
    """A piece of the dump, and its worker."""

    piece: bytes
    worker: int
    future: Future = field(default_factory=Future)


def _all_pieces(dump: str, options: WikiOptions) -> Iterator[Extracted]:
    """Extract all pieces, in the order of the dump. A worker that dies is replaced; its page is set aside."""
    source, workers = WikiDump(dump), options.workers or cores()
    pools: list[Optional[ProcessPoolExecutor]] = [None] * workers
    given: deque[_Task] = deque()

    def submit(task: _Task) -> None:
        pools[task.worker] = pools[task.worker] or process_pool(1)
        task.future = pools[task.worker].submit(extract_piece, task.piece, options, source.site)

    def first() -> Extracted:
        task = given.popleft()
        try:
            return task.future.result()
        except BrokenProcessPool:
            pools[task.worker] = None
            result = _one_by_one(task.piece, options, source.site)
            for other in given:
                if other.worker == task.worker:
                    submit(other)
            return result

    try:
        for number, piece in enumerate(source.pieces()):
            given.append(_Task(piece, number % workers))
            submit(given[-1])
            if len(given) >= PIECES_AHEAD * workers:
                yield first()
        while given:
            yield first()
    finally:
        for pool in pools:
            if pool is not None:
                end(pool)


def _one_by_one(piece: bytes, options: WikiOptions, dump: DumpSite) -> Extracted:
    """Extract page by page a piece that killed its worker, so that its other pages are kept."""
    texts, counts, titles, pool = [], Counter(), [], None
    for page in _single(piece):
        pool = pool or process_pool(1)
        try:
            more = pool.submit(extract_piece, page, options, dump).result()
        except BrokenProcessPool:
            pool, more = None, ([], Counter(unparsed=1, bytes=len(page)), [f"{_title(page)}: it took too long"])
        texts += more[0]
        counts.update(more[1])
        titles += more[2]
    if pool:
        end(pool)
    return texts, counts, titles


def _single(piece: bytes) -> Iterator[bytes]:
    """The pages of a piece, as bytes."""
    at = 0
    while (end_at := piece.find(END, at)) >= 0:
        yield piece[at : end_at + len(END)]
        at = end_at + len(END)


def _title(page: bytes) -> str:
    match = re.search(rb"<title>([^<]*)", page)
    return html.unescape(match[1].decode(errors="replace")) if match else "?"


def extract_piece(piece: bytes, options: WikiOptions, dump: DumpSite) -> Extracted:
    """Extract some pages. The process ends if one of them takes more than SECONDS."""
    texts, counts, titles = [], Counter(bytes=len(piece)), []
    site, taken = _site(dump, options), options.namespaces.split(",")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for page in _read_pages(piece, counts, titles):
        reason, text = "redirects" if page.redirect else "namespace" if page.namespace not in taken else "", ""
        if not reason:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                text = plain_text(page.text, site, page.title)
                reason = "" if len(text) >= max(1, options.min_text_length) else "empty"
            except Exception as error:  # the parser fails at some markup
                reason = "unparsed"
                titles.append(f"{page.title}: {type(error).__name__}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        counts[reason or "articles"] += 1
        if not reason:
            texts.append(written(page, text, dump.base, options.json))
    return texts, counts, titles


def _site(dump: DumpSite, options: WikiOptions) -> WikiSite:
    """Options of the conversion. The wiki's own names of files and categories count beside the English ones."""
    site, own = WikiSite(), {key: {name.lower()} - {""} for key, name in dump.namespaces.items()}
    return replace(
        site,
        files=site.files | own.get("6", set()) | own.get("-2", set()),
        categories=site.categories | own.get("14", set()),
        lists=options.lists,
        language=dump.language.partition("-")[0].lower() or site.language,
    )


def _read_pages(piece: bytes, counts: Counter, titles: list[str]) -> Iterator[WikiPage]:
    """The pages of a piece; pages of bad XML are counted as unparsed, and their titles kept."""
    try:
        yield from pages_of(piece)
    except BadPages:
        for page in _single(piece):
            try:
                yield from pages_of(page)
            except BadPages as error:
                counts["unparsed"] += 1
                titles.append(f"{_title(page)}: {error}")


def written(page: WikiPage, text: str, base: str, as_json: bool) -> str:
    """An article as written to a file."""
    url = f"{base}?curid={page.id}"
    if as_json:
        record = dict(id=page.id, revid=page.revision, url=url, title=page.title, text=text)
        return json.dumps(record, ensure_ascii=False) + "\n"
    quoted = [html.escape(word) for word in (page.id, url, page.title)]
    return '<doc id="{}" url="{}" title="{}">\n'.format(*quoted) + f"{page.title}\n\n{text}\n\n</doc>\n"


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
