# SPDX-License-Identifier: Apache-2.0
"""`--preflight`: checks settings, files and memory; every rank without a device; a shrunk job; the machines.

The first rank checks what needs no machines, while the others wait for it. Every check is a line, PASS or FAIL; nothing
is trained or written. torch is imported after the checks that do not need it.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from megatron.model.recipe import Recipe
from megatron.planner import target, text
from megatron.planner.choose import resolve_open_settings
from megatron.planner.cluster import Cluster
from megatron.planner.memory import peaks
from megatron.planner.preflight.verdict import Check, PreflightReport, refusal
from megatron.planner.problems import Inspection, inspect
from megatron.planner.startup import groups_of, slow_start, start_up
from megatron.settings import rank_env, schema
from megatron.telemetry.figures import part_of
from megatron.training import rules

STEPS = 4  # of the shrunk job: the first one warms up


def preflight(config: schema.Config, recipe: Recipe, log=print, env: Mapping[str, str] = os.environ) -> None:
    """Check everything. Raises SettingsError on every rank if anything failed.

    recipe: of the model; env: has this rank and the number of ranks, as torchrun sets them
    """
    here = rank_env.ranks(env if rank_env.is_started(env) else {})  # of one process, it joins no others
    report = PreflightReport(log if here.rank == 0 else lambda text: None)
    config, unresolved = resolve_open_settings(config, report.log)
    cluster, source = target.cluster_of(config)
    inspection = inspect(config, cluster)
    inspection = replace(inspection, settings=unresolved + inspection.settings)
    report.add(*check_settings(config, inspection, cluster, source, here.world_size))
    if any(check.name == "settings" for check in report.failed):
        raise refusal(report.failed, len(report.checks))
    if here.rank == 0:
        check_design(inspection, cluster.world_size, recipe, report)
    if here.world_size > 1:
        together(config, inspection, report)
    report.end(unchecked(cluster, here.world_size))


def unchecked(cluster: Cluster, started: int) -> list[str]:
    """Describe what a preflight on this many started ranks does not check."""
    cuda = cluster.device.kind == "cuda"
    items = ["how fast a step is", "real memory"] + ["the kernels that a GPU takes"] * cuda
    if started == 1 and cluster.world_size > 1:
        looks = "start it on them to check software, files, disks, clocks and network"
        items += [f"the machines of the {cluster.world_size} ranks ({looks})"] + ["NCCL"] * cuda
    return [*items, "the content of the data", "whether the loss falls"]


# Settings that have no effect most often because another one was forgotten: refused before an expensive job.
FORGOTTEN = (
    "sequence_parallel sharding_degree amp_custom_black_list amp_custom_white_list no_recompute_layers loss_scale "
    "optimizer_offload_fraction nvme_offload_dir rotary_percent"
).split()


def check_settings(config, inspection: Inspection, cluster: Cluster, source: str, started: int) -> list[Check]:
    """The checks that need no torch."""
    world, job, layout = cluster.world_size, inspection.job, inspection.layout
    problems = list(inspection.settings)
    if started > 1 and started != world:
        problems.append(f"--world-size {world} is not this job: it has {started} ranks; leave the flag out")
    checks = [Check("settings", "", problem) for problem in problems]
    idle = {} if problems else rules.idle(config, world)
    given = {name: config.given(name) for name in set(idle) & set(FORGOTTEN)}
    refused = [idle[name] for name, one in given.items() if one.value != one.default]
    checks += [Check("settings", "", words, "leave it out, or give what it needs") for words in refused]
    if not checks:
        checks.append(Check("settings", f"{text.described(job)}; {layout.short()} on {world} ranks"))
        checks += [Check("settings", f"warning: {words}") for words in idle.values()]
    checks += [Check("files", "", problem) for problem in inspection.files]
    if layout and not inspection.files:
        checks.append(Check("files", "all files in the settings are here"))
    checks += [Check("memory", "", problem) for problem in inspection.memory]
    if layout and not inspection.memory:
        most = max(peaks(job, layout, cluster.device))
        checks.append(
            Check(
                "memory",
                f"{part_of(most, cluster.device.memory_bytes)} on the fullest rank, predicted "
                f"({cluster.device.name}, {source})",
            )
        )
    if layout and world > 1:
        kind = cluster.device.kind
        groups = groups_of(layout, config.model.num_layers, kind == "cuda")
        slow = slow_start(config, layout, kind)
        took = start_up(groups, kind).total
        summary = f"{groups.most} groups per rank, {groups.in_job:,} in the job; ready in about {took:,.0f} s"
        checks.append(Check("start-up", f"{summary}, by a model{f'; warning: {slow}' * bool(slow)}"))
    return checks


def check_design(inspection: Inspection, world_size: int, recipe, report: PreflightReport) -> None:
    """Check every distinct rank on the meta device, then the shrunk job against one process."""
    import torch

    from megatron.planner.preflight.ranks import Design, check_ranks
    from megatron.planner.preflight.shrunk_job import check_shrunk_job

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no pool of threads may exist when the shrunk job's ranks are forked
    config = inspection.resolved
    config = replace(
        config,
        precision=replace(config.precision, precision=inspection.job.precision),
        kernels=replace(config.kernels, torch_compile=False, dump_graph=None),
    )
    for check in check_ranks(Design(config, world_size, inspection.job.facts, recipe.build_model)):
        report.add(check)
    for check in check_shrunk_job(config, world_size, recipe, STEPS):
        report.add(check)
    torch.set_num_threads(threads)


def together(config: schema.Config, inspection: Inspection, report: PreflightReport) -> None:
    """The checks of all started ranks: join, compare, measure. Every rank also raises the failures of the first."""
    from megatron.mpu import collectives, initialize
    from megatron.planner.preflight.machines import check_machines

    place = initialize.join_job(inspection.resolved.parallel, inspection.resolved.kernels)
    weights = inspection.job.facts.parameters
    for check in check_machines(config, place, weights * (4 if config.checkpoint.no_save_optim else 12)):
        report.add(check)
    failed, number = collectives.broadcast_object((report.failed, len(report.checks)), place.mesh.world)
    initialize.leave_job(place)
    if failed:
        raise refusal(failed, number)
