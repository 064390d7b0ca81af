# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: report all properties and all problems of a training that are known without a device."""

from collections.abc import Iterator

from megatron.errors import Failure
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import EXPERT_DP, JOINED, ranks_along
from megatron.pipeline.data_parallel_messages import without_messages
from megatron.pipeline.draw import diagram
from megatron.pipeline.simulate import make_rank_schedules, simulate
from megatron.planner import goodput, target, text
from megatron.planner.choose import resolve_open_settings
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import MemoryReport, memory_report, on_disk
from megatron.planner.plans import Plan
from megatron.planner.problems import inspect, prefixes, refusal
from megatron.planner.speed import slower_in_fp8, step
from megatron.planner.startup import describe_groups, groups_of, slow_start
from megatron.planner.traffic import transfers
from megatron.settings import batch, schema
from megatron.settings.spelling import settings_of
from megatron.telemetry.figures import WIDE, WIDTH, count, seconds, sentence, several, size, table
from megatron.training import rules


def dry_run(config: schema.Config, log=print) -> None:
    """Report the effects of the settings, starting with the verdict. Raises SettingsError with all problems."""
    chosen: list[str] = []
    config, unresolved = resolve_open_settings(config, chosen.append)
    cluster, source = target.cluster_of(config)
    width = WIDE if config.planner.wide else WIDTH
    inspection = inspect(config, cluster)
    problems = unresolved + inspection.problems
    wrong = f"{several(len(problems), 'problem')}, listed at the end"
    verdict = f"dry run: {wrong if problems else 'no problems found'}"
    if not inspection.resolved:
        log(verdict)
    else:
        plan, needed = _plan(inspection.job, inspection.layout, cluster)
        log(f"{verdict}; {text.rate(plan, cluster)}\n{text.verdict(plan, cluster)}\n")
        for line in filter(None, chosen):
            log(line)
        remarks = [inspection.remark] * bool(inspection.remark) + rules.remarks(config, cluster.world_size)
        for section in _sections(inspection.resolved, plan, needed, cluster, source, width):
            log(section + "\n")
        slow = slow_start(inspection.resolved, inspection.layout, cluster.device.kind)
        for remark in [
            *remarks,
            *gain_of_fp8(plan, cluster),
            *text.far(inspection.layout, cluster),
            *[slow] * bool(slow),
        ]:
            log(sentence(f"note: {remark}", width))
        for warning in rules.idle(config, cluster.world_size).values():
            log(sentence(f"warning: {warning}", width))
    if problems:
        raise refusal(problems)


def _plan(job: Job, layout: Layout, cluster: Cluster) -> tuple[Plan, list[MemoryReport]]:
    """The plan of the layout, and the memory of each pipeline rank."""
    needed = [memory_report(job, layout, cluster.device, rank) for rank in range(layout.pp)]
    worst = max(needed, key=lambda one: one.total)
    return Plan(layout, job, step(job, layout, cluster), worst.total, worst.rank), needed


def gain_of_fp8(plan: Plan, cluster: Cluster) -> list[str]:
    """What products in fp8 change of the step's time, and the linear layers that are slower with them."""
    job, layout = plan.job, plan.layout
    if not job.fp8:
        return []
    ratio = plan.step.seconds / step(job.without_fp8, layout, cluster).seconds
    losing = slower_in_fp8(job, layout, cluster)
    words = f"; slower with it: {', '.join(losing)}: --fp8-skip {','.join(losing)}" if losing else ""
    basis = "which were never measured" if cluster.device.kind == "cuda" else "in plain torch"
    return [
        f"--fp8-format: a step takes {ratio:.2f} x as long as without it, by assumed speeds of products, {basis}{words}"
    ]


def _sections(
    config, plan: Plan, needed: list[MemoryReport], cluster: Cluster, source: str, width: int
) -> Iterator[str]:
    job, layout = plan.job, plan.layout
    lines = [text.described(job), text.devices(cluster, source), *_changed(config)]
    yield "\n".join(sentence(line, width) for line in lines)
    yield _topology(layout, cluster, width)
    if cluster.world_size > 1:
        groups = groups_of(layout, job.facts.num_layers, cluster.device.kind == "cuda")
        buffers = max(one.device.get("communication buffers", 0) for one in needed)
        yield "\n".join(sentence(line, width) for line in describe_groups(groups, cluster.device, buffers))
    yield _stages(job, layout, needed, cluster, width)
    shown = needed if layout.pp <= 4 else [needed[n] for n in sorted({0, plan.rank, layout.pp - 1})]
    head = f"memory of a rank on {cluster.device.name} ({cluster.device.memory_gb:.1f} GB), predicted"
    yield f"{head}\n{text.memory_tables(shown, cluster.device.memory_bytes, width)}"
    if layout.pp > 1:
        yield _schedule(job, layout, width)
    if cluster.world_size > 1:
        yield text.traffic(transfers(job, layout, 0), width)
    yield "\n".join(sentence(line, width) for line in _data(config, job, layout))
    yield "\n".join(sentence(line, width) for line in _checkpoints(config, job, cluster, layout))
    if config.planner.mtbf:
        yield "\n".join(sentence(line, width) for line in goodput.describe(config, plan, cluster))
    if layout.disk:
        yield sentence(_files(config, job, layout, cluster), width)
    yield "\n".join(_time(config, plan, cluster, width))


def _changed(config: schema.Config) -> list[str]:
    """The settings that are not at their defaults, one group per line."""
    lines = []
    for name, own in config.groups.items():
        words = [
            f"{s.name}={s.word(getattr(own, s.name))}"
            for s in settings_of({name: type(own)})
            if getattr(own, s.name) not in (s.default, None)
        ]
        lines += [f"  {name}: {', '.join(words)}"] if words and name not in ("planner",) else []
    return ["settings other than defaults:", *lines]


def _topology(layout: Layout, cluster: Cluster, width: int) -> str:
    context = f"context {layout.cp} x " * (layout.cp > 1)
    lines = [
        f"{several(cluster.world_size, 'rank')} on {several(cluster.nodes, 'node')} "
        f"= pipeline {layout.pp} x data {layout.dp} (shared by {layout.shard}) x {context}tensor {layout.tp}"
    ]
    named = {name: (layout.dense_sizes, JOINED.get(name, (name,))) for name in ("tp", "cp", "dp", "pp")}
    if layout.folded:
        named |= {name: (layout.expert_sizes, (name,)) for name in ("ep", "etp")}
        named["expert_dp"] = layout.expert_sizes, EXPERT_DP
    for name, (sizes, axes) in named.items():
        groups = ranks_along(sizes, axes)
        if len(groups[0]) > 1:
            first = groups[0] if len(groups[0]) <= 8 else [*groups[0][:3], "...", groups[0][-1]]
            lines.append(f"  {name}: {len(groups)} groups of {len(groups[0])}, the first: {', '.join(map(str, first))}")
    return "\n".join(sentence(line, width) for line in lines)


def _stages(job: Job, layout: Layout, needed, cluster: Cluster, width: int) -> str:
    """The layers and the memory of each pipeline rank."""
    from megatron.planner.parameters import rank_units

    pipeline, rows, depths = layout.pipeline(job.facts.num_layers), [], job.facts.settings.depths
    last = "output, loss" + f", {several(depths, 'depth')} further ahead" * bool(depths)
    for rank in range(layout.pp):
        own = [_range(pipeline.layers[stage]) for stage in pipeline.stages_of(rank)]
        ends = ["embedding"] * (pipeline.stages[0][0] == rank) + [last] * (pipeline.stages[-1][0] == rank)
        parameters = sum(unit.elements for unit in rank_units(job, layout, rank))
        total = needed[rank].total
        rows.append(
            [
                rank,
                " ".join(own),
                ", ".join(ends) or "-",
                f"{parameters:,}",
                size(total),
                f"{total / cluster.device.memory_bytes:.0%}",
            ]
        )
    if len(rows) > 20:
        rows = [*rows[:8], ["..."] + [""] * 5, *rows[-4:]]
    head = ["pipeline rank", "layers", "and", "parameters", "memory", "of device"]
    return table(rows, head, left=(1, 2), width=width)


def _range(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else (str(layers[0]) if layers else "none")


FEW, MUCH = 4, 1 << 16  # micro-batches of a narrow diagram; columns of one that is never cut


def _schedule(job: Job, layout: Layout, width: int) -> str:
    """A diagram of a short step, in place of the real one."""
    pipeline, num_microbatches = layout.pipeline(job.facts.num_layers), layout.num_microbatches(job)
    short = pipeline.custom.num_microbatches if pipeline.custom else min(num_microbatches, 2 * layout.pp)
    turns = ", forward and backward passes in turns" * layout.turns
    head = f"schedule {layout.schedule}{turns}, {num_microbatches} micro-batches a step"
    if layout.pp > 16:
        return sentence(head, width)
    plan = (
        list(map(without_messages, pipeline.custom.lists))
        if pipeline.custom
        else make_rank_schedules(layout.order, layout.pp, short, layout.chunks)
    )
    picture = diagram(simulate(plan, pipeline.stages), width=min(width, 160))
    if "..." in picture:  # cut: backward passes may be missing
        if width >= WIDE:
            picture = diagram(simulate(plan, pipeline.stages), width=MUCH)
        else:
            if not pipeline.custom:
                short = min(short, FEW)
                plan = make_rank_schedules(layout.order, layout.pp, short, layout.chunks)
            picture = diagram(simulate(plan, pipeline.stages), width=width, whole=True)
    return f"{sentence(f'{head}, of which {short} are drawn' if short < num_microbatches else head, width)}\n{picture}"


def _data(config: schema.Config, job: Job, layout: Layout) -> Iterator[str]:
    samples = batch.total_samples(config.batch, layout.dp) if config.batch.has_length else 0
    wanted = samples * job.facts.sample_tokens
    if samples:
        steps = batch.total_iterations(config.batch, layout.dp)
        yield f"data: {steps:,} steps, {samples:,} samples, {count(wanted)} tokens"
    else:
        yield "data: for a training of unknown length"
    given = prefixes(config.data.train_data_path or config.data.data_path or [])
    if not given:
        own = f"  samples of {config.model.model_type} itself" if recipe_of(config).own_data else "  no data is given"
        yield "  synthetic samples" if config.data.mock_data else own
        return
    held = 0
    for prefix in given:
        tokens = _tokens(prefix)
        held += tokens or 0
        yield f"  {prefix}: {'not here' if tokens is None else f'{count(tokens)} tokens'}"
    if held and samples:
        split = "" if config.data.train_data_path else ", before --split"
        yield f"  {wanted / held:,.2f} epochs of all of it{split}"


def _tokens(prefix: str) -> int | None:
    from megatron.data.formats import open_tokens

    try:
        return int(open_tokens(prefix).sequence_lengths.sum())
    except (Failure, OSError):
        return None


def _checkpoints(config: schema.Config, job: Job, cluster: Cluster, layout: Layout) -> Iterator[str]:
    c = config.checkpoint
    trained, frozen = job.selection.sizes(job.facts.weights)
    each = trained * (4 if c.no_save_optim else 12) + frozen * job.element
    yield f"a checkpoint: {size(each)}, {size(each / cluster.world_size)} from each rank"
    if c.save and c.save_interval and c.save_interval > 0 and config.batch.has_length:
        saves = batch.total_iterations(config.batch, layout.dp) // c.save_interval
        kept = min(saves, c.keep_last or saves)
        yield f"  {saves:,} checkpoints are written, {kept:,} stay: {size(kept * each)} on the disk of {c.save}"


def _files(config: schema.Config, job: Job, layout: Layout, cluster: Cluster) -> str:
    """The size of the files in --nvme-offload-dir."""
    copies = 1 + config.checkpoint.async_save
    most = max(on_disk(job, layout, rank, copies) for rank in range(layout.pp))
    node = most * min(cluster.local_size, cluster.world_size)
    twice = ", twice because of --async-save" if copies > 1 else ""
    return (
        f"optimizer state in files{twice}: at most {size(most)} of a rank, {size(node)} of a node, in "
        f"{config.optimizer.nvme_offload_dir}"
    )


def _time(config: schema.Config, plan: Plan, cluster: Cluster, width: int) -> Iterator[str]:
    timed, note = plan.step, text.speeds_note(cluster, plan.layout)
    yield f"expected: {seconds(timed.seconds)} a step {note}"
    yield text.parts(timed, cluster, width)
    yield f"bubble {timed.bubble:.1%} of the passes"
    yield from text.pace(plan, cluster, None)
    if config.batch.has_length:
        steps = batch.total_iterations(config.batch, plan.layout.dp)
        yield f"{steps:,} steps: {seconds(steps * timed.seconds)} {note}"
    yield sentence(text.trust(plan, cluster), width)
    if cluster.device.assumed:
        yield "--calibration FILE replaces assumed speeds by measured ones (docs/planning.md)"
