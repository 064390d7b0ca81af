# SPDX-License-Identifier: Apache-2.0
"""The HTML page of a report: layout and style."""

import html
from dataclasses import dataclass, field

STYLE = """
:root { color-scheme: light dark }
:root { --ink: #111827; --soft: #6b7280; --line: #e5e7eb; --card: #ffffff; --ground: #f3f4f6; --accent: #2563eb }
@media (prefers-color-scheme: dark) {
:root { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; --card: #111827; --ground: #030712; --accent: #60a5fa } }
* { box-sizing: border-box }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 28px; margin: 0 } h2 { font-size: 18px; margin: 36px 0 12px } h3 { font-size: 14px; margin: 16px 0 4px }
.subtitle { color: var(--soft); margin: 4px 0 24px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px }
.tile, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px }
.tile { padding: 14px 16px; overflow-wrap: anywhere; min-width: 0 }
.tile b { display: block; font-size: 26px; font-weight: 650; line-height: 1.25 }
.tile span { display: block } .tile small { color: var(--soft) }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(430px, 1fr)); gap: 12px; margin-bottom: 12px }
.wide figure { grid-column: 1 / -1 }
figure { margin: 0; padding: 12px 12px 6px } figure img { width: 100%; display: block }
figcaption { font-weight: 600; padding: 0 4px 6px }
.card { padding: 6px 16px; margin-bottom: 12px; overflow-x: auto }
table { border-collapse: collapse; width: 100% } td { border-top: 1px solid var(--line); padding: 5px 8px 5px 0 }
tr:first-child td { border-top: 0 } td:first-child { color: var(--soft); width: 38% }
td { overflow-wrap: anywhere; vertical-align: top }
.grid td, .grid th { min-width: 112px; padding-right: 16px; text-align: left } .grid td:first-child { width: auto }
.grid td { white-space: pre-line }
.grid thead + tbody tr:first-child td { border-top: 1px solid var(--line) } th { font-weight: 650; padding: 5px 8px 5px 0 }
i.key { display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin: 0 6px 3px 0; background: var(--key) }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 10px 0 }
pre { font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace }
mark { background: none; color: var(--accent); font-weight: 650 }
summary { cursor: pointer; padding: 8px 0; color: var(--soft) }
@media (max-width: 520px) { main { padding: 20px 12px 40px } .pictures { grid-template-columns: minmax(0, 1fr) }
td, tr { display: block; padding: 2px 0 } td + td { border-top: 0; padding-bottom: 6px }
td:first-child { width: auto; white-space: normal; overflow-wrap: anywhere }
.grid td, .grid th { display: table-cell; padding: 5px 12px 5px 0 } .grid tr { display: table-row }
.grid td + td { border-top: 1px solid var(--line) } .grid tr:first-child td { border-top: 0 } }
@media print { body { background: #fff } details { display: none } figure, .tile { break-inside: avoid } }
"""


@dataclass
class Grid:
    """A table of several columns: their heads, and rows of cells.

    colours: of the columns after the first, (in the light scheme, in the dark one).
    """

    caption: str
    head: list[str]
    rows: list[list[str]]
    colours: list[tuple[str, str]] = field(default_factory=list)


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


def page(
    title: str, subtitle: str, tiles: list[tuple[str, str, str]], sections: list[Section], refresh: int = 0
) -> str:
    """A complete HTML page. Sections without content are left out; all text is escaped.

    refresh: seconds after which a browser reloads the page; 0: never
    """
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(what)}</span>'
        f"<small>{html.escape(remark)}</small></div>"
        for value, what, remark in tiles
    )
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{again}<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f'<h1>{html.escape(title)}</h1><p class="subtitle">{html.escape(subtitle)}</p>'
        f'<div class="tiles">{cells}</div>\n' + "\n".join(map(_section, sections)) + "</main></body></html>\n"
    )


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
    keys = ["", *(f'<i class="key" style="--key: light-dark({light}, {dark})"></i>' for light, dark in grid.colours)]
    keys += [""] * (len(grid.head) - len(keys))
    head = "".join(f"<th>{key}{html.escape(title)}</th>" for key, title in zip(keys, grid.head, strict=True))
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows)
    caption = f"<h3>{html.escape(grid.caption)}</h3>" if grid.caption else ""
    table = f'<table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'{caption}<div class="card">{table}</div>'
