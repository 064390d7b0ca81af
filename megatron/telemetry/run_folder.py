# SPDX-License-Identifier: Apache-2.0
"""Find the metrics of a run from its --save folder.

The metrics are in the folder itself unless --metrics-file is given. A launch then writes their path to metrics_file.txt in
the folder: one line, relative to the folder, so that both may be moved together.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Optional, TypeVar

from megatron.storage.urls import location
from megatron.telemetry.run_record import records

METRICS = "metrics.jsonl"
POINTER = "metrics_file.txt"
Found = TypeVar("Found")


def point_to(metrics: Path, folder: Path) -> None:
    """Write the path of the metrics to a run's folder, or remove the path of an earlier launch. Raises OSError."""
    pointer = folder / POINTER
    if metrics.resolve() == (folder / METRICS).resolve():
        pointer.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    pointer.write_text(os.path.relpath(metrics.resolve(), folder.resolve()) + "\n", encoding="utf-8")


def find_metrics(folder: Path) -> Optional[Path]:
    """The metrics file of a run's folder; None if there is none.

    First the path in metrics_file.txt, then metrics.jsonl. Runs of earlier versions wrote no metrics_file.txt: there the
    --metrics-file in the newest checkpoint counts, relative to the current directory.
    """
    named = folder / POINTER
    if named.is_file():
        path = folder.resolve() / named.read_text(encoding="utf-8", errors="replace").strip()
        if path.is_file():
            return Path(os.path.normpath(path))
    if (folder / METRICS).is_file():
        return folder / METRICS
    config = (last_state(str(folder)) or {}).get("config") or {}
    path = Path((config.get("logging") or {}).get("metrics_file") or "")
    return path if path.is_file() and _saves_into(path, folder) else None


def found_below(folder: Path, find: Callable[[Path], Optional[Found]]) -> Iterator[Found]:
    """What `find` returns for the files and folders at any depth below a folder, run 2 before run 10.

    Where it finds something, it looks no deeper: a run's folder holds many files. Hidden folders and links are left out.
    """
    try:
        inside = sorted((path for path in folder.iterdir() if path.name[0] != "."), key=numbers_by_size)
    except OSError:  # gone meanwhile, or not ours
        return
    for path in inside:
        if (found := find(path)) is not None:
            yield found
        elif path.is_dir() and not path.is_symlink() and not NAME.fullmatch(path.name):
            yield from found_below(path, find)


def numbers_by_size(path: Path) -> list:
    """A key for sorting: run 2 before run 10."""
    return [(word.isdigit(), int(word) if word.isdigit() else word) for word in re.split(r"(\d+)", path.name) if word]


def _saves_into(metrics: Path, folder: Path) -> bool:
    """Whether the run of a metrics file saves into this folder: a relative path may belong to another run from here."""
    launches = [record for record in records(metrics) if record and record["kind"] == "run"]
    save = launches and ((launches[-1].get("config") or {}).get("checkpoint") or {}).get("save")
    return bool(save) and Path(save).resolve() == folder.resolve()


def unique_names(places: list[str]) -> list[str]:
    """Short and unique names of runs: the last parts of their paths, as many as necessary.

    >>> unique_names(["/runs/a", "/runs/b"]), unique_names(["/x/run", "s3://y/run"])
    (['a', 'b'], ['x/run', 'y/run'])
    """
    parts, shown = [place.split("/") for place in places], 1
    while len({tuple(part[-shown:]) for part in parts}) < len(set(places)):
        shown += 1
    return ["/".join(part[-shown:]) for part in parts]


def last_state(folder: str) -> Optional[dict]:
    """The state.json of the newest complete checkpoint of a folder, or of a prefix in an object store."""
    for path in _checkpoints(folder):
        try:
            state = json.loads((path / "state.json").read_bytes())
            return state if isinstance(state, dict) else None
        except (OSError, ValueError):  # damaged: `checkpoint verify` reports how
            return None
    return None


class Saved(NamedTuple):
    """A checkpoint: its iteration, and the time of writing in Unix seconds."""

    iteration: int
    time: float


def last_saved(folder: str) -> Optional[Saved]:
    """The newest complete checkpoint of a folder, or of a prefix in an object store."""
    for path in _checkpoints(folder):
        return Saved(int(NAME.fullmatch(path.name)[1]), (path / "index.json").stat().st_mtime)
    return None


def _checkpoints(folder: str) -> list[Path]:
    """The complete checkpoints, newest first."""
    paths = [
        path for path in location(folder).glob("iter_*") if NAME.fullmatch(path.name) and (path / "index.json").exists()
    ]
    return sorted(paths, key=lambda path: int(NAME.fullmatch(path.name)[1]), reverse=True)


NAME = re.compile(r"iter_(\d+)")
