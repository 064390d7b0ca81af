# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run are, for whoever knows its --save folder: tools look there first.

They are in the folder itself, unless --metrics-file puts them elsewhere. Then a launch leaves the path in the folder, in
metrics_file.txt: one line, relative to the folder, so that both may be moved together.
"""

import json
import os
import re
from pathlib import Path
from typing import Optional

from megatron.storage.urls import location
from megatron.telemetry.run_record import records

METRICS = "metrics.jsonl"
POINTER = "metrics_file.txt"


def point_to(metrics: Path, folder: Path) -> None:
    """Leave in a run's folder where its metrics are, or take back what an earlier launch has left. Raises OSError."""
    pointer = folder / POINTER
    if metrics.resolve() == (folder / METRICS).resolve():
        pointer.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    pointer.write_text(os.path.relpath(metrics.resolve(), folder.resolve()) + "\n", encoding="utf-8")


def find_metrics(folder: Path) -> Optional[Path]:
    """The metrics file of a run's folder; None where there is none to be found.

    The folder's own last word counts: what metrics_file.txt says, then metrics.jsonl. Runs of earlier versions have left
    no such word, but their checkpoints know the settings: a relative --metrics-file is then taken from here.
    """
    named = folder / POINTER
    if named.is_file():
        found = folder.resolve() / named.read_text(encoding="utf-8", errors="replace").strip()
        if found.is_file():
            return Path(os.path.normpath(found))
    if (folder / METRICS).is_file():
        return folder / METRICS
    config = (last_state(str(folder)) or {}).get("config") or {}
    told = (config.get("logging") or {}).get("metrics_file")
    return Path(told) if told and Path(told).is_file() and _saves_into(Path(told), folder) else None


def _saves_into(metrics: Path, folder: Path) -> bool:
    """Whether the run of a metrics file saves into this folder: the same relative path may mean another run from here."""
    launches = [record for record in records(metrics) if record and record["kind"] == "run"]
    save = launches and ((launches[-1].get("config") or {}).get("checkpoint") or {}).get("save")
    return bool(save) and Path(save).resolve() == folder.resolve()


def last_state(folder: str) -> Optional[dict]:
    """What the newest complete checkpoint of a folder, or of a prefix in an object store, says of its run."""
    found = [
        path for path in location(folder).glob("iter_*") if NAME.fullmatch(path.name) and (path / "index.json").exists()
    ]
    for path in sorted(found, key=lambda path: int(NAME.fullmatch(path.name)[1]), reverse=True):
        try:
            state = json.loads((path / "state.json").read_bytes())
            return state if isinstance(state, dict) else None
        except (OSError, ValueError):  # damaged: `checkpoint verify` says how
            return None
    return None


NAME = re.compile(r"iter_(\d+)")
