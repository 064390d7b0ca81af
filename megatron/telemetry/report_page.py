# SPDX-License-Identifier: Apache-2.0
"""The HTML of reports: pages of headline numbers, pictures, tables and texts, and these as parts of another page."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.telemetry.web import COMMON

Tile = tuple[str, str, str]  # value, name, remark


@dataclass
class Grid:
    """A table of several columns: their heads, and rows of cells."""

    caption: str
    head: list[str]
    rows: list[list[str]]


@dataclass
class Section:
    """A heading with pictures (caption, data URL), tables (caption, rows), grids or quotes (prompt, text) below it."""

    heading: str
    pictures: list[tuple[str, str]] = field(default_factory=list)
    tables: list[tuple[str, dict[str, str] | list[tuple[str, str]]]] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    quotes: list[tuple[str, str]] = field(default_factory=list)
    folded: bool = False
    wide: bool = False  # pictures over the whole width


def page(title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section], refresh: int = 0) -> str:
    """A complete HTML page. Sections without content are left out; all text is escaped.

    refresh: seconds after which a browser reloads the page; 0: never
    """
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    style = "\n".join((COMMON / name).read_text(encoding="utf-8") for name in ("page.css", "facts.css"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{again}<title>{html.escape(title)}</title><style>{style}</style></head>\n"
        f'<body><main class="sheet"><h1>{html.escape(title)}</h1>{tiles_html(subtitle, tiles)}\n'
        f"{sections_html(sections)}</main></body></html>\n"
    )


def tiles_html(subtitle: str, tiles: Sequence[Tile]) -> str:
    """A line below a heading, and headline numbers."""
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(what)}</span>'
        f"<small>{html.escape(remark)}</small></div>"
        for value, what, remark in tiles
    )
    return f'<p class="subtitle">{html.escape(subtitle)}</p><div class="tiles">{cells}</div>'


def sections_html(sections: Sequence[Section]) -> str:
    """The sections that have content."""
    return f'<div class="facts">{"".join(map(_section, sections))}</div>'


def _section(section: Section) -> str:
    pictures = "".join(
        f'<figure><figcaption>{html.escape(caption)}</figcaption><img alt="{html.escape(caption)}" src="{url}"></figure>'
        for caption, url in section.pictures
    )
    inner = f'<div class="pictures{" wide" * section.wide}">{pictures}</div>' if pictures else ""
    for caption, rows in section.tables:
        if rows:
            lines = "".join(
                f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
                for name, value in (rows.items() if isinstance(rows, dict) else rows)
            )
            inner += (
                f"<h3>{html.escape(caption)}</h3>" if caption else ""
            ) + f'<div class="card"><table>{lines}</table></div>'
    inner += "".join(map(_grid, section.grids))
    for prompt, text in section.quotes:
        start = f"<mark>{html.escape(prompt)}</mark>" if prompt else ""
        inner += f'<div class="card"><pre>{start}{html.escape(text)}</pre></div>'
    if not inner:
        return ""
    if section.folded:
        inner = f"<details><summary>show all</summary>{inner}</details>"
    return f"<section><h2>{html.escape(section.heading)}</h2>{inner}</section>"


def _grid(grid: Grid) -> str:
    """A table that scrolls sideways if it does not fit; empty if it has no rows."""
    if not grid.rows:
        return ""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in grid.head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows)
    caption = f"<h3>{html.escape(grid.caption)}</h3>" if grid.caption else ""
    table = f'<table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'{caption}<div class="card">{table}</div>'
