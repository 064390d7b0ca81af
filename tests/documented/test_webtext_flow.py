# SPDX-License-Identifier: Apache-2.0
"""The seven commands of B_webtext.sh, one after the other, from a server of this machine to shuffled documents."""

import http.server
import importlib
import json
import shlex
import threading
from pathlib import Path

import pytest

for package in ("aiohttp", "protego", "resiliparse", "tld", "ftfy", "eldc"):
    pytest.importorskip(package, reason="pip install '.[openwebtext]'")

HERE = Path(__file__).parent
WORDS = (
    "It was the best of times and the worst of times when the people of the old town went down to the river, because the "
    "water had risen in the night and nobody knew how long the bridge would hold. Number {} of them told the story later. "
)
TEXTS = {
    "/1": WORDS.format("one") * 8,
    "/2": WORDS.format("one") * 8 + "It ended.",
    "/3": WORDS.format("three")[::-1] * 8,
}
TEXTS["/4"] = "".join(
    f"The {number}th of many sentences that stand on no other page of ours at all. " for number in range(40)
)
TEXTS["/5"] = "too short"


class Pages(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        body = f"<html><body><article><p>{TEXTS.get(self.path, '')}</p></article></body></html>".encode()
        self.send_response(200 if self.path in TEXTS else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with lists of addresses, as the page supposes them; its server."""
    monkeypatch.chdir(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.02))
    thread.start()
    folder = Path("path/to/URLs")
    folder.mkdir(parents=True)
    here = f"http://127.0.0.1:{server.server_address[1]}"
    (folder / "RS_2018-01.txt").write_text("".join(f"{here}{path}\n" for path in TEXTS) + "http://imgur.com/x\n")
    (folder / "RS_2018-02.txt").write_text(f"{here}/1\n{here}/a.jpg\n")
    yield here
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.sampled(2)
def test_from_lists_to_shuffled_documents(place):
    """Each command with its words as printed; the download also with those that let it reach this machine."""
    counts = []
    for line in (HERE / "B_webtext.sh").read_text().splitlines():
        first, *words = shlex.split(line.translate(str.maketrans("", "", "<>")))  # in bash these would be redirections
        name = "shuf" if first == "shuf" else f"openwebtext.{Path(words.pop(0)).stem}"
        more = ["--allow_private", "--delay", "0", "--scrape_procs", "1"] if name.endswith("download") else []
        importlib.import_module(f"megatron.tools.{name}").main([*words, *more])
        made = words[words.index("-o") + 1] if "-o" in words else words[-1]
        counts.append(len(Path(made).read_text().splitlines()))
    addresses, pages, clean, _, _, kept, shuffled = counts
    assert addresses == pages == 5, "without what is of a picture or there twice"
    assert clean == 3, "without what is short, or in no language"
    texts = [json.loads(line)["text"] for line in Path("path/to/train_data.json").read_text().splitlines()]
    assert kept == shuffled == len(texts) == 2, "one of each two that are alike"
    assert sorted(text[:6] for text in texts) == ["It was", "The 0t"]
