# SPDX-License-Identifier: Apache-2.0
"""Find the files of a run from its --save folder: metrics, events, checkpoints.

The metrics are in the folder itself unless --metrics-file is given. A launch then writes their path to metrics_file.txt in
the folder: one line, relative to the folder, so that both may be moved together.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Optional, TypeVar, Union

from megatron.errors import DataError, StorageError, no_such_file
from megatron.storage.durable import Damaged, read_sealed
from megatron.storage.processes import shared_memory
from megatron.storage.urls import UrlPath, local_folder, location
from megatron.telemetry.run_record import is_metrics

Place = Union[Path, UrlPath]
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
NAMED = "name the --save folders of runs, or the folder they are in"
POINTER = "metrics_file.txt"
SNAPSHOTS = "memory_snapshots.json"  # where its snapshots lie in memory (`checkpoint/memory_snapshots.py`)
SNAPSHOT_FOLDER = "megatron-snapshots-"  # start of the name of a run's folder in memory
Found = TypeVar("Found")


def nothing_at(name: str, place: Place) -> DataError:
    """The error of a name without runs: nothing is there, or a folder without metrics."""
    if not (place.exists() or place.is_dir()):
        return DataError(f"{name}: {no_such_file(name, 'folder')}", do=NAMED)
    return DataError(
        f"{name}: no {METRICS} in it, nor in a folder below it",
        "a run writes it next to its checkpoints (--save), or to --metrics-file",
    )


def last_snapshot(save: Place, folder: Optional[str] = None) -> Optional[tuple[int, float]]:
    """(iteration, time of writing) of the newest snapshot of a run in this node's memory; None if there is none here.

    folder: --non-persistent-local-ckpt-dir
    """
    try:
        _, record = read_sealed(save / SNAPSHOTS)
        memory = Path(folder or shared_memory()) / f"{SNAPSHOT_FOLDER}{record['memory']}"
        found = [(re.fullmatch(r"iter_(\d+)-[0-9a-f]+", path.name), path) for path in memory.iterdir()]
        return max(((int(name[1]), path.stat().st_mtime) for name, path in found if name), default=None)
    except (OSError, Damaged, StorageError, ValueError, KeyError, TypeError):
        return None


def point_to(metrics: Path, folder: Path) -> None:
    """Write the path of the metrics to a run's folder, or remove the path of an earlier launch. Raises OSError."""
    pointer = folder / POINTER
    if metrics.resolve() == (folder / METRICS).resolve():
        pointer.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    pointer.write_text(os.path.relpath(metrics.resolve(), folder.resolve()) + "\n", encoding="utf-8")


def find_metrics(place: Place) -> Optional[Place]:
    """The metrics file of a run's folder, or the file itself; None if there is none.

    First the path in metrics_file.txt, then metrics.jsonl. Runs of earlier versions wrote no metrics_file.txt: there the
    --metrics-file in the newest checkpoint counts, relative to the current directory. A run whose folder is in an object
    store writes its metrics to a folder of this machine; they may have been copied there.
    """
    if place.name.endswith(".jsonl"):
        return place if place.is_file() else None
    if isinstance(place, UrlPath):
        metrics = find_metrics(local_folder(str(place)))
        if metrics and location(_save_of(metrics)) == place:
            return metrics
        return place / METRICS if (place / METRICS).is_file() else None
    named = place / POINTER
    if named.is_file():
        path = place.resolve() / named.read_text(encoding="utf-8", errors="replace").strip()
        if path.is_file():
            return Path(os.path.normpath(path))
    if (place / METRICS).is_file():
        return place / METRICS
    config = (last_state(str(place)) or {}).get("config") or {} if place.is_dir() else {}
    path = Path((config.get("logging") or {}).get("metrics_file") or "")
    save = path.is_file() and _save_of(path)  # a relative path may belong to another run from here
    return path if save and Path(save).resolve() == place.resolve() else None


def _save_of(metrics: Path) -> str:
    """The --save folder of the newest launch in a metrics file; empty if it has none."""
    from megatron.telemetry.history import read_end  # and numpy, which few need that look for files

    return read_end(metrics).group("checkpoint").get("save") or ""


def events_path(metrics: Optional[Place]) -> Optional[Place]:
    """The events file next to a metrics file: events.jsonl, or NAME.events.jsonl next to a --metrics-file NAME.jsonl.

    >>> events_path(Path("runs/a/metrics.jsonl")), events_path(Path("logs/a.jsonl"))
    (PosixPath('runs/a/events.jsonl'), PosixPath('logs/a.events.jsonl'))
    """
    if metrics is None:
        return None
    return metrics.with_name(EVENTS if metrics.name == METRICS else f"{metrics.stem}.{EVENTS}")


def find_events(place: Path) -> Path:
    """The events file of a run's folder, or of its metrics file. It may not exist."""
    if place.name.endswith(EVENTS):
        return place
    metrics = place if place.suffix == ".jsonl" else find_metrics(place)
    return events_path(metrics) if metrics else place / EVENTS


def runs_at(place: Place) -> list[tuple[Place, Place]]:
    """Find (folder, metrics file) of the run of a folder, or of the runs at any depth below it (in a store: directly).

    If `place` is a metrics file, it also stands for the folder: files of other runs may be next to it (--metrics-file).
    """
    if metrics := find_metrics(place):
        return [(metrics.parent if metrics == place and metrics.name == METRICS else place, metrics)]
    if isinstance(place, Path):
        return [*found_below(place, _run_at)] if place.is_dir() else []
    inside = sorted(place.iterdir(), key=numbers_by_size) if place.is_dir() else []
    return [(folder, metrics) for folder in inside if (metrics := find_metrics(folder))]


def _run_at(place: Path) -> Optional[tuple[Place, Place]]:
    """The run of a folder or of a file inside a folder that was named; other files of JSON lines hold texts or samples."""
    metrics = find_metrics(place)
    if metrics is None or metrics == place and not is_metrics(place):
        return None
    return place, metrics


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


def newest_checkpoint(folder: Optional[str]) -> Optional[int]:
    """The iteration of the newest complete checkpoint of a folder. Its contents are verified when it is loaded."""
    newest = next(iter(_checkpoints(folder)), None) if folder else None
    return newest and int(NAME.fullmatch(newest.name)[1])


def _checkpoints(folder: str) -> list[Place]:
    """The complete checkpoints, newest first."""
    paths = [
        path for path in location(folder).glob("iter_*") if NAME.fullmatch(path.name) and (path / "index.json").exists()
    ]
    return sorted(paths, key=lambda path: int(NAME.fullmatch(path.name)[1]), reverse=True)


NAME = re.compile(r"iter_(\d+)")
