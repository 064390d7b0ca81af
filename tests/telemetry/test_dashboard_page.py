# SPDX-License-Identifier: Apache-2.0
"""The page of the dashboard in a real browser: the system's Chromium, by playwright."""

import json
import shutil
import time
from pathlib import Path

import pytest

from megatron.tools import report
from tests.telemetry.test_dashboard import launch, served, step, write

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytest.importorskip("uvicorn")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()
BLUE, ORANGE = (37, 99, 235), (234, 88, 12)  # of the first two runs, in the light scheme
# How many pixels of a chart have a colour, or nearly.
PIXELS = """([chart, colour]) => { const canvas = document.querySelector(`[data-chart="${chart}"] canvas`);
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const data = copy.getImageData(0, 0, canvas.width, canvas.height).data; let found = 0;
    for (let at = 0; at < data.length; at += 4)
        if (data[at + 3] > 200 && colour.every((part, n) => Math.abs(part - data[at + n]) < 12)) found++;
    return found }"""
CURVE = """([chart, run]) => charts.find((one) => one.id === chart).curves.find((curve) => curve.run === run)"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=60_000)
        yield running
        running.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    timers = dict(kind="timers", steps=1, seconds={"forward-backward": dict(min=1, max=2, ranks=[1.0, 1.0, 1.4])})
    write(
        folder / "slow",
        launch(),
        *(step(n, 4 - n / 100) for n in range(1, 301)),
        *(timers | dict(iteration=n) for n in (100, 200, 300)),
    )
    pipeline = launch(mesh=dict(pp=2))
    loads = {"blocks.0": [30, 10, 0, 40], "blocks.1": [20, 20, 20, 20]}
    experts = (dict(kind="experts", iteration=n, loads=loads) for n in range(20, 201, 20))
    write(folder / "wide", pipeline, *(step(n, 3 - n / 100) for n in range(1, 201)), *experts)
    event = dict(
        time=1.0, event="spike", level="warning", iteration=50, rank=None, message="<b>loss</b> far above its median"
    )
    (folder / "wide" / "events.jsonl").write_text(json.dumps(event) + "\n")
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with served(folder) as (address, _):
        yield address


@pytest.fixture
def visit(browser, url):
    """`visit(width=..., scheme=...)`: a page with the charts drawn; complaints of the browser fail the test."""
    opened, complaints = [], []

    def open_page(address="", width=1200, scheme="light"):
        page = browser.new_page(viewport=dict(width=width, height=900), color_scheme=scheme)
        page.set_default_timeout(60_000)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(error.stack or str(error)))
        page.goto(address if "://" in address else url + address)
        page.wait_for_selector('[data-chart="lm loss"] .u-over')
        opened.append(page)
        return page

    yield open_page
    for page in opened:
        page.close()
    assert complaints == []


def wait_for(page, expression: str) -> None:
    """Wait until an expression holds. (The page's policy refuses playwright's own function for this.)"""
    until = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < until, expression
        time.sleep(0.05)


@pytest.mark.sampled(5)
def test_curves_of_two_runs_that_go_on(visit, folder):
    page = visit("#smoothing=0")
    assert page.locator("#runs b").all_inner_texts() == ["slow", "wide"]
    assert page.evaluate(PIXELS, ["lm loss", BLUE]) > 100 and page.evaluate(PIXELS, ["lm loss", ORANGE]) > 100
    text = page.locator('[data-chart="lm loss"] .values').inner_text()
    assert "slow" in text and "wide" in text and text.count("last step") == 2  # and no running mean
    assert "loss of the last step" in page.locator("#runs").inner_text()
    assert "<b>loss</b> far above its median" in page.locator("#events").inner_text()
    assert page.locator("#ranks canvas").is_visible() and "forward-backward" in page.locator("#ranks").inner_text()
    assert page.locator("#experts canvas").is_visible() and "blocks.0" in page.locator("#experts-note").inner_text()
    told = [page.locator(f"#{kind}-scale").inner_text().split("\n") for kind in ("ranks", "experts")]
    assert told[0] == ["0.6 or less", "1", "1.3", "1.8 or more", "times its peers"]
    assert told[1] == ["0", "1", "2", "3 or more", "times the mean"]
    page.locator("#experts-name").select_option("blocks.1")
    wait_for(page, "document.querySelector('#experts-note').innerText.includes('of blocks.1')")
    assert page.locator("#pictures img").is_visible()  # the schedule of the run with a pipeline
    write(folder / "slow", *(step(n, 1.25) for n in range(301, 401)))
    wait_for(page, "document.querySelector('#runs').innerText.includes('400')")
    wait_for(page, f"(({CURVE})(['lm loss', '0'])).x.at(-1) === 400")
    write(folder / "slow", launch(310), step(311, 7.5))  # the run resumes from an earlier checkpoint
    wait_for(page, f"(({CURVE})(['lm loss', '0'])).x.at(-1) === 311 && (({CURVE})(['lm loss', '0'])).y.at(-1) === 7.5")
    wait_for(page, "document.querySelector('#runs').innerText.includes('1 restart')")
    page.get_by_role("checkbox", name="wide").uncheck()
    wait_for(page, f"!({CURVE})(['lm loss', '1'])")
    assert page.evaluate(PIXELS, ["lm loss", ORANGE]) == 0 and "hide=wide" in page.url


def test_a_metric_that_a_short_run_alone_has_fills_its_chart(visit, tmp_path):
    """Beside a run of 300 steps, whose events it does not mark; the loss of both has the range of both."""
    write(tmp_path / "long", launch(), *(step(n, 4 - n / 100) for n in range(1, 301)))
    write(tmp_path / "short", launch(), *(step(n, 3.0, **{"dpo loss": 0.7 - n / 100}) for n in range(1, 21)))
    event = dict(time=1.0, event="spike", level="warning", iteration=10, rank=None, message="a spike")
    (tmp_path / "long" / "events.jsonl").write_text(json.dumps(event) + "\n")
    report.main([str(tmp_path / "long"), str(tmp_path / "short"), "--output", str(tmp_path / "a.html")])
    page = visit(f"file://{tmp_path / 'a.html'}#smoothing=0")
    wait_for(page, "cards.get('dpo loss')?.u && cards.get('lm loss')?.u")
    ends = "(chart) => [cards.get(chart).u.scales.x.min, cards.get(chart).u.scales.x.max]"
    assert page.evaluate(ends, "dpo loss") == [1, 20] and page.evaluate(ends, "lm loss") == [1, 300]


def test_a_report_is_the_page_with_its_data_inside(visit, folder, tmp_path):
    """One file from a disk: curves, axes, smoothing, heat maps, the pipeline and events, without a server."""
    report.main([str(folder / "slow"), str(folder / "wide"), "--output", str(tmp_path / "a.html"), "--title", "Two"])
    page = visit(f"file://{tmp_path / 'a.html'}#smoothing=0")
    assert page.title() == page.locator("h1").inner_text() == "Two" and not page.locator("#live").is_visible()
    assert page.evaluate(PIXELS, ["lm loss", BLUE]) > 100 and page.evaluate(PIXELS, ["lm loss", ORANGE]) > 100
    assert page.evaluate(f"(({CURVE})(['lm loss', '1'])).x.at(-1)") == 200
    assert "<b>loss</b> far above its median" in page.locator("#events").inner_text()
    assert page.locator("#ranks canvas").is_visible() and page.locator("#pictures img").is_visible()
    page.locator("#experts-name").select_option("blocks.1")
    wait_for(page, "document.querySelector('#experts-note').innerText.includes('of blocks.1')")
    page.keyboard.press("x")
    wait_for(
        page,
        f"(({CURVE})(['lm loss', '1'])).x.at(-1) === 800 && events.find((one) => one.event === 'spike').at === 200",
    )
    page.keyboard.press("]")
    page.keyboard.press("]")
    wait_for(page, f"(({CURVE})(['lm loss', '1'])).smooth?.length === 200")
    assert page.locator("#window").inner_text() == "mean of 16" and "compared with slow" in page.inner_text("main")
    values = "document.querySelector('[data-chart=\"lm loss\"] .values').innerText"
    wait_for(page, f"{values}.split('mean of the last 16 steps').length === 3")
    for _ in range(3):
        page.keyboard.press("]")
    wait_for(page, f"{values}.includes('mean of the last 200 steps')")  # all that the second run has
    page.keyboard.press("2")
    wait_for(page, f"!({CURVE})(['lm loss', '1'])")


def test_everything_by_keyboard(visit):
    page = visit()
    keys = page.keyboard
    keys.press("2")
    wait_for(page, "document.querySelector('#chosen').innerText === '1 of 2'")
    keys.press("a")
    wait_for(page, "document.querySelector('#chosen').innerText === '2 of 2'")
    keys.press("x")
    wait_for(page, f"document.querySelector('[value=samples]').checked && (({CURVE})(['lm loss', '0'])).x[0] === 4")
    keys.press("x")
    wait_for(page, f"document.querySelector('[value=tokens]').checked && (({CURVE})(['lm loss', '0'])).x[0] === 64")
    keys.press("]")
    assert page.locator("#window").inner_text() == "mean of 32"
    keys.press("c")
    assert page.locator("#clip").is_checked() and "clip=1" in page.url and "axis=tokens" in page.url
    keys.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(3, 7, 18)"
    keys.press("?")
    assert page.locator("#keys").is_visible()
    keys.press("Escape")
    assert not page.locator("#keys").is_visible()
    plot = page.locator('[data-chart="lm loss"] .plot')
    while not plot.evaluate("(plot) => plot === document.activeElement"):
        keys.press("Tab")
    keys.press("ArrowLeft")
    assert "tokens" in page.locator('[data-chart="lm loss"] .head').inner_text()
    assert "tokens" in page.locator("#spoken").inner_text()
    keys.press("l")
    assert page.locator('[data-chart="lm loss"] button').get_attribute("aria-pressed") == "true"
    assert page.locator('[data-chart="learning_rate"] button').get_attribute("aria-pressed") == "false"
    keys.press("+")
    wait_for(page, f"view.between && (({CURVE})(['lm loss', '0'])).x[0] > 64")
    assert page.locator("#reset").is_visible()
    keys.press("Escape")
    wait_for(page, f"!view.between && (({CURVE})(['lm loss', '0'])).x[0] === 64")


def test_the_mouse_zooms_all_charts(visit):
    page = visit("#smoothing=0")
    box = page.locator('[data-chart="lm loss"] .u-over').bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=3)
    page.mouse.up()
    wait_for(page, "view.between && cards.get('learning_rate').u.scales.x.min > 10")
    page.mouse.dblclick(box["x"] + 50, box["y"] + 50)
    wait_for(page, "!view.between && cards.get('learning_rate').u.scales.x.min === 1")


def test_dark_by_the_system(visit):
    page = visit(scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(3, 7, 18)"
    assert page.evaluate(PIXELS, ["lm loss", (96, 165, 250)]) > 50  # the blue of the dark scheme
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(243, 244, 246)"
    wait_for(page, f"({PIXELS})(['lm loss', [37, 99, 235]]) > 50")
    page.reload()
    page.wait_for_selector('[data-chart="lm loss"] .u-over')
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(243, 244, 246)"  # it is kept


@pytest.mark.sampled(2)
def test_a_telephone(visit):
    page = visit(width=400)
    page.locator("#list summary").click()
    page.wait_for_selector("#runs b >> visible=true")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    edges = """Math.max(...[...document.querySelectorAll('main *:not(.scroll > *), aside *')]
        .map((one) => one.getBoundingClientRect().right))"""
    assert page.evaluate(edges) <= 400
    widths = page.evaluate("[...document.querySelectorAll('.u-wrap')].map((one) => one.clientWidth)")
    assert len(widths) > 4 and min(widths) > 300
