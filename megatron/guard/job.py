# SPDX-License-Identifier: Apache-2.0
"""Run a tool on several ranks: they join, work and leave together, and do not wait for a rank that is lost."""

from collections.abc import Callable
from typing import Any, Optional

from megatron.checkpoint.missing import refuse_no_model
from megatron.errors import SettingsError
from megatron.mpu.cpu_threads import choose_waiting
from megatron.settings import rank_env
from megatron.settings.schema import Guard, Kernels, Parallel


def check_shares(tp: int, pp: int) -> None:
    """Raise SettingsError, before torch is loaded, if the ranks cannot be divided into groups with one model each."""
    world = rank_env.ranks().world_size
    for name, size in dict(tensor=tp, pipeline=pp).items():
        if size < 1:
            raise SettingsError(f"--{name}-model-parallel-size {size} has to be at least 1")
    if world % (tp * pp):
        raise SettingsError(
            f"tensor {tp} x pipeline {pp} = {tp * pp} ranks, which do not divide the {world} ranks of this job",
            do=f"start {tp * pp} ranks, or a multiple: {rank_env.launch_command(tp * pp)}",
        )


def on_ranks(parallel: Parallel, device: str, work: Callable[[Any], Any], *models: Optional[str]) -> None:
    """Do work(context) on the ranks of this job (`mpu.initialize.RankContext`). Imports torch.

    models: folders of checkpoints; one that has none is told even where the device is missing, too
    """
    for folder in filter(None, models):
        refuse_no_model(folder)
    choose_waiting()  # before torch is loaded
    from megatron.guard.endings import guarded
    from megatron.mpu import parallel_state
    from megatron.mpu.initialize import join_job, leave_job

    with guarded(Guard()):
        context = join_job(parallel, Kernels(device=device))
        try:
            work(context)
            leave_job(context)
        finally:  # a rank that failed does not wait for the others
            parallel_state.use_mesh(None)
