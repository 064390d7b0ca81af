# SPDX-License-Identifier: Apache-2.0
"""The page of how far a run is: what it says, when it is written, and when a browser loads it again."""

import base64
import json
import os
import re
import threading
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest

from megatron.corpus.driver import CorpusProgress, run
from megatron.corpus.plan import save_plan
from megatron.corpus.runners.local import run_local
from megatron.corpus.status import StatusPage, bars, status_page
from megatron.errors import DataError, StorageError
from megatron.tools import corpus
from tests.corpus.conftest import STAGES

SVG = "{http://www.w3.org/2000/svg}"


def refreshes(page: str) -> bool:
    return 'http-equiv="refresh"' in page


def picture(page: str) -> ElementTree.Element:
    [data] = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return ElementTree.fromstring(base64.b64decode(data))


def widths(svg: ElementTree.Element) -> list[tuple[str, float]]:
    return [(one.get("class"), float(one.get("width"))) for one in svg.iter(f"{SVG}rect")]


def test_bars_are_as_long_as_what_is_done():
    back, half, _, none, _, full, _, empty = widths(
        ElementTree.fromstring(bars({"<a&b>": [1, 2], "b": [0, 7], "c": [3, 3], "d": [0, 0]}))
    )
    assert half == ("part", back[1] / 2) and back[1] > 100 and none == ("part", 0.0)
    assert full == ("full", back[1]) and empty == ("full", back[1])


def test_what_the_page_says():
    told = dict(phases={"00-shards": [3, 3], "01-filter": [1, 5]}, running=2, seconds=75.0, seconds_left=7384.0)
    told |= dict(state="running", at=0, quarantined={"filter, shard <3>": "ValueError: & bad"})
    page = status_page(told, "runs/<x>")
    assert refreshes(page) and "4 of 8" in page and "50.0%" in page and "1 min 15 s" in page and "2 h 3 min" in page
    assert "filter, shard &lt;3&gt;" in page and "ValueError: &amp; bad" in page and "runs/&lt;x&gt;" in page
    texts = [one.text for one in picture(page).iter(f"{SVG}text")]
    assert texts == ["00-shards", "3 of 3", "01-filter", "1 of 5"]
    for state in ("done", "failed", "stopped", "unknown", "killed: the same command resumes it"):
        assert not refreshes(status_page(dict(told, state=state), "x"))
    assert refreshes(status_page(dict(told, state="running, or killed"), "x"))
    assert "the same command resumes it" in status_page(dict(told, state="killed: the same command resumes it"), "x")
    assert "unknown" in status_page(dict(phases={}), "x")


def test_a_run_keeps_the_page_whole_and_up_to_date(small_corpus, tmp_path, monkeypatch):
    """A reader that looks all the time sees whole pages alone, the last of them of the end."""
    monkeypatch.setattr("megatron.corpus.status.EVERY", 0.0)
    monkeypatch.setattr("megatron.corpus.driver.AFTER", 0.0)
    path = tmp_path / "pages" / "status.html"
    plan = small_corpus.plan(tmp_path / "out")
    seen, over = set(), threading.Event()

    def look():
        while not over.is_set():
            if path.exists():
                seen.add(path.read_text())

    reader = threading.Thread(target=look)
    reader.start()
    try:
        run(plan, tmp_path / "out", partial(run_local, workers=1), StatusPage(path, "out"))
    finally:
        over.set()
        reader.join()
    last = path.read_text()
    assert all(page.endswith("</html>\n") for page in seen | {last}) and len(seen) > 2
    assert not refreshes(last) and f"{len(plan.tasks)} of {len(plan.tasks)}" in last
    assert {kind for kind, _ in widths(picture(last))} == {"back", "full"}
    assert [*path.parent.iterdir()] == [path]


def test_it_is_written_every_few_seconds_and_at_the_end(tmp_path):
    path = tmp_path / "status.html"
    keep = StatusPage(path, "x")
    progress = CorpusProgress({"00-shards": [0, 2]}, 1, {}, 1.0)
    keep(progress)
    first = path.read_text()
    progress.phases = {"00-shards": [1, 2]}
    keep(progress)
    assert path.read_text() == first
    progress.state = "done"
    keep(progress)
    assert "1 of 2" in path.read_text()


def recipe_of(small_corpus, tmp_path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"input: {small_corpus.input}\nshard-mb: {small_corpus.shard_mb}\n{STAGES.format(more='')}")
    return str(path)


def test_the_commands(small_corpus, tmp_path, capsys):
    output, page = tmp_path / "out", tmp_path / "run.html"
    recipe = recipe_of(small_corpus, tmp_path)
    corpus.main(["run", recipe, "--output", str(output), "--workers", "1", "--status-page", str(page)])
    assert "done" in page.read_text() and not refreshes(page.read_text())
    capsys.readouterr()
    later = tmp_path / "later.html"
    corpus.main(["status", "--output", str(output), "--html", str(later), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert widths(picture(later.read_text())) == widths(picture(page.read_text()))
    [*_, (gone, _)] = told["phases"].items()
    for folder in (output / "tasks" / gone).iterdir():
        (folder / "receipt.json").unlink()
    corpus.main(["status", "--output", str(output), "--html", str(later)])
    assert f"0 of {told['phases'][gone][1]}" in [one.text for one in picture(later.read_text()).iter(f"{SVG}text")]


def test_a_page_that_cannot_be_written(small_corpus, tmp_path):
    recipe = recipe_of(small_corpus, tmp_path)
    flags = ["--output", str(tmp_path / "out"), "--workers", "1", "--status-page"]
    with pytest.raises(DataError, match="is a folder"):
        corpus.main(["run", recipe, *flags, str(tmp_path)])
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        corpus.main(["run", recipe, *flags, str(tmp_path / "file" / "page.html")])
    with pytest.raises(DataError, match="no run was started"):
        corpus.main(["status", "--output", str(tmp_path / "none"), "--html", str(tmp_path / "page.html")])
    assert not (tmp_path / "page.html").exists()


def test_status_of_a_plan_that_nobody_has_begun(small_corpus, tmp_path, capsys):
    save_plan(small_corpus.plan(tmp_path / "out"), tmp_path / "out")
    corpus.main(["status", "--output", str(tmp_path / "out"), "--html", os.fspath(tmp_path / "page.html")])
    assert "unknown" in capsys.readouterr().out and not refreshes((tmp_path / "page.html").read_text())
