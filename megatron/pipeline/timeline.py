# SPDX-License-Identifier: Apache-2.0
"""The measured times of a step's ops: written by a run (`--pipeline-timeline FILE`), compared with a simulation by check.

A JSON object: `schedule`, `stages` (stage -> [rank, chunk]), and `ranks`: for each rank its ops in order, each as
["F3.1", start, end] in seconds since the step began. An op's time is its computation: waiting for a message comes
before its start.
Two passes that took turns follow each other in the list and have the same times.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from megatron.errors import DataError
from megatron.pipeline.schedule import BESIDE, Op, StageMap, parse_op
from megatron.pipeline.simulate import RankSchedules, Times, verify

Record = list[tuple[Op, float, float]]  # ops of a rank with start and end in seconds


@dataclass(frozen=True)
class Timeline:
    """A measured step of one pipeline."""

    schedule: str
    stages: StageMap
    ranks: list[Record]

    @property
    def plan(self) -> RankSchedules:
        return [
            [one for (op, _, _), second in _turns(record) for one in [BESIDE] * second + [op]] for record in self.ranks
        ]

    @property
    def times(self) -> Times:
        """Times in the form of `simulate`, from the start of the first op."""
        first = min(start for record in self.ranks for _, start, _ in record)
        return {
            (rank, op): (start - first, end - first)
            for rank, record in enumerate(self.ranks)
            for op, start, end in record
        }

    def cost(self, rank: int, op: Op) -> float:
        """Seconds of an op: the median over micro-batches of its kind on that rank and chunk."""
        return self.costs[rank, op.kind, op.chunk]

    def hidden(self, rank: int, one: Op, other: Op) -> float:
        """Seconds that two passes save by turns: the median of their chunks."""
        return self.cost(rank, one) + self.cost(rank, other) - self.together[rank, one.chunk, other.chunk]

    @cached_property
    def costs(self) -> dict[tuple[int, str, int], float]:
        """(rank, kind, chunk) -> seconds. Passes that only ran in turns count as half of the time of both."""
        alone, half = defaultdict(list), defaultdict(list)
        for rank, record in enumerate(self.ranks):
            marked = _turns(record)
            for ((op, start, end), second), (_, following) in zip(marked, [*marked[1:], (None, False)]):
                key = rank, op.kind, op.chunk
                if second or following:
                    half[key].append((end - start) / 2)
                else:
                    alone[key].append(end - start)
        return {key: median(seconds) for key, seconds in (half | alone).items()}

    @cached_property
    def together(self) -> dict[tuple[int, int, int], float]:
        """(rank, chunk of the forward pass, of the backward pass) -> seconds of two passes that take turns."""
        durations = defaultdict(list)
        for rank, record in enumerate(self.ranks):
            marked = _turns(record)
            for ((one, _, _), _), ((other, start, end), second) in zip(marked, marked[1:]):
                if second:
                    durations[rank, one.chunk, other.chunk].append(end - start)
        return {key: median(seconds) for key, seconds in durations.items()}

    def write(self, path: str) -> None:
        """Write the timeline as JSON, one line for each rank."""
        rows = [
            json.dumps([[str(op), round(start, 7), round(end, 7)] for op, start, end in record])
            for record in self.ranks
        ]
        head = json.dumps(dict(schedule=self.schedule, stages=self.stages))[:-1]
        text = head + ', "ranks": [\n' + ",\n".join(rows) + "\n]}\n"
        Path(path).write_text(text, encoding="utf-8")


def _turns(record: Record) -> list[tuple[tuple[Op, float, float], bool]]:
    """The ops of a rank, each with whether it took turns with the one before it: both have the same times."""
    before = [None, *record]
    return [
        (entry, bool(last and entry[0].kind in "BI" and last[0].kind == "F" and entry[1:] == last[1:]))
        for last, entry in zip(before, record)
    ]


def read_timeline(path: str) -> Timeline:
    """Read a timeline. Raises DataError for a file that is not one."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        ranks = [[(parse_op(word), float(start), float(end)) for word, start, end in row] for row in record["ranks"]]
        stages = tuple((int(rank), int(chunk)) for rank, chunk in record["stages"])
        timeline = Timeline(str(record["schedule"]), stages, ranks)
        if not any(end > start for row in ranks for _, start, end in row):
            raise ValueError("nothing in it took any time")
        verify(timeline.plan, 1 + max(op.micro for row in ranks for op, _, _ in row), stages)
        return timeline
    except OSError as error:
        raise DataError(f"cannot read {path}", error.strerror) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no timeline of a pipeline", str(error), "--pipeline-timeline FILE of a training run writes one"
        ) from error
