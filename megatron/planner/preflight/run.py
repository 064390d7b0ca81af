# SPDX-License-Identifier: Apache-2.0
"""`--preflight`, top to bottom: settings, files and memory; every rank without a device; the shrunk job; the machines.

The first rank looks at what needs no machines, while the others wait for it. Every check is a line, PASS or FAIL; nothing
is trained, nothing is written. What needs torch is imported behind the checks that need none.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from megatron.model.recipe import Recipe
from megatron.planner import target, text
from megatron.planner.choose import resolve_open_settings
from megatron.planner.preflight.verdict import Check, PreflightReport, refusal
from megatron.planner.problems import Inspection, fullest, inspect
from megatron.planner.speed import Cluster
from megatron.planner.startup import groups_of, slow_start, start_up
from megatron.settings import rank_env, schema
from megatron.telemetry.figures import part_of
from megatron.training import rules

STEPS = 4  # of the shrunk job: the first one warms up


def preflight(config: schema.Config, recipe: Recipe, log=print, env: Mapping[str, str] = os.environ) -> None:
    """Check everything. Raises SettingsError on every rank if anything failed.

    recipe: what is trained; env: says which rank of how many this is, as torchrun sets it
    """
    here = rank_env.ranks(env)
    report = PreflightReport(log if here.rank == 0 else lambda text: None)
    config, unresolved = resolve_open_settings(config, report.log)
    cluster, source = target.cluster_of(config)
    found = inspect(config, cluster)
    found = replace(found, settings=unresolved + found.settings)
    report.add(*check_settings(config, found, cluster, source, here.world_size))
    if any(check.name == "settings" for check in report.failed):
        raise refusal(report.failed, len(report.checks))
    if here.rank == 0:
        check_design(found, cluster.world_size, recipe, report)
    if here.world_size > 1:
        together(config, found, report)
    report.end(unchecked(cluster, here.world_size))


def unchecked(cluster: Cluster, started: int) -> list[str]:
    """What a preflight cannot know, on this many ranks that it was started on."""
    cuda = cluster.device.kind == "cuda"
    found = ["how fast a step is", "real memory"] + ["the kernels that a GPU takes"] * cuda
    if started == 1 and cluster.world_size > 1:
        looks = "start it on them: software, files, disks, clocks and network are checked then"
        found += [f"the machines of the {cluster.world_size} ranks ({looks})"] + ["NCCL"] * cuda
    return [*found, "what the data say", "whether the loss falls"]


# Settings whose lack of an effect means most often that another one was forgotten: refused before an expensive job.
FORGOTTEN = (
    "sequence_parallel sharding_degree amp_custom_black_list amp_custom_white_list no_recompute_layers loss_scale "
    "optimizer_offload_fraction nvme_offload_dir rotary_percent"
).split()


def check_settings(config, found: Inspection, cluster: Cluster, source: str, started: int) -> list[Check]:
    """What needs no torch."""
    world = cluster.world_size
    problems = list(found.settings)
    if started > 1 and started != world:
        problems.append(f"--world-size {world} is not this job: it has {started} ranks; leave the flag out")
    checks = [Check("settings", "", problem) for problem in problems]
    idle = {} if problems else rules.idle(config, world)
    given = {name: config.given(name) for name in set(idle) & set(FORGOTTEN)}
    refused = [idle[name] for name, one in given.items() if one.value != one.default]
    checks += [Check("settings", "", words, "leave it out, or give what it needs") for words in refused]
    if not checks:
        checks.append(Check("settings", f"{text.described(found.job)}; {found.layout.short()} on {world} ranks"))
        checks += [Check("settings", f"warning: {words}") for words in idle.values()]
    checks += [Check("files", "", problem) for problem in found.files]
    if found.layout and not found.files:
        checks.append(Check("files", "everything that the settings name is here"))
    checks += [Check("memory", "", problem) for problem in found.memory]
    if found.layout and not found.memory:
        most = max(fullest(found.job, found.layout, cluster))
        checks.append(
            Check(
                "memory",
                f"{part_of(most, cluster.device.memory_bytes)} on the fullest rank, predicted "
                f"({cluster.device.name}, {source})",
            )
        )
    if found.layout and world > 1:
        kind = cluster.device.kind
        groups = groups_of(found.layout, config.model.num_layers, kind == "cuda")
        slow = slow_start(config, found.layout, kind)
        took = start_up(groups, kind).total
        said = f"{groups.most} groups a rank, {groups.in_job:,} in the job; ready in about {took:,.0f} s"
        checks.append(Check("start-up", f"{said}, by a model{f'; warning: {slow}' * bool(slow)}"))
    return checks


def check_design(found: Inspection, world_size: int, recipe, report: PreflightReport) -> None:
    """Every distinct rank on the meta device, then the shrunk job against one process."""
    import torch

    from megatron.planner.preflight.ranks import Design, check_ranks
    from megatron.planner.preflight.shrunk_job import check_shrunk_job

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no pool of threads may exist when the shrunk job's ranks are forked
    config = found.resolved
    config = replace(
        config,
        precision=replace(config.precision, precision=found.job.precision),
        kernels=replace(config.kernels, torch_compile=False, dump_graph=None),
    )
    for check in check_ranks(Design(config, world_size, found.job.facts, recipe.build_model)):
        report.add(check)
    for check in check_shrunk_job(config, world_size, recipe, STEPS):
        report.add(check)
    torch.set_num_threads(threads)


def together(config: schema.Config, found: Inspection, report: PreflightReport) -> None:
    """All ranks of a job that was started: join, compare, measure. Every rank raises what the first one found, too."""
    from megatron.mpu import collectives, initialize
    from megatron.planner.preflight.machines import check_machines

    place = initialize.join_job(found.resolved.parallel, found.resolved.kernels)
    weights = found.job.facts.parameters
    for check in check_machines(config, place, weights * (4 if config.checkpoint.no_save_optim else 12)):
        report.add(check)
    failed, number = collectives.broadcast_object((report.failed, len(report.checks)), place.mesh.world)
    initialize.leave_job(place)
    if failed:
        raise refusal(failed, number)
