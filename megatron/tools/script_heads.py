# SPDX-License-Identifier: Apache-2.0
"""Write into the head of each model's script the devices that it is for, and the planner's predictions.

    python -m megatron.tools.script_heads                        rewrite the heads of scripts/{pretrain,auto,qat,prune}_*.sh
    python -m megatron.tools.script_heads --check                only list those that are not up to date (exit code 1)

Memory and speed are predictions, and the head says so, with their assumptions; nothing in it was measured.

A script prints its command (`PRINT=1 bash SCRIPT --dry-run`); nothing is started. Needs no torch.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from megatron.errors import Failure, SettingsError, run_main
from megatron.model.command_line import parse_any
from megatron.planner import target
from megatron.planner.choose import automatic
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Layout
from megatron.planner.memory import memory_report
from megatron.planner.reached_speed import KIND
from megatron.planner.speed import step
from megatron.planner.text import error_of
from megatron.settings.positional import parse_one
from megatron.settings.schema import setting
from megatron.telemetry.figures import seconds
from megatron.training.rules import layout_is_open, resolve

FOLDER = Path(__file__).resolve().parents[2] / "scripts"
WRITTEN = re.compile(r"# (needs|layout|predicted|assumed)  +\S")
OWN_VARIABLES = (
    "DATA_PATH",
    "DATA",
    "VOCAB_FILE",
    "MERGE_FILE",
    "TOKENIZER_MODEL",
    "CHECKPOINTS",
    "PRETRAINED",
    "SHRINK",
    "GPUS",
)


@dataclass(frozen=True)
class HeadsOptions:
    """The scripts, and whether they are rewritten."""

    scripts: Optional[list[str]] = setting("scripts (default: those of all models)", None)
    check: bool = setting("change nothing; exit code 1 if a head differs from today's prediction", False)


def main(argv: list[str]) -> None:
    """Update heads, or list those that are not up to date."""
    asked = parse_one(argv, HeadsOptions, "python -m megatron.tools.script_heads", __doc__)
    stale = []
    for path in map(Path, asked.scripts or model_scripts()):
        text = path.read_text(encoding="utf-8")
        wanted = with_head(text, head(path))
        if wanted != text:
            stale.append(str(path))
            if not asked.check:
                path.write_text(wanted, encoding="utf-8")
    if asked.check and stale:
        raise Failure(f"heads that are not up to date: {', '.join(stale)}", do="python -m megatron.tools.script_heads")
    print("\n".join(f"written: {path}" for path in stale) or "all heads are up to date")


def model_scripts() -> list[Path]:
    """The scripts that launch a model themselves, without aliases of other scripts."""
    return [
        path
        for path in sorted(
            path for kind in ("pretrain", "auto", "qat", "prune") for path in FOLDER.glob(f"{kind}_*.sh")
        )
        if "\nlaunch " in path.read_text(encoding="utf-8")
    ]


def command(path: Path, *words: str) -> list[str]:
    """The flags of pretrain_gpt.py that a script passes with --dry-run."""
    env = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    done = subprocess.run(
        ["bash", str(path), "--dry-run", *words],
        capture_output=True,
        text=True,
        env=env | dict(PRINT="1", PYTHON=sys.executable),
    )
    if done.returncode:
        raise SettingsError(f"{path} does not say its command", done.stderr.strip())
    return shlex.split(done.stdout)[2:]  # without python and pretrain_gpt.py


def head(path: Path) -> list[str]:
    """The lines of a head."""
    config = parse_any(command(path))
    cluster, _ = target.cluster_of(config, {})
    if layout_is_open(config):
        planned, plans, outcome = automatic(config, lambda text: None)
        return _lines(cluster, outcome.job, plans[0].layout, planned.batch.global_batch_size, searched=True)
    config = resolve(config, cluster.world_size)
    job, layout = target.planned_job(config, cluster)
    return _lines(cluster, job, layout, job.global_batch)


def _lines(cluster: Cluster, job, layout: Layout, batch: int, searched: bool = False) -> list[str]:
    job = replace(job, global_batch=batch)
    device, ranks = cluster.device, cluster.world_size
    needed = [memory_report(job, layout, device, rank) for rank in range(layout.pp)]
    worst, host = max(one.total for one in needed), max(sum(one.host.values()) for one in needed)
    took = step(job, layout, cluster)
    nodes = ranks // cluster.local_size
    where = f"{nodes} nodes of {cluster.local_size}" if nodes > 1 else "one node" if ranks > 1 else "one GPU"
    offloaded = f", and {host / 1e9:.1f} GB of the host's memory for each rank" if host else ""
    memory = f"{worst / 1e9:.1f} of {device.memory_gb:.1f} GB on the fullest rank{offloaded}"
    pace = (
        f"{seconds(took.seconds)} a step of {batch * job.facts.sample_tokens:,} tokens, "
        f"{took.tokens_per_second(job):,.0f} tokens/s"
    )
    rate = f"{took.tflops_per_rank(ranks):.0f} TFLOP/s a GPU" + (f", bubble {took.bubble:.1%}" if layout.pp > 1 else "")
    lines = [
        ("needs", f"{ranks} x {device.name}: {where}"),
        ("predicted", memory),
        ("predicted", f"{pace}, {rate} (speeds assumed)"),
        (
            "assumed",
            f"speeds of {KIND}: {error_of(cluster, layout)} (docs/planning.md); not measured: not yet run on GPUs",
        ),
    ]
    if searched:
        size = layout.micro_batch_size
        lines.insert(1, ("layout", f"{layout.short()}, micro-batch {size}: the planner's choice for these"))
    return [f"# {name:9}  {text}" for name, text in lines]


def with_head(text: str, lines: list[str]) -> str:
    """Replace the head of a script by these lines, above its first command."""
    kept = [line for line in text.splitlines() if not WRITTEN.match(line)]
    at = next(number for number, line in enumerate(kept) if not line.startswith("#"))
    while kept[at - 1] == "#":
        kept.pop(at := at - 1)
    return "\n".join([*kept[:at], "#", *lines, *kept[at:], ""])


if __name__ == "__main__":
    run_main(main)
