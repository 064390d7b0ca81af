# SPDX-License-Identifier: Apache-2.0
"""Downloads from a server of this machine that does everything wrong, and kills at any moment.

Each 127.0.0.x is a server of its own for the downloader; names are those of this file's server for all of them.
"""

import asyncio
import gzip
import http.server
import ipaddress
import json
import lzma
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

for package in ("aiohttp", "protego", "resiliparse", "lxml"):
    pytest.importorskip(package, reason="pip install '.[corpus]'")

from megatron.corpus.openwebtext import scrape  # noqa: E402
from megatron.corpus.openwebtext.download_record import DownloadRecord, PageOutcome  # noqa: E402
from megatron.corpus.openwebtext.fetch import Fetcher, Limits, Refused, is_public, retry_after  # noqa: E402
from megatron.errors import DataError, Locked, SettingsError, UsageError  # noqa: E402
from megatron.tools.openwebtext import download  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
CHINESE = "\u4e2d\u6587\u7f51\u9875\u7684\u6b63\u6587"


def html(text: str) -> str:
    return f"<html><head><title>t</title></head><body><p>{text}</p></body></html>"


class Server(http.server.ThreadingHTTPServer):
    """Counts requests by path, and how many were under way for a host at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("0.0.0.0", 0), Handler)
        self.met, self.under_way, self.most, self.times = Counter(), Counter(), Counter(), {}
        self.lock, self.over = threading.Lock(), threading.Event()

    def handle_error(self, request, client_address):
        pass  # clients hang up

    def url(self, path: str, host: int = 1) -> str:
        return f"http://127.0.0.{host}:{self.server_address[1]}{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_GET(self):
        host, path = self.headers["Host"].split(":")[0], urlsplit(self.path).path
        with self.server.lock:
            self.server.met[self.path] += 1
            self.server.times.setdefault(host, []).append(time.monotonic())
            self.server.under_way[host] += 1
            self.server.most[host] = max(self.server.most[host], self.server.under_way[host])
        try:
            getattr(self, path.strip("/").split("/")[0].replace(".", "_") or "page", self.page)()
        finally:
            with self.server.lock:
                self.server.under_way[host] -= 1

    def answer(self, body, status=200, kind="text/html; charset=utf-8", **headers):
        body = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Type": kind, "Content-Length": len(body), **more}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def page(self):
        self.answer(html(f"The text of {self.path} and no other."))

    def robots_txt(self):
        host = self.headers["Host"].split(":")[0]
        texts = {"127.0.0.9": "User-agent: *\nDisallow: /private\nCrawl-delay: 0.2\n"}
        if host == "127.0.0.8":
            return self.answer("later", 503)
        return self.answer(texts[host], kind="text/plain") if host in texts else self.answer("none", 404)

    def redirect(self):
        self.answer("", 302, Location=self.path.partition("?")[2])

    def around(self):
        number = int(self.path.rpartition("/")[2])
        self.answer("", 301, Location=f"/around/{number + 1}")

    def busy(self):
        first = self.server.met[self.path] == 1
        self.answer("later", 429, Retry_After="0.3" if not first else "1") if first else self.page()

    def broken(self):
        self.answer("oops", 500)

    def healed(self):
        self.answer("oops", 503) if self.server.met[self.path] < 3 else self.page()

    def drip(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        while not self.server.over.wait(0.05):
            self.wfile.write(b"<p>a ")

    def silent(self):
        self.server.over.wait(30)

    def endless(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        while not self.server.over.is_set():
            self.wfile.write(b"<p>a " * 10_000)

    def headers_without_end(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not self.server.over.is_set():
            self.wfile.write(b"X: " + b"a" * 5000 + b"\r\n")

    def cut(self):
        self.answer(html("cut"), Content_Length=5000)
        self.close_connection = True

    def nonsense(self):
        self.wfile.write(b"\x00\x01\x02 what is this\r\n\r\n")
        self.close_connection = True

    def picture(self):
        self.answer(b"\x89PNG", kind="image/png")

    def untold(self):
        self.answer(html("no content type"), kind=None)

    def packed(self):
        self.answer(gzip.compress(html("was packed").encode()), Content_Encoding="gzip")

    def deflated(self):
        raw = zlib.compressobj(wbits=-15)
        data = raw.compress(html("was deflated").encode()) + raw.flush()
        self.answer(
            zlib.compress(html("was deflated").encode()) if "zlib" in self.path else data, Content_Encoding="deflate"
        )

    def half_packed(self):
        self.answer(gzip.compress(random.Random(1).randbytes(5000))[:1000], Content_Encoding="gzip")

    def not_packed(self):
        self.answer(html("never packed"), Content_Encoding="gzip")

    def unknown_packing(self):
        self.answer(b"?", Content_Encoding="zip64")

    def bomb(self):
        self.answer(gzip.compress(bytes(8_000_000), 9), Content_Encoding="gzip")

    def gbk(self):
        said = dict(told="text/html; charset=gbk", wrong="text/html; charset=utf-8", unsaid="text/html")
        page = f"<html><head><meta charset=gb2312></head><body><p>{CHINESE}</p></body></html>"
        self.answer(page.encode("gbk"), kind=said[self.path.rpartition("/")[2]])

    def plain(self):
        self.answer("  just <b>text</b>\n", kind="text/plain")

    def empty(self):
        self.answer("")

    def script(self):
        self.answer("<html><body><script>alert(1)</script></body></html>")


@pytest.fixture(scope="module")
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs=dict(poll_interval=0.02))
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    thread.join()
    made.server_close()


LIMITS = Limits(timeout=30, max_bytes=1 << 20, allow_private=True)  # a busy machine is slow, too


def get(url: str, limits: Limits = LIMITS):
    """What comes of one address: its text by the scraper `bs4`, or the reason."""

    async def one():
        async with Fetcher(limits) as fetcher:
            return await fetcher.page(url)

    try:
        page = asyncio.run(one())
    except Refused as refused:
        return refused.reason
    return scrape.scrape(page.body, page.content_type, page.charset, "bs4")


PAGES = {
    "/some/page": "The text of /some/page and no other.",
    "/redirect?/some/page": "The text of /some/page and no other.",
    "/around/1": "too_many_redirects",
    "/redirect?/redirect?": "redirect_to_nowhere",
    "/redirect?file:///etc/passwd": "scheme",
    "/redirect?http://user@127.0.0.1/": "bad_url",
    "/redirect?http://[::1/": "bad_url",
    "/missing/../..": "The text of / and no other.",
    "/broken": "http_500",
    "/drip": "timeout",
    "/silent": "timeout",
    "/endless": "too_large",
    "/headers_without_end": "bad_answer",
    "/cut": "connection",
    "/nonsense": "bad_answer",
    "/picture": "content_type",
    "/untold": "no content type",
    "/packed": "was packed",
    "/deflated": "was deflated",
    "/deflated/zlib": "was deflated",
    "/half_packed": "broken_packing",
    "/not_packed": "broken_packing",
    "/unknown_packing": "content_encoding",
    "/bomb": "too_large",
    "/gbk/told": CHINESE,
    "/gbk/wrong": CHINESE,
    "/gbk/unsaid": CHINESE,
    "/plain": "just <b>text</b>",
    "/empty": "",
    "/script": "",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", PAGES)
def test_what_comes_of_a_page(server, path):
    limits = replace(LIMITS, timeout=1.0) if PAGES[path] == "timeout" else LIMITS
    assert get(server.url(path), limits) == PAGES[path]


def test_redirects_in_a_circle_are_met_once(server):
    here = server.url("/redirect?/redirect")  # it asks for /redirect, which says nothing of where
    assert get(here) == "redirect_to_nowhere"
    path = "/redirect?" + server.url("/circle_of_two")
    Handler.circle_of_two = lambda self: self.answer("", 302, Location=path)
    assert get(server.url("/circle_of_two")) == "redirect_loop"
    assert server.met["/circle_of_two"] == 1


PRIVATE = dict(
    private_address="""http://127.0.0.1/ http://localhost/ http://10.1.2.3/ http://[::1]/ http://0x7f.1/
        http://169.254.169.254/latest/meta-data http://[::ffff:127.0.0.1]/ http://0.0.0.0/""".split(),
    bad_url="http://2130706433/ http://127.1/ http://0/ http://0177.0.0.1/ http:///x http://a:b@example.org/ http://a:b/".split(),
    scheme="file:///etc/passwd ftp://example.org/ gopher://127.0.0.1/ /etc/passwd".split(),
)


@pytest.mark.parametrize("url, reason", [(url, reason) for reason, urls in PRIVATE.items() for url in urls])
def test_the_private_network_is_out_of_reach(url, reason):
    assert get(url, Limits(timeout=30)) == reason


def test_a_redirect_into_the_private_network_is_refused(server, monkeypatch):
    """The first server counts as public here; where it sends us to does not."""
    from megatron.corpus.openwebtext import fetch

    monkeypatch.setattr(fetch, "is_public", lambda address: str(address) == "127.0.0.1")
    public = Limits(timeout=30)
    assert get(server.url("/some/page"), public).startswith("The text")
    assert get(server.url(f"/redirect?{server.url('/secret', host=2)}"), public) == "private_address"
    assert server.met["/secret"] == 0


def test_which_addresses_are_public():
    public = "8.8.8.8 1.1.1.1 2606:4700::1111".split()
    others = """127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 240.0.0.1
    255.255.255.255 ::1 :: fe80::1 fc00::1 ff02::1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:7f00:1::""".split()
    assert [one for one in public + others if is_public(ipaddress.ip_address(one))] == public


def test_when_a_server_wants_to_be_asked_again():
    assert retry_after("7") == 7.0 and retry_after(None) is None and retry_after("-1") is None
    assert retry_after("Wed, 21 Oct 2015 07:28:10 GMT", now=1445412480.0) == 10.0
    assert retry_after("Wed, 21 Oct 2015 07:28:10 GMT", now=1445412490.5) == 0.0


# ---- whole downloads ---------------------------------------------------------------------------------------------------

FAST = "--allow_private --delay 0 --backoff 0.02 --scraper bs4 --scrape_procs 1 --n_procs 8 --chunk_size 3".split()


def make(folder: Path, urls: list[str]) -> Path:
    (folder / "urls.txt").write_text("".join(f"{url}\n" for url in urls))
    return folder / "urls.txt"


def read(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(set(line) == {"text", "url"} for line in lines)
    assert len({line["url"] for line in lines}) == len(lines), "doubled"
    return {line["url"]: line["text"] for line in lines}


def run(source: Path, *flags: str) -> None:
    download.main([str(source), *FAST, *flags])


def test_a_list_with_retries_robots_and_pauses(server, tmp_path, capsys):
    good = [server.url(f"/page/{number}", host) for host in (2, 3) for number in range(4)]
    paths = {
        "/healed": 4,
        "/busy": 5,
        "/private/x": 9,
        "/allowed/1": 9,
        "/allowed/2": 9,
        "/x": 8,
        "/broken/list": 7,
        "/picture": 6,
        "/broken/slowly": 9,
    }
    others = [server.url(path, host) for path, host in paths.items()]
    source = make(tmp_path, [*good, *others, "", "http://[nonsense", "not an address"])
    flags = ["--output", str(tmp_path / "raw.json"), "--sqlite_meta", "--retries", "2", "--save_uncompressed"]
    run(source, *flags, "--output_dir", str(tmp_path / "kept"))
    pages = read(tmp_path / "raw.json")
    expected = {
        url for url in [*good, *others] if not any(word in url for word in ("private", "/x", "broken", "picture"))
    }
    assert set(pages) == expected and all(urlsplit(url).path in text for url, text in pages.items())
    assert server.most["127.0.0.2"] == server.most["127.0.0.3"] == 1, "a server is asked for one page at a time"
    assert server.met["/private/x"] == 0 and server.met["/broken/list"] == 1 + 2
    slow = server.times["127.0.0.9"]  # robots.txt, then its pages, of which one fails three times
    assert len(slow) == 6 and min(after - at for at, after in zip(slow, slow[1:], strict=False)) >= 0.2, "Crawl-delay"
    assert server.times["127.0.0.5"][-1] - server.times["127.0.0.5"][-2] >= 1.0, "Retry-After"
    base = sqlite3.connect(tmp_path / "raw.json.sqlite")
    reasons = dict(base.execute("SELECT url, reason FROM pages"))
    assert len(reasons) == 19 and Counter(reasons.values()) == Counter(
        ok=len(expected), robots=1, robots_unreachable=1, http_500=2, content_type=1, bad_url=1, scheme=1
    )
    assert len(list((tmp_path / "kept" / "data").rglob("*.txt"))) == len(expected)
    assert "FINAL | 19 of 19 done | ok: 12 |" in capsys.readouterr().out
    before = server.met.copy()
    run(source, *flags)  # all is done
    assert server.met == before and set(read(tmp_path / "raw.json")) == expected


def test_addresses_that_are_refused_without_a_request_cost_no_pause(server, tmp_path, capsys):
    """Those of one server that robots.txt forbids, and what is no address; a page that was fetched does cost one."""
    forbidden = [server.url(f"/private/{number}", 9) for number in range(40)]
    private = [f"http://10.0.0.1:{number}/" for number in range(1, 30)]
    nonsense = [f"http://[nonsense{number}" for number in range(30)] + [f"ftp://a.org/{n}" for n in range(30)]
    good = [server.url(f"/allowed/{number}", 9) for number in range(3)]
    source = make(tmp_path, [*forbidden[:20], good[0], good[1], *forbidden[20:], good[2], *nonsense])
    began = time.monotonic()
    run(source, "--output", str(tmp_path / "raw.json"), "--delay", "0.5")
    assert 1.5 <= time.monotonic() - began < 25  # robots.txt and three pages; 100 addresses would take 50 s
    assert set(read(tmp_path / "raw.json")) == set(good) and not any("private" in path for path in server.met)
    slow = server.times["127.0.0.9"][-4:]
    assert min(after - at for at, after in zip(slow, slow[1:], strict=False)) >= 0.49
    said = capsys.readouterr().out
    assert "99 addresses were refused without a request and without a pause: robots 39, bad_url 30, scheme 30" in said
    began = time.monotonic()
    (tmp_path / "private.txt").write_text("".join(f"{url}\n" for url in private))
    download.main([str(tmp_path / "private.txt"), "--output", str(tmp_path / "none.json"), "--delay", "2"])
    assert time.monotonic() - began < 30 and "29 addresses were refused without a request" in capsys.readouterr().out


def test_what_failed_for_a_while_is_tried_again_when_asked(server, tmp_path):
    source = make(tmp_path, [server.url("/mended", 20), server.url("/picture", 21)])
    Handler.mended = lambda self: self.answer("no", 503)
    output = tmp_path / "raw.json"
    run(source, "--output", str(output), "--retries", "0")
    assert output.read_bytes() == b""
    Handler.mended = Handler.page
    run(source, "--output", str(output))
    assert output.read_bytes() == b""
    pictures = server.met["/picture"]
    run(source, "--output", str(output), "--retry_failed")
    assert list(read(output)) == [server.url("/mended", 20)] and server.met["/picture"] == pictures
    with DownloadRecordOf(output) as record:
        assert +record.counts == Counter(ok=1, content_type=1)


class DownloadRecordOf:
    """The record of an output, whatever it was begun with."""

    def __init__(self, output: Path):
        with open(f"{output}.ckpt") as file:
            self.record = DownloadRecord(output, json.loads(file.readline()))

    def __enter__(self) -> DownloadRecord:
        return self.record

    def __exit__(self, *of_error) -> None:
        self.record.close()


def test_turns_of_servers():
    """One address of a server at a time, those behind a small window too; a pause is kept; the end is told to all."""
    urls = ["http://a/1", "http://a/2", "http://b/1", "http://a/3", "http://a/4"]
    log = []

    async def work(turns):
        while turn := await turns.next():
            server, job = turn
            log.append(("begin", server, job.url))
            await asyncio.sleep(0.01)
            log.append(("end", server, job.url))
            again = job if job.url == "http://a/2" and not job.tries else None
            job.tries += 1
            turns.done(server, 0.0, again)

    async def all_of_them():
        turns = download.Turns((download.PageJob(*job) for job in enumerate(urls)), 1)
        await asyncio.wait_for(asyncio.gather(*(work(turns) for _ in range(3))), 10)

    asyncio.run(all_of_them())
    assert Counter(url for kind, _, url in log if kind == "end") == Counter([*urls, "http://a/2"])
    for server in "ab":
        kinds = [kind for kind, found, _ in log if found == server]
        assert kinds == ["begin", "end"] * (len(kinds) // 2)


def test_a_server_that_is_gone_does_not_hold_up_the_others(tmp_path, server, monkeypatch):
    monkeypatch.setattr(download, "FAILURES_OF_A_HOST", 3)
    gone = [f"http://127.0.0.30:9/{number}" for number in range(50)]  # nobody listens there
    good = [server.url(f"/page/{number}", 31) for number in range(3)]
    run(make(tmp_path, gone + good), "--output", str(tmp_path / "raw.json"), "--retries", "5", "--no-robots")
    assert set(read(tmp_path / "raw.json")) == set(good)
    with DownloadRecordOf(tmp_path / "raw.json") as record:
        assert record.counts["host_silent"] == 49 and record.counts["connection"] == 1


def test_packed_pieces_are_one_file_that_preprocessing_reads(server, tmp_path, monkeypatch):
    from megatron.data.json_input import find_sources, parse_line, read_blocks

    monkeypatch.chdir(tmp_path)
    urls = [server.url(f"/page/{number}", 40 + number) for number in range(7)]
    run(make(tmp_path, urls), "--compress", "--max_urls", "5")
    with lzma.open("scraped/urls.jsonl.xz", "rt") as file:
        assert {json.loads(line)["url"] for line in file} == set(urls[:5])
    run(tmp_path / "urls.txt", "--compress")
    [source] = find_sources(["scraped/urls.jsonl.xz"])
    lines = b"".join(block for block, _ in read_blocks(source, 1 << 20)).splitlines()
    assert {parse_line(line, ["url"])[0] for line in lines} == set(urls) and len(lines) == len(urls)


@pytest.mark.parametrize("scraper", ["newspaper", "trafilatura", "bs4", "raw"])
def test_what_a_scraper_takes(scraper):
    """The article, without menu and footer; all paragraphs; the page."""
    if scraper == "trafilatura":
        try:
            import trafilatura  # noqa: F401
        except ImportError as error:
            pytest.skip(f"trafilatura: {error}")
    lines = [
        f"This is sentence {n} of a long article about rivers, with <b>bold</b> words &amp; more." for n in range(9)
    ]
    article = "".join(f"<p>{line}</p>\n" for line in lines)
    page = f"<html><body><nav><ul><li><a href=/>Home page</a></li></ul></nav><article>{article}</article>"
    page += "<footer>Copyright by somebody</footer><script>var x = 1;</script></body></html>"
    text = scrape.scrape(page.encode(), "text/html", None, scraper)
    if scraper == "raw":
        assert text == page
        return
    seen = [line.replace("<b>", "").replace("</b>", "").replace("&amp;", "&") for line in lines]
    assert [line for line in text.splitlines() if line] == seen


def test_a_page_that_brings_its_scraper_down_is_one_page_lost():
    """Workers that die, hang, or raise: the others' texts come."""
    good = html("Paragraphs of a good page.").encode()

    async def all_of_them():
        pool = scrape.ScraperPool(1, "bs4", seconds=5)
        pool._idle.get_nowait()
        process = scrape.process_pool(1)
        pool._idle.put_nowait(process)
        await asyncio.get_running_loop().run_in_executor(process, os.getpid)
        texts = [await pool.text(good, "text/html", None)]
        [pid] = process._processes
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            try:
                texts.append(await pool.text(good, "text/html", None))
            except Refused as refused:
                texts.append(refused.reason)
        pool._seconds = 0.0
        try:
            await pool.text(good, "text/html", None)
        except Refused as refused:
            texts.append(refused.reason)
        pool.close()
        return texts

    text = "Paragraphs of a good page."
    assert asyncio.run(all_of_them()) == [text, "scraper_crash", text, "scraper_timeout"]


# ---- the record --------------------------------------------------------------------------------------------------------


def test_a_cut_at_any_byte_loses_and_doubles_nothing(tmp_path):
    """Both files cut where a kill, or a machine that went down, may leave them; then the rest is done."""
    pages = [
        PageOutcome(n, f"http://a.org/{n}", "ok" if n % 4 else "no_text", f"text {n}" * (n % 4)) for n in range(12)
    ]
    output, record_path = tmp_path / "raw.json", tmp_path / "raw.json.ckpt"
    record = DownloadRecord(output, dict(list="x"))
    states = [(b"", record_path.read_bytes())]
    for page in pages:
        if record.add(page, 3):
            states.append((output.read_bytes(), record_path.read_bytes()))
    record.close()
    whole = sorted(output.read_bytes().splitlines())
    choice = random.Random(3)
    for _ in range(120):
        step = choice.randrange(len(states) - 1)
        (text, said), (more_text, more_said) = states[step : step + 2]
        if choice.random() < 0.5:  # killed while pages were written
            cut = (more_text[: choice.randrange(len(text), len(more_text) + 1)], said)
        else:  # killed while the line was written
            cut = (more_text, more_said[: choice.randrange(len(said), len(more_said) + 1)])
        output.write_bytes(cut[0])
        record_path.write_bytes(cut[1])
        record = DownloadRecord(output, dict(list="x"))
        for page in choice.sample(pages, len(pages)):
            if page.number not in record:
                record.add(page, 5)
        record.commit()
        assert record.counts == Counter(ok=9, no_text=3)
        record.close()
        assert sorted(output.read_bytes().splitlines()) == whole
        record = DownloadRecord(output, dict(list="x"))
        assert record.counts == Counter(ok=9, no_text=3)
        record.close()


def test_files_that_do_not_belong_together_are_refused(tmp_path, server):
    source, output = make(tmp_path, [server.url("/page/1", 50)]), tmp_path / "raw.json"
    output.write_text("something else\n")
    for _ in range(2):
        with pytest.raises(DataError, match="no record of how it came"):
            run(source, "--output", str(output))
        assert output.read_text() == "something else\n"
    output.unlink()
    run(source, "--output", str(output))
    with pytest.raises(DataError, match="belongs to another download"):
        run(source, "--output", str(output), "--scraper", "raw")
    make(tmp_path, [server.url("/page/2", 50)])
    with pytest.raises(DataError, match="belongs to another download"):
        run(source, "--output", str(output))
    make(tmp_path, [server.url("/page/1", 50)])
    output.write_text("")
    with pytest.raises(DataError, match="shorter than its record"):
        run(source, "--output", str(output))
    (tmp_path / "raw.json.ckpt").write_text("{}\n")
    with pytest.raises(DataError, match="damaged at byte 0"):
        run(source, "--output", str(output))


def test_two_downloads_do_not_write_one_file(tmp_path):
    output = tmp_path / "raw.json"
    record = DownloadRecord(output, {})
    code = (
        "import sys; from pathlib import Path; from megatron.corpus.openwebtext.download_record import DownloadRecord\n"
    )
    code += "DownloadRecord(Path(sys.argv[1]), {})"
    done = subprocess.run([sys.executable, "-c", code, output], cwd=ROOT, capture_output=True, text=True, timeout=60)
    record.close()
    assert Locked.__name__ in done.stderr


@pytest.mark.parametrize(
    "flags, error, text",
    [
        ("--n_procs 0", SettingsError, "more than 0"),
        ("--timeout 0", SettingsError, "or -1"),
        ("--retries -1", SettingsError, "0 or more"),
        ("--scraper lynx", UsageError, "none of newspaper"),
        ("other.txt", UsageError, "1 file is wanted"),
        ("--workers 3", UsageError, "unknown flag"),
    ],
)
def test_wrong_settings(tmp_path, flags, error, text):
    with pytest.raises(error, match=text):
        download.main([str(make(tmp_path, [])), *flags.split()])
    with pytest.raises(DataError, match="no such list"):
        download.main([str(tmp_path / "none.txt")])


def start(source: Path, output: Path) -> subprocess.Popen:
    words = [sys.executable, "-m", "megatron.tools.openwebtext.download", source, "--output", output, *FAST]
    return subprocess.Popen(
        list(map(str, words)), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def slow_list(server, tmp_path, count: int) -> Path:
    Handler.slowly = lambda self: (time.sleep(0.01), self.page())
    return make(tmp_path, [server.url(f"/slowly/{number}", 100 + number % 20) for number in range(count)])


def wait_for(path: Path, lines: int) -> None:
    end = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.sampled(2)
def test_a_signal_ends_it_with_all_that_came_and_the_same_command_goes_on(server, tmp_path):
    source, output = slow_list(server, tmp_path, 300), tmp_path / "raw.json"
    process = start(source, output)
    wait_for(Path(f"{output}.ckpt"), 5)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 9 and "run the same command again" in said
    part = read(output)
    assert 0 < len(part) < 300
    run(source, "--output", str(output))
    assert set(read(output)) == set(source.read_text().split())


def lives(pid: str) -> bool:
    """Whether a process runs: not gone, nor dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.full
def test_kills_at_random_moments(server, tmp_path):
    """Each address of 1,500 is there once, and almost none was fetched twice: what was under way and not yet written."""
    source, output, choice = slow_list(server, tmp_path, 1500), tmp_path / "raw.json", random.Random(5)
    record, kills, scrapers = Path(f"{output}.ckpt"), 0, []
    while True:
        process = start(source, output)
        more = record.read_bytes().count(b"\n") if record.exists() else 0
        more += choice.randrange(1, 80)
        while process.poll() is None and (not record.exists() or record.read_bytes().count(b"\n") < more):
            time.sleep(0.002)
        time.sleep(choice.random() * 0.02)
        if process.poll() is not None:
            break
        scrapers += Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.communicate()
        kills += 1
    assert process.returncode == 0 and kills > 5, process.communicate()[1]
    assert set(read(output)) == set(source.read_text().split())
    asked = sum(count for path, count in server.met.items() if path.startswith("/slowly"))
    assert asked <= 1500 + 300 + kills * (8 + 3)  # 300: those of the test before
    end = time.monotonic() + 20
    while any(map(lives, scrapers)):
        assert time.monotonic() < end, "processes outlive a killed download"
        time.sleep(0.1)
