# SPDX-License-Identifier: Apache-2.0
"""Goodput of a supervised job: how much of its time went into steps that count. Pure; needs no torch."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Optional

from megatron.guard.heartbeat import STARTUP

STARTING = "starting"
OTHER = ("evaluate", "save", "replay")  # phases that are neither steps nor start-up


@dataclass
class Attempt:
    """One launch of the job. Times in seconds."""

    number: int
    ranks: int
    launched: float = 0.0  # since the supervisor began
    ended: float = 0.0
    cause: str = ""
    failure: str = ""  # its kind
    code: int = 0
    why: str = ""  # the message of the rank that failed first
    rank: Optional[int] = None  # that rank
    host: str = ""  # and its machine
    excluded: int = 0  # nodes that were left out
    first_step: int = 0  # the step that it began with; 0: it did not reach one
    last_step: int = 0  # the last step that it completed
    phases: dict = field(default_factory=dict)  # phase -> seconds, on rank 0
    first_step_seconds: float = 0.0
    silent: float = 0.0  # without progress before it was ended
    ending: float = 0.0  # from the first sign of its end, or the order to end it, until all its processes were gone
    waited: float = 0.0  # before the next launch

    @property
    def wall(self) -> float:
        return self.ended - self.launched

    @property
    def made_a_step(self) -> bool:
        return self.last_step >= self.first_step > 0

    @property
    def ending_in_words(self) -> str:
        return in_words(self.failure, self.cause, self.why, self.rank, self.host)

    @property
    def setup(self) -> float:
        """Time from launch to the first step; the whole attempt if it did not reach one."""
        other = sum(self.phases.get(name, 0.0) for name in OTHER)
        return max(0.0, self.wall - self.silent - self.ending - self.stepping - other)

    @property
    def startup(self) -> dict[str, float]:
        """The time of `setup` by phase, as rank 0 reported it. The rest is the launcher's, before and after the ranks."""
        parts = {words: self.phases.get(phase, 0.0) for phase, words in STARTUP.items()}
        return {"launcher": max(0.0, self.setup - sum(parts.values())), **parts}

    @property
    def stepping(self) -> float:
        """Time in steps, repeated ones included."""
        return sum(seconds for name, seconds in self.phases.items() if name not in (*STARTUP, *OTHER))


@dataclass(frozen=True)
class GoodputReport:
    """Productive and lost time of a job. Times in seconds."""

    outcome: str
    code: int
    wall: float
    productive: float
    lost: dict[str, float]  # cause -> seconds
    starting: dict[str, float]  # the time lost in starting, by phase
    first_steps: float  # sum of the attempts' first steps, which take longer than others
    restarts: int
    steps: int
    repeated_steps: int
    checkpoints: int
    attempts: list[dict]

    @property
    def goodput(self) -> float:
        return self.productive / self.wall if self.wall > 0 else 0.0

    def text(self) -> str:
        """The report as text."""
        lines = [
            f"{self.outcome} after {_time(self.wall)}: {self.steps} steps, {self.restarts} restarts, "
            f"{self.checkpoints} checkpoints",
            f"  productive {_time(self.productive)} ({self.goodput:.1%})",
        ]
        for cause, seconds in self.lost.items():
            if seconds >= 0.05:
                parts = f" ({self._startup()})" if cause == STARTING else ""
                lines.append(f"  lost {_time(seconds)}: {cause}{parts}")
        if self.repeated_steps:
            lines.append(f"  {self.repeated_steps} steps were made again because they had not been saved")
        for attempt in self.attempts:
            first, last = attempt["first_step"], attempt["last_step"]
            span = f"steps {first} to {last}" if 0 < first <= last else "no step"
            lines.append(
                f"  attempt {attempt['number']} on {attempt['ranks']} ranks: {_time(attempt['wall'])}, {span}, "
                f"{in_words(*(attempt[name] for name in ('failure', 'cause', 'why', 'rank', 'host')))}"
            )
        return "\n".join(lines)

    def _startup(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.starting.items() if seconds >= 0.05)
        return f"{parts}; first steps {self.first_steps:.1f}"

    def brief(self) -> dict:
        """The report without its attempts and the parts of starting, for the event of the job's end."""
        names = ("wall", "productive", "lost", "restarts", "steps", "repeated_steps", "checkpoints")
        return {name: getattr(self, name) for name in names} | dict(goodput=round(self.goodput, 4))

    def record(self) -> dict:
        """The report as JSON."""
        return {**asdict(self), "goodput": round(self.goodput, 4)}


def account(attempts: list[Attempt], outcome: str, code: int, wall: float, checkpoints: int) -> GoodputReport:
    """Sum up the attempts. Productive and lost time sum to `wall`.

    A step that a later attempt repeated counts as lost in the earlier one.
    """
    lost: Counter[str] = Counter()
    starting: Counter[str] = Counter()
    productive, repeated, steps = 0.0, 0, 0
    for number, attempt in enumerate(attempts):
        later = next((other for other in attempts[number + 1 :] if other.first_step), None)
        made = max(0, attempt.last_step - attempt.first_step + 1) if attempt.first_step else 0
        again = _again(attempt, later, made)
        share = again / made if made else 0.0
        productive += attempt.stepping * (1 - share)
        steps += made - again
        repeated += again
        lost["steps made again"] += attempt.stepping * share
        lost[STARTING] += attempt.setup
        starting.update(attempt.startup)
        lost["standing still before it was noticed"] += attempt.silent
        lost["ending what was left of an attempt"] += attempt.ending
        lost["waiting between attempts"] += attempt.waited
        for name, words in (("save", "saving checkpoints"), ("evaluate", "evaluating"), ("replay", "finding a NaN")):
            lost[words] += attempt.phases.get(name, 0.0)
    lost["the supervisor itself"] = max(0.0, wall - productive - sum(lost.values()))
    lost = {cause: round(seconds, 3) for cause, seconds in lost.most_common()}
    records = [{**asdict(attempt), "wall": round(attempt.wall, 3)} for attempt in attempts]
    starting = {name: round(seconds, 3) for name, seconds in starting.items()}
    first_steps = round(sum(attempt.first_step_seconds for attempt in attempts), 3)
    return GoodputReport(
        outcome,
        code,
        round(wall, 3),
        round(productive, 3),
        lost,
        starting,
        first_steps,
        max(0, len(attempts) - 1),
        steps,
        repeated,
        checkpoints,
        records,
    )


def in_words(failure: str, cause: str, why: str, rank: Optional[int] = None, host: str = "") -> str:
    """
    >>> in_words("code", "failed (exit 1)", "ValueError: 3", 5, "n2")
    'code: failed (exit 1), first on rank 5 of n2: ValueError: 3'
    """
    first = "" if rank is None else f", first on rank {rank} of {host}"
    return ": ".join(filter(None, (failure, f"{cause}{first}", why)))


def _again(attempt: Attempt, later: Optional[Attempt], made: int) -> int:
    """Steps of an attempt that a later one repeated."""
    return 0 if later is None else min(made, max(0, attempt.last_step - later.first_step + 1))


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"
