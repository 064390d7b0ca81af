# SPDX-License-Identifier: Apache-2.0
"""Check a pipeline schedule before a run: bubble, memory, a diagram. Or compare it with the times of a run.

python -m megatron.pipeline.check --pp 4 --micro 8
python -m megatron.pipeline.check --pp 4 --micro 8 --schedule zb-v --svg zb-v.svg
python -m megatron.pipeline.check --pp 4 --micro 8 --schedule 1f1b --zero 3 --gather 0.3 --reduce 0.3 --overlap
python -m megatron.pipeline.check --pp 4 --micro 8 --overlap-moe-expert-parallel-comm --exchange 0.3
python -m megatron.pipeline.check --schedule my_own.txt
python -m megatron.pipeline.check --timeline step.json --svg step.svg
"""

import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import SettingsError, StorageError, run_main
from megatron.pipeline.custom_schedule import is_file, read_schedule
from megatron.pipeline.data_parallel_messages import (
    ALL,
    IN,
    OUT,
    ChunkPieces,
    Sharding,
    list_messages,
    without_messages,
)
from megatron.pipeline.draw import diagram, svg
from megatron.pipeline.schedule import (
    TRAINING,
    BrokenSchedule,
    Op,
    StageMap,
    default_chunks,
    in_turns,
    problems,
    stage_map,
)
from megatron.pipeline.simulate import (
    COST,
    Cost,
    RankSchedules,
    Times,
    bubble_of,
    hidden_by_turns,
    make_rank_schedules,
    report,
    simulate,
    verify,
)
from megatron.pipeline.timeline import read_timeline
from megatron.settings.schema import setting


@dataclass(frozen=True)
class CheckOptions:
    """Options of the command."""

    pipeline_model_parallel_size: int = setting("ranks that split the layers", 4, "--pp")
    micro: int = setting("micro-batches of a step", 8, "--micros", "--num-micro-batches")
    chunks: Optional[int] = setting(
        "model chunks a rank (default: the schedule's own number)",
        None,
        "--virtual-pp-degree",
        "--num-virtual-stages-per-pipeline-rank",
    )
    schedule: Optional[str] = setting(
        f"one of {', '.join(TRAINING)}, or FILE.txt (default: compare all)", None, "--pipeline-schedule"
    )
    cost: str = setting("time of F,B,I,W", ",".join(f"{COST[kind]:g}" for kind in "FBIW"))
    wire: float = setting("time of a message, in forward passes of a chunk", 0.0)
    zero: Optional[Literal[0, 1, 2, 3]] = setting("also simulate the gathers and reductions of this ZeRO stage", None)
    layers: int = setting("layers of a model chunk, which are gathered and reduced one by one", 4)
    gather: float = setting("time of gathering a chunk's parameters", 0.5)
    reduce: float = setting("time of reducing a chunk's gradients", 0.5)
    update: float = setting("time of the optimizer's update", 0.0)
    overlap: bool = setting("gather and reduce layers while others are computed", False)
    overlap_moe_expert_parallel_comm: bool = setting("forward and backward passes take turns (experts)", False)
    exchange: float = setting(
        "time of experts' exchanges in a pass of a chunk, forward or backward; passes that take turns hide them", 0.0
    )
    list_ops: bool = setting("with --zero, print the ops of each rank, as a schedule file has them", False)
    timeline: Optional[str] = setting("file of a run's --pipeline-timeline, to compare with its simulation", None)
    svg: Optional[str] = setting("file for a picture", None)
    no_diagram: bool = setting("print numbers only", False)


def main(argv: list[str]) -> None:
    from megatron.settings.parse import parse

    what = "Simulate, verify, measure and draw a pipeline schedule."
    fields = tuple(CheckOptions.__dataclass_fields__)
    prog = "python -m megatron.pipeline.check"
    asked = parse(argv, {"check": CheckOptions}, prog=prog, description=what, common=fields)["check"]
    panels, unit = _measured(asked.timeline) if asked.timeline else _compared(asked)
    for title, times in panels.items() if not asked.no_diagram else ():
        width = shutil.get_terminal_size((160, 24)).columns
        print(f"\n{title}\n{diagram(times, width=width, colour=sys.stdout.isatty(), whole=bool(asked.timeline))}")
    if asked.svg:
        try:
            Path(asked.svg).write_text(svg(panels, unit), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write --svg {asked.svg}", error.strerror) from error


def _compared(asked: CheckOptions) -> tuple[dict[str, Times], str]:
    """Print the numbers of the requested schedules. Returns the panels to draw, and the unit of their times."""
    if asked.wire < 0:
        raise SettingsError(f"--wire {asked.wire:g} must be at least 0: the time of a message")
    plans = _plans(asked)
    passes, panels = _cost(asked.cost), {}
    if not 0 <= asked.exchange <= min(passes["F"], passes["B"], passes["I"]):
        raise SettingsError(
            f"--exchange {asked.exchange:g} must be a part of the time of each pass F, B and I (--cost)"
        )
    hidden = lambda rank, one, other: hidden_by_turns(*((passes[op.kind], asked.exchange) for op in (one, other)))
    ranks, num_microbatches = _size(next(iter(plans.values()))[0])
    print(f"{ranks} ranks, {num_microbatches} micro-batches; time unit: {UNIT}")
    print(f"{'schedule':>14}{'chunks':>8}{'span':>9}{'bubble':>9}   live activations of each rank, in micro-batches")
    for name, (plan, stages) in plans.items():
        verify(plan, num_microbatches, stages)
        chunks = len(stages) // len(plan)
        if asked.zero is None:
            plan, cost = list(map(without_messages, plan)), passes
        else:
            plan, cost = _with_messages(asked, plan, stages, passes)
        result = report(plan, stages, cost, asked.wire, asked.update, hidden)
        live = " ".join(f"{held / chunks:g}" for held in result.live)
        span = result.span / chunks / passes["F"]
        print(f"{name:>14}{chunks:8d}{span:9.1f}{result.bubble:9.1%}   {live}")
        times = simulate(plan, stages, cost, asked.wire, asked.update, hidden)
        # Divided by the number of chunks, so that schedules of different chunks have one scale.
        short = {key: tuple(moment / chunks / passes["F"] for moment in moments) for key, moments in times.items()}
        panels[f"{name}{f', {chunks} chunks a rank' * (chunks > 1)}: {span:.1f} passes"] = short
    return panels, f"time: 1 is the {UNIT}"


UNIT = "forward pass of a rank's layers"


def _with_messages(
    asked: CheckOptions, plan: RankSchedules, stages: StageMap, passes: Mapping[str, float]
) -> tuple[RankSchedules, Cost]:
    """The plan with the requested gathers and reductions, and the time of each op. The ends of a model take no time."""
    wrong = [name for name in ("gather", "reduce", "update") if not 0 <= getattr(asked, name) < math.inf]
    if wrong or asked.layers < 1:
        raise SettingsError(
            "; ".join([f"--{name} {getattr(asked, name):g} must be a time of at least 0" for name in wrong])
            or f"--layers {asked.layers} must be at least 1"
        )
    own, lists = tuple(map(str, range(asked.layers))), []
    how = Sharding(asked.zero, asked.zero > 0, asked.overlap and asked.zero > 0, asked.overlap)
    for rank, ops in enumerate(plan):
        chunks = []
        for stage in sorted((stage for stage, (at, _) in enumerate(stages) if at == rank), key=lambda n: stages[n][1]):
            held = (IN,) * (stage == 0) + own + (OUT,) * (stage == len(stages) - 1)
            chunks.append(ChunkPieces(asked.layers, held, held, learns=stage > 0))
        try:
            listed = list_messages(ops, chunks, how)
        except BrokenSchedule as error:
            raise SettingsError(f"--schedule {asked.schedule}: rank {rank} cannot run this list", str(error)) from error
        if asked.list_ops:
            print(*listed.ops, *listed.after[:-1], f" # rank {rank}")
        lists.append([op for part in listed for op in part])
    messages = dict(G=asked.gather * (asked.zero > 0), H=asked.gather, R=asked.reduce)

    def cost(rank: int, op: Op) -> float:
        if op.piece == ALL:  # all reductions of the rank, or a sum over copies, of which there are none
            return asked.reduce * len(stages) / len(plan) * (not how.sharded and not how.reduce_beside)
        share = 1 / asked.layers if op.piece in own else float(not op.piece)
        return share * (messages[op.kind] if op.kind in messages else passes[op.kind])

    return lists, cost


def _plans(asked: CheckOptions) -> dict[str, tuple[RankSchedules, StageMap]]:
    """Name -> plan and map of stages. Raises SettingsError when no schedule can run."""
    if asked.schedule and is_file(asked.schedule):
        custom = read_schedule(asked.schedule)
        return {Path(custom.path).name: (custom.lists, custom.stages)}
    pp, num_microbatches = asked.pipeline_model_parallel_size, asked.micro
    names = [asked.schedule] if asked.schedule else TRAINING
    chunks = {name: default_chunks(name) if asked.chunks is None else asked.chunks for name in names}
    wrong = {name: problems(name, pp, num_microbatches, chunks[name]) for name in names}
    good = [name for name in names if not wrong[name]]
    if not good:
        raise SettingsError("; ".join(dict.fromkeys(line for lines in wrong.values() for line in lines)))
    if "1f1b" in good and chunks["1f1b"] > 1 and "interleaved" in good:
        good.remove("1f1b")  # the same schedule
    if asked.overlap_moe_expert_parallel_comm:
        if good == ["gpipe"]:
            raise SettingsError(
                "gpipe has no passes that could take turns: all backward passes come after all forward passes"
            )
        good = [in_turns(name) for name in good if name != "gpipe"]
        chunks = {in_turns(name): number for name, number in chunks.items()}
    return {
        name: (make_rank_schedules(name, pp, num_microbatches, chunks[name]), stage_map(name, pp, chunks[name]))
        for name in good
    }


def _size(plan: RankSchedules) -> tuple[int, int]:
    return len(plan), 1 + max(op.micro for ops in plan for op in ops)


def _cost(text: str) -> dict[str, float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(COST) or not all(0 < number < math.inf for number in numbers):
        raise SettingsError(f"--cost {text} must be four times above 0, for F,B,I,W, as in 1,2,1,1")
    return dict(zip("FBIW", numbers))


def _measured(path: str) -> tuple[dict[str, Times], str]:
    """Compare a run's step with the simulation of the same plan from the run's times of each op."""
    timeline = read_timeline(path)
    simulated, measured = (
        simulate(timeline.plan, timeline.stages, timeline.cost, hidden=timeline.hidden),
        timeline.times,
    )
    spans = {
        name: max(end for _, end in times.values())
        for name, times in (("measured", measured), ("simulated", simulated))
    }
    print(f"{timeline.schedule}: {len(timeline.plan)} ranks, {_size(timeline.plan)[1]} micro-batches")
    for name, times in (("measured", measured), ("simulated", simulated)):
        print(f"{name:>12}: {spans[name] * 1000:9.2f} ms, bubble {bubble_of(times, len(timeline.plan)):.1%}")
    print(f"{'ratio':>12}: {spans['measured'] / spans['simulated']:9.3f}")
    for rank in range(len(timeline.plan)):
        costs = {
            f"{kind}{f'.{chunk}' * (chunk > 0)}": timeline.costs[where, kind, chunk]
            for where, kind, chunk in sorted(timeline.costs)
            if where == rank
        }
        costs |= {
            f"F{f'.{one}' * (one > 0)} & B{f'.{other}' * (other > 0)}": seconds
            for (where, one, other), seconds in sorted(timeline.together.items())
            if where == rank
        }
        print(f"{'rank':>10} {rank}: " + ", ".join(f"{name} {1000 * cost:.2f} ms" for name, cost in costs.items()))
    return {"simulated from the measured time of each op": simulated, "measured": measured}, "time in seconds"


if __name__ == "__main__":
    run_main(main)
