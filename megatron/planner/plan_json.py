# SPDX-License-Identifier: Apache-2.0
"""A search result as JSON, for --json and --parallel-plan."""

from dataclasses import asdict

from megatron.planner.choose import SearchResult
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import memory_report
from megatron.planner.plans import Plan
from megatron.planner.startup import groups_of, start_up
from megatron.planner.text import accuracy_of, basis, share_of_peak
from megatron.planner.traffic import transfers
from megatron.settings.plan_file import layout_settings, shape
from megatron.settings.schema import Config


def record(config: Config, outcome: SearchResult, top: int, rejected: int, command: str) -> dict:
    """Everything that the terminal shows, full memory and traffic reports, and the settings of each plan for `config`."""
    searched, cluster = outcome.searched, outcome.cluster
    return dict(
        world_size=cluster.world_size,
        local_world_size=cluster.local_size,
        device=asdict(cluster.device),
        model=shape(outcome.job.facts.settings),
        parameters=outcome.parameters,
        vocab_size=outcome.job.facts.vocab_size,
        remarks=outcome.remarks,
        layouts=searched.num_layouts,
        evaluated=searched.evaluated,
        alike=searched.alike,
        fastest=searched.fastest.layout.short() if searched.fastest else None,
        too_large=searched.too_large,
        seconds=round(outcome.seconds, 3),
        command=command,
        plans=[_plan(config, plan, outcome) for plan in searched.plans[:top]],
        rejected=[
            dict(layout=r.layout.short(), flags=r.layout.flags(), bytes_over=r.over, rank=r.rank, why=r.why())
            for r in searched.rejected[:rejected]
        ],
        impossible=searched.impossible,
    )


def _plan(config: Config, plan: Plan, outcome: SearchResult) -> dict:
    device, layout, job = outcome.cluster.device, plan.layout, plan.job
    return dict(
        layout=layout.short(),
        flags=layout.flags(),
        settings=layout_settings(layout.applied(config, job.global_batch)) | dict(data_parallel_size=layout.dp),
        global_batch=job.global_batch,
        speeds=basis(outcome.cluster),
        seconds=plan.step.seconds,
        parts=plan.step.parts,
        bubble=plan.step.bubble,
        tokens_per_second=plan.step.tokens_per_second(job),
        error=None if (known := accuracy_of(outcome.cluster, layout)) is None else known._asdict(),
        mfu=share_of_peak(plan, outcome.cluster),
        tflops_per_rank=plan.step.tflops_per_rank(outcome.cluster.world_size),
        mfu_causal=share_of_peak(plan, outcome.cluster, seen=True),
        tflops_per_rank_causal=plan.step.tflops_per_rank(outcome.cluster.world_size, seen=True),
        bytes=plan.bytes,
        memory=[
            asdict(memory_report(job, layout, device, rank))
            | dict(total=memory_report(job, layout, device, rank).total)
            for rank in range(layout.pp)
        ],
        groups=_groups(layout, job, device.kind),
        traffic=[asdict(transfer) for transfer in transfers(job, layout, 0)],
    )


def _groups(layout: Layout, job: Job, kind: str) -> dict:
    groups = groups_of(layout, job.facts.num_layers, kind == "cuda")
    axes = {name: dict(groups=number, ranks=ranks) for name, (number, ranks) in groups.axes.items()}
    counts = dict(most_of_a_rank=groups.most, in_job=groups.in_job, axes=axes, channels=groups.channels)
    return counts | dict(start_up_seconds=start_up(groups, kind).parts)
