# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as pictures: for the terminal, and as SVG. Both draw times, simulated or measured."""

from collections.abc import Iterator
from html import escape

from megatron.pipeline.schedule import Op
from megatron.pipeline.sharding import COMMUNICATION
from megatron.pipeline.simulate import Times

ANSI = dict(
    F="44;97", B="42;30", I="46;30", W="43;30", G="45;97", GB="45;97", R="41;97", U="47;30"
)  # background;foreground
FILL = dict(F=("#4c78a8", "#85aad1"), B=("#54a24b", "#8fca88"), I=("#72b7b2", "#a9d8d4"), W=("#eeca3b", "#f5e08e"))
FILL |= dict(G=("#b279a2", "#d6a5c9"), GB=("#b279a2", "#d6a5c9"), R=("#e45756", "#ff9d98"), U=("#9d755d", "#d8b5a5"))
PADDING = dict(F="-", B="=", I="-", W="~", G=">", GB=">", R="<", U="+")


def diagram(times: Times, *, width: int = 120, colour: bool = False, whole: bool = False) -> str:
    """One line per rank, time to the right, each op a block with its micro-batch (F3.1: of chunk 1). Under the line of a
    rank that gathers and reduces stands its communication lane.

    Without colour a block reads F3---- (forward of micro-batch 3). Lines are cut at `width`; `whole`: labels are.
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
        for op, start, end in row:
            start, end = round(start * columns), round(end * columns)
            if end > width - (9 if op is row[-1][0] else 12):  # the dots need three columns
                line += " " * (min(start, width - 12) - column) + "..."
                break
            line += " " * (start - column) + _block(op, end - start, colour)
            column = end
        lines.append(f"{name} |{line}" if name else f"rank {rank:2d} |{line}")
    return "\n".join(lines)


def _rows(times: Times) -> Iterator[tuple[int, str, list[tuple[Op, float, float]]]]:
    """(rank, name of its lane, ops of the lane): the compute lane has no name; another one only where it has ops."""
    for rank in sorted({rank for rank, _ in times}):
        own = [(op, start, end) for (where, op), (start, end) in times.items() if where == rank]
        own.sort(key=lambda entry: entry[1:])
        yield rank, "", [entry for entry in own if entry[0].kind not in COMMUNICATION]
        sent = [entry for entry in own if entry[0].kind in COMMUNICATION and entry[2] > entry[1]]
        if sent:
            yield rank, "   comm", sent


def _block(op: Op, length: int, colour: bool) -> str:
    if not colour:
        return str(op).ljust(length, PADDING[op.kind])[:length]
    label = f"{op.micro}" + f".{op.chunk}" * (op.chunk > 0)
    shade = "1;" if op.chunk % 2 else ""
    return f"\033[{shade}{ANSI[op.kind]}m{label.ljust(length)[:length]}\033[0m"


WIDTH, ROW, LEFT = 1240, 26, 60  # pixels: of the picture, of a rank's line, of its name


def svg(panels: dict[str, Times]) -> str:
    """A picture with a panel for each title, all on one scale of time, so that simulated and measured compare."""
    span = max((end for times in panels.values() for _, end in times.values()), default=1.0) or 1.0
    scale, y, parts = (WIDTH - LEFT - 20) / span, 30, []
    for title, times in panels.items():
        parts.append(f'<text x="{LEFT}" y="{y - 8}" class="title">{escape(title)}</text>')
        for rank, name, row in _rows(times):
            parts.append(f'<text x="8" y="{y + 17}">{name.strip() or f"rank {rank}"}</text>')
            parts += [_rectangle(op, LEFT + start * scale, y, (end - start) * scale) for op, start, end in row]
            y += ROW
        y += 36
    legend = dict(F="forward", B="backward", I="gradient of inputs", W="gradient of weights", U="update")
    legend |= dict(G="gather parameters", GB="gather them again", R="reduce gradients")
    kinds = [kind for kind in FILL if any(op.kind == kind for times in panels.values() for _, op in times)]
    for number, kind in enumerate(kinds):
        x = LEFT + 190 * number
        parts.append(f'<rect x="{x}" y="{y - 22}" width="14" height="14" fill="{FILL[kind][0]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y - 10}">{kind} {legend[kind]}</text>')
    style = "text{font:11px sans-serif;fill:#222}.title{font-weight:bold;font-size:13px}.op{pointer-events:none}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rectangle(op: Op, x: float, y: float, width: float) -> str:
    fill = FILL[op.kind][op.chunk % 2]
    box = f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}" fill="{fill}" stroke="#fff" stroke-width=".5">'
    label = f'<text class="op" x="{x + 2:.2f}" y="{y + 15}">{op.micro}</text>' if width > 6 * len(str(op.micro)) else ""
    return f"{box}<title>{op}</title></rect>{label}"
