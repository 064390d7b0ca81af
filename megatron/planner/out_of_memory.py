# SPDX-License-Identifier: Apache-2.0
"""Explain an error of memory: what was planned and what was in use, which part exceeds the plan, and what would fit.

error: out of memory on rank 3: activations and workspaces take 16.3 GB more than planned
  tried to allocate 2.0 GB
  planned 62.3 GB: weights and optimizer 40.1, activations and workspaces 18.9, reserve 1.2, outside of torch 2.1
  in use  78.9 GB: weights and optimizer 40.1, activations and workspaces 35.2, reserve 1.2, outside of torch 2.4
  -> --micro-batch-size 1 (61.2 GB) or --recompute-granularity full (48.0 GB) would fit
"""

from megatron.errors import Failure, explain
from megatron.planner import problems
from megatron.planner.memory import MemoryReport, memory_report, peaks
from megatron.planner.target import cluster_of, planned_job
from megatron.settings.schema import Config
from megatron.telemetry.memory import MemoryInUse

STATE, STEP, RESERVE, OUTSIDE = PARTS = (
    "weights and optimizer",
    "activations and workspaces",
    "reserve",  # of torch's allocator: free pieces between those in use
    "outside of torch",  # the driver's context, NCCL, other processes
)
PART_OF = {  # an entry of `MemoryReport.device` -> its part, other than STATE
    **dict.fromkeys(("activations", "logits", "teacher's passes", "workspace", "pipeline buffers"), STEP),
    **dict.fromkeys(("gathered weights", "weights in fp8", "gradient buffers"), STEP),
    "fragmentation": RESERVE,
    "communication buffers": OUTSIDE,
    "device context": OUTSIDE,
}


def explained(error: BaseException, config: Config, use: MemoryInUse) -> Failure:
    """The failure to report for an error of memory. use: of the rank that raised it"""
    said = explain(error)
    cluster, _ = cluster_of(config)
    job, layout = planned_job(config, cluster)
    planned = planned_parts(memory_report(job, layout, cluster.device, use.pipeline_rank))
    used = used_parts(use)
    part = max(used, key=lambda name: used[name] - planned[name])
    excess = used[part] - planned[part]
    what = f"out of memory on rank {use.rank}"
    if excess > 0:
        what += f": {part} take{'s' * (part == RESERVE)} {excess / 1e9:.1f} GB more than planned"
    more = max(0, sum(used.values()) - sum(planned[name] for name in used))
    need = lambda other: max(peaks(job, other, cluster.device)) + more
    do = problems.remedies(job, layout, need, cluster.device.usable_bytes, most=3)
    lines = [said.why, _line("planned", {name: planned[name] for name in used}), _line("in use ", used)]
    return Failure(what, "\n  ".join(filter(None, lines)), do)


def planned_parts(report: MemoryReport) -> dict[str, int]:
    """Bytes of each part that the planner predicts."""
    parts = dict.fromkeys(PARTS, 0)
    for name, size in report.device.items():
        parts[PART_OF.get(name, STATE)] += size
    return parts


def used_parts(use: MemoryInUse) -> dict[str, int]:
    """Bytes of each part that was in use. A process on a CPU shows only the first two, and its own code in the first."""
    parts = {STATE: use.state, STEP: max(0, use.most - use.state)}
    if use.most_reserved is not None:
        parts |= {RESERVE: max(0, use.most_reserved - use.most), OUTSIDE: use.outside}
    return parts


def _line(which: str, parts: dict[str, int]) -> str:
    return f"{which} {sum(parts.values()) / 1e9:.1f} GB: " + ", ".join(
        f"{name} {size / 1e9:.1f}" for name, size in parts.items()
    )
