# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: everything that can be known of a training before a device is touched, and every problem at once."""

from collections.abc import Iterator

from megatron.errors import Failure
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import JOINED, ranks_along
from megatron.pipeline.draw import diagram
from megatron.pipeline.simulate import make_plan, simulate
from megatron.planner import target, text
from megatron.planner.choose import settled
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import ledger, on_disk
from megatron.planner.problems import inspect, prefixes, refusal
from megatron.planner.search import Plan
from megatron.planner.speed import Cluster, step
from megatron.planner.traffic import transfers
from megatron.settings import batch, schema
from megatron.settings.spelling import settings_of
from megatron.training import rules


def dry_run(config: schema.Config, log=print) -> None:
    """Say what the settings would do. Raises SettingsError with every violation if they cannot work."""
    config, unsettled = settled(config, log)
    cluster, source = target.cluster_of(config)
    found = inspect(config, cluster)
    if found.resolved:
        for section in _sections(found.resolved, found.job, found.layout, cluster, [source, found.remark]):
            log(section + "\n")
        for remark in [*rules.remarks(config, cluster.world_size), *_far(found.layout, cluster)]:
            log(f"note: {remark}")
        for warning in rules.idle(config, cluster.world_size).values():
            log(f"warning: {warning}")
    if unsettled or found.problems:
        raise refusal(unsettled + found.problems)
    log("dry run: nothing was found that cannot work")


def _sections(config, job: Job, layout: Layout, cluster: Cluster, remarks: list[str]) -> Iterator[str]:
    found = step(job, layout, cluster)
    needed = [ledger(job, layout, cluster.device, rank) for rank in range(layout.pp)]
    worst = max(needed, key=lambda one: one.total)
    plan = Plan(layout, job, found, worst.total, worst.rank)
    count = job.facts.parameters
    yield "\n".join(
        [text.described(job, count), *_changed(config), *(f"note: {remark}" for remark in remarks if remark)]
    )
    yield _topology(layout, cluster)
    yield _stages(job, layout, needed, cluster)
    shown = needed if layout.pp <= 4 else [needed[n] for n in sorted({0, worst.rank, layout.pp - 1})]
    head = f"memory of a rank on {cluster.device.name} ({cluster.device.memory_gb:.1f} GB)"
    yield f"{head}\n{text.ledgers(shown, cluster.device.memory_bytes)}"
    if layout.pp > 1:
        yield _schedule(job, layout)
    if cluster.world_size > 1:
        yield text.traffic(transfers(job, layout, 0))
    yield "\n".join(_data(config, job, layout))
    yield "\n".join(_checkpoints(config, count, cluster, layout))
    if layout.disk:
        yield _files(config, job, layout, cluster)
    yield "\n".join(_time(config, plan, cluster))


def _far(layout: Layout, cluster: Cluster) -> list[str]:
    """What works, and is slow for the distance between ranks."""
    if layout.tp <= cluster.local_size:
        return []
    return [
        f"--tensor-model-parallel-size {layout.tp} reaches over machines of {cluster.local_size} ranks: four messages of "
        f"each layer and micro-batch cross the network; up to {cluster.local_size} they stay inside a machine"
    ]


def _changed(config: schema.Config) -> list[str]:
    """The settings that are not at their defaults, a group a line."""
    lines = []
    for name, own in config.groups.items():
        told = [
            f"{s.name}={s.word(getattr(own, s.name))}"
            for s in settings_of({name: type(own)})
            if getattr(own, s.name) not in (s.default, None)
        ]
        lines += [f"  {name}: {', '.join(told)}"] if told and name not in ("planner",) else []
    return ["settings that are not defaults:", *lines]


def _topology(layout: Layout, cluster: Cluster) -> str:
    sizes = dict(pp=layout.pp, replicate=layout.replicate, shard=layout.shard, cp=1, tp=layout.tp)
    lines = [
        f"{cluster.world_size} ranks on {max(1, cluster.world_size // cluster.local_size)} node(s) = pipeline "
        f"{layout.pp} x data {layout.dp} (shared by {layout.shard}) x tensor {layout.tp}"
    ]
    for name in ("tp", "dp", "pp"):
        groups = ranks_along(sizes, JOINED.get(name, (name,)))
        if len(groups[0]) > 1:
            first = groups[0] if len(groups[0]) <= 8 else [*groups[0][:3], "...", groups[0][-1]]
            lines.append(f"  {name}: {len(groups)} groups of {len(groups[0])}, the first: {', '.join(map(str, first))}")
    return "\n".join(lines)


def _stages(job: Job, layout: Layout, needed, cluster: Cluster) -> str:
    """Which layers lie where, and how full that makes the rank."""
    from megatron.planner.parameters import rank_units

    pipeline, rows = layout.pipeline(job.facts.num_layers), []
    for rank in range(layout.pp):
        own = [_range(pipeline.layers[stage]) for stage in pipeline.stages_of(rank)]
        ends = ["embedding"] * (pipeline.stages[0][0] == rank) + ["output, loss"] * (pipeline.stages[-1][0] == rank)
        count = sum(unit.exact for unit in rank_units(job, layout, rank))
        total = needed[rank].total
        rows.append(
            [
                rank,
                " ".join(own),
                ", ".join(ends) or "-",
                f"{count:,}",
                f"{total / 2**30:.2f}",
                f"{total / cluster.device.memory_bytes:.0%}",
            ]
        )
    if len(rows) > 20:
        rows = [*rows[:8], ["..."] + [""] * 5, *rows[-4:]]
    return text.table(
        rows, ["pipeline rank", "layers", "and", "parameters of a rank", "GiB", "of the device"], left=(1, 2)
    )


def _range(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else (str(layers[0]) if layers else "none")


def _schedule(job: Job, layout: Layout) -> str:
    """A diagram of a short step, and the gaps of the real one."""
    pipeline, micros = layout.pipeline(job.facts.num_layers), layout.micros(job)
    short = pipeline.own.micros if pipeline.own else min(micros, 2 * layout.pp)
    head = f"schedule {layout.schedule}, {micros} micro-batches a step"
    if layout.pp > 16:
        return head
    plan = pipeline.own.plan if pipeline.own else make_plan(layout.schedule, layout.pp, short, layout.chunks)
    picture = diagram(simulate(plan, pipeline.stages), width=110)
    return f"{head}{f', of which {short} are drawn' if short < micros else ''}\n{picture}"


def _data(config: schema.Config, job: Job, layout: Layout) -> Iterator[str]:
    samples = batch.total_samples(config.batch, layout.dp)
    wanted = samples * job.facts.seq_length
    yield (
        f"data: {batch.total_iterations(config.batch, layout.dp):,} steps, {samples:,} samples, {wanted / 1e9:,.3f} "
        "billion tokens"
    )
    given = prefixes(config.data.train_data_path or config.data.data_path or [])
    if not given:
        own = f"  samples of {config.model.model_type} itself" if recipe_of(config).own_data else "  no data is given"
        yield "  synthetic samples" if config.data.mock_data else own
        return
    held = 0
    for prefix in given:
        size = _tokens(prefix)
        held += size or 0
        yield f"  {prefix}: {'not here' if size is None else f'{size:,} tokens'}"
    if held:
        yield f"  {wanted / held:.2f} epochs of all of it, before --split takes its part"


def _tokens(prefix: str) -> int | None:
    from megatron.data.indexed import IndexedDataset

    try:
        return int(IndexedDataset(prefix).sequence_lengths.sum())
    except (Failure, OSError):
        return None


def _checkpoints(config: schema.Config, count: int, cluster: Cluster, layout: Layout) -> Iterator[str]:
    size = count * (4 if config.checkpoint.no_save_optim else 12)
    yield f"a checkpoint: {text.gib(size)} ({size / 1e9:,.1f} GB), {text.gib(size / cluster.world_size)} from each rank"
    c = config.checkpoint
    if c.save and c.save_interval and c.save_interval > 0:
        saves = batch.total_iterations(config.batch, layout.dp) // c.save_interval
        kept = min(saves, c.keep_last or saves)
        yield f"  {saves:,} checkpoints are written, {kept:,} stay: {text.gib(kept * size)} on the disk of {c.save}"


def _files(config: schema.Config, job: Job, layout: Layout, cluster: Cluster) -> str:
    """What --nvme-offload-dir has to hold."""
    copies = 1 + config.checkpoint.async_save
    most = max(on_disk(job, layout, rank, copies) for rank in range(layout.pp))
    node = most * min(cluster.local_size, cluster.world_size)
    twice = ", twice because of --async-save" if copies > 1 else ""
    return (
        f"optimizer state in files{twice}: at most {text.gib(most)} of a rank, {text.gib(node)} of a node, in "
        f"{config.optimizer.nvme_offload_dir}"
    )


def _time(config: schema.Config, plan: Plan, cluster: Cluster) -> Iterator[str]:
    found = plan.step
    steps = batch.total_iterations(config.batch, plan.layout.dp)
    assumed = " (speeds are assumed; --calibration makes them real)" if cluster.device.assumed else ""
    yield f"expected: {text.duration(found.seconds)} a step{assumed}: {text.parts(found)}"
    yield f"  bubble {found.bubble:.1%} of the passes; {found.tflops_per_rank(cluster.world_size):.4g} TFLOP/s a rank"
    yield from (f"  {line}" for line in text.pace(plan, cluster, None))
    yield f"  {steps:,} steps: {text.duration(steps * found.seconds)}"
