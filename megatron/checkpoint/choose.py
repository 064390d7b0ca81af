# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a folder a start takes: the newest good one, or that of a given iteration."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from megatron.checkpoint.backends import TRACKER, CheckpointPath, backend_of
from megatron.checkpoint.missing import no_checkpoint
from megatron.checkpoint.parity import repair
from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError, Failure
from megatron.settings.from_checkpoint import foreign_format, megatron_format_problem
from megatron.settings.rank_env import print_notes, print_warnings
from megatron.storage.durable import Damaged
from megatron.storage.urls import UrlPath

OTHER = "give another folder of checkpoints, or copy this one again"
NEW_RUN = "check --load; for a new run, give the same new folder as --save and --load, or --auto-resume"


def checkpoints(folder: CheckpointPath) -> dict[int, CheckpointPath]:
    """Iteration -> directory of every checkpoint, oldest first. One that was set aside counts until it is replaced."""
    return backend_of(folder).checkpoints(folder)


def read_tracker(folder: CheckpointPath) -> Optional[int]:
    """The iteration in the tracker file; None if the file is missing or torn."""
    try:
        text = (folder / TRACKER).read_bytes()[:32].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def passed_over(path: CheckpointPath, why: str, iteration: int) -> str:
    """The warning about a damaged checkpoint. iteration: of the one that was loaded instead."""
    return f"{path} is passed over, and iteration {iteration} loaded instead: {why}"


def rebuilt(path: CheckpointPath, files: str) -> str:
    """The warning about files of a checkpoint that were rebuilt."""
    return f"{files} of {path} were lost or damaged, and are rebuilt from parity"


@dataclass(frozen=True)
class Choice:
    """Checkpoints to try, best first, and notices for the user about the choice.

    damaged: (path, what is wrong) of checkpoints that were passed over
    repaired: (path, what was rebuilt) of checkpoints
    """

    paths: tuple[CheckpointPath, ...]
    notices: tuple[str, ...] = ()
    damaged: tuple[tuple[CheckpointPath, str], ...] = ()
    repaired: tuple[tuple[CheckpointPath, str], ...] = ()


def newest_good(folder: CheckpointPath, step: Optional[int] = None) -> CheckpointPath:
    """The checkpoint of a folder for a command that looks at it: `choose`, with what the user should know on stderr."""
    choice = choose(folder, step=step)
    path = choice.paths[0]
    print_notes(choice.notices)
    print_warnings(passed_over(*one, iteration_of(path)) for one in choice.damaged)
    return path


def newest(folder: CheckpointPath, step: Optional[int] = None) -> CheckpointPath:
    """The checkpoint of a folder for a command that makes something of it, which outlives a warning.

    So a newest one with visible damage is a CheckpointError, unless its parity files mend it, and no older one is taken.
    """
    choice = choose(folder, step=step, repairs=True)
    path = choice.paths[0]
    if choice.damaged:
        raise CheckpointError(
            f"the newest checkpoint of {folder} is damaged; an older one is taken only if you name it",
            "\n  ".join(why for _, why in choice.damaged),
            f"--ckpt-step {iteration_of(path)}, or the path {path}, takes the newest good one",
        )
    print_notes(choice.notices)
    print_warnings(rebuilt(*one) for one in choice.repaired)
    return path


def choose(
    folder: CheckpointPath,
    *,
    step: Optional[int] = None,
    allow_empty: Union[bool, None, Callable[[], bool]] = None,
    repairs: bool = False,
) -> Choice:
    """The checkpoints of a folder to try, in order: the tracker's, then older ones from new to old, then newer ones.

    step:         only this iteration (`--ckpt-step`)
    allow_empty:  an empty folder is not an error (`--auto-resume`; None for commands without this flag); or a function
                  that decides this for an empty folder, and may raise
    repairs:      rebuild lost files in front of the first good checkpoint, where there are parity files (`parity`)
    A directory that is itself a checkpoint is the only choice. Checkpoints with visible damage in front of the first good
    one are left out, with a notice; only index and file sizes are read, and later checkpoints are not checked.
    Raises CheckpointError when no checkpoint remains.
    """
    if (folder / "index.json").exists():
        return _only(folder, step)
    paths = checkpoints(folder)
    if step is not None:
        if step not in paths:
            listed = ", ".join(map(str, paths)) or "none"
            raise CheckpointError(
                f"{folder} has no checkpoint of iteration {step}",
                f"it has: {listed}",
                "give one of these to --ckpt-step; without it the newest is taken",
            )
        return Choice((paths[step],))
    if not paths:
        if not megatron_format_problem(folder) and (allow_empty() if callable(allow_empty) else allow_empty):
            return Choice(())
        raise no_checkpoint(folder) if allow_empty is None else no_checkpoint(folder, NEW_RUN)
    named, notices = read_tracker(folder), []
    order = sorted(paths, reverse=True)
    if named in paths:
        newer = [iteration for iteration in order if iteration > named]
        order = [iteration for iteration in order if iteration <= named] + newer[::-1]
        if newer:
            notices.append(f"{folder / TRACKER} names iteration {named}, but there are newer ones: {newer[::-1]}")
    else:
        torn = f"names iteration {named}, which does not exist" if named is not None else "is missing or torn"
        notices.append(f"{folder / TRACKER} {torn}; taking the newest checkpoint, iteration {order[0]}")
    return _first_good(folder, [paths[iteration] for iteration in order], notices, repairs)


def _first_good(folder: CheckpointPath, paths: list[CheckpointPath], notices: list[str], repairs: bool) -> Choice:
    """The choice from the first checkpoint without visible damage on."""
    damaged, repaired = [], []
    for place, path in enumerate(paths):
        problem = _visible_damage(path)
        if problem and repairs and (files := rebuild_lost(path)):
            repaired.append((path, files))
            problem = _visible_damage(path)
        if not problem:
            return Choice(tuple(paths[place:]), tuple(notices), tuple(damaged), tuple(repaired))
        damaged.append((path, problem))
    raise none_good(folder, notices, damaged)


def none_good(folder: CheckpointPath, notices: Sequence[str], damaged: Sequence[tuple[Any, str]]) -> CheckpointError:
    said = dict.fromkeys([*notices, *(why for _, why in damaged)])
    return CheckpointError(f"{folder} holds no valid checkpoint", "\n  ".join([*said][:8]), OTHER)


def iteration_of(path: CheckpointPath) -> int:
    return int(re.search(r"iter_(\d+)", path.name)[1])


def _only(path: CheckpointPath, step: Optional[int]) -> Choice:
    """The choice of one checkpoint. Raises CheckpointError if it is of another iteration than `step`."""
    if step is not None:
        with Reader(path) as reader:
            stored = reader.state["iteration"]
        if stored != step:
            raise CheckpointError(
                f"{path} is of iteration {stored}, and --ckpt-step asks for {step}",
                do="give the folder of the checkpoints, or drop --ckpt-step",
            )
    return Choice((path,))


def rebuild_lost(path: CheckpointPath) -> str:
    """Rebuild what is lost of a checkpoint, if it has parity files: the names of these files; "": nothing was rebuilt."""
    if isinstance(path, UrlPath):
        return ""
    try:
        return ", ".join(repair(path))
    except (Failure, OSError):
        return ""


def _visible_damage(path: CheckpointPath) -> Optional[str]:
    if problem := foreign_format(path):
        return problem
    try:
        with Reader(path) as reader:
            reader.check_files()
    except Damaged as problem:
        return str(problem)
    return None
