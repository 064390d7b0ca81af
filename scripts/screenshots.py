# SPDX-License-Identifier: Apache-2.0
"""Reports and drawings as a real browser shows them, at 1400 and 400 pixels, in the light and in the dark scheme.

    python scripts/screenshots.py [FILE.html FILE.svg ...] [--output runs/screenshots]

Without files: the drawings of docs/, the report of every run in runs/, and runs/compare.html. Needs Chromium and its
driver, which it asks over HTTP; where they are not installed it says so and does nothing. A drawing is shown as an image,
as on a page of the docs.
"""

import argparse
import base64
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTHS, SCHEMES = (1400, 400), ("light", "dark")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --force-color-profile=srgb""".split()
TALLEST = 12_000  # pixels


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "screenshots")
    asked = parser.parse_args(argv)
    browser, driver = (next(filter(None, map(shutil.which, names)), None) for names in (BROWSERS, ["chromedriver"]))
    if not browser or not driver:
        lacking = " or ".join(BROWSERS) if not browser else "chromedriver"
        print(f"no screenshots: {lacking} is not installed (Debian: apt-get install chromium chromium-driver)")
        return
    files = asked.files or [*sorted((ROOT / "docs").glob("*.svg")), *sorted((ROOT / "runs").glob("*/report.html"))]
    files += [] if asked.files else sorted((ROOT / "runs").glob("compare.html"))
    asked.output.mkdir(parents=True, exist_ok=True)
    with session(browser, driver) as tell:
        for file in files:
            for width in WIDTHS:
                for scheme in SCHEMES:
                    name = f"{file.parent.name}-{file.stem}-{width}-{scheme}.png"
                    (asked.output / name).write_bytes(picture(tell, file, width, scheme))
                    print(f"written: {asked.output / name}")


@contextlib.contextmanager
def session(browser: str, driver: str) -> Iterator:
    """`tell(command, parameters)` asks a browser of ours by the DevTools protocol, and returns its answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        base = f"http://127.0.0.1:{port}/session"
        options = {"binary": browser, "args": FLAGS}
        found = _ask(base, {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}, patience=30)
        own = f"{base}/{found['sessionId']}"
        yield lambda command, **parameters: _ask(f"{own}/goog/cdp/execute", {"cmd": command, "params": parameters})
        urllib.request.urlopen(urllib.request.Request(own, method="DELETE"), timeout=30).close()
    finally:
        process.terminate()
        process.wait()


def _ask(url: str, body: dict, patience: float = 0.0):
    """The value that the driver answers with. `patience`: seconds that it may take to listen."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    until = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) or time.monotonic() > until:
                raise
            time.sleep(0.1)


def picture(tell, file: Path, width: int, scheme: str) -> bytes:
    """The whole of a page as PNG."""
    with tempfile.TemporaryDirectory() as folder:
        page = file.resolve()
        if file.suffix == ".svg":
            page = Path(folder) / "page.html"
            page.write_text(PAGE.format(url=file.resolve().as_uri()), encoding="utf-8")
        tell("Emulation.setDeviceMetricsOverride", width=width, height=300, deviceScaleFactor=1, mobile=width < 600)
        tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tell("Page.navigate", url=page.as_uri())
        tell("Runtime.evaluate", expression=READY, awaitPromise=True)
        size = tell("Page.getLayoutMetrics")["cssContentSize"]
        clip = dict(x=0, y=0, width=max(width, size["width"]), height=min(size["height"], TALLEST), scale=1)
        shot = tell("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    return base64.b64decode(shot["data"])


PAGE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>:root {{ color-scheme: light dark }} body {{ margin: 16px }} img {{ width: 100%; max-width: 1012px }}</style>
<img src="{url}">
"""
READY = """new Promise(done => { const wait = () =>
    document.readyState == "complete" ? setTimeout(done, 200) : setTimeout(wait, 50); wait() })"""


if __name__ == "__main__":
    main(sys.argv[1:])
