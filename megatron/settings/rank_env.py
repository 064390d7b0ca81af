# SPDX-License-Identifier: Apache-2.0
"""This process's rank and the number of ranks, from the environment of torchrun, srun, mpirun or `scripts/_launch.sh`.

>>> ranks(dict(RANK="3", WORLD_SIZE="16"))
Ranks(rank=3, world_size=16, local_rank=0, local_world_size=None)
"""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import product
from typing import Optional

from megatron.errors import SettingsError, UsageError


@dataclass(frozen=True)
class Ranks:
    """The rank of a process in its job. Without a launcher, it is the only rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: Optional[int] = None  # ranks of this node, if the launcher sets it


# Colossal-AI's flags for a rank that is started by hand -> variables of torchrun
BY_HAND = {
    "--rank": "RANK",
    "--world-size": "WORLD_SIZE",
    "--local-rank": "LOCAL_RANK",
    "--host": "MASTER_ADDR",
    "--port": "MASTER_PORT",
}
# Variables of torchrun, and of two families of mpirun
TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def adopt(argv: list[str], env: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set torchrun's variables from srun, mpirun or the command line; returns the rest of the command line.

    `--rank 1 --world_size 2 --host node0 --port 29500` makes this process a rank of a job. Without --rank, --world-size is
    a flag of the planner. If a launcher has set the rank, the command line is returned unchanged.

    >>> env = {}
    >>> adopt("--rank 1 --lr 1e-4 --world_size=2".split(), env), env["LOCAL_RANK"], env["MASTER_ADDR"]
    (['--lr', '1e-4'], '1', 'localhost')
    """
    found, rest, words = {}, [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        name = BY_HAND.get(flag.replace("_", "-"))
        if name is None:
            rest.append(word)
        else:
            found[name] = value if equals else next(words, "")
    if "RANK" in env or "RANK" not in found:
        _adopt_ranks(env)
        return argv
    for flag, name in BY_HAND.items():
        if name != "MASTER_ADDR" and not found.get(name, "0").isdecimal():
            raise UsageError(f"{flag} {found[name]}: expected a number", do="--rank 0 --world-size 2 --host H --port P")
    if "WORLD_SIZE" not in found:
        raise UsageError(
            f"--rank {found['RANK']} needs --world-size",
            "a rank that is started by hand has to know the number of ranks",
            "add --world-size N, and --host and --port of rank 0; or use torchrun without these flags",
        )
    host = found.setdefault("MASTER_ADDR", "localhost")
    found.setdefault("MASTER_PORT", "29500")
    if host in ("localhost", "127.0.0.1", "::1"):
        found.setdefault("LOCAL_RANK", found["RANK"])
        found["LOCAL_WORLD_SIZE"] = found["WORLD_SIZE"]
    found.setdefault("LOCAL_RANK", "0")
    env.update(found)
    return rest


def is_started(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as a rank of a job. Without LOCAL_RANK, RANK and WORLD_SIZE may be
    numbers of nodes (PAI's DLC), and this process the only one.
    """
    return all(name in env for name in TORCHRUN[:3])


def adopt_launcher(env: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables for a tool: those of mpirun or srun, or this process is alone if no launcher started it.

    >>> env = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="node0")
    >>> adopt_launcher(env)
    >>> env
    {'MASTER_ADDR': 'node0'}
    """
    _adopt_ranks(env)
    if not is_started(env) and env.get("WORLD_SIZE", "1") != "1":
        found = " and ".join(f"{name}={env.pop(name)}" for name in ("RANK", "WORLD_SIZE") if name in env)
        several = "several ranks are started by python -m megatron.tools.launch or torchrun"
        print(
            f"note: {found} without LOCAL_RANK: no launcher has set them; this process is alone ({several})",
            file=sys.stderr,
        )


def _adopt_ranks(env: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of mpirun or srun, if it has started the ranks and RANK is not set.

    mpirun does not set the host of rank 0 for several machines: add -x MASTER_ADDR=HOST.

    >>> env = dict(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_LOCAL_RANK="3",
    ...            OMPI_COMM_WORLD_LOCAL_SIZE="4")
    >>> _adopt_ranks(env)
    >>> ranks(env), env["MASTER_ADDR"]
    (Ranks(rank=3, world_size=4, local_rank=3, local_world_size=4), 'localhost')
    """
    if "RANK" in env:
        return
    # Before SLURM: inside an allocation, processes of mpirun also have SLURM's variables, of mpirun's own daemon. srun may
    # set the first two of MPICH's.
    for names, needed in ((OPEN_MPI, OPEN_MPI[:2]), (MPICH, MPICH)):
        if all(name in env for name in needed) and int(env[names[0]]) > 1:
            env.update({ours: env[theirs] for ours, theirs in zip(TORCHRUN, names) if theirs in env})
            env.setdefault("MASTER_PORT", "29500")
            env.setdefault("LOCAL_RANK", "0")
            if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
                env.setdefault("MASTER_ADDR", "localhost")
            return
    _adopt_slurm(env)


def _adopt_slurm(env: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of `srun`, if it has started a task for each rank.

    >>> env = dict(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="12", SLURM_STEP_TASKS_PER_NODE="8,4", SLURM_PROCID="9",
    ...            SLURM_NODEID="1", SLURM_LOCALID="1", SLURM_STEP_NODELIST="gpu-[07,12-14],cpu3", SLURM_JOB_ID="5")
    >>> _adopt_slurm(env)
    >>> [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    ['9', '12', '1', '4', 'gpu-07', '20080']
    """
    if "SLURM_STEP_ID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    each = []  # "8(x2),4": tasks of each node
    for part in env["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.rstrip(")").partition("(x")
        each += [int(count)] * int(times or 1)
    job, step, restarts = (int(env.get(f"SLURM_{name}", "0")) for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    own = bool(env.get("CUDA_VISIBLE_DEVICES")) and "," not in env["CUDA_VISIBLE_DEVICES"]  # it sees only its own GPU
    env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
    env.update(LOCAL_RANK="0" if own else env["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(each[int(env["SLURM_NODEID"])]))
    env.setdefault("MASTER_ADDR", first_host(env["SLURM_STEP_NODELIST"]))
    env.setdefault("MASTER_PORT", str(20000 + (job * 16 + step + 97 * restarts) % 10000))  # as scripts/_launch.sh does


def first_host(nodes: str) -> str:
    """The first host of a SLURM host list: `gpu-[07,12-14],cpu3` -> `gpu-07`. Raises SettingsError if it has none."""
    try:
        return next(hosts(nodes))
    except (StopIteration, ValueError):
        raise SettingsError(
            f"SLURM_STEP_NODELIST={nodes} is not a list of hosts",
            "the ranks meet at the first host",
            "export MASTER_ADDR with the host of rank 0",
        ) from None


def hosts(nodes: str) -> Iterator[str]:
    """The hosts of a SLURM host list in its order. A name may have several brackets; numbers keep their zeros.

    Raises ValueError for an open bracket or a range without numbers.

    >>> list(hosts("rack[1-2]n[08-10],cpu3"))
    ['rack1n08', 'rack1n09', 'rack1n10', 'rack2n08', 'rack2n09', 'rack2n10', 'cpu3']
    """
    for name in re.findall(r"(?:\[[^]]*\]|[^,])+", nodes):  # commas in brackets separate ranges, others names
        parts = re.split(r"\[([^]]*)\]", name)  # text, ranges, text, ...
        if set("".join(parts[::2])) & set("[]"):
            raise ValueError(f"{name}: a bracket is open")
        yield from map("".join, product(*(_numbers(part) if i % 2 else [part] for i, part in enumerate(parts))))


def _numbers(ranges: str) -> list[str]:
    """Expand the inside of a bracket: `08-10,3` -> 08, 09, 10, 3."""
    numbers = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        numbers += [f"{n:0{len(low)}}" for n in range(int(low), int(high) + 1)] if high else [low]
    return numbers


def print_notes(notes: Iterable[str]) -> None:
    """Print notes on standard error, on the first rank alone."""
    for note in notes if ranks().rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, on the first rank alone."""
    for warning in warnings if ranks().rank == 0 else ():
        print(f"warning: {warning}", file=sys.stderr)


def ranks(env: Mapping[str, str] = os.environ) -> Ranks:
    """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises SettingsError for an invalid number."""
    given = {}
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if name in env:
            if not env[name].isdecimal() or int(env[name]) < least:
                what = "number of ranks" if least else "number"
                raise SettingsError(
                    f"{name}={env[name]} in the environment is not a {what}",
                    "torchrun and srun set it for each rank",
                    f"unset {name} to train in one process",
                )
            given[name.lower()] = int(env[name])
    return Ranks(**given)


def refuse_other_ranks(tp: int, pp: int) -> None:
    """Raise SettingsError unless this job has as many ranks as share a model."""
    if tp * pp != (world := ranks().world_size):
        raise SettingsError(
            f"the model is shared by tensor {tp} x pipeline {pp} = {tp * pp} ranks, and this job has {world}",
            do=f"{launch_command(max(1, tp * pp))}, or give --tensor-model-parallel-size and "
            "--pipeline-model-parallel-size whose product is the number of ranks",
        )


def launch_command(ranks: int) -> str:
    """The command line that starts the command of this process on `ranks` ranks."""
    spec, (script, *flags) = getattr(sys.modules["__main__"], "__spec__", None), sys.argv
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [script]
    return (
        f"python -m megatron.tools.launch --nproc-per-node {ranks} {shlex.join([*program, *flags])} "
        "(torchrun takes the same arguments; several machines: docs/launching.md)"
    )
