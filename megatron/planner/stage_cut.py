# SPDX-License-Identifier: Apache-2.0
"""Partition layers with unequal cost into stages that minimize the predicted time of a step.

FLOPs alone underestimate a decoder layer with few tokens: on a GPU, launching its kernels may take as long as they run.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from heapq import nsmallest

from megatron.model.t5 import stages as t5_stages
from megatron.pipeline.stages import balanced
from megatron.planner import target
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.speed import end_costs, layer_costs, step
from megatron.settings import batch, rank_env
from megatron.settings.rules import out_of_range
from megatron.settings.schema import AUTO, GROUPS, Config

KEPT = 8  # number of best cuts to continue from
MOVES = 64  # approximate number of stages that a layer can move to in one round

Cut = tuple[int, ...]  # layers of each stage


def fastest(job: Job, layout: Layout, cluster: Cluster) -> str:
    """Layers of each stage, as in --pipeline-stage-layers: never slower than even stages.

    A local search that starts from even stages and from stages balanced by cost. Each round moves one layer between stages
    and continues with the few fastest cuts, until no move is faster.
    """
    layers, stages = job.facts.num_layers, layout.pp * layout.chunks
    timed = cache(lambda cut: (step(job, in_stages(layout, _words(cut)), cluster).seconds, cut))
    first, last = end_costs(job, layout, cluster)
    costs = layer_costs(job, layout, cluster)
    starts = {tuple(balanced(costs, stages, first=first, last=last)), tuple(balanced([1.0] * layers, stages))}
    few, expanded = sorted(map(timed, starts)), set()
    while todo := [cut for _, cut in few if cut not in expanded]:
        expanded.add(todo[0])
        few = nsmallest(KEPT, {*few, *map(timed, _moved(todo[0]))})
    return _words(few[0][1])


def in_stages(layout: Layout, words: str) -> Layout:
    """The layout with these layers in its stages."""
    parallel = layout.parallel and replace(layout.parallel, pipeline_stage_layers=words)
    return replace(layout, stage_layers=words, parallel=parallel)


def _words(cut: Cut) -> str:
    return ",".join(map(str, cut))


def _moved(cut: Cut) -> Iterator[Cut]:
    """Every cut that moves one layer from one stage to another."""
    far = max(1, MOVES // len(cut))
    for giver in (n for n, layers in enumerate(cut) if layers > 1):
        for taker in range(max(0, giver - far), min(len(cut), giver + far + 1)):
            if taker != giver:
                yield tuple(n - (at == giver) + (at == taker) for at, n in enumerate(cut))


def normalize_config(config: Config) -> Config:
    """Balance the stages of an encoder-decoder by time, unless the user gives them (`Recipe.normalize_config`).

    All ranks get the same stages: the device is derived from flags, not from a rank's machine.
    """
    normalized = t5_stages.normalize_config(config)
    if not t5_stages.is_cut_by_work(config, normalized) or not _can_be_timed(normalized):
        return normalized
    p, asked, here = normalized.parallel, normalized.planner, rank_env.ranks()
    model = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    world = max(1, (asked.world_size or here.world_size) // model) * model
    dp, local = world // model, asked.local_world_size or here.local_world_size
    if batch.problems(normalized.batch, dp):
        return normalized
    ranks_of_node = min(local or target.ranks_of_node(world), world)
    cluster = Cluster(target.device_by_flags(normalized), world, ranks_of_node)
    job, layout = target.planned_job(normalized, cluster)
    odd = any(size % layout.tp for size in job.facts.divisible_by_tp().values())
    if odd or job.facts.loss_tokens(layout.rank_setup(job)) < 1:
        return normalized
    return replace(normalized, parallel=in_stages(layout, fastest(job, layout, cluster)).parallel)


def _can_be_timed(config: Config) -> bool:
    """Whether the settings are in range; otherwise the rules report them, or a search chooses the micro-batch."""
    return config.batch.micro_batch_size != AUTO and not any(out_of_range(getattr(config, name)) for name in GROUPS)
