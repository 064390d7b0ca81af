# SPDX-License-Identifier: Apache-2.0
"""One supervised training, a random fault every 10 to 20 s, automatic restart; at its end the bits of a run without faults.

What may happen is the table `FAULTS`. The supervisor restarts the job by itself; where it has to end (SIGTERM, as from a
cluster), it is started again with the same command, as a queue would. When the time is over the job is asked to stop;
a clean run to the same step, started afterwards, is compared with it in every bit and every sample.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megatron.checkpoint.choose import checkpoints, read_tracker
from megatron.errors import Preempted
from megatron.guard import processes
from megatron.guard.beat_files import Beat, read_beats
from megatron.storage.processes import adopt_orphans
from tests.chaos.runs import RECOVERED, Job, attempts_in, compare, going_back, launch, record
from tests.chaos.supervised import command, environment
from tests.chaos.victim import Fault

GAP = (10.0, 20.0)  # seconds between two faults
LAYOUT = "zero1"
MORE = "--train-iters 100000 --save-interval 40 --keep-last 3 --eval-iters 0"
PACE = 0.03  # seconds that a step takes longer than it must, so that ten minutes of steps are checked in one
STOP = "SIGSTOP of a rank"
DAMAGE = "damage of the newest checkpoint"
GOING_ON = 120.0  # seconds that a job has, after the last fault, to come to its next checkpoint
SETTINGS = (
    "--max-restarts",
    "100000",
    "--same-step-limit",
    "100000",
    "--on-failure",
    "numerics=restart",
    "--hang-timeout",
    "10",
)


@dataclass
class Account:
    """What was done, and what became of it."""

    seconds: float = 0.0
    injected: Counter = field(default_factory=Counter)
    survived: int = 0  # faults behind which the job came to a further checkpoint
    supervisors: int = 0  # times that the supervisor was started
    given_up: list[int] = field(default_factory=list)  # codes with which one ended that nobody had asked to
    steps: int = 0
    hangs: int = 0  # that the supervisor has seen
    back: list[str] = field(default_factory=list)  # starts from an older checkpoint than the newest
    verdict: str = "it has not come to its end"

    @property
    def good(self) -> bool:
        whole = self.survived == sum(self.injected.values()) and len(self.back) <= self.injected[DAMAGE]
        return self.verdict == RECOVERED and not self.given_up and whole

    def text(self) -> str:
        """For the terminal."""
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.injected.items()))
        return "\n".join(
            [
                f"{self.survived} of {sum(self.injected.values())} faults survived in {self.seconds / 60:.1f} minutes: "
                f"{kinds}",
                f"{self.steps} steps, {self.supervisors} starts of the supervisor, given up with {self.given_up or 'none'}",
                f"{self.hangs} hangs were seen, {self.injected[STOP]} ranks were stopped",
                f"went on from an older checkpoint than the newest {len(self.back)} times; damaged was one "
                f"{self.injected[DAMAGE]} times",
                f"compared with a clean run of {self.steps} steps: {self.verdict}",
            ]
        )

    def line(self, seed: int) -> dict[str, Any]:
        """As a case of the report."""
        group = f"a random fault every {GAP[0]:.0f}-{GAP[1]:.0f} s, one supervised run"
        count = sum(self.injected.values())
        return dict(
            id="random/run",
            group=group,
            seed=seed,
            phase="",
            rank=None,
            expected=RECOVERED,
            got=self.verdict,
            exit=None,
            faults=count,
            good=self.good,
            seconds=round(self.seconds, 1),
            survived=self.survived,
            kinds=dict(self.injected),
            steps=self.steps,
            back=self.back,
            hangs=self.hangs,
        )


def random_run(folder: Path, minutes: float, seed: int, say: Callable[[str], None] = print) -> Account:
    """Train for `minutes` with faults, then compare. Everything lies in `folder`."""
    hunt = Hunt(folder, random.Random(seed), say)
    started = time.monotonic()
    try:
        hunt.run(minutes * 60)
    finally:
        processes.end_descendants(os.getpid())
    account = hunt.account
    account.seconds = time.monotonic() - started
    said = (hunt.job.folder / "supervisor.log").read_text(errors="replace")
    account.back, account.hangs = going_back(attempts_in(said)), said.count("the job hangs:")
    account.steps = read_tracker(hunt.job.save) or 0
    say(f"a clean run of {account.steps} steps")
    clean = Job(LAYOUT, folder / "clean", folder, f"{MORE} --exit-interval {account.steps}")
    clean.folder.mkdir()
    codes = launch(clean.world, clean.flags(), folder / "clean.log", patience=3600)
    assert codes == [0] * clean.world, f"the clean run ended with {codes}: see {folder / 'clean.log'}"
    account.verdict = compare(record(clean.save), record(hunt.job.save))
    return account


class Hunt:
    """A job, and what happens to it."""

    def __init__(self, folder: Path, dice: random.Random, say: Callable[[str], None]):
        self.folder, self.dice, self.say = folder, dice, say
        self.job = Job(LAYOUT, folder / "job", folder, MORE)
        self.job.folder.mkdir()
        self.beats, self.wanted = self.job.folder / "beats", folder / "spoil-a-value"
        self.account, self.supervisor, self.output = Account(), None, None
        self.asked = False  # the supervisor that runs was asked to stop
        self.pending: list[int] = []  # of each fault that is not survived yet: the newest checkpoint at its time
        self.log = open(folder / "faults.jsonl", "a", encoding="utf-8")

    def run(self, seconds: float) -> None:
        """Fault after fault; then an orderly end."""
        adopt_orphans()
        end = time.monotonic() + seconds
        due = time.monotonic() + self.dice.uniform(*GAP)
        while time.monotonic() < end:
            self.keep_going()
            if time.monotonic() > due and self.inject():
                due = time.monotonic() + self.dice.uniform(*GAP)
            time.sleep(0.1)
        patience = time.monotonic() + GOING_ON
        while self.pending and time.monotonic() < patience:
            self.keep_going()
            time.sleep(0.1)
        self.preempt(None)
        self.note_end(self.supervisor.wait(GOING_ON))

    def note_end(self, code: int) -> None:
        """A supervisor has ended: as it was asked to, or as the job was; or it has given up."""
        if code != Preempted.code and not self.asked:
            self.account.given_up.append(code)
            self.say(f"the supervisor has given up with {code}: see {self.job.folder}")
        self.asked = False

    def keep_going(self) -> None:
        """Start the supervisor where there is none, and count what was survived."""
        code = self.supervisor and self.supervisor.poll()
        if code is not None:
            self.note_end(code)
        if self.supervisor is None or code is not None:
            fault = Fault("value", "", None, action="nan", module="blocks.1.mlp", wanted=str(self.wanted), pace=PACE)
            words = command(self.job.flags(), self.job.folder, fault, *SETTINGS)
            with open(self.job.folder / "supervisor.log", "a") as output:
                self.supervisor = subprocess.Popen(words, env=environment(), stdout=output, stderr=subprocess.STDOUT)
            self.account.supervisors += 1
        newest = max(checkpoints(self.job.save), default=0)
        survived = [at for at in self.pending if newest > at]
        self.account.survived += len(survived)
        self.pending = [at for at in self.pending if newest <= at]

    def inject(self) -> bool:
        """One fault, if there is somebody to hurt."""
        beats = [beat for beat in read_beats(self.beats) if processes.alive_here(beat)]
        if not beats:
            return False
        kind = self.dice.choices(list(FAULTS), [weight for weight, _ in FAULTS.values()])[0]
        victim = self.dice.choice(beats)
        newest = max(checkpoints(self.job.save), default=0)
        if not FAULTS[kind][1](self, victim):
            return False
        self.account.injected[kind] += 1
        self.pending.append(newest)
        told = dict(
            time=time.strftime("%H:%M:%S"),
            kind=kind,
            rank=victim.rank,
            phase=victim.phase,
            step=victim.step,
            newest=newest,
        )
        self.log.write(json.dumps(told) + "\n")
        self.log.flush()
        self.say(
            f"{told['time']}  {kind:<28} rank {victim.rank} in {victim.phase}, step {victim.step}, saved: {newest}"
        )
        return True

    # ---- what may happen; each says whether it could --------------------------------------------------------------------

    def kill(self, beat: Beat) -> bool:
        return processes.send(beat.pid, signal.SIGKILL)

    def stop(self, beat: Beat) -> bool:
        return beat.step > beat.since and processes.send(beat.pid, signal.SIGSTOP)

    def terminate(self, beat: Beat) -> bool:
        return processes.send(beat.pid, signal.SIGTERM)

    def preempt(self, beat: Optional[Beat]) -> bool:
        self.asked = True
        self.supervisor.send_signal(signal.SIGTERM)
        return True

    def kill_launcher(self, beat: Beat) -> bool:
        fields = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()
        launcher = int(fields[1])
        return launcher != self.supervisor.pid and processes.send(launcher, signal.SIGKILL)

    def spoil(self, beat: Beat) -> bool:
        if beat.step <= beat.since:
            return False
        self.wanted.touch()
        return True

    def damage(self, beat: Beat) -> bool:
        """Of the newest checkpoint, if there is another; then a rank is killed, so that the job has to load."""
        found = list(checkpoints(self.job.save).values())
        if len(found) < 2:
            return False
        path = self.dice.choice([path for path in found[-1].iterdir() if path.is_file()])
        processes.send(beat.pid, signal.SIGKILL)
        data = bytearray(path.read_bytes())
        at = self.dice.randrange(len(data))
        data[at] ^= 1 << self.dice.randrange(8)
        path.write_bytes(data[: at + 1] if self.dice.random() < 0.3 else data)
        return True


FAULTS = {  # kind -> weight, what it does
    "SIGKILL of a rank": (6, Hunt.kill),
    STOP: (3, Hunt.stop),
    "SIGTERM to a rank": (2, Hunt.terminate),
    "SIGTERM to the supervisor": (2, Hunt.preempt),
    "SIGKILL of torchrun": (2, Hunt.kill_launcher),
    "NaN in a layer": (3, Hunt.spoil),
    DAMAGE: (3, Hunt.damage),
}
