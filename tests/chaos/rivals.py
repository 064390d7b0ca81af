# SPDX-License-Identifier: Apache-2.0
"""Jobs in each other's way: several on one --save, several processes at one index cache, owners that are killed."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megatron.checkpoint.choose import read_tracker
from megatron.checkpoint.folder import Saver
from megatron.data.index_cache import cached_arrays
from megatron.errors import Locked
from tests.chaos.case import Case, Got
from tests.chaos.crashes import goes_on, two_checkpoints
from tests.chaos.samples import pieces_of

ONE_WRITER = "one writer at a time, all others told (exit code 10), nothing lost"
ONE_BUILDER = "built once, read by all"
JOBS = 8


def at_once(body: Callable[[int], None], count: int) -> list[int]:
    """Exit codes of `count` processes that run `body(number)` at the same time; negative: a signal."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                body(number)
                code = 0
            except Locked as error:
                code = error.code
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def one_save(folder: Path, seed: int) -> Got:
    """Round after round eight jobs want to write into one folder; the one that may is killed in every second round."""
    place, rounds, wrong, saved = folder / "runs", 6, [], 2
    place.mkdir()
    two_checkpoints(place)
    for number in range(rounds):
        fatal = number % 2 == 1

        def job(who: int, number=number, fatal=fatal) -> None:
            try:
                with Saver(place) as saver:
                    (place / f"writer-{number}-{who}").touch()
                    saver.save(number + 3, pieces_of(number + 3), {"value": number + 3})
                    while len(list(place.glob(f"*-{number}-*"))) < JOBS:  # the others have tried too
                        time.sleep(0.01)
                    if fatal:
                        os.kill(os.getpid(), signal.SIGKILL)
            except BaseException as error:  # whatever ends it: the others wait for its mark
                (place / f"{'told' if isinstance(error, Locked) else 'failed'}-{number}-{who}").touch()
                raise

        codes = at_once(job, JOBS)
        writers = len(list(place.glob(f"writer-{number}-*")))
        saved = number + 3
        wanted = sorted([-signal.SIGKILL if fatal else 0] + [Locked.code] * (JOBS - 1))
        if sorted(codes) != wanted or writers != 1 or read_tracker(place) != saved:
            wrong.append(f"round {number}: {writers} writers, exit codes {codes}, tracker {read_tracker(place)}")
    problem = goes_on({(saved, float(saved))}, set(), place, True)
    wrong += [problem] if problem else []
    return Got("; ".join(wrong) or ONE_WRITER, faults=rounds * JOBS)


def one_cache(folder: Path, seed: int) -> Got:
    """Round after round eight processes want one entry that is not there; in every second round its builder is killed."""
    rounds, wrong, dice = 6, [], random.Random(seed)
    for number in range(rounds):
        log, fatal, pause = folder / f"log{number}", number % 2 == 1, dice.uniform(0.02, 0.2)

        def build(log=log, fatal=fatal, pause=pause) -> dict[str, np.ndarray]:
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(pause)
            if fatal and len(log.read_text().splitlines()) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return dict(squares=np.arange(1000) ** 2)

        def job(who: int, number=number, build=build) -> None:
            arrays = cached_arrays(
                folder / "cache", "squares", dict(n=number), build, log=lambda text: None, required=True
            )
            assert arrays["squares"][31] == 961

        codes = at_once(job, JOBS)
        built = len(log.read_text().splitlines())
        if sorted(codes) != sorted([0] * (JOBS - fatal) + [-signal.SIGKILL] * fatal) or built != 1 + fatal:
            wrong.append(f"round {number}: built {built} times, exit codes {codes}")
    left = [path.name for path in (folder / "cache").iterdir() if ".building-" in path.name]
    wrong += [f"left behind: {left}"] if left else []
    return Got("; ".join(wrong) or ONE_BUILDER, faults=rounds * JOBS)


def cases() -> list[Case]:
    """Two cases, both short."""
    return [
        Case("rivals/save", "several jobs on one --save", ONE_WRITER, one_save, short=True),
        Case("rivals/index-cache", "eight processes build one cache", ONE_BUILDER, one_cache, short=True),
    ]
