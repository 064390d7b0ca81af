# SPDX-License-Identifier: Apache-2.0
"""Draw pipeline schedules in the terminal and as SVG, from simulated or measured times."""

import math
from collections.abc import Iterator
from html import escape

from megatron.pipeline.data_parallel_messages import MESSAGES
from megatron.pipeline.schedule import Op
from megatron.pipeline.simulate import Times, bubble_of

# Background;foreground
ANSI = dict(F="44;97", B="42;30", I="46;30", W="43;30", G="45;97", H="45;97", R="41;97", U="47;30")
FILL = dict(F=("#4c78a8", "#85aad1"), B=("#54a24b", "#8fca88"), I=("#72b7b2", "#a9d8d4"), W=("#eeca3b", "#f5e08e"))
FILL |= dict(G=("#b279a2", "#d6a5c9"), H=("#8c6bb1", "#bfa8d9"), R=("#e45756", "#ff9d98"), U=("#9d755d", "#d8b5a5"))
PADDING = dict(F="-", B="=", I="-", W="~", G=">", H=">", R="<", U="+")


def diagram(times: Times, *, width: int = 120, colour: bool = False, whole: bool = False) -> str:
    """A diagram with one line per rank, time to the right, each op a block with its micro-batch (F3.1: of chunk 1).

    A rank with gathers and reductions has a second line for its communication lane. Without colour a block reads F3----
    (forward of micro-batch 3), and F3&B1== if two passes take turns. Lines are cut at `width`; with `whole` they are not,
    but labels may be.
    """
    if not times:
        return ""
    span = max(end for _, end in times.values())
    columns = (width - 9) / span
    if not whole:  # every label fits
        unit = min(end - start for start, end in times.values() if end > start)
        label = max(len(str(op)) for _, op in times) + (not colour)
        columns = max(label, min(2 * label, int(columns * unit))) / unit
    lines = []
    for rank, name, row in _rows(times):
        line, column = "", 0
        for ops, start, end in row:
            start, end = round(start * columns), round(end * columns)
            if end > width - (9 if ops is row[-1][0] else 12):  # the dots need three columns
                line += " " * (min(start, width - 12) - column) + "..."
                break
            line += " " * (start - column) + _block(ops, end - start, colour)
            column = end
        lines.append(f"{name} |{line}" if name else f"rank {rank:2d} |{line}")
    return "\n".join(lines)


Row = list[tuple[tuple[Op, ...], float, float]]  # one op, or two that take turns; start; end


def _rows(times: Times) -> Iterator[tuple[int, str, Row]]:
    """(rank, name of the lane, ops of the lane): the compute lane has no name; the other one only exists with ops."""
    for rank in sorted({rank for rank, _ in times}):
        own = [(op, start, end) for (where, op), (start, end) in times.items() if where == rank]
        own.sort(key=lambda entry: entry[1:])
        yield rank, "", _blocks([entry for entry in own if entry[0].kind not in MESSAGES])
        sent = [((op,), start, end) for op, start, end in own if op.kind in MESSAGES and end > start]
        if sent:
            yield rank, "   comm", sent


def _blocks(passes: list[tuple[Op, float, float]]) -> Row:
    """The passes of a rank, sorted by time. Those that take turns have the same times, and are one block."""
    blocks = Row()
    for op, *span in passes:
        if blocks and op.kind in "BI" and blocks[-1][0][-1].kind == "F" and list(blocks[-1][1:]) == span:
            blocks[-1] = ((*blocks[-1][0], op), *span)
        else:
            blocks.append(((op,), *span))
    return blocks


def _block(ops: tuple[Op, ...], length: int, colour: bool) -> str:
    if not colour:
        return "&".join(map(str, ops)).ljust(length, PADDING[ops[-1].kind])[:length]
    ends = [length * (place + 1) // len(ops) for place in range(len(ops))]
    parts = []
    for op, start, end in zip(ops, [0, *ends], ends):
        label = f"{op.micro}" + f".{op.chunk}" * (op.chunk > 0)
        shade = "1;" if op.chunk % 2 else ""
        parts.append(f"\033[{shade}{ANSI[op.kind]}m{label.ljust(end - start)[: end - start]}\033[0m")
    return "".join(parts)


WIDTH, LEFT, RIGHT = 1000, 84, 16  # units: of the picture, of the names of ranks, of the margin
HEAD, ROW, BAR, GAP = 36, 24, 20, 14  # of a panel's title, of a rank's line, of a block in it, below a panel
KINDS = dict(F="forward", B="backward", I="gradient of inputs", W="gradient of weights", U="update")
KINDS |= dict(G="gather parameters", H="gather them again", R="reduce gradients")
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2937 } .title { font-weight: bold; font-size: 15px }
.ground { fill: #ffffff } .idle { fill: #e5e7eb } .grid { stroke: #9ca3af; stroke-opacity: .45 }
.op { font-size: 11px; fill: #111827; pointer-events: none }
@media (max-width: 600px) { text { font-size: 20px } .title { font-size: 23px } .op { display: none } }
@media (prefers-color-scheme: dark) { text { fill: #e5e7eb } .ground { fill: #111827 } .idle { fill: #374151 }
.op { fill: #111827 } }"""


def svg(panels: dict[str, Times], unit: str = "time") -> str:
    """An SVG with a panel for each title, all on the same time axis, labelled by `unit`.

    Grey is time in which a rank waits; its share is in the title. Colours follow the light or dark scheme of the page,
    and text grows where the picture is small.
    """
    span = max((end for times in panels.values() for _, end in times.values()), default=1.0) or 1.0
    scale, y, parts = (WIDTH - LEFT - RIGHT) / span, 0.0, []
    for title, times in panels.items():
        parts.append(f'<text x="{LEFT}" y="{y + HEAD - 11}" class="title">{escape(_titled(title, times))}</text>')
        y += HEAD
        own = max((end for _, end in times.values()), default=0.0) * scale
        for rank, name, row in _rows(times):
            parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{name.strip() or f"rank {rank}"}</text>')
            if not name:
                parts.append(f'<rect x="{LEFT}" y="{y}" width="{own:.2f}" height="{BAR}" class="idle"/>')
            parts += [_rectangles(ops, LEFT + start * scale, y, (end - start) * scale) for ops, start, end in row]
            y += ROW
        y += GAP
    axis, bottom = _axis(span, scale, y, unit)
    legend, height = _legend({(op.kind, op.chunk % 2) for times in panels.values() for _, op in times}, bottom)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" class="ground"/>\n'
        + "\n".join([*axis, *parts, *legend])
        + "\n</svg>\n"
    )


def _titled(title: str, times: Times) -> str:
    """A panel's title, with the share of time in which ranks wait."""
    return f"{title}, bubble {bubble_of(times, len({rank for rank, _ in times})):.1%}" if times else title


def _axis(span: float, scale: float, y: float, unit: str) -> tuple[list[str], float]:
    """(grid lines and labels of the time axis below the panels, their lower edge)."""
    step = tick(span)
    parts = []
    for number in range(int(span / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{HEAD}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 18}" text-anchor="middle">{number * step:g}</text>')
    parts.append(f'<text x="{LEFT}" y="{y + 44}">{escape(unit)}</text>')
    return parts, y + 60


def tick(span: float) -> float:
    """A round distance of ticks, for four to nine of them in the span.

    >>> tick(33), tick(0.4), tick(80)
    (5.0, 0.05, 10.0)
    """
    base = 10.0 ** math.floor(math.log10(span))
    return base * next(share for share in (0.2, 0.5, 1.0, 2.0) if span / base <= 9 * share)


def _legend(used: set[tuple[str, int]], y: float) -> tuple[list[str], float]:
    """(a swatch for every colour of the picture, their lower edge). used: (kind of op, whether its chunk is odd)"""
    two = any(odd for _, odd in used)
    entries = []
    for kind in FILL:
        for odd in (0, 1):
            if (kind, odd) in used:
                of = f", {'odd' if odd else 'even'} chunks" if two and (kind, 1) in used else ""
                entries.append((f'fill="{FILL[kind][odd]}"', f"{KINDS[kind]}{of}"))
    entries.append(('class="idle"', "waiting (bubble)"))
    parts = []
    for number, (fill, words) in enumerate(entries):
        x, top = 16 + (WIDTH - 16) / 2 * (number % 2), y + 30 * (number // 2)
        parts.append(f'<rect x="{x:.0f}" y="{top}" width="16" height="16" {fill}/>')
        parts.append(f'<text x="{x + 24:.0f}" y="{top + 14}">{words}</text>')
    return parts, y + 30 * -(-len(entries) // 2)


def _rectangles(ops: tuple[Op, ...], x: float, y: float, width: float) -> str:
    """A block: one rectangle, or two above each other for passes that take turns."""
    height, words = BAR / len(ops), "&amp;".join(str(op.micro) for op in ops)
    boxes = [
        f'<rect x="{x:.2f}" y="{y + place * height:g}" width="{width:.2f}" height="{height:g}" '
        f'fill="{FILL[op.kind][op.chunk % 2]}" stroke="#fff" stroke-width=".5"><title>{op}</title></rect>'
        for place, op in enumerate(ops)
    ]
    fits = width > 7 * len("&".join(str(op.micro) for op in ops))
    return "".join(boxes) + (f'<text class="op" x="{x + 2:.2f}" y="{y + 14}">{words}</text>' if fits else "")
