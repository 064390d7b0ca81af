# SPDX-License-Identifier: Apache-2.0
"""Lay out a job that has lost ranks on the remaining ones, with the same global batch. Needs no torch.

If possible, tensor and pipeline parallel sizes are kept and only the data parallel size shrinks. Otherwise they get smaller
too: the planner chooses the layout with the most ranks that fits in memory, and among these the one nearest to the previous
layout. A checkpoint loads into any layout.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Optional

from megatron.errors import Failure, SettingsError
from megatron.guard.command import RANKS, config_of, is_srun, shape_of, value_of, with_flag, with_ranks, without
from megatron.planner.layout import Layout
from megatron.planner.memory import memory_report
from megatron.planner.target import cluster_of, job_of
from megatron.settings.schema import Config
from megatron.training.rules import check, resolve

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SPLITS = (
    "--pipeline-schedule",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-stage-layers",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)


def fewer_ranks(words: list[str], now: int, least: int, most: Optional[int] = None) -> tuple[int, list[str]]:
    """The largest number of ranks below `now` for the job with the same global batch, and the command for it.

    most: ranks for which there are devices
    Raises SettingsError if no number down to `least` works, with the reasons for the largest.
    """
    config = config_of(words)
    if config is None:
        raise SettingsError("the settings of the job cannot be read, so it cannot be laid out again")
    nodes, each = shape_of(words)
    if nodes > 1 and not is_srun(words):
        raise SettingsError(
            f"this is one of {nodes} machines, and a supervisor on each cannot agree on fewer",
            do="supervise the job from one place: supervise ... -- srun ... torchrun ...",
        )
    size = _resolved(config, now).batch.global_batch_size
    if config.planner.parallel_plan:  # it is for the previous number of ranks
        words = [*without(words, "--parallel-plan"), *Layout.of(_resolved(config, now), now).flags()]
        config = config_of(words)
    asserted = ("--data-parallel-size", "--local-batch-size", "--gradient-accumulation-steps")
    words = with_flag(without(words, *asserted), "--global-batch-size", str(size))
    divisible = value_of(words, *RANKS) is not None  # the ranks are on one machine
    most = now - 1 if most is None else min(now - 1, most)
    numbers = [ranks for ranks in range(most, least - 1, -1) if ranks % each == 0 or ranks < each and divisible]
    why: list[str] = []
    for ranks in numbers:
        problems = check(config_of(words), ranks)
        if not problems:
            return ranks, with_ranks(words, ranks)
        why = why or problems
    need = needed(config, now)
    for ranks in numbers:
        for changed in _layouts(words, config, ranks):
            then = config_of(changed)
            if then is None or check(then, ranks):
                continue
            if fits(then, ranks, need):
                return ranks, with_ranks(changed, ranks)
            p = then.parallel
            why.append(
                f"tp {p.tensor_model_parallel_size} pp {p.pipeline_model_parallel_size} on {ranks} ranks would need "
                f"{needed(then, ranks) / 1e9:.0f} GB of each"
            )
    raise SettingsError(
        f"no layout on {least} to {most} ranks keeps the global batch of {size}",
        "; ".join(why[:4]),
        "see --min-world-size, --global-batch-size and --micro-batch-size",
    )


def _layouts(words: list[str], config: Config, ranks: int) -> Iterator[list[str]]:
    """The command with smaller tensor and pipeline parallel sizes that divide this many ranks, the largest first."""
    p = config.parallel
    pairs = [
        (tp, pp)
        for tp in range(1, p.tensor_model_parallel_size + 1)
        for pp in range(1, p.pipeline_model_parallel_size + 1)
        if ranks % (tp * pp * p.context_parallel_size) == 0
    ]
    for tp, pp in sorted(pairs, key=lambda pair: (-pair[0] * pair[1], -pair[0])):
        changed = words if pp == p.pipeline_model_parallel_size else without(words, *SPLITS)
        yield with_flag(with_flag(changed, TP, str(tp)), PP, str(pp))


def fits(config: Config, ranks: int, enough: float) -> bool:
    """Whether a rank's memory suffices: the device's, or the memory that the job needed before (`enough`), if larger."""
    cluster, _ = cluster_of(_on(config, ranks))
    return needed(config, ranks) <= max(enough, cluster.device.usable_bytes)


def needed(config: Config, ranks: int) -> float:
    """Bytes of the fullest rank; 0 if the planner has no estimate for such settings."""
    try:
        config = _resolved(config, ranks)
        cluster, _ = cluster_of(_on(config, ranks))
        layout = Layout.of(config, ranks)
        job, _ = job_of(config, cluster, layout.dp)
        return max(memory_report(job, layout, cluster.device, rank).total for rank in range(layout.pp))
    except (Failure, ValueError):
        return 0.0


def _resolved(config: Config, ranks: int) -> Config:
    """The settings on this many ranks, with the smallest micro-batch if the job chooses it itself."""
    return resolve(replace(config, batch=config.batch.smallest()), ranks)


def _on(config: Config, ranks: int) -> Config:
    return replace(config, planner=replace(config.planner, world_size=ranks, local_world_size=None))
