# SPDX-License-Identifier: Apache-2.0
"""The measured times of a step's ops: written by a run (`--pipeline-timeline FILE`), compared with a simulation by check.

A JSON object: `schedule`, `stages` (stage -> [rank, chunk]), and `ranks`: for each rank its ops in order, each as
["F3.1", start, end] in seconds since the step began. An op's time is its computation: waiting for a message comes
before its start.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from megatron.errors import DataError
from megatron.pipeline.schedule import Op, StageMap, parse_op
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
        return [[op for op, _, _ in record] for record in self.ranks]

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

    @cached_property
    def costs(self) -> dict[tuple[int, str, int], float]:
        """(rank, kind, chunk) -> seconds."""
        durations = defaultdict(list)
        for rank, record in enumerate(self.ranks):
            for op, start, end in record:
                durations[rank, op.kind, op.chunk].append(end - start)
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
