# SPDX-License-Identifier: Apache-2.0
"""Tools on several ranks: they join, work and leave together, and a rank that is lost does not keep the others waiting."""

from collections.abc import Callable
from typing import Any

from megatron.errors import SettingsError
from megatron.mpu.cpu_threads import choose_waiting
from megatron.settings import rank_env
from megatron.settings.schema import Guard, Kernels, Parallel


def check_shares(tp: int, pp: int) -> None:
    """Raise SettingsError where the ranks of this job cannot be groups that have a model each, before torch is loaded."""
    world = rank_env.ranks().world_size
    for name, size in dict(tensor=tp, pipeline=pp).items():
        if size < 1:
            raise SettingsError(f"--{name}-model-parallel-size {size} has to be at least 1")
    if world % (tp * pp):
        raise SettingsError(
            f"tensor {tp} x pipeline {pp} = {tp * pp} ranks, which do not divide the {world} ranks of this job",
            do=f"start {tp * pp} ranks, or a multiple: {rank_env.launch_command(tp * pp)}",
        )


def on_ranks(parallel: Parallel, device: str, work: Callable[[Any], Any]) -> None:
    """Do work(context) on the ranks of this job (`mpu.initialize.RankContext`). Imports torch."""
    choose_waiting()  # before torch is loaded
    from megatron.guard.endings import guarded
    from megatron.mpu import parallel_state
    from megatron.mpu.initialize import join_job, leave_job

    with guarded(Guard()):
        context = join_job(parallel, Kernels(device=device))
        try:
            work(context)
            leave_job(context)
        finally:  # who has failed leaves alone
            parallel_state.use_mesh(None)
