# SPDX-License-Identifier: Apache-2.0
"""Variables of the environment that torch, CUDA and Triton read once, with the suite's defaults. A user's own are kept.

| variable | default | why |
|---|---|---|
| `PYTORCH_ALLOC_CONF` | `expandable_segments:True` | blocks of many sizes share memory: less is lost between them |
| `CUDA_DEVICE_MAX_CONNECTIONS` | the streams in use, from 8 to 32 | streams that share a queue wait for each other |
| `TRITON_CACHE_DIR` | a folder of this machine | in a shared home thousands of ranks would read and write it |
| `TORCH_NCCL_HIGH_PRIORITY` | 1 | a message that is ready takes the first free place of the device |

A matrix product fills the device. A message that is ready at the same time would start only after the product's last blocks
were scheduled; with priority it takes the first free place, and overlaps with the product. Megatron-LM orders the two by
CUDA_DEVICE_MAX_CONNECTIONS=1, which prevents the overlap of ZeRO's messages (docs/gpus.md).
"""

import getpass
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megatron.mpu.mesh import Mesh, mesh_of
from megatron.settings import schema

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
QUEUES = 8, 32  # of a device: CUDA's default and its most
LOGGED = (*ALLOCATOR, "CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_CACHE_DIR", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


def set_variables(parallel: schema.Parallel, rank: int, world_size: int, env: MutableMapping[str, str] = os.environ):
    """Set the variables that are not set. Call it before CUDA is initialized."""
    for name, value in defaults(mesh_of(parallel, rank, world_size, create_groups=False), env).items():
        env.setdefault(name, value)


def defaults(mesh: Mesh, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The suite's defaults for a rank of this mesh, without those that another spelling of the user replaces.

    >>> defaults(Mesh(), dict(PYTORCH_CUDA_ALLOC_CONF="x"))["CUDA_DEVICE_MAX_CONNECTIONS"]
    '8'
    """
    least, most = QUEUES
    values = dict(
        CUDA_DEVICE_MAX_CONNECTIONS=str(min(max(streams_of(mesh), least), most)),
        TRITON_CACHE_DIR=str(Path(tempfile.gettempdir()) / f"triton_{getpass.getuser()}"),
        TORCH_NCCL_HIGH_PRIORITY="1",
    )
    return values if any(env.get(name) for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True", **values}


def streams_of(mesh: Mesh) -> int:
    """The streams of a rank: that of products, and one for each communicator.

    Stages talk over a communicator for each neighbour, and all-to-all of experts and gathers over one for each group.
    """
    neighbours = min(mesh.pp.size - 1, 2)
    groups = [names for _, names in mesh.own_groups() if names != ["pp"] and mesh.carries(names)]
    return 1 + (mesh.world_size > 1) + len(groups) + neighbours


def described(env: Mapping[str, str] = os.environ) -> str:
    """The variables in force, for the log."""
    return "variables: " + ", ".join(f"{name}={env[name]}" for name in LOGGED if env.get(name))
