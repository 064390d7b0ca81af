# SPDX-License-Identifier: Apache-2.0
"""Initialize distributed training: this process's rank and device, the process group, and the mesh of all ranks.

`torchrun` and other launchers set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without them the job has one
rank: the same code runs, with every axis of size 1.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.errors import DeviceLost, Failure, PeerLost, SettingsError, node_name
from megatron.fused_kernels import cpu_ops
from megatron.mpu import collectives, device_variables, parallel_state
from megatron.mpu.cpu_threads import choose_threads, waiting
from megatron.mpu.mesh import Mesh, mesh_of
from megatron.settings import rank_env, schema

T = TypeVar("T")
PATIENCE = 10.0  # seconds to wait for other ranks before the first rank of each machine prints a message


@dataclass(frozen=True)
class RankContext:
    """The rank of this process in the job, its device and its mesh."""

    mesh: Mesh
    device: torch.device
    joined: bool = False  # the process group was initialized here, so it is destroyed here
    described: str = ""  # for the log: the threads of a rank on a CPU, the variables that a GPU follows

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, which prints for the whole job."""
        return self.mesh.rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of every rank of the job, on every rank."""
        return collectives.all_gather_object(value, self.mesh.world)

    def from_rank_zero(self, call: Callable[[], T]) -> T:
        """Run a function on rank 0; its result, or the `Failure` that it raises, is that of all ranks."""
        answer: Any = None
        if self.is_rank_zero:
            try:
                answer = call()
            except Failure as error:
                answer = error
        answer = self.all_gather_object(answer)[0]
        if isinstance(answer, Failure):
            raise answer
        return answer


def join_job(parallel: schema.Parallel, kernels: schema.Kernels) -> RankContext:
    """Initialize the process group if the job has more than one rank, and create the mesh.

    Raises SettingsError if the ranks are invalid or CUDA is requested and missing, PeerLost if other ranks do not join.
    """
    here = rank_env.ranks()
    rank, world = here.rank, here.world_size
    joined = not dist.is_initialized()
    if not joined:  # the calling program has initialized it
        rank, world = dist.get_rank(), dist.get_world_size()
    if not 0 <= rank < world:
        raise SettingsError(
            f"RANK={rank} is not one of WORLD_SIZE={world} ranks",
            "both are in the environment",
            "let torchrun set them, or unset them for a single process",
        )
    prepare_device(parallel, kernels, rank, world)
    device = pick_device(kernels.device, here.local_rank)
    if kernels.deterministic_mode and device.type == "cuda":
        repeat_bit_by_bit()
    described = use_threads(here.local_world_size or 1) if device.type == "cpu" else device_variables.described()
    if world > 1 and parallel.distributed_backend == "nccl" and device.type == "cpu":  # before the ranks meet
        raise SettingsError(
            "--distributed-backend nccl needs CUDA devices, and this run is on the CPU", do="leave the flag out (gloo)"
        )
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if world > 1 and joined:
        backend = parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        others = "rank 0" if rank else "rank 1" if world == 2 else f"some of ranks 1 to {world - 1}"
        still = f"rank {rank} is still waiting for {others} at {where}"
        late = threading.Timer(PATIENCE, print, [still], dict(file=sys.stderr, flush=True))
        late.daemon = True
        if here.local_rank == 0:
            late.start()
        try:
            # Without device_id, which would require all ranks to create every group (mpu/groups.py).
            dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
                raise SettingsError(
                    f"rank {rank} of {world} does not know where the ranks meet: {' and '.join(absent)} not set",
                    f"WORLD_SIZE={world} is in the environment, which torchrun sets with the others",
                    "start all ranks with torchrun (mpirun: add -x MASTER_ADDR=HOST); or unset WORLD_SIZE and RANK",
                ) from error
            raise PeerLost(
                f"rank {rank} of {world} could not join the job at {where}",
                f"it waited {timeout.total_seconds():g} s for {others}: {str(error).splitlines()[0]}",
                "start all ranks with torchrun; is the port free and reachable?",
            ) from error
        finally:
            late.cancel()
    mesh = mesh_of(parallel, rank, world, here.local_world_size or 8, timeout=timeout)
    parallel_state.use_mesh(mesh)
    return RankContext(mesh, device, joined, described)


def leave_job(context: RankContext) -> None:
    """Destroy the process group after a barrier, so that no connection breaks while other ranks still communicate."""
    if dist.is_initialized() and context.joined:
        collectives.barrier(context.mesh.world)
        dist.destroy_process_group()
        context.mesh.release()
    parallel_state.use_mesh(None)


def prepare_device(parallel: schema.Parallel, kernels: schema.Kernels, rank: int, world_size: int) -> None:
    """Set the variables that CUDA reads once, unless this run is on CPUs. Call it before CUDA is initialized."""
    if kernels.device != "cpu" and torch.version.cuda:
        device_variables.set_variables(parallel, rank, world_size)


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank. `auto` is CUDA if available; each rank of a node uses the device of its local rank.

    Raises DeviceLost if there is none: a supervisor then looks at the node, because a job that has trained there lost it.
    """
    there = torch.cuda.is_available()
    if not there and (wanted == "cuda" or wanted == "auto" and has_silent_gpus()):
        raise DeviceLost(
            f"--device {wanted}: torch finds no CUDA device",
            f"torch {torch.__version__} on {node_name()}",
            "use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES",
        )
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise DeviceLost(
            f"local rank {local_rank} has no CUDA device of its own: there are {count} on {node_name()}",
            do=f"start at most {count} processes on this node (--nproc-per-node {count})",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def has_silent_gpus(driver: str = "/dev/nvidiactl") -> bool:
    """Whether torch is made for CUDA and the node has a driver: then `auto` must not fall back to the CPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles")
    return torch.version.cuda is not None and not hidden and os.path.exists(driver)


def repeat_bit_by_bit() -> None:
    """Use deterministic kernels on CUDA, also in attention's backward pass; torch raises an error if it has none.

    Call it before the first matrix product on the device, when cuBLAS reads its variable, and before NCCL's first group.
    `fused_kernels` skips packages that torch does not control. Raises SettingsError if NCCL_ALGO asks for sums inside the
    network's switches, which Megatron-LM's mode of this name excludes, too.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    algorithm = os.environ.setdefault("NCCL_ALGO", "^NVLS")
    if "NVLS" in algorithm.upper() and not algorithm.startswith("^"):
        raise SettingsError(
            f"NCCL_ALGO={algorithm} with --deterministic-mode",
            "NVLink switches add up in any order",
            "unset it (then it is ^NVLS), or name Ring or Tree",
        )
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def use_threads(ranks_here: int = 1) -> str:
    """Set the number of threads to this rank's share of the cores, or OMP_NUM_THREADS; returns a description."""
    threads = choose_threads(ranks_here)
    if not threads.given:
        torch.set_num_threads(threads.count)
    return f"{threads}; {waiting()}"


def pick_precision(wanted: str, context: RankContext) -> str:
    """Resolve `auto`: bf16 if the device multiplies it clearly faster than fp32, else fp32; rank 0 decides for all.

    The speed is measured, because instruction sets do not show whether the math library uses them.
    """
    if wanted != "auto":
        return wanted
    return collectives.broadcast_object(
        measured_precision(context.device) if context.is_rank_zero else None, context.mesh.world
    )


def measured_precision(device: torch.device) -> str:
    """bf16 if its matrix products run at more than 1.25 times the speed of fp32, else fp32."""
    if cpu_ops.widens(device.type, torch.bfloat16):  # would be measured in torch's loops, for seconds
        return "fp32"
    return "bf16" if measured_flops(device, torch.bfloat16) > 1.25 * measured_flops(device, torch.float32) else "fp32"


def measured_flops(device: torch.device, dtype: torch.dtype, size: int = 768) -> float:
    """FLOP/s of the fastest of a few products of square matrices on this rank; takes some tens of milliseconds."""
    a = torch.ones(size, size, dtype=dtype, device=device)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def weight_format(precision: schema.Precision) -> torch.dtype:
    """The dtype of the model's weights, and of messages between pipeline stages."""
    return torch.float32 if precision.amp_level == "O1" else DTYPES[precision.precision]


DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
