# SPDX-License-Identifier: Apache-2.0
"""All events of a run: of events.jsonl, and those that its metrics tell of."""

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from megatron.telemetry.history import History


def run_events(history: History, recorded: Sequence[dict]) -> list[dict]:
    """The events of a run in order of time: those of events.jsonl, and before them, or without that file, those that its
    metrics tell of: launches, saves, spikes, rollbacks, ends.
    """
    recorded = sorted(recorded, key=lambda event: event["time"])
    found, reached, when = [], 0, 0.0
    for record in _with_spikes(history, spikes=not recorded):
        try:
            when = datetime.fromisoformat(str(record.get("time"))).timestamp()
        except ValueError:
            if "time" in record or not when:  # of a spike, the record before it tells it
                continue
        found.append(_as_event(record, when, reached))
        reached = max(reached, record["iteration"])
    return [event for event in found if not recorded or event["time"] < recorded[0]["time"]] + recorded


def _with_spikes(history: History, spikes: bool) -> list[dict]:
    """The records of events, with those spikes of steps that caused no rollback in their places."""
    found = list(history.events)
    deviations = history.steps["spike"] if spikes else np.empty(0)
    for place in np.flatnonzero(np.nan_to_num(deviations)).tolist():
        iteration = int(history.steps["iteration"][place])
        why = f"{deviations[place]:.1f} deviations above the median"
        after = (n for n, one in enumerate(found) if one["iteration"] >= iteration and one["kind"] != "run")
        found.insert(next(after, len(found)), dict(kind="spike", iteration=iteration, why=why))
    return found


def _as_event(record: dict, when: float, reached: int) -> dict:
    """A record of metrics.jsonl in the form of an event. reached: the last iteration before it"""
    kind, at, code = record["kind"], record["iteration"], record.get("code")
    name = dict(run="start", rewind="rollback").get(kind, kind)
    lost = f"; the log had reached iteration {reached:,}" if reached > at else ""
    host = f" on {record['host']}" if record.get("host") else ""
    message = dict(
        run=f"training starts at iteration {at}{host}{lost}",
        save=f"checkpoint of iteration {at} was written",
        spike=str(record.get("why") or "a spike"),
        rewind=f"training went back to iteration {at}",
        end=f"ended after iteration {at} with exit code {code}: {record.get('why') or 'done'}",
    )[kind]
    level = "warning" if kind in ("spike", "rewind") else "error" if kind == "end" and code not in (0, 9) else "info"
    event = dict(time=when, event=name, level=level, iteration=at, rank=None, message=message)
    return event | (dict(seconds=record.get("seconds")) if kind == "save" else {})
