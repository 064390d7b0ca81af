# SPDX-License-Identifier: Apache-2.0
"""The page of the dashboard: served by a live server, or as one file with its data inside, which opens offline."""

from collections.abc import Sequence
from pathlib import Path

import orjson

from megatron.telemetry.dashboard.runs import Runs
from megatron.telemetry.report_page import Section, Tile, sections_html, tiles_html
from megatron.telemetry.web import COMMON, PageHead

PAGE = Path(__file__).parent / "page"
FILES = (PAGE / "uPlot.min.css", PAGE / "dashboard.css", PAGE / "uPlot.iife.min.js", PAGE / "dashboard.js")


def page_head(title: str, heading: str, files: Sequence[Path] = FILES) -> PageHead:
    """The head of the page."""
    return PageHead(title, heading, files, theme_key="d", help_key="?")


def body(tiles: str = "", facts: str = "", data: str = "") -> str:
    """The body of the page. tiles: HTML above its charts; facts: HTML below its events; data: values as JSON"""
    text = (PAGE / "body.html").read_text(encoding="utf-8")
    kept = f'<script type="application/json" id="kept">{data}</script>\n' if data else ""
    return text.replace("<!-- tiles -->", tiles).replace("<!-- facts -->", facts).replace("</body>", f"{kept}</body>")


def page_with_data(title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section], runs: Runs) -> str:
    """The page with its data, headline numbers and sections inside."""
    data = orjson.dumps(runs.kept(), option=orjson.OPT_SERIALIZE_NUMPY).decode().replace("<", "\\u003c")
    whole = body(tiles_html(subtitle, tiles), sections_html(sections), data)
    return page_head(title, title, (*FILES, COMMON / "facts.css")).whole(whole)
