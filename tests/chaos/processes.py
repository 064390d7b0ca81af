# SPDX-License-Identifier: Apache-2.0
"""Processes that die, are told to end, or lose their output, at every phase of a run, in every layout.

After each fault the job is started again as a user would, and has to come to the bits and samples of a clean run, from the
newest checkpoint that it had said to be saved.
"""

import random
import signal
from functools import partial
from pathlib import Path

from megatron.errors import Interrupted, PeerLost, Preempted
from tests.chaos.case import Case, Got
from tests.chaos.runs import (
    EVERY,
    HASTY,
    LAYOUTS,
    PATIENT,
    RECOVERED,
    STEPS,
    Job,
    clean_run,
    compare,
    record,
    restarted,
)
from tests.chaos.victim import ALL, Fault

TWO = ("dp2", "zero1", "tp2", "pp2")  # what every fault meets; all layouts of two ranks are killed at random times
ANY = range(2, STEPS)
SAVES = range(EVERY, STEPS + 1, EVERY)
# phase -> the steps at which it may be met, and on which rank: its own, the first one, or whichever comes first
PHASES = {
    "rendezvous": ((0,), "own"),
    "index build": ((0,), "any"),
    "data": (ANY, "own"),
    "forward": (ANY, "own"),
    "backward": (ANY, "own"),
    "collective": (ANY, "own"),
    "optimizer": (ANY, "own"),
    "eval": ((5, 10), "own"),
    "shard write": (SAVES, "own"),
    "before manifest": (SAVES, "first"),
    "before rename": (SAVES, "first"),
    "before tracker": (SAVES, "first"),
    "retention": (SAVES[2:], "first"),
}
SHORT = {  # one layout a phase, so that each layout and each rank has some
    ("dp2", "rendezvous", 1),
    ("zero1", "index build", 0),
    ("tp2", "data", 1),
    ("pp2", "backward", 1),
    ("tp2", "collective", 0),
    ("zero1", "optimizer", 1),
    ("dp2", "eval", 0),
    ("dp2", "shard write", 1),
    ("zero1", "before manifest", 0),
    ("pp2", "before rename", 0),
    ("dp2", "before tracker", 0),
    ("tp2", "retention", 0),
}
UNHARMED = "trained to the end, to the bits of a clean run"
SIGNALS = {  # name -> code of the rank that hears it, and of the other
    "SIGTERM": (Preempted.code, Preempted.code),
    "SIGUSR1": (Preempted.code, Preempted.code),
    "SIGINT": (Interrupted.code, Interrupted.code),
    "SIGINT SIGINT": (Interrupted.code, PeerLost.code),  # the second one ends the rank at once
    "SIGHUP": (-signal.SIGHUP, PeerLost.code),
}


def cases() -> list[Case]:  # noqa: C901 (a table in the form of loops)
    """All of them."""
    found = []
    for layout in TWO:
        for phase in PHASES:
            for rank in range(2):
                found.append(
                    Case(
                        f"kill/{layout}/{phase.replace(' ', '-')}/rank{rank}",
                        "SIGKILL of a rank at a phase",
                        RECOVERED,
                        partial(killed, layout, phase, rank),
                        phase,
                        rank,
                        short=(layout, phase, rank) in SHORT,
                    )
                )
    for layout, (world, _) in LAYOUTS.items():
        if world == 2:
            found.append(
                Case(
                    f"kill/{layout}/any-time",
                    "SIGKILL of a rank at random times",
                    RECOVERED,
                    partial(killed_at_random, layout),
                    short=layout == "dp2",
                )
            )
    for layout in TWO:
        for name, more in (("save", ""), ("async-save", "--async-save")):
            found.append(
                Case(
                    f"kill/{layout}/{name}",
                    f"SIGKILL of all ranks during a save{more and ' in the background'}",
                    RECOVERED,
                    partial(killed_in_saves, layout, more),
                    name,
                )
            )
    for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"):
        for times in (1, 2):
            for layout, rank in (("dp2", 0), ("dp2", 1), ("tp2", 0), ("pp2", 1)):
                found.append(
                    Case(
                        f"signal/{name}/{times}x/{layout}/rank{rank}",
                        "SIGTERM, USR1, INT, HUP, once and twice",
                        RECOVERED,
                        partial(signalled, layout, rank, name, times),
                        "forward",
                        rank,
                        short=(layout, rank) == ("dp2", 1) and times == 2,
                    )
                )
    for layout in TWO:
        for rank in range(2):
            found.append(
                Case(
                    f"stdout/{layout}/rank{rank}",
                    "closed standard output",
                    RECOVERED,
                    short=rank == 0 and layout == "dp2",
                    run=partial(unheard, layout, rank),
                    phase="data",
                    rank=rank,
                )
            )
    found.append(Case("stdout/dp2/none", "closed standard output", UNHARMED, partial(without_output, "dp2"), rank=0))
    return found


def killed(layout: str, phase: str, rank: int, folder: Path, seed: int) -> Got:
    """A rank is killed at a phase of a random step that has it; the other rank has to say that it has lost a neighbour."""
    steps, whose = PHASES[phase]
    step = random.Random(f"{seed} {layout} {phase} {rank}").choice(steps)
    job = Job(
        layout,
        folder,
        folder.parent,
        cache=folder / "cache" if phase == "index build" else None,
        grace=HASTY if phase == "rendezvous" else PATIENT,
    )
    fault = Fault(phase, str(folder / "marker"), rank=dict(own=rank, first=0, any=None)[whose], target=rank, step=step)
    first = job.start(fault)
    if first.codes[rank] != -signal.SIGKILL:
        return Got(f"rank {rank} was not killed: {first.codes}", first.codes[rank], faults=0)
    other = first.codes[1 - rank]
    if other != PeerLost.code and not (step == 0 and other is None):  # who waits for ranks is ended by the launcher
        return Got(f"the other rank ended with {other}: {first.said[-300:]}", other)
    return Got(restarted(job, first), -signal.SIGKILL)


def killed_at_random(layout: str, folder: Path, seed: int, times: int = 5) -> Got:
    """One job, five random ranks killed at random times; restarted each time."""
    dice = random.Random(f"{seed} {layout}")
    job, clean = Job(layout, folder, folder.parent, grace=HASTY), clean_run(layout, folder.parent)
    attempts, kills = [], 0
    while not attempts or attempts[-1].codes != [0, 0]:
        attempts.append(job.start(kill=(dice.uniform(0.0, 0.4), dice.randrange(2)) if kills < times else None))
        kills += -signal.SIGKILL in attempts[-1].codes
        if len(attempts) > 20:
            return Got(f"not done after 20 starts: {attempts[-1].said[-300:]}")
    return Got(compare(clean, record(job.save), attempts), -signal.SIGKILL, faults=kills)


def killed_in_saves(layout: str, more: str, folder: Path, seed: int, times: int = 10) -> Got:
    """One job that saves after each step; in ten of its saves all ranks are killed, a random time after the save began."""
    dice = random.Random(f"{seed} {layout} save")
    ahead = int("--async-save" in more)  # steps that training may be ahead of what is saved
    more = f"{more} --save-interval 1 --train-iters 40".strip()
    job, clean = Job(layout, folder, folder.parent, more), clean_run(layout, folder.parent, more)
    attempts, kills = [], 0
    while not attempts or attempts[-1].codes != [0, 0]:
        marker = folder / f"marker-{len(attempts)}"
        fault = Fault("save", str(marker), target=ALL, step=1, delay=dice.uniform(0.0001, 0.015))
        attempts.append(last := job.start(fault if kills < times else None))
        killed_in = (last.resumed or 0) + int(marker.read_text()) if marker.exists() else 0
        kills += last.codes == [-signal.SIGKILL] * 2 and last.told < killed_in - ahead
        if len(attempts) > 5 * times:
            return Got(f"not done after {len(attempts)} starts: {last.said[-300:]}")
    return Got(compare(clean, record(job.save), attempts), -signal.SIGKILL, faults=kills)


def signalled(layout: str, rank: int, name: str, times: int, folder: Path, seed: int) -> Got:
    """A rank hears a signal in the middle of a step; all but SIGHUP save that very step on all ranks."""
    step = random.Random(f"{seed} {layout} {name} {times} {rank}").choice(ANY)
    job = Job(layout, folder, folder.parent)
    action = " ".join([name] * times)
    first = job.start(Fault("forward", str(folder / "marker"), rank=rank, step=step, action=action))
    own, others = SIGNALS.get(action) or SIGNALS[name]
    if (first.codes[rank], first.codes[1 - rank]) != (own, others):
        return Got(f"ranks ended with {first.codes}: {first.said[-300:]}", first.codes[rank], faults=times)
    if others in (Preempted.code, Interrupted.code) and first.saved != step:
        return Got(f"stopped at step {step} with a checkpoint of {first.saved}", own, faults=times)
    return Got(restarted(job, first), own, faults=times)


def without_output(layout: str, folder: Path, seed: int) -> Got:
    """The rank that prints was started without any standard output (`>&-`): it trains all the same."""
    job = Job(layout, folder, folder.parent)
    first = job.start(Fault("rendezvous", str(folder / "marker"), rank=0, action="shut"))
    found = compare(clean_run(layout, folder.parent), record(job.save)) if first.codes == [0, 0] else str(first.codes)
    return Got(UNHARMED if found == RECOVERED else found, first.codes[0])


def unheard(layout: str, rank: int, folder: Path, seed: int) -> Got:
    """Nobody reads a rank's standard output any more. The rank that prints may end, or go on: nothing may be lost."""
    job = Job(layout, folder, folder.parent)
    step = random.Random(f"{seed} {layout} {rank}").choice(ANY)
    first = job.start(Fault("data", str(folder / "marker"), rank=rank, step=step, action="close"))
    return Got(restarted(job, first), first.codes[rank])
