# SPDX-License-Identifier: Apache-2.0
"""Plans, ledgers and traffic as tables for a terminal."""

from collections.abc import Iterable, Sequence

from megatron.planner.layout import Job
from megatron.planner.memory import Ledger
from megatron.planner.search import Found, Plan
from megatron.planner.speed import Cluster, StepTime
from megatron.planner.traffic import Transfer


def gib(size: float) -> str:
    """
    >>> gib(3 * 2**30), gib(1536), gib(0)
    ('3.00 GiB', '1.5 KiB', '0')
    """
    for unit, factor, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if size >= 0.95 * factor:
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size:.0f}" + " B" * (size > 0)


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(12.3), duration(90000), duration(900000)
    ('12.3 ms', '12.30 s', '25.0 h', '10.4 days')
    """
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 1000:
        return f"{seconds:.2f} s"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:,.1f} days"


def table(rows: Sequence[Sequence], head: Sequence[str], left: Iterable[int] = (0,)) -> str:
    """Columns as wide as they need to be, numbers to the right."""
    cells = [list(map(str, row)) for row in [head, *rows]]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    )


def recomputed(plan: Plan) -> str:
    """What is computed again, in a word or two."""
    r = plan.layout.recompute
    spared = f" but {len(r.exempt_layers)}" if r.no_recompute_layers else ""
    return (r.recompute_granularity or "-") + spared


def plans(found: Found, cluster: Cluster, count: int) -> str:
    """The ranked table."""
    rows = []
    for number, plan in enumerate(found.plans[:count], 1):
        step, lay = plan.step, plan.layout
        rows.append(
            [
                number,
                lay.short(),
                lay.micro,
                plan.job.global_batch,
                recomputed(plan),
                "yes" if lay.offload else "-",
                lay.stage_layers and "uneven" or "-",
                f"{plan.bytes / 2**30:.1f}",
                duration(step.seconds),
                f"{step.tokens_per_second(plan.job):,.0f}",
                f"{step.tflops_per_rank(cluster.world_size):.4g}",
                f"{step.bubble:.1%}",
            ]
        )
    head = [
        "",
        "layout",
        "micro",
        "batch",
        "recompute",
        "offload",
        "stages",
        "GiB",
        "step",
        "tokens/s",
        "TFLOP/s a rank",
        "bubble",
    ]
    return table(rows, head, left=(1, 4))


def rejected(found: Found, count: int) -> str:
    """The closest layouts that do not fit, and what never came into question."""
    rows = [
        [r.layout.short(), r.layout.micro, r.layout.recompute.recompute_granularity or "-", r.why()]
        for r in found.rejected[:count]
    ]
    lines = [table(rows, ["layout", "micro", "recompute", "why not"], left=(0, 2, 3))] if rows else []
    return "\n".join(lines + [f"{reason}" for reason in found.impossible[:count]])


def sizes(found: Found) -> str:
    """Plans of one layout by micro-batch, around the best: what each needs and takes, and why larger ones cannot be."""
    fit = sorted(found.plans, key=lambda plan: plan.layout.micro)
    at = fit.index(found.plans[0])
    told = [
        f"{plan.layout.micro}: {plan.bytes / 1e9:.2f} GB, {duration(plan.step.seconds)} a step"
        for plan in fit[max(0, at - 3) : at + 3]
    ]
    if found.rejected:
        least = min(found.rejected, key=lambda one: one.layout.micro)
        all_above = len(found.rejected) > 1 and fit[-1].layout.micro < least.layout.micro
        told.append(f"{least.layout.micro}{' and more' * all_above}: {least.why()}")
    return "; ".join(told)


def ledgers(found: Sequence[Ledger], capacity: int) -> str:
    """A column for each pipeline rank."""
    names = list(dict.fromkeys(name for one in found for name in one.device))
    rows = [[name, *[gib(one.device.get(name, 0)) for one in found]] for name in names]
    rows += [
        [f"  {kind}", *[gib(one.activations.get(kind, 0)) for one in found]]
        for kind in dict.fromkeys(kind for one in found for kind in one.activations)
    ]
    at = names.index("activations") + 1 if "activations" in names else len(names)
    rows = rows[:at] + rows[len(names) :] + rows[at : len(names)]
    rows.append(["all together", *[gib(one.total) for one in found]])
    rows.append(["of the device", *[f"{one.total / capacity:.0%}" for one in found]])
    if any(one.host for one in found):
        rows.append(["on the host", *[gib(sum(one.host.values())) for one in found]])
    return table(rows, ["bytes of a rank", *[f"stage rank {one.rank}" for one in found]])


def traffic(found: Sequence[Transfer]) -> str:
    """Of one step of one rank."""
    rows = [[t.op, t.axis, t.what, gib(t.bytes), f"{t.calls:,}", "beside" if t.beside else ""] for t in found]
    return table(rows, ["collective", "axis", "of what", "bytes a step", "calls", ""], left=(0, 1, 2, 5))


def parts(step: StepTime) -> str:
    """What a step's time is made of."""
    shares = [
        f"{name} {duration(value)} ({value / step.seconds:.0%})"
        for name, value in sorted(step.parts.items(), key=lambda item: -item[1])
        if value / step.seconds >= 0.0005
    ]
    return ", ".join(shares)


def pace(plan: Plan, cluster: Cluster, tokens: float | None) -> list[str]:
    """Tokens a day, and days to a budget."""
    each = plan.step.tokens_per_second(plan.job)
    lines = [f"{each:,.0f} tokens/s, {each * 86400 / 1e9:,.2f} billion tokens a day"]
    if tokens:
        lines.append(
            f"{tokens / 1e9:,.1f} billion tokens: {tokens / each / 86400:,.1f} days, "
            f"{tokens / (plan.job.global_batch * plan.job.facts.seq_length):,.0f} steps, "
            f"{tokens / each / 3600 * cluster.world_size:,.0f} device hours"
        )
    return lines


def described(job: Job, count: int) -> str:
    """The model in a line."""
    return f"{job.facts.describe(f'{count / 1e9:.3f} B')}, {job.precision}"
