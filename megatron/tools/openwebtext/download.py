# SPDX-License-Identifier: Apache-2.0
"""Download the pages of a list of URLs and extract their texts: JSON lines {"text": ..., "url": ...}.

    python -m megatron.tools.openwebtext.download clean_urls.txt --n_procs 50 --output raw.json

The same command resumes after an end of any kind: <output>.ckpt records finished URLs. A server gets one request at a
time, --delay seconds apart (more if its robots.txt or a `Retry-After` asks for it), and none that its robots.txt
forbids. Temporary failures are retried with growing pauses. Pages are written in the order of their arrival. Addresses
of private networks are refused, as names, in redirects and as numbers.
"""

import asyncio
import heapq
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Optional
from urllib.parse import urlsplit

import xxhash

from megatron.corpus.openwebtext.download_record import DownloadRecord, PageOutcome, write_sqlite
from megatron.errors import DataError, Interrupted, MissingPackage, Preempted, SettingsError, run_main
from megatron.mpu.cpu_threads import cores
from megatron.settings.positional import divide, expect, parse_one
from megatron.settings.schema import setting
from megatron.storage.durable import storage_errors

PROG = "python -m megatron.tools.openwebtext.download"
LONGEST = 8192  # bytes of a URL
SECONDS_BETWEEN_COMMITS = 10  # at most, if pages arrive slowly
LONGEST_DELAY = 60.0  # seconds that robots.txt may ask for between pages
SILENT = ("timeout", "dns", "connection")  # reasons that mean no answer from a server
FAILURES_OF_A_HOST = 10  # tries in a row without an answer, after which the rest of its URLs are given up


@dataclass(frozen=True)
class DownloadOptions:
    """Input, requests and output. The names of the first ten are Megatron-LM's."""

    output: Optional[str] = setting("the JSON lines (default: <output_dir>/<name of the list>.jsonl)", None)
    n_procs: int = setting("pages that are fetched at the same time, each of another server", 10)
    timeout: float = setting("seconds for a page, redirects included; -1: 60", -1)
    max_urls: int = setting("addresses of the list that are taken; -1: all", -1)
    chunk_size: int = setting("pages that are written at once: at most so many are fetched again after a kill", 100)
    scraper: Literal["newspaper", "trafilatura", "bs4", "raw"] = setting(
        "newspaper: the article (by resiliparse); trafilatura: by that; bs4: texts of paragraphs; raw: the page",
        "newspaper",
    )
    save_uncompressed: bool = setting("each page as a text file, too: <output_dir>/data/, meta/", False)
    output_dir: str = setting("folder of what has no path of its own", "scraped")
    compress: bool = setting("pack the JSON lines, a piece per chunk", False)
    compress_fmt: Literal["xz", "bz2", "gz", "zst"] = setting(
        "with --compress: how; it becomes the file's ending", "xz"
    )
    sqlite_meta: bool = setting("write what became of each address to <output>.sqlite at the end", False)
    delay: float = setting("seconds between two pages of a server", 1.0)
    robots: bool = setting("whether robots.txt is obeyed", True)
    user_agent: str = setting(
        "User-Agent header: a name, then a page or address where you can be reached", "megatron-openwebtext/1.0"
    )
    max_bytes: int = setting("larger pages are left out", 10 << 20)
    max_redirects: int = setting("redirects of a page", 5)
    retries: int = setting("further tries of what may pass: no answer, HTTP 429 and 5xx", 3)
    backoff: float = setting("seconds before the first of them; doubled each time", 2.0)
    max_wait: float = setting("seconds that a server may ask to wait", 300.0)
    retry_failed: bool = setting("going on: also try again what ended so", False)
    scrape_procs: Optional[int] = setting("processes that make text of pages (default: one per core)", None)
    allow_private: bool = setting("also fetch from this machine and its networks", False)
    log_interval: float = setting("seconds between progress lines", 10.0)


def main(argv: list[str]) -> None:
    """LIST: download, write the texts, print the counts of outcomes."""
    files, flags = divide(argv, DownloadOptions)
    common = tuple(DownloadOptions.__dataclass_fields__)[:14]
    options = parse_one(flags, DownloadOptions, f"{PROG} LIST", __doc__, common)
    [source] = expect(files, "LIST", PROG)
    check(options)
    try:
        import aiohttp  # noqa: F401  # checked before anything is written
        import protego  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            "download needs the packages aiohttp and protego", str(error), "pip install '.[corpus]'"
        ) from None
    download(Path(source), options)


def check(options: DownloadOptions) -> None:
    """Raise SettingsError for numbers out of range."""
    for name in ("n_procs", "chunk_size", "max_bytes", "log_interval", "scrape_procs"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise SettingsError(f"--{name} {value}: more than 0 is needed")
    for name in ("delay", "max_redirects", "retries", "backoff", "max_wait"):
        if getattr(options, name) < 0:
            raise SettingsError(f"--{name} {getattr(options, name)}: 0 or more is needed")
    for name in ("timeout", "max_urls"):
        if getattr(options, name) <= 0 and getattr(options, name) != -1:
            raise SettingsError(f"--{name} {getattr(options, name)}: more than 0 is needed, or -1")
    if "\n" in options.user_agent or not options.user_agent.isascii():
        raise SettingsError("--user_agent is one line of ASCII")


def download(source: Path, options: DownloadOptions) -> DownloadRecord:
    """Download unfinished URLs. Raises Preempted or Interrupted after a signal; the record is complete then."""
    output = output_path(source, options)
    keep = Path(options.output_dir) if options.save_uncompressed else None
    packing = options.compress_fmt if options.compress else None
    total, digest = measure(source)
    total = total if options.max_urls == -1 else min(total, options.max_urls)
    depends = dict(list=digest, scraper=options.scraper, packing=packing)
    record = DownloadRecord(output, depends, packing, keep, options.retry_failed)
    done = sum(record.counts.values())
    print(f"{source}: {total:,} addresses, {done:,} of them done before; texts go to {output}", flush=True)
    work = Download(source, record, options, total)
    try:
        stopped = asyncio.run(work.run())
    finally:
        record.close()
    if options.sqlite_meta:
        with storage_errors(output):
            write_sqlite(record.path, output.with_name(f"{output.name}.sqlite"))
    print(f"FINAL | {figures(record, total)}", flush=True)
    if work.not_asked:
        reasons = ", ".join(f"{name} {count:,}" for name, count in work.not_asked.most_common())
        print(f"{work.not_asked.total():,} addresses were refused without a request and without a pause: {reasons}")
    if stopped:
        kind = Interrupted if stopped == signal.SIGINT else Preempted
        raise kind(
            f"the download was stopped; {output} has the texts so far", do="run the same command again to resume"
        )
    return record


def output_path(source: Path, options: DownloadOptions) -> Path:
    """The path of the JSON lines."""
    path = Path(options.output) if options.output else Path(options.output_dir) / f"{source.stem}.jsonl"
    ending = f".{options.compress_fmt}"
    return path if not options.compress or path.suffix == ending else path.with_name(path.name + ending)


def addresses(source: Path) -> Iterator[str]:
    """The URLs of a list, in order, without blank lines."""
    from megatron.corpus.lines import blocks, split

    for line in split(blocks(source), LONGEST):
        if text := line.strip():
            yield text.decode("utf-8", errors="replace")


def measure(source: Path) -> tuple[int, str]:
    """(number of URLs, their digest). Raises DataError if there is no list."""
    if not source.is_file():
        raise DataError(f"{source}: no such list", do=f"{PROG} clean_urls.txt --output raw.json")
    digest, number = xxhash.xxh3_128(), 0
    for address in addresses(source):
        digest.update(address.encode() + b"\n")
        number += 1
    return number, digest.hexdigest()


def figures(record: DownloadRecord, total: int) -> str:
    """The counts of outcomes, on a line."""
    counts = record.counts
    reasons = [f"{name}: {count:,}" for name, count in counts.most_common() if name != "ok" and count]
    return " | ".join([f"{sum(counts.values()):,} of {total:,} done", f"ok: {counts['ok']:,}", *reasons])


# ---- the order of requests ---------------------------------------------------------------------------------------------


@dataclass
class PageJob:
    """A URL to download."""

    number: int
    url: str
    tries: int = 0


class Turns:
    """The queue of URLs: next is one of a server that has no request running and has had its pause.

    Holds a window of the list, grouped by server, so that several servers are busy even if the list is sorted by server.
    """

    def __init__(self, jobs: Iterator[PageJob], window: int):
        self._jobs, self._window = jobs, window
        self._waiting: dict[str, deque[PageJob]] = {}  # server -> its URLs of the window
        self._ready: list[tuple[float, int, str]] = []  # (not before, order, server), a heap: servers that are not busy
        self._not_before: dict[str, float] = {}
        self._busy: set[str] = set()
        self._held = self._order = 0
        self._changed = asyncio.get_running_loop().create_future()

    async def next(self) -> Optional[tuple[str, PageJob]]:
        """(server, URL); the server is busy until `done`. None: all are done."""
        loop = asyncio.get_running_loop()
        while True:
            self._fill()
            if self._ready and self._ready[0][0] <= loop.time():
                server = heapq.heappop(self._ready)[2]
                self._busy.add(server)
                self._held -= 1
                return server, self._waiting[server].popleft()
            if not self._ready and not self._busy:
                self._wake()
                return None
            await asyncio.wait([self._changed], timeout=self._ready[0][0] - loop.time() if self._ready else None)

    def _wake(self) -> None:
        """Let the workers that wait for a turn look again."""
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    def done(self, server: str, pause: float, again: Optional[PageJob] = None) -> None:
        """End a try at a server, which then has a pause of `pause` seconds. again: a job to retry."""
        now = asyncio.get_running_loop().time()
        self._busy.discard(server)
        self._not_before[server] = now + pause
        if len(self._not_before) > 4 * self._window:
            self._not_before = {name: at for name, at in self._not_before.items() if at > now}
        if again is not None:
            self._waiting[server].append(again)
            self._held += 1
        if self._waiting[server]:
            self._line_up(server)
        else:
            del self._waiting[server]
        self._wake()

    def give_up(self, server: str) -> list[PageJob]:
        """Remove and return the waiting URLs of a busy server."""
        jobs = list(self._waiting[server])
        self._waiting[server].clear()
        self._held -= len(jobs)
        return jobs

    def _fill(self) -> None:
        while self._held < self._window and (job := next(self._jobs, None)):
            server = _server(job.url)
            waiting = self._waiting.setdefault(server, deque())
            waiting.append(job)
            self._held += 1
            if len(waiting) == 1 and server not in self._busy:
                self._line_up(server)

    def _line_up(self, server: str) -> None:
        self._order += 1
        heapq.heappush(self._ready, (self._not_before.get(server, 0.0), self._order, server))


def _server(url: str) -> str:
    """The host of a URL, without its port."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


# ---- the download ------------------------------------------------------------------------------------------------------


class Download:
    """Downloads, scrapes and records the pages of a list."""

    def __init__(self, source: Path, record: DownloadRecord, options: DownloadOptions, total: int):
        self._source, self._record, self._options, self._total = source, record, options, total
        self._silent: dict[str, int] = {}  # server -> tries in a row without an answer
        self.not_asked: Counter[str] = Counter()  # reason -> URLs that were refused without a request
        self._committed = self._logged = time.monotonic()

    async def run(self) -> Optional[int]:
        """Run until all is done or a signal arrives, and commit the record; returns the signal's number."""
        from megatron.corpus.openwebtext.fetch import Fetcher, Limits
        from megatron.corpus.openwebtext.scrape import ScraperPool

        options, stop = self._options, asyncio.get_running_loop().create_future()
        self._stop = stop
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(
                number, lambda one=number: stop.done() or stop.set_result(one)
            )
        limits = Limits(
            timeout=60.0 if options.timeout == -1 else options.timeout,
            max_bytes=options.max_bytes,
            redirects=options.max_redirects,
            agent=options.user_agent,
            robots=options.robots,
            allow_private=options.allow_private,
            connections=options.n_procs + 2,
        )
        self._scrapers = ScraperPool(options.scrape_procs or cores(), options.scraper)
        jobs = islice(enumerate(addresses(self._source)), self._total)
        self._turns = Turns(
            (PageJob(*job) for job in jobs if job[0] not in self._record), max(1000, 20 * options.n_procs)
        )
        async with Fetcher(limits) as self._fetcher:
            workers = [asyncio.ensure_future(self._work()) for _ in range(options.n_procs)]
            ends = asyncio.gather(*workers)
            try:
                await asyncio.wait([ends, stop], return_when=asyncio.FIRST_COMPLETED)
                if ends.done():
                    ends.result()  # an error in a worker ends the command
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                await asyncio.gather(ends, return_exceptions=True)
                self._scrapers.close()
        self._record.commit()
        return stop.result() if stop.done() else None

    async def _work(self) -> None:
        """One of the --n_procs workers."""
        # Cancelling is not enough: before Python 3.12, a cancellation during a timeout may be lost.
        while not self._stop.done() and (turn := await self._turns.next()):
            server, job = turn
            outcome, pause = await self._try(server, job)
            if outcome is not None:
                self._keep(outcome)
                if self._gone(server):
                    for other in self._turns.give_up(server):
                        self._keep(PageOutcome(other.number, other.url, "host_silent", tries=other.tries, passing=True))
            self._turns.done(server, pause, job if outcome is None else None)

    async def _try(self, server: str, job: PageJob) -> tuple[Optional[PageOutcome], float]:
        """Try a URL: (its outcome, or None to retry; seconds of pause for its server)."""
        from megatron.corpus.openwebtext.fetch import NotAsked, Refused

        options, start = self._options, time.monotonic()
        job.tries += 1
        try:
            page = await self._fetcher.page(job.url)
            self._silent.pop(server, None)
            delay = await self._delay(page.url)
            taken = dict(status=page.status, bytes=len(page.body), tries=job.tries)
            try:
                text = await self._scrapers.text(page.body, page.content_type, page.charset)
                seconds = round(time.monotonic() - start, 3)
                return PageOutcome(
                    job.number, job.url, "ok" if text else "no_text", text, seconds=seconds, **taken
                ), delay
            except Refused as refused:
                return PageOutcome(job.number, job.url, refused.reason, **taken), delay
        except NotAsked as refused:
            self.not_asked[refused.reason] += 1
            await asyncio.sleep(0)  # let signals and other workers run during a series of these
            return PageOutcome(job.number, job.url, refused.reason, tries=job.tries), 0.0
        except Refused as refused:
            if refused.reason in SILENT:
                self._silent[server] = self._silent.get(server, 0) + 1
            wait = max(await self._delay(job.url), min(refused.wait or 0.0, options.max_wait))
            if refused.again and job.tries <= options.retries and not self._gone(server):
                return None, max(wait, options.backoff * 2 ** (job.tries - 1))
            seconds = round(time.monotonic() - start, 3)
            end = dict(status=refused.status, seconds=seconds, tries=job.tries, passing=refused.again)
            return PageOutcome(job.number, job.url, refused.reason, **end), wait

    async def _delay(self, url: str) -> float:
        """Seconds between two requests to the server of a URL, which may have none."""
        wanted = await self._fetcher.delay(url) if _server(url) else 0.0
        return max(self._options.delay, min(wanted, LONGEST_DELAY))

    def _gone(self, server: str) -> bool:
        return self._silent.get(server, 0) >= FAILURES_OF_A_HOST

    def _keep(self, outcome: PageOutcome) -> None:
        now = time.monotonic()
        if self._record.add(outcome, self._options.chunk_size):
            self._committed = now
        elif now - self._committed > SECONDS_BETWEEN_COMMITS:
            self._record.commit()
            self._committed = now
        if now - self._logged > self._options.log_interval:
            self._logged = now
            print(f"PROGRESS | {figures(self._record, self._total)}", flush=True)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
