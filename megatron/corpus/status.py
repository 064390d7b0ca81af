# SPDX-License-Identifier: Apache-2.0
"""A page with the progress of a corpus run, which a browser reloads by itself until the run ends.

python -m megatron.tools.corpus run recipe.yaml --output runs/corpus --status-page status.html
python -m megatron.tools.corpus status --output runs/corpus --html status.html
"""

import html
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from megatron.storage.durable import storage_errors, whole_file
from megatron.telemetry.curves import data_url
from megatron.telemetry.report_page import Grid, Section, page

REFRESH = 10  # seconds between two looks of a browser
EVERY = 5.0  # seconds between two versions of the page
WIDTH, ROW = 500, 40  # of the bars, in pixels
_STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#111827}.back{fill:#e5e7eb}.part{fill:#2563eb}.full{fill:#16a34a}"
    "@media(prefers-color-scheme:dark){text{fill:#e5e7eb}.back{fill:#374151}.part{fill:#60a5fa}.full{fill:#4ade80}}"
)


def status_page(progress: Mapping[str, Any], output: str) -> str:
    """The page of a run. progress: the content of `status.json`, with phases: name -> [done, all]."""
    phases, state = progress["phases"], progress.get("state", "unknown")
    done, total = (sum(column) for column in zip(*phases.values(), strict=True)) if phases else (0, 0)
    left, goes_on = progress.get("seconds_left"), state.startswith("running")
    tiles = [
        (state.partition(":")[0], "state", state.partition(": ")[2] or f"at {_moment(progress.get('at'))}"),
        (f"{done:,} of {total:,}", "tasks done", f"{done / total:.1%}" if total else ""),
        (f"{progress.get('running', 0) if goes_on else 0:,}", "tasks under way", ""),
        (_duration(progress.get("seconds")), "since it began", ""),
    ]
    if goes_on:
        tiles.append((_duration(left), "left, about", "if tasks go on as they did"))
    aside = progress.get("quarantined") or {}
    sections = [
        Section("Phases", pictures=[("tasks done", data_url(bars(phases)))] if phases else []),
        Section("Set aside", grids=[Grid("", ["task", "why"], [[about, why] for about, why in aside.items()])]),
    ]
    return page("Corpus", f"{output}, written at {_moment(time.time())}", tiles, sections, REFRESH * goes_on)


def bars(phases: Mapping[str, list[int]]) -> str:
    """A bar a phase, as SVG."""
    rows = []
    for number, (name, (done, total)) in enumerate(phases.items()):
        y, share = number * ROW, done / total if total else 1.0
        rows.append(
            f'<text x="0" y="{y + 14}">{html.escape(name)}</text>'
            f'<text x="{WIDTH}" y="{y + 14}" text-anchor="end">{done:,} of {total:,}</text>'
            f'<rect class="back" x="0" y="{y + 20}" width="{WIDTH}" height="10" rx="4"/>'
            f'<rect class="{"full" if done == total else "part"}" x="0" y="{y + 20}" width="{WIDTH * share:.1f}" '
            'height="10" rx="4"/>'
        )
    height = len(rows) * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<style>{_STYLE}</style>{''.join(rows)}</svg>"
    )


def write_page(path: Path, text: str) -> None:
    """Write the page completely or not at all, because a browser may load it at any moment."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode())


class StatusPage:
    """Rewrites the page every few seconds and at the end of a run."""

    def __init__(self, path: Path, output: str):
        self.path, self.output, self.last = path, output, 0.0

    def __call__(self, progress) -> None:
        now = time.monotonic()
        if progress.state == "running" and now - self.last < EVERY and self.last:
            return
        self.last = now
        write_page(self.path, status_page(vars(progress), self.output))


def _moment(seconds: Optional[float]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "an unknown time"


def _duration(seconds: Optional[float]) -> str:
    """
    >>> _duration(75.4), _duration(7384), _duration(None)
    ('1 min 15 s', '2 h 3 min', 'unknown')
    """
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
