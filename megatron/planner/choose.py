# SPDX-License-Identifier: Apache-2.0
"""From the settings of a training to its best layout: for the planner's command and for --auto-parallel."""

import time
from dataclasses import dataclass, replace

from megatron import config as schema
from megatron import flops, rules
from megatron.errors import SettingsError
from megatron.planner import target
from megatron.planner.arithmetic import least_devices
from megatron.planner.layout import Job
from megatron.planner.search import Found, Plan, Space, search
from megatron.planner.speed import Cluster
from megatron.planner.text import duration, parts, plans


@dataclass(frozen=True)
class Outcome:
    """A search and what it was for."""

    found: Found
    job: Job
    cluster: Cluster
    parameters: int
    source: str  # of the cluster's figures
    remarks: list[str]
    seconds: float


def find(config: schema.Config) -> Outcome:
    """Search the layouts that settings leave open, on the cluster that they describe."""
    cluster, source = target.cluster_of(config)
    job, remark = target.job_of(config, cluster)
    space = space_of(config, cluster)
    started = time.perf_counter()
    found = search(job, cluster, space)
    count = flops.parameters(job.model, job.vocab_size)
    remarks = [remark] if remark else []
    if cluster.device.assumed:
        remarks.append("speeds are assumed; --calibrate on the machine itself makes times real")
    return Outcome(found, job, cluster, count, source, remarks, time.perf_counter() - started)


def space_of(config: schema.Config, cluster: Cluster) -> Space:
    """What settings leave open: a parallel setting that is not at its default is kept."""
    p, b, default = config.parallel, config.batch, schema.Parallel()
    sizes = dict(global_batch=b.global_batch_size, max_global_batch=config.planner.max_global_batch_size)
    if b.rampup_batch_size:
        raise SettingsError("--rampup-batch-size changes the batch while training, and a layout is searched for one size",
                            do="search for the full size, then add the flag to the command line")  # fmt: skip
    if not any(sizes.values()):
        raise SettingsError(
            "a search needs to know the batch", do="--global-batch-size N, or --max-global-batch-size N"
        )
    if all(sizes.values()):
        raise SettingsError("--global-batch-size and --max-global-batch-size: give one of them")

    def given(name: str):
        value = getattr(p, name)
        return value if value != getattr(default, name) else None

    return Space(
        **sizes,
        tp=given("tensor_model_parallel_size"),
        pp=given("pipeline_model_parallel_size"),
        micro=b.micro_batch_size if b.micro_batch_size != 1 else None,
        zero=given("sharding_stage"),
        schedule=given("pipeline_schedule"),
        offload=cluster.device.kind == "cuda",
    )


def nothing_fits(outcome: Outcome) -> SettingsError:
    """The error for a search without a plan: by how much it failed, and what would help."""
    found, cluster = outcome.found, outcome.cluster
    if not found.rejected:
        return SettingsError(f"no layout of {cluster.world_size} ranks is possible", "; ".join(found.impossible[:5]),
                             "choose another number of ranks or another batch")  # fmt: skip
    each = 18 if outcome.job.element == 2 else 16
    least, power = least_devices(each * outcome.parameters * 1.1 + 0, cluster.device.memory_bytes * 0.85)
    closest = found.rejected[0]
    return SettingsError(
        f"none of {found.looked_at:,} layouts fits {cluster.world_size} x {cluster.device.memory_gb:g} GB",
        f"the closest, {closest.layout.short()} with recomputation of "
        f"{closest.layout.recompute.recompute_granularity or 'nothing'}, is {closest.why()}",
        f"state alone, {each} bytes a parameter, needs about {max(least, cluster.world_size + 1)} such devices "
        f"({max(power, 2 * cluster.world_size)} as a power of two); or a smaller model, or shorter sequences",
    )  # fmt: skip


def plan_problems(config: schema.Config, plan: Plan, cluster: Cluster) -> list[str]:
    """What the rules of a training say against a plan; data and length of training are not its business."""
    data = schema.Data(mock_data=True)
    tokenizer = schema.Tokenizer(tokenizer_type="NullTokenizer", vocab_size=plan.job.vocab_size)
    settings = replace(plan.layout.applied(config, plan.job.global_batch), data=data, tokenizer=tokenizer,
                       checkpoint=schema.Checkpoint(), optimizer=replace(schema.Optimizer(), lr=1.0))  # fmt: skip
    if settings.batch.train_iters is None and settings.batch.train_samples is None:
        settings = replace(settings, batch=replace(settings.batch, train_iters=1))
    return rules.check(settings, cluster.world_size)


def automatic(config: schema.Config, say) -> tuple[schema.Config, list[Plan], Outcome]:
    """For --auto-parallel: (settings with the best layout in them, the best plans, the search). Says why."""
    outcome = find(config)
    found, cluster = outcome.found, outcome.cluster
    if not found.plans:
        raise nothing_fits(outcome)
    best = found.plans[0]
    say(f"--auto-parallel: {found.looked_at:,} layouts of {cluster.world_size} ranks ({cluster.device.name}, "
        f"{cluster.device.memory_gb:.1f} GB, {outcome.source}), {found.too_large:,} do not fit; "
        f"in {outcome.seconds:.1f} s")  # fmt: skip
    say(plans(found, cluster, 5))
    say(f"chosen: {' '.join(best.layout.flags())} --global-batch-size {best.job.global_batch}")
    say(f"because it is expected to be the fastest, {duration(best.step.seconds)} a step: {parts(best.step)}")
    return best.layout.applied(config, best.job.global_batch), found.plans, outcome
