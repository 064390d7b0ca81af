# SPDX-License-Identifier: Apache-2.0
"""The settings of the planner: one group of `config.py`, which knows them all."""

from dataclasses import dataclass
from typing import Optional

from megatron.setting import setting


@dataclass(frozen=True)
class Planner:
    """Looking before launching: the layout is searched, or everything is shown and nothing trained."""

    auto_parallel: bool = setting("search the layout for the ranks there are, say why, and train in it", False)
    max_global_batch_size: Optional[int] = setting("let the search choose the global batch, up to this size", None)
    tune_steps: int = setting(
        "with --auto-parallel or --micro-batch-size auto: time the best three for so many steps each first", 0
    )
    parallel_plan: Optional[str] = setting(
        "file of megatron.tools.plan --emit PLAN.json: train in its best layout", None
    )
    dry_run: bool = setting("show settings, layout, memory, time and every problem; no device, no training", False)
    preflight: bool = setting(
        "check settings, every rank's shapes, a small twin of the job and the machines; train nothing", False
    )
    world_size: Optional[int] = setting("ranks to plan for (default: those of this job)", None, "--num-gpus")
    local_world_size: Optional[int] = setting("ranks of a node (default: this job's, else 8)", None, "--gpus-per-node")
    device_name: Optional[str] = setting("device to plan for, such as A100-80GB (default: what is here)", None)
    device_memory_gb: Optional[float] = setting(
        "GB (10^9 bytes) of a device (default: DEVICE_MEMORY_GB, or its own)", None
    )
    calibration: Optional[str] = setting("file that megatron.tools.plan --calibrate wrote: times become real", None)
