# SPDX-License-Identifier: Apache-2.0
"""A plan as something to run: the command line that asks for it, and a script around that."""

import shlex

from megatron.model.recipe import command_of, recipe_of
from megatron.planner.search import Plan
from megatron.planner.speed import Cluster
from megatron.planner.text import resting_on
from megatron.settings import schema
from megatron.settings.plan_file import LAYOUT
from megatron.settings.presets import preset
from megatron.settings.spelling import Setting, dashed, negated, settings_of
from megatron.settings.statements import SaidBy
from megatron.telemetry.figures import WIDTH, seconds, size


def training_flags(config: schema.Config, leave_out: frozenset[str] = frozenset()) -> list[str]:
    """The flags of every setting that somebody gave, or that is not at its default, apart from those of the planner."""
    words, own = [], config.groups
    groups = schema.GROUPS | recipe_of(config).setting_groups
    for setting in settings_of({name: group for name, group in groups.items() if name != "planner"}):
        value, said = getattr(own[setting.group], setting.name), config.said(setting.name)
        default = said.value if said and said.source == SaidBy.RECIPE else setting.default
        if setting.name not in {*leave_out, "model_type"} and (value != default or config.given(setting.name)):
            words += _words(setting, value)
    return words


def _words(setting: Setting, value) -> list[str]:
    if setting.name == "model_name_or_path" and preset(str(value)):
        return []  # what it stands for is said flag by flag
    value = setting.word(value)
    if value is True:
        return [dashed(setting.name)]
    if value is False:
        return [negated(setting.name)]
    if isinstance(value, list):
        return [dashed(setting.name), *map(str, value)]
    return [] if value is None else [dashed(setting.name), f"{value:g}" if isinstance(value, float) else str(value)]


def planned_flags(config: schema.Config, plan: Plan) -> list[str]:
    """The command line of a training in a plan's layout."""
    words = training_flags(config, LAYOUT)
    words += plan.layout.flags() + ["--global-batch-size", str(plan.job.global_batch)]
    for setting in settings_of({name: group for name, group in schema.GROUPS.items() if name != "planner"}):
        said = config.given(setting.name)  # also where it is a default: what was asked for is in the command
        if setting.name in LAYOUT and said and (setting.kind is bool or dashed(setting.name) not in words):
            words = [word for word in words if word != dashed(setting.name)]
            words += _words(setting, getattr(config.groups[setting.group], setting.name))
    return words


def launcher(cluster: Cluster) -> list[str]:
    """What starts the ranks."""
    nodes = max(1, cluster.world_size // cluster.local_size)
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
    """Ready for the shell, as many flags a line as fit."""
    start = [f'"{word}"' if word.startswith("$") else word for word in launcher(cluster)]
    pieces = [[*start, command_of(config.model.model_type)]]  # a flag with its values each
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


ROOM = WIDTH - len("     \\")  # characters of a line between its indentation and the backslash behind it


def script(config: schema.Config, plan: Plan, cluster: Cluster) -> str:
    """A bash script that trains in a plan's layout and passes further flags on."""
    nodes = max(1, cluster.world_size // cluster.local_size)
    tokens = plan.step.tokens_per_second(plan.job)
    head = [
        "#!/usr/bin/env bash",
        f"# {cluster.world_size} x {cluster.device.name} on {nodes} node{'s' * (nodes > 1)}: {plan.layout.short()}",
        f"# predicted: {size(plan.bytes)} on the fullest rank (written by megatron.tools.plan)",
        f"# expected: {seconds(plan.step.seconds)} a step, {tokens:,.0f} tokens/s {resting_on(cluster)}",
    ]
    if nodes > 1:
        head.append("# On every node: NODE_RANK (0, 1, ...), MASTER_ADDR and MASTER_PORT of the first node.")
        head.append(': "${NODE_RANK:?}" "${MASTER_ADDR:?}" "${MASTER_PORT:=29500}"')
    return "\n".join([*head[:4], "set -euo pipefail", *head[4:], "", command_line(config, plan, cluster) + ' "$@"', ""])
