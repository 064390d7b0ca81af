# SPDX-License-Identifier: Apache-2.0
"""A plan as a command line to run, and a script with it."""

import shlex

from megatron.model.recipe import command_of, recipe_of
from megatron.planner.cluster import Cluster
from megatron.planner.plans import Plan
from megatron.planner.text import speeds_note
from megatron.settings import schema
from megatron.settings.presets import preset
from megatron.settings.spelling import settings_of
from megatron.settings.statements import SaidBy
from megatron.telemetry.figures import WIDTH, seconds, size


def training_flags(config: schema.Config, always: tuple[str, ...] = ()) -> list[str]:
    """The flags of all settings that were given, differ from their defaults, or are in `always`, without the planner's.

    A named shape stands for its own settings, and for its vocabulary.
    """
    words, own, shape = [], config.groups, preset(str(config.model.model_name_or_path)) or {}
    groups = schema.GROUPS | recipe_of(config).setting_groups
    for setting in settings_of({name: group for name, group in groups.items() if name != "planner"}):
        value, said = getattr(own[setting.group], setting.name), config.said(setting.name)
        if said and said.source == SaidBy.PRESET and shape and setting.name in {*shape, "vocab_size"}:
            default = said.value
        else:
            default = said.value if said and said.source == SaidBy.RECIPE else setting.default
        if setting.name != "model_type" and (value != default or setting.name in always or config.given(setting.name)):
            words += setting.words(value)
    return words


def planned_flags(config: schema.Config, plan: Plan) -> list[str]:
    """The command line of a training in a plan's layout."""
    return training_flags(plan.layout.applied(config, plan.job.global_batch), always=("micro_batch_size",))


def launcher(cluster: Cluster) -> list[str]:
    """The command that starts the ranks."""
    nodes = cluster.nodes
    if cluster.world_size == 1:
        return ["python"]
    if nodes == 1:
        return ["torchrun", "--nproc-per-node", str(cluster.local_size)]
    return [
        "torchrun",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(cluster.local_size),
        "--node-rank",
        "$NODE_RANK",
        "--master-addr",
        "$MASTER_ADDR",
        "--master-port",
        "$MASTER_PORT",
    ]


def command_line(config: schema.Config, plan: Plan, cluster: Cluster) -> str:
    """The command line for a shell, with as many flags per line as fit."""
    start = [f'"{word}"' if word.startswith("$") else word for word in launcher(cluster)]
    pieces = [[*start, command_of(config.model.model_type)]]  # one flag with its values each
    for word in planned_flags(config, plan):
        if word.startswith("--"):
            pieces.append([word])
        else:
            pieces[-1].append(shlex.quote(word))
    lines = [""]
    for piece in pieces:
        whole = " ".join(piece)
        for part in [whole] if len(whole) <= ROOM else piece:
            if lines[-1] and len(lines[-1]) + len(part) >= ROOM:
                lines.append("")
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n    ".join(lines)


ROOM = WIDTH - len("     \\")  # characters of a line between its indentation and the backslash


def script(config: schema.Config, plan: Plan, cluster: Cluster) -> str:
    """A bash script that trains in a plan's layout and passes additional flags on."""
    nodes = cluster.nodes
    tokens = plan.step.tokens_per_second(plan.job)
    head = [
        "#!/usr/bin/env bash",
        f"# {cluster.world_size} x {cluster.device.name} on {nodes} node{'s' * (nodes > 1)}: {plan.layout.short()}",
        f"# predicted: {size(plan.bytes)} on the fullest rank (written by megatron.tools.plan)",
        f"# expected: {seconds(plan.step.seconds)} a step, {tokens:,.0f} tokens/s {speeds_note(cluster, plan.layout)}",
    ]
    if nodes > 1:
        head.append("# On every node: NODE_RANK (0, 1, ...), MASTER_ADDR and MASTER_PORT of the first node.")
        head.append(': "${NODE_RANK:?}" "${MASTER_ADDR:?}" "${MASTER_PORT:=29500}"')
    return "\n".join([*head[:4], "set -euo pipefail", *head[4:], "", command_line(config, plan, cluster) + ' "$@"', ""])
