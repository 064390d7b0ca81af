# SPDX-License-Identifier: Apache-2.0
"""A crash after every change that a save, preprocessing, a merge or an index cache makes to the disk.

The work runs once and is watched; then each moment of it is laid out as a folder, as a killed process and as several kinds
of power failure would leave it (`powerloss.py`), and somebody comes who wants to go on: everything that was complete must
be there, nothing may have its final name before it is whole, and the work, done again, must succeed.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional
from unittest import mock

import numpy as np

import preprocess_data
from megatron.checkpoint import survey
from megatron.checkpoint.choose import checkpoints, read_tracker
from megatron.checkpoint.folder import Saver
from megatron.data.index_cache import cached_arrays, load
from megatron.data.indexed import IndexedDataset
from megatron.data.merge import merge
from megatron.errors import DataError
from tests.chaos.case import Case, Got
from tests.chaos.powerloss import KILL, NAMES, SYNCED, TORN, Disk, lay_out, record
from tests.chaos.samples import SHARDS, pieces_of, surviving, token_files, write_checkpoint

WHOLE = "what was whole is whole, nothing else looks so"
_TORN = 2  # random power failures at each moment
_AGAIN = 12  # the work is done again after each so many different crashes


@dataclass(frozen=True)
class Scene:
    """Work that may crash.

    prepare:     makes the folder's first content, which is on the disk
    work:        what crashes
    check:       (folder, whether the work had ended) -> what is wrong with what was left, None if nothing; may change the
                 folder, for it goes on from there as the next run would
    repeatable: whether the work, done again behind `check`, has the same outcome
    """

    prepare: Callable[[Path], None]
    work: Callable[[Path], None]
    check: Callable[[Path, bool], Optional[str]]
    repeatable: bool = True


def crash_everywhere(scene: Scene, folder: Path, seed: int) -> Got:
    """Lay out and check the crashes after each change that the work makes, and in the middle of each write."""
    place = folder / "place"
    place.mkdir()
    scene.prepare(place)
    disk, known, wrong, states = Disk(place), set(), [], 0
    changes = record(place, partial(scene.work, place), folder / "changes")
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(os, "fsync", lambda handle: None):
        for number, ended, kind, files in _moments(disk, changes, seed):
            states += 1
            state = (ended, *files.items())
            if state not in known:
                known.add(state)
                lay_out(files, place)
                problem = scene.check(place, ended)
                if problem is None and scene.repeatable and len(known) % _AGAIN == 0:
                    scene.work(place)
                    problem = scene.check(place, True)
                if problem:
                    change = changes[number - 1]
                    wrong.append(f"{kind}, change {number} of {len(changes)} ({change.kind} {change.path}): {problem}")
    return Got(f"{len(wrong)} of {states} crashes: {wrong[0]}" if wrong else WHOLE, faults=states)


def _moments(disk: Disk, changes: list, seed: int) -> Iterator[tuple[int, bool, str, dict]]:
    """(number of the change, whether it was the last, kind of crash, what it leaves)"""
    for number, change in enumerate(changes, 1):
        ended = number == len(changes)
        if change.kind == "write" and len(change.data) > 1:
            disk.apply(change._replace(data=change.data[: len(change.data) // 2]))
            yield number, False, KILL, disk.after(KILL)
        disk.apply(change)
        for kind in (KILL, SYNCED, NAMES):
            yield number, ended, kind, disk.after(kind)
        for dice in range(_TORN):
            yield number, ended, TORN, disk.after(TORN, seed + number * _TORN + dice)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def two_checkpoints(folder: Path) -> None:
    """Iterations 1 and 2."""
    for iteration in (1, 2):
        write_checkpoint(folder, iteration, iteration)


def save(iteration: int, value: int, keep_last: Optional[int], folder: Path) -> None:
    """A save by one rank, retention included."""
    with Saver(folder, keep_last=keep_last) as saver:
        saver.save(iteration, pieces_of(value), {"value": value})


def goes_on(allowed: set, gone: set, folder: Path, ended: bool) -> Optional[str]:
    """What is wrong with a folder of checkpoints after a crash.

    allowed: (iteration, value) that a new run may start from; the last one once the save has returned
    gone:    iterations that retention may have taken
    """
    there = checkpoints(folder)
    for path in there.values():
        _, problems = survey.verify(path)
        if problems:
            return f"{path.name} has its final name and {problems[0]}"
    missing = {1, 2} - set(there) - gone
    if missing:
        return f"iteration {missing} is lost"
    if read_tracker(folder) not in there:
        return f"the tracker names iteration {read_tracker(folder)}, there are {list(there)}"
    found = surviving(folder)
    if found not in allowed or (ended and found != max(allowed)):
        return f"a new run starts from {found}"
    with Saver(folder) as saver:  # the next run cleans up, and can save
        left = [path.name for path in folder.iterdir() if path.name.startswith((".tmp", ".old"))]
        if left or surviving(folder) != found:
            return f"the next run finds {surviving(folder)} and leaves {left}"
        saver.save(9, pieces_of(9), {})
    return None if surviving(folder) == (9, 9.0) else "the next run's save is not what a third one finds"


SAVES = {  # iteration, value, keep_last; what may be found afterwards; what retention may take
    "new": ((3, 3, None), {(2, 2.0), (3, 3.0)}, set()),
    "retention": ((3, 3, 1), {(2, 2.0), (3, 3.0)}, {1, 2}),
    "over-the-newest": ((2, 22, None), {(2, 2.0), (2, 22.0)}, set()),
    "over-the-newest-retention": ((2, 22, 1), {(2, 2.0), (2, 22.0)}, {1}),
}


def save_scene(name: str) -> Scene:
    """One of SAVES."""
    what, allowed, gone = SAVES[name]
    return Scene(two_checkpoints, partial(save, *what), partial(goes_on, allowed, gone), False)


def several_files_scene() -> Scene:
    """A checkpoint of several files, as a job of several ranks writes it."""
    work = partial(write_checkpoint, iteration=3, value=3, shards=SHARDS)
    return Scene(two_checkpoints, work, partial(goes_on, {(2, 2.0), (3, 3.0)}, set()), False)


# ---- token files -----------------------------------------------------------------------------------------------------

_PREFIX = "out_text_document"
_FILES = (*(_PREFIX + suffix for suffix in (".bin", ".idx", ".sums.json", ".stats.json")), "out.rejected.jsonl")


def make_text(folder: Path, documents: int = 12) -> None:
    """A corpus of numbers, with a line that is none."""
    lines = [json.dumps(dict(text=" ".join(str((i * k) % 90) for k in range(30)))) for i in range(documents)]
    (folder / "text.jsonl").write_text("\n".join([*lines, "not a document"]))


def run_preprocess(folder: Path) -> None:
    """Preprocess the corpus in one worker."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        preprocess_data.main(
            [
                "--input",
                str(folder / "text.jsonl"),
                "--output-prefix",
                str(folder / "out"),
                "--workers",
                "1",
                "--tokenizer-type",
                "NullTokenizer",
                "--vocab-size",
                "99",
            ]
        )


def make_parts(folder: Path) -> None:
    """Two small datasets."""
    for number in range(2):
        token_files(folder / "parts" / f"part{number}", tokens=300, seed=number)


def run_merge(folder: Path) -> None:
    """Merge them."""
    merge([str(folder / "parts")], str(folder / _PREFIX))


def outputs(folder: Path) -> dict[str, bytes]:
    """What there is of the outcome, name -> content."""
    return {name: (folder / name).read_bytes() for name in _FILES if (folder / name).exists()}


class TokenFiles:
    """The check of preprocessing and merging; `before` makes what there is of an earlier, other run."""

    def __init__(self, prepare: Callable[[Path], None], work: Callable[[Path], None], earlier: bool):
        self.make, self.work, self.earlier = prepare, work, earlier
        self.versions: list[dict[str, bytes]] = []

    def prepare(self, folder: Path) -> None:
        """The input; before it the outcome of a run without crashes, to compare with, and an older outcome."""
        self.make(folder)
        self.work(folder)
        self.versions.append(outputs(folder))
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        if self.earlier:
            token_files(folder / _PREFIX, tokens=500, seed=9)
            self.versions.append(outputs(folder))

    def check(self, folder: Path, ended: bool) -> Optional[str]:
        """Every file with a final name is whole; a dataset that opens is one of the whole ones."""
        found = outputs(folder)
        for name, content in found.items():
            if content not in [version.get(name) for version in self.versions]:
                return f"{name} has its final name and is not whole ({len(content)} bytes)"
        prefix = str(folder / _PREFIX)
        with contextlib.suppress(DataError):
            IndexedDataset(prefix)
            if not any(all(found[name] == version[name] for name in _FILES[:2]) for version in self.versions):
                return "a dataset that never was can be opened"
        if ended and found != self.versions[0]:
            return "the work had ended, and its outcome is not there"
        return None


def token_scene(prepare, work, earlier: bool) -> Scene:
    """Preprocessing or merging, into nothing or over an earlier dataset."""
    files = TokenFiles(prepare, work, earlier)
    return Scene(files.prepare, work, files.check)


# ---- index caches ----------------------------------------------------------------------------------------------------


def build_cache(folder: Path, log=lambda text: None) -> dict[str, np.ndarray]:
    """An entry of two arrays, as with --data-cache-path."""
    made = dict(squares=np.arange(900) ** 2, pairs=np.arange(60).reshape(30, 2))
    return cached_arrays(folder / "cache", "maps", dict(n=900), lambda: made, log=log, required=True)


def check_cache(folder: Path, ended: bool) -> Optional[str]:
    """An entry that is there is whole; one that is not is built again, with a word if it was damaged."""
    said: list[str] = []
    entries = [path for path in folder.glob("cache/maps-*") if path.is_dir() and ".building-" not in path.name]
    for entry in entries:
        arrays, damage = load(entry, dict(n=900))
        if arrays is None:
            return f"{entry.name} has its final name and is damaged: {damage}"
    arrays = build_cache(folder, said.append)
    if arrays["squares"][30] != 900 or arrays["pairs"].tolist()[29] != [58, 59]:
        return "the arrays are others"
    return None  # a cache that is lost with the power is built again, which is no loss


# ---- the cases -------------------------------------------------------------------------------------------------------


def scenes() -> dict[str, Callable[[], Scene]]:
    """Every work that may crash, by name."""
    found: dict[str, Callable[[], Scene]] = {f"save/{name}": partial(save_scene, name) for name in SAVES}
    found["save/several-files"] = several_files_scene
    for where, earlier in (("fresh", False), ("over-another", True)):
        found[f"preprocess/{where}"] = partial(token_scene, make_text, run_preprocess, earlier)
        found[f"merge/{where}"] = partial(token_scene, make_parts, run_merge, earlier)
    found["index-cache"] = lambda: Scene(lambda folder: None, build_cache, check_cache)
    return found


def _case(make: Callable[[], Scene], folder: Path, seed: int) -> Got:
    return crash_everywhere(make(), folder, seed)


def cases() -> list[Case]:
    """Each scene, with a crash after every change."""
    group = "crash after each write, fsync, rename: kill and power loss"
    return [Case(f"crash/{name}", group, WHOLE, partial(_case, make), short=True) for name, make in scenes().items()]
