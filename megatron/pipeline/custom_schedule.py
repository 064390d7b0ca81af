# SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule from a user's text file: a line of ops for each rank, verified before use.

    # two ranks, three micro-batches; B may be split into I and W; F0.1 belongs to the rank's second model chunk
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2

F2 & B0 are two passes that take turns: each computes while a message of experts of the other is under way.

A line may also list the gathers and reductions of data parallelism (`sharding.py`): all of them, or none.
`python -m megatron.pipeline.check --zero 3 --list-ops` prints such lines. Empty lines and comments after # are ignored.
With a line `stages: v` the two chunks of a rank lie in a V (first and last stage on rank 0); without it the stages go round
the ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron.errors import SettingsError
from megatron.pipeline.data_parallel_messages import pairs_of, passes_of
from megatron.pipeline.schedule import Op, StageMap, looped, parse_op, v_shaped
from megatron.pipeline.simulate import BrokenSchedule, RankSchedules, verify

DO = "docs/design.md explains schedules; python -m megatron.pipeline.check draws them"


@dataclass(frozen=True)
class CustomSchedule:
    """A verified schedule from a file."""

    path: str
    lists: RankSchedules  # as they are in the file, with or without messages of data parallelism
    stages: StageMap

    @cached_property
    def plan(self) -> RankSchedules:
        """The passes of each rank."""
        return list(map(passes_of, self.lists))

    @property
    def chunks(self) -> int:
        return len(self.stages) // len(self.plan)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step: the plan is only for this number."""
        return 1 + max(op.micro for ops in self.plan for op in ops)

    @property
    def split(self) -> bool:
        return any(op.kind == "W" for ops in self.plan for op in ops)

    @property
    def turns(self) -> bool:
        """Whether passes take turns."""
        return any(map(pairs_of, self.lists))


def is_file(name: str) -> bool:
    """Whether a value of `--pipeline-schedule` is a file."""
    return name.endswith(".txt") or "/" in name


def read_schedule(path: str) -> CustomSchedule:
    """Read and verify a schedule file. Raises SettingsError with file, line and op."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--pipeline-schedule {path} cannot be read", str(error)) from error
    plan, lines, shape = [], [], looped
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words[:1] == ["stages:"]:
            shape = _shape(words[1:], f"{path}, line {number}")
        elif words:
            plan.append(_ops(words, f"{path}, line {number}"))
            lines.append(number)
    if not plan:
        raise SettingsError(f"{path} holds no schedule", "there is no line of ops", DO)
    chunks = 1 + max(op.chunk for ops in plan for op in ops)
    if shape is v_shaped and chunks != 2:
        raise SettingsError(f"{path}: stages in a V need two model chunks a rank, and the ops have {chunks}", do=DO)
    schedule = CustomSchedule(path, plan, shape(len(plan), chunks))
    try:
        verify(schedule.lists, schedule.num_microbatches, schedule.stages)
    except BrokenSchedule as error:
        where = "" if error.rank is None else f", line {lines[error.rank]}"
        raise SettingsError(f"{path}{where}: this schedule cannot run", str(error), DO) from error
    if not any(op.kind in "BW" for op in schedule.plan[0]):
        raise SettingsError(f"{path}: this schedule never trains", "it only has forward passes", DO)
    return schedule


def _shape(words: list[str], where: str):
    known = dict(v=v_shaped, looped=looped)
    if len(words) != 1 or words[0] not in known:
        raise SettingsError(f"{where}: 'stages: {' '.join(words)}' is not known", do="stages: looped, or stages: v")
    return known[words[0]]


def _ops(words: list[str], where: str) -> list[Op]:
    try:
        ops = [parse_op(word) for word in words]
    except ValueError as error:
        raise SettingsError(f"{where}: {error}", do=DO) from error
    for word, op in zip(words, ops):
        if max(op.micro, op.chunk) >= len(ops):  # a typing error: `verify` would list billions of missing ops
            raise SettingsError(
                f"{where}: {word} is not possible: micro-batches and chunks count from 0, without gaps, and "
                f"the line has {len(ops)} ops",
                do=DO,
            )
    return ops
