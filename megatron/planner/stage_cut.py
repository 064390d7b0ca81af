# SPDX-License-Identifier: Apache-2.0
"""Layers of unequal work, cut into stages so that a step takes as little of the planner's own time as can be.

By FLOPs alone a decoder layer of few tokens looks short; on a GPU whose ops take as long to start as to run it is not.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from heapq import nsmallest

from megatron.model.balance import balanced
from megatron.model.t5 import stages as t5_stages
from megatron.planner import target
from megatron.planner.layout import Job, Layout
from megatron.planner.speed import Cluster, end_costs, layer_costs, step
from megatron.settings import batch, rank_env
from megatron.settings.rules import out_of_range
from megatron.settings.schema import AUTO, GROUPS, Config

KEPT = 8  # cuts from which layers move on
MOVES = 64  # about so many stages that a layer may move to are tried at once

Cut = tuple[int, ...]  # layers of each stage


def fastest(job: Job, layout: Layout, cluster: Cluster) -> str:
    """Layers of each stage, in words as in --pipeline-stage-layers: never slower than even stages.

    From even stages, and from those of least work on the slowest, one layer moves at a time; of what that brings the
    fastest few go on, until their own moves bring none that is among them.
    """
    layers, stages = job.facts.num_layers, layout.pp * layout.chunks
    timed = cache(lambda cut: (step(job, in_stages(layout, _words(cut)), cluster).seconds, cut))
    first, last = end_costs(job, layout, cluster)
    costs = layer_costs(job, layout, cluster)
    starts = {tuple(balanced(costs, stages, first=first, last=last)), tuple(balanced([1.0] * layers, stages))}
    few, looked_at = sorted(map(timed, starts)), set()
    while todo := [cut for _, cut in few if cut not in looked_at]:
        looked_at.add(todo[0])
        few = nsmallest(KEPT, {*few, *map(timed, _moved(todo[0]))})
    return _words(few[0][1])


def in_stages(layout: Layout, words: str) -> Layout:
    """The layout with its layers cut so."""
    told = layout.parallel and replace(layout.parallel, pipeline_stage_layers=words)
    return replace(layout, stage_layers=words, parallel=told)


def _words(cut: Cut) -> str:
    return ",".join(map(str, cut))


def _moved(cut: Cut) -> Iterator[Cut]:
    """Every cut in which one stage has a layer more and another one less."""
    far = max(1, MOVES // len(cut))
    for giver in (n for n, layers in enumerate(cut) if layers > 1):
        for taker in range(max(0, giver - far), min(len(cut), giver + far + 1)):
            if taker != giver:
                yield tuple(n - (at == giver) + (at == taker) for at, n in enumerate(cut))


def normalize_config(config: Config) -> Config:
    """`Recipe.normalize_config` of an encoder-decoder, with stages balanced by time unless the user gives them.

    All ranks cut alike: flags say the device, not what the machine of a rank looks like.
    """
    found = t5_stages.normalize_config(config)
    if not t5_stages.is_cut_by_work(config, found) or not _can_be_timed(found):
        return found
    p, asked, here = found.parallel, found.planner, rank_env.ranks()
    model = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    world = max(1, (asked.world_size or here.world_size) // model) * model
    dp, local = world // model, asked.local_world_size or here.local_world_size
    if batch.problems(found.batch, dp):
        return found
    cluster = Cluster(target.device_by_flags(found), world, min(local or target.ranks_of_node(world), world))
    job, _ = target.job_of(found, cluster, dp)
    layout = Layout.of(found, world)
    odd = any(size % layout.tp for size in job.facts.divisible_by_tp().values())
    if odd or job.facts.loss_tokens(layout.rank_setup(job)) < 1:
        return found
    return replace(found, parallel=in_stages(layout, fastest(job, layout, cluster)).parallel)


def _can_be_timed(config: Config) -> bool:
    """Whether the numbers are those of some training; the rules will say what is wrong, or a search the micro-batch."""
    return config.batch.micro_batch_size != AUTO and not any(out_of_range(getattr(config, name)) for name in GROUPS)
