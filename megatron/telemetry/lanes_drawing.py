# SPDX-License-Identifier: Apache-2.0
"""Files of the lanes of profiled steps: `rank_N.lanes.json`, a picture of all profiled ranks, tracks of a Chrome trace.

In the picture each rank has its passes and, below them, a line for each lane of messages that it uses: thin while a message
overlaps other work, thick and red while the rank waits for it. The total of its waits stands on the right.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatron.storage.durable import whole_file
from megatron.telemetry.lanes import COMPUTE, LANES, SEND, Bar, exposed

WIDTH, LEFT, RIGHT = 1200, 150, 110  # units: of the picture, of the names of lanes, of the times of waits
HEAD, TALL, LOW, GAP = 64, 24, 16, 12  # above the first rank; of a line of passes; of a line of messages; below a rank
FILL = dict(F="#4c78a8", B="#54a24b", I="#72b7b2", W="#eeca3b", reduce="#8f7bb8", update="#9d755d", data="#e7cba9")
WORDS = dict(F="forward", B="backward", I="gradients of inputs", W="gradients of weights", reduce="reduce, norm")
WORDS |= dict(update="update", data="other")
STYLE = """text { font: 12px system-ui, sans-serif; fill: #1f2937 } .title { font-weight: bold; font-size: 15px }
.ground { fill: #ffffff } .row { fill: #f3f4f6 } .pass { font-size: 10px; fill: #111827; pointer-events: none }
.grid { stroke: #9ca3af; stroke-opacity: .45 } .way { fill: #64748b; fill-opacity: .55 } .wait { fill: #dc2626 }
@media (prefers-color-scheme: dark) { text { fill: #e5e7eb } .ground { fill: #111827 } .row { fill: #1f2937 }
.pass { fill: #111827 } .way { fill: #94a3b8 } .wait { fill: #f87171 } }"""


@dataclass(frozen=True)
class RankLanes:
    """The recording of one rank over some iterations. began: time 0 of its bars, in ns since 1970"""

    rank: int
    iterations: tuple[int, int]
    began: int
    bars: list[Bar]

    def write(self, path: Path) -> None:
        """Write the recording as JSON, a line for each bar. The file is replaced in one piece."""
        head = json.dumps(dict(rank=self.rank, iterations=self.iterations, began=self.began))[:-1]
        rows = ",\n".join(json.dumps([bar.lane, bar.name, *(round(time, 9) for time in bar[2:])]) for bar in self.bars)
        _replace(path, f'{head}, "bars": [\n{rows}\n]}}\n')


def read_lanes(path: Path) -> RankLanes:
    """Read a file of `RankLanes.write`."""
    record = json.loads(path.read_text(encoding="utf-8"))
    bars = [Bar(*row) for row in record["bars"]]
    return RankLanes(record["rank"], tuple(record["iterations"]), record["began"], bars)


def draw_profiled(folder: Path, own: RankLanes, ranks: Iterable[int]) -> Path:
    """Draw the ranks among `ranks` whose files in the folder are of the same iterations.

    Each rank calls it after writing its own file, and draws again if there are more files by then: the last rank draws all.
    """
    target, drawn = folder / "timeline.svg", None
    while True:
        paths = [path for path in (folder / f"rank_{rank}.lanes.json" for rank in sorted(ranks)) if path.exists()]
        present = [lanes for lanes in map(read_lanes, paths) if lanes.iterations == own.iterations]
        if present == drawn:
            return target
        _replace(target, picture(present))
        drawn = present


def _replace(path: Path, text: str) -> None:
    with whole_file(path) as file:  # several ranks may be drawing
        file.write(text.encode())


# ---- the picture ---------------------------------------------------------------------------------------------------------


def picture(ranks: list[RankLanes]) -> str:
    """An SVG with the lanes of all ranks on one time axis, which is as exact as the clocks of the machines agree."""
    zero = min((lanes.began for lanes in ranks), default=0)
    shift = {lanes.rank: (lanes.began - zero) / 1e9 for lanes in ranks}
    first = min((shift[lanes.rank] + bar.start for lanes in ranks for bar in lanes.bars), default=0.0)
    last = max((shift[lanes.rank] + bar.end for lanes in ranks for bar in lanes.bars), default=1.0)
    scale, y, parts = (WIDTH - LEFT - RIGHT) / max(last - first, 1e-9), float(HEAD), []
    for lanes in ranks:
        waits, used = exposed(lanes.bars), {bar.lane for bar in lanes.bars}
        for lane in (lane for lane in LANES if lane in used):
            height = TALL if lane == COMPUTE else LOW
            name = f"rank {lanes.rank}" if lane == COMPUTE else lane
            parts.append(f'<text x="{LEFT - 8}" y="{y + height - 5}" text-anchor="end">{name}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{height - 2}" class="row"/>')
            at = shift[lanes.rank] - first
            for bar in (bar for bar in lanes.bars if bar.lane == lane):
                parts += _pass(bar, at, scale, y) if lane == COMPUTE else _message(bar, at, scale, y)
            if lane in waits:
                parts.append(
                    f'<text x="{WIDTH - RIGHT + 8}" y="{y + height - 5}">waits {1000 * waits[lane]:.1f} ms</text>'
                )
            y += height
        y += GAP
    iterations = {lanes.iterations for lanes in ranks}
    title = " and ".join(f"iterations {low} to {high}" for low, high in sorted(iterations))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24:g}">'
        f'<style>{STYLE}</style><rect width="100%" height="100%" class="ground"/>\n'
        f'<text x="{LEFT}" y="22" class="title">{escape(title)}: passes, and overlapping messages</text>\n'
        + "\n".join([*_legend(ranks), *_axis(last - first, scale, y), *parts])
        + "\n</svg>\n"
    )


def _pass(bar: Bar, at: float, scale: float, y: float) -> list[str]:
    x, width = LEFT + (at + bar.start) * scale, (bar.end - bar.start) * scale
    fill = FILL[_kind(bar)]
    size = f'width="{width:.2f}" height="{TALL - 2}"'
    box = f'<rect x="{x:.2f}" y="{y}" {size} fill="{fill}" stroke="#fff" stroke-width=".5">'
    label = f'<text class="pass" x="{x + 2:.2f}" y="{y + 14}">{escape(bar.name)}</text>'
    return [f"{box}{_title(bar)}</rect>"] + [label] * (width > 7 * len(bar.name))


def _kind(bar: Bar) -> str:
    """The kind of a pass (F of F3.1), or the phase itself; "data" for phases without a colour."""
    return next((kind for kind in (bar.name, bar.name[0]) if kind in FILL), "data")


def _message(bar: Bar, at: float, scale: float, y: float) -> list[str]:
    """Thin until the wait, then thick. A send is a tick: its sender does not know when it arrives."""
    x, begin, end = (LEFT + (at + time) * scale for time in bar[2:])
    way = 2.0 if bar.lane == SEND else max(begin - x, 1.0)
    parts = [f'<rect x="{x:.2f}" y="{y + 5}" width="{way:.2f}" height="4" class="way">{_title(bar)}</rect>']
    if end > begin:
        parts.append(
            f'<rect x="{begin:.2f}" y="{y}" width="{end - begin:.2f}" height="{LOW - 2}" class="wait">{_title(bar)}</rect>'
        )
    return parts


def _title(bar: Bar) -> str:
    waited = f", waited for {1000 * bar.exposed:.3f} ms" if bar.lane != COMPUTE else ""
    return f"<title>{escape(bar.name)}: {1000 * (bar.end - bar.start):.3f} ms{waited}</title>"


def _legend(ranks: list[RankLanes]) -> list[str]:
    parts, x = [], LEFT
    used = {_kind(bar) for lanes in ranks for bar in lanes.bars if bar.lane == COMPUTE}
    entries = [(f'fill="{FILL[kind]}"', words) for kind, words in WORDS.items() if kind in used]
    for fill, words in [*entries, ('class="way"', "message under way"), ('class="wait"', "waiting for it: exposed")]:
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" {fill}/>')
        parts.append(f'<text x="{x + 17}" y="44">{words}</text>')
        x += 30 + 7 * len(words)
    return parts


def _axis(span: float, scale: float, y: float) -> list[str]:
    """Grid lines and labels of the time axis, in milliseconds."""
    step = 10.0 ** len(str(int(1000 * span))) / 10  # of ms: from one to nine marks
    marks = [number * step for number in range(int(1000 * span / step) + 1)]
    parts = []
    for mark in marks:
        x = LEFT + mark / 1000 * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{HEAD - 6}" y2="{y - 4}" class="grid"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 10}" text-anchor="middle">{mark:g} ms</text>')
    return parts


# ---- the trace -----------------------------------------------------------------------------------------------------------


def with_lanes(trace: str, lanes: RankLanes) -> str:
    """A Chrome trace as torch writes it, with the lanes added as a process of their own.

    Times are microseconds since the trace's `baseTimeNanoseconds`. Messages overlap: they are "asynchronous" events.
    """
    head, separator, rest = trace.partition('"traceEvents": [')
    if not separator:
        return trace
    base = head.partition('"baseTimeNanoseconds":')[2].split(",")[0].strip()
    zero = (lanes.began - int(base or 0)) / 1000
    process = f"lanes of rank {lanes.rank}"
    events = [dict(ph="M", name="process_name", pid=process, tid=0, args=dict(name=process))]
    for number, bar in enumerate(lanes.bars):
        start, wait, end = (zero + 1e6 * time for time in bar[2:])
        if bar.lane == COMPUTE:
            events.append(dict(ph="X", cat="lane", name=bar.name, pid=process, tid=COMPUTE, ts=start, dur=end - start))
            continue
        event = dict(cat=bar.lane, name=bar.name, pid=process, tid=bar.lane, id=number)
        events += [dict(event, ph="b", ts=start), dict(event, ph="e", ts=end)]
        if end > wait:
            name = f"waits for {bar.name}"
            events.append(dict(ph="X", cat="wait", name=name, pid=process, tid=bar.lane, ts=wait, dur=end - wait))
    return head + separator + "\n" + ",\n".join(map(json.dumps, events)) + "," + rest
