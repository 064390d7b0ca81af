# SPDX-License-Identifier: Apache-2.0
"""Layouts for generation as a table, as JSON and as a command. `width` is in columns."""

from collections.abc import Sequence
from dataclasses import asdict

from megatron.planner.cluster import Cluster
from megatron.planner.serving import Requests, ServingPlan
from megatron.planner.text import basis
from megatron.telemetry.figures import WIDTH, part_of, seconds, sentence, size, table


def answer(plan: ServingPlan, cluster: Cluster, requests: Requests) -> str:
    """The best layout, its memory and its times, in a few lines."""
    memory = part_of(plan.bytes, cluster.device.memory_bytes)
    texts = f"{plan.texts * plan.replicas:,} texts at a time"
    pace = f"{seconds(plan.token)} a token, {plan.tokens_per_second:,.0f} tokens/s of {texts}"
    first = f"{seconds(plan.first)} to the first token after {requests.prompt:,}"
    return "\n".join(
        [
            f"the best layout: {plan.short()}",
            f"  memory: {memory} on the fullest rank: weights {size(plan.weights)}, keys and values "
            f"{size(plan.cache * plan.texts)}, other {size(plan.workspace)}",
            f"  time: {pace} ({basis(cluster)})",
            f"        {first} ({basis(cluster)})",
        ]
    )


def plans(found: Sequence[ServingPlan], width: int = WIDTH) -> str:
    """The table of layouts that fit."""
    rows = [
        [
            *(number, plan.short(), plan.texts, plan.room, f"{plan.weights / 1e9:.1f}", f"{plan.bytes / 1e9:.1f}"),
            *(seconds(plan.first), seconds(plan.token), f"{plan.tokens_per_second:,.0f}"),
        ]
        for number, plan in enumerate(found, 1)
    ]
    head = ["", "layout", "texts", "room", "weights", "GB", "first", "a token", "tokens/s"]
    return table(rows, head, left=(1,), width=width, spare=("room", "weights"))


def rejected(found: Sequence[ServingPlan], cluster: Cluster, width: int = WIDTH) -> str:
    """The layouts that do not fit."""
    lines = []
    for plan in found:
        over = plan.weights + plan.workspace + plan.cache * plan.texts - cluster.device.usable_bytes
        lines.append(
            sentence(f"{plan.short()}: out of memory by {size(over)} with {plan.texts:,} texts a replica", width)
        )
    return "\n".join(lines)


def parts(plan: ServingPlan, cluster: Cluster, width: int = WIDTH) -> str:
    """The parts of a token's time."""
    rows = [
        [name, seconds(took), f"{took / plan.token:.0%}", basis(cluster)]
        for name, took in sorted(plan.parts.items(), key=lambda one: -one[1])
    ]
    return table(rows, ["part of a token", "time", "share", "speeds"], width=width)


def command(plan: ServingPlan) -> str:
    """The command that serves a checkpoint in a layout, one replica of it."""
    start = "python" if plan.ranks == 1 else f"python -m megatron.tools.launch --nproc-per-node {plan.ranks}"
    return " ".join([start, "-m", "megatron.tools.serve", "--load", "DIR", *plan.flags])


def record(found: Sequence[ServingPlan], cluster: Cluster, requests: Requests) -> dict:
    """Everything that the terminal shows."""
    return dict(
        world_size=cluster.world_size,
        local_world_size=cluster.local_size,
        device=asdict(cluster.device),
        prompt_length=requests.prompt,
        output_length=requests.output,
        speeds=basis(cluster),
        plans=[
            asdict(plan)
            | dict(
                layout=plan.short(),
                fits=plan.fits,
                bytes=plan.bytes,
                tokens_per_second=plan.tokens_per_second,
                flags=plan.flags,
            )
            for plan in found
        ],
        command=command(found[0]) if found and found[0].fits else None,
    )
