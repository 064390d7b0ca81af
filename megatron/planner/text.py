# SPDX-License-Identifier: Apache-2.0
"""Plans, memory reports and traffic as tables and sentences for a terminal.

`width` is in columns (`telemetry.figures.WIDTH`, or WIDE for --wide). Memory is exact arithmetic; times depend on the
speeds of a device, and every line with a time states whether those are assumed or measured (`basis`).
"""

from collections.abc import Sequence

from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import MemoryReport
from megatron.planner.plans import Plan, SearchedPlans
from megatron.planner.reached_speed import KIND, Accuracy, accuracies
from megatron.planner.speed import StepTime
from megatron.planner.traffic import Transfer
from megatron.telemetry.figures import WIDTH, count, part_of, seconds, sentence, size, table
from megatron.telemetry.peak_flops import fp8_peak, joint_peak, peak_flops


def basis(cluster: Cluster) -> str:
    """The source of the speeds: "assumed" or "measured"."""
    return "assumed" if cluster.device.assumed else "measured"


def speeds_note(cluster: Cluster, layout: Layout | None = None) -> str:
    """A note on the source of the speeds, to follow a time; with the error of such layouts in published runs."""
    if layout is None or not cluster.device.assumed:
        return f"(speeds are {basis(cluster)})"
    return f"(assumed; {error_of(cluster, layout)})"


def error_of(cluster: Cluster, layout: Layout) -> str:
    """The error of predicted times, as published runs with the same features show it for this device."""
    known, other = accuracy_of(cluster, layout), cluster.device.other_mixtures
    return str(
        known or ("error unknown" if other is None else f"error unknown; of other mixtures up to {other.worst:.0%}")
    )


def accuracy_of(cluster: Cluster, layout: Layout) -> Accuracy | None:
    """The errors of published runs on this device whose layouts have the same features; None if there are none."""
    device = cluster.device
    return device.accuracies.get(layout.features(cluster.local_size, device.mixture))


def rate(plan: Plan, cluster: Cluster, seen: bool = False) -> str:
    """TFLOP/s of a rank, and their share of the peak (MFU). seen: as in `Facts.flops`."""
    tflops, share = plan.step.tflops_per_rank(cluster.world_size, seen), share_of_peak(plan, cluster, seen)
    used = "" if share is None else f", MFU {share:.0%}"
    return f"{tflops:.4g} TFLOP/s a {'GPU' if cluster.device.kind == 'cuda' else 'rank'}{used} ({basis(cluster)})"


def share_of_peak(plan: Plan, cluster: Cluster, seen: bool = False) -> float | None:
    """MFU of a plan; None for a device whose peak is not known. seen: as in `Facts.flops`."""
    job, name = plan.job, cluster.device.name
    fp8 = job.fp8 and job.facts.fp8_share(job.fp8, job.fp8_wgrad)
    peak = joint_peak(peak_flops(name, job.precision), fp8_peak(name, job.fp8), fp8 or 0.0)
    return plan.step.tflops_per_rank(cluster.world_size, seen) * 1e12 / peak if peak else None


def choice(searched: SearchedPlans, tolerance: float) -> str:
    """Why the first plan was chosen, if it is not the fastest; else ""."""
    best, fastest = searched.plans[0], searched.fastest
    if best.layout == fastest.layout and best.job == fastest.job:
        return ""
    slower = best.per_sample / fastest.per_sample - 1
    return (
        f"chosen as the simplest, with most memory free, of {searched.alike:,} plans within {tolerance:.0%} of the "
        f"fastest; {fastest.layout.short()} is predicted to be {slower:.1%} faster"
    )


def trust(plan: Plan, cluster: Cluster) -> str:
    """The basis of a plan's predicted times: speeds, and errors in published runs."""
    device = cluster.device
    if not device.assumed:
        return "times rest on speeds that were measured with --calibrate"
    if device.kind != "cuda":
        return "times rest on assumed speeds of a CPU; --calibrate measures them"
    known, features = accuracy_of(cluster, plan.layout), plan.layout.features(cluster.local_size, device.mixture)
    if known:
        count = "one published run" if known.runs == 1 else f"{known.runs} published runs"
        errors = f"errors are those of {count} on this GPU with the same features ({features})"
    elif accuracies(device.name):
        errors = f"their error is unknown: no published run on this GPU has the same features ({features})"
    else:
        errors = "no published run of this GPU was found to compare them with"
    if not known and (other := device.other_mixtures):
        errors += (
            f"; {other.runs} runs of other mixtures had a median error of {other.median:.0%}, worst {other.worst:.0%}"
        )
    return f"times assume the speeds of {KIND}; {errors}; this suite was measured on one H200 alone (docs/planning.md)"


def recomputed(plan: Plan) -> str:
    """The recomputation of a plan in a word or two."""
    r = plan.layout.recompute
    spared = f" but {len(r.exempt_layers)}" if r.no_recompute_layers else ""
    return (r.words or "-") + spared


def verdict(plan: Plan, cluster: Cluster) -> str:
    """Whether a plan fits, and its speed, in a few lines."""
    room = part_of(plan.bytes, cluster.device.memory_bytes)
    pace = f"{seconds(plan.step.seconds)} a step, {count(plan.step.tokens_per_second(plan.job))} tokens/s"
    note = speeds_note(cluster, plan.layout)
    lines = [f"  memory: {room} on the fullest rank, predicted", f"  time: {pace} {note}"]
    if 0 < plan.step.seen_flops < plan.step.flops:
        lines.append(f"  with half of causal attention: {rate(plan, cluster, seen=True)}")
    return "\n".join(lines)


def devices(cluster: Cluster, source: str) -> str:
    """The devices of a cluster, and the source of their speeds."""
    device = cluster.device
    return f"{cluster.world_size} x {device.name} of {device.memory_gb:.1f} GB, {cluster.local_size} a node ({source})"


def far(layout: Layout, cluster: Cluster) -> list[str]:
    """Notes on a layout that works, but is slow because of the distance between ranks."""
    near, notes = cluster.local_size, []
    if layout.tp > near:
        notes.append(
            f"--tensor-model-parallel-size {layout.tp} spans machines of {near} ranks: four messages of "
            f"each layer and micro-batch cross the network; up to {near} they stay inside a machine"
        )
    if layout.ep > 1 and layout.ep * layout.cuts.etp > near:
        parts = f" x --expert-tensor-parallel-size {layout.cuts.etp}" * (layout.cuts.etp > 1)
        notes.append(
            f"--expert-model-parallel-size {layout.ep}{parts} spans machines of {near} ranks: four exchanges of tokens of "
            f"each layer with experts and micro-batch cross the network; up to {near} they stay inside a machine"
        )
    return notes


def plans(searched: SearchedPlans, cluster: Cluster, most: int, width: int = WIDTH) -> str:
    """The table of ranked plans. Leaves out columns without effect in any row, and in a narrow terminal also minor ones."""
    rows = []
    for number, plan in enumerate(searched.plans[:most], 1):
        step, lay = plan.step, plan.layout
        rows.append(
            {
                "": number,
                "layout": lay.short(),
                "micro": lay.micro_batch_size,
                "batch": plan.job.global_batch,
                "recompute": recomputed(plan),
                "offload": "yes" if lay.offload else "-",
                "stages": lay.stage_layers and "uneven" or "-",
                "GB": f"{plan.bytes / 1e9:.1f}",
                "a step": seconds(step.seconds),
                "tokens/s": f"{step.tokens_per_second(plan.job):,.0f}",
                "TFLOP/s": f"{step.tflops_per_rank(cluster.world_size):.4g}",
                "bubble": f"{step.bubble:.1%}",
                "speeds": basis(cluster),
                "error": _short_error(cluster, lay),
            }
        )
    head = [name for name in rows[0] if name not in IDLE or any(row[name] != "-" for row in rows)]
    cells = [[row[name] for name in head] for row in rows]
    left = [n for n, name in enumerate(head) if name in ("layout", "recompute")]
    return table(
        cells, head, left, width, spare=("stages", "bubble", "TFLOP/s", "batch", "error", "offload", "recompute")
    )


def _short_error(cluster: Cluster, layout: Layout) -> str:
    known = accuracy_of(cluster, layout)
    return f"{known.median:.0%}-{known.worst:.0%}" if known else "-"


IDLE = ("error", "recompute", "offload", "stages")  # columns to leave out if all rows have "-"


def rejected(searched: SearchedPlans, most: int, width: int = WIDTH) -> str:
    """The closest layouts that do not fit, and the impossible ones."""
    rows = [
        [r.layout.short(), r.layout.micro_batch_size, r.layout.recompute.words or "-", r.why()]
        for r in searched.rejected[:most]
    ]
    head = ["layout", "micro", "recompute", "why not"]
    lines = [table(rows, head, left=(0, 2, 3), width=width, spare=("recompute",))] if rows else []
    return "\n".join(lines + [sentence(reason, width) for reason in searched.impossible[:most]])


def sizes(searched: SearchedPlans, cluster: Cluster, width: int = WIDTH) -> str:
    """The plans of one layout by micro-batch, around the best: memory and time of each, and why larger ones do not fit."""
    fit = sorted(searched.plans, key=lambda plan: plan.layout.micro_batch_size)
    at = fit.index(searched.plans[0])
    rows = [
        [
            f"{plan.layout.micro_batch_size}:",
            size(plan.bytes),
            f"{seconds(plan.step.seconds)} a step",
            f"{plan.step.tokens_per_second(plan.job):,.0f} tokens/s",
            speeds_note(cluster, plan.layout),
        ]
        for plan in fit[max(0, at - 3) : at + 3]
    ]
    lines = table(rows[1:], rows[0], width=width - 2).splitlines()
    if searched.rejected:
        least = min(searched.rejected, key=lambda one: one.layout.micro_batch_size)
        all_above = len(searched.rejected) > 1 and fit[-1].layout.micro_batch_size < least.layout.micro_batch_size
        lines.append(f"{least.layout.micro_batch_size}{' and more' * all_above}: {least.why()}")
    return "\n".join(f"  {line}" for line in lines)


def memory_tables(reports: Sequence[MemoryReport], capacity: int, width: int = WIDTH) -> str:
    """The memory table, with a column for each pipeline rank."""
    names = list(dict.fromkeys(name for one in reports for name in one.device))
    rows = [[name, *[size(one.device.get(name, 0)) for one in reports]] for name in names]
    rows += [
        [f"  {kind}", *[size(one.activations.get(kind, 0)) for one in reports]]
        for kind in dict.fromkeys(kind for one in reports for kind in one.activations)
    ]
    at = names.index("activations") + 1 if "activations" in names else len(names)
    rows = rows[:at] + rows[len(names) :] + rows[at : len(names)]
    rows.append(["total", *[size(one.total) for one in reports]])
    rows.append(["of the device", *[f"{one.total / capacity:.0%}" for one in reports]])
    if any(one.host for one in reports):
        rows.append(["on the host", *[size(sum(one.host.values())) for one in reports]])
    return table(rows, ["memory of pipeline rank", *[f"{one.rank}" for one in reports]], width=width)


def traffic(transfers: Sequence[Transfer], width: int = WIDTH) -> str:
    """The traffic of one step of one rank."""
    rows = [[t.op, t.axis, t.what, size(t.bytes), f"{t.calls:,}", "overlapped" if t.beside else ""] for t in transfers]
    return table(rows, ["collective", "axis", "of what", "a step", "calls", ""], left=(0, 1, 2, 5), width=width)


def parts(step: StepTime, cluster: Cluster, width: int = WIDTH) -> str:
    """The parts of a step's time."""
    rows = [
        [name, seconds(value), f"{value / step.seconds:.0%}", basis(cluster)]
        for name, value in sorted(step.parts.items(), key=lambda item: -item[1])
        if value / step.seconds >= 0.0005
    ]
    return table(rows, ["part of a step", "time", "share", "speeds"], width=width)


def pace(plan: Plan, cluster: Cluster, tokens: float | None) -> list[str]:
    """Tokens per day, and days for a number of tokens."""
    each, note = plan.step.tokens_per_second(plan.job), speeds_note(cluster, plan.layout)
    lines = [f"{each:,.0f} tokens/s, {count(each * 86400)} tokens a day {note}"]
    if tokens:
        hours = tokens / each / 3600 * cluster.world_size
        steps = tokens / (plan.job.global_batch * plan.job.facts.sample_tokens)
        lines.append(f"{count(tokens)} tokens: {seconds(tokens / each)}, {count(hours)} device hours {note}")
        lines.append(f"{count(tokens)} tokens: {steps:,.0f} steps of {plan.job.global_batch:,} samples")
    return lines


def described(job: Job) -> str:
    """The model in a line, with its trained and frozen parameters if some are frozen."""
    trained, frozen = job.selection.sizes(job.facts.weights)
    part = f"; {count(trained)} parameters are trained, {count(frozen)} are frozen" if frozen else ""
    rows = f"; the busiest rank of experts has {job.busiest:g} times the mean of rows" * (job.busiest > 1)
    rows += f", and memory for {job.fullest:g} times" * (job.fullest > job.busiest)
    return f"{job.facts.describe(count(job.facts.parameters))}, {job.precision}{part}{rows}"
