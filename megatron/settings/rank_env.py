# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many this process is: what torchrun, srun or `scripts/_launch.sh` say in the environment.

>>> ranks(dict(RANK="3", WORLD_SIZE="16"))
Ranks(rank=3, world_size=16, local_rank=0, local_world_size=None)
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Optional

from megatron.errors import SettingsError


@dataclass(frozen=True)
class Ranks:
    """A place in a job. Without a launcher: the only rank of a job of its own."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: Optional[int] = None  # ranks of this node, where the launcher says it


def adopt_slurm(env: MutableMapping[str, str] = os.environ) -> None:
    """Say in torchrun's words what `srun` says to a task, where it has started one for each rank and nobody else spoke.

    >>> env = dict(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="12", SLURM_STEP_TASKS_PER_NODE="8,4", SLURM_PROCID="9",
    ...            SLURM_NODEID="1", SLURM_LOCALID="1", SLURM_STEP_NODELIST="gpu-[07,12-14],cpu3", SLURM_JOB_ID="5")
    >>> adopt_slurm(env)
    >>> [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    ['9', '12', '1', '4', 'gpu-07', '20080']
    """
    if "RANK" in env or "SLURM_STEP_ID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    each = []  # "8(x2),4": tasks of each node
    for part in env["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        each += [int(count)] * int(times or 1)
    job, step, restarts = (int(env.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    own = bool(env.get("CUDA_VISIBLE_DEVICES")) and "," not in env["CUDA_VISIBLE_DEVICES"]  # it sees its own GPU alone
    env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
    env.update(LOCAL_RANK="0" if own else env["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(each[int(env["SLURM_NODEID"])]))
    env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
    env.setdefault("MASTER_PORT", str(20000 + (job * 16 + step + 97 * restarts) % 10000))  # as scripts/_launch.sh does


def first_host(nodes: str) -> str:
    """The first of a list of SLURM's: `gpu-[07,12-14],cpu3` -> `gpu-07`."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^\[,]*))?", nodes)
    return "".join(part or "" for part in found.groups())


def ranks(env: Mapping[str, str] = os.environ) -> Ranks:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises SettingsError for one that is no number of ranks."""
    given = {}
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if name in env:
            if not env[name].isdecimal() or int(env[name]) < least:
                what = "number of ranks" if least else "number"
                raise SettingsError(
                    f"{name}={env[name]} in the environment is no {what}",
                    "torchrun and srun set it for each rank",
                    f"unset {name} to train in one process",
                )
            given[name.lower()] = int(env[name])
    return Ranks(**given)


def launch_command(ranks: int) -> str:
    """What starts the command of this process on so many ranks, word by word."""
    spec, (script, *flags) = getattr(sys.modules["__main__"], "__spec__", None), sys.argv
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [script]
    return (
        f"python -m megatron.tools.launch --nproc-per-node {ranks} {shlex.join([*program, *flags])} "
        "(torchrun takes the same words; several machines: docs/launching.md)"
    )
