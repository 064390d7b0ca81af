# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's functions for ranks and groups, for code that is written for them.

    from megatron import mpu
    torch.distributed.all_reduce(x, group=mpu.get_data_parallel_group())

They use the mesh of the job that this process has joined last, and raise RuntimeError without one. The suite itself passes
`Mesh` and `Axis` as arguments, and calls none of these. Not supported: virtual stages, of which a rank has several at a
time, and groups that the suite does not create (ranks of several axes together, such as tensor and pipeline ranks).
"""

from typing import Any, Optional

import torch.distributed as dist

from megatron.mpu.groups import new_group
from megatron.mpu.mesh import Axis, Mesh


class _Job:
    mesh: Optional[Mesh] = None
    alone: Any = None  # a group of only this rank, created on request


def use_mesh(mesh: Optional[Mesh]) -> None:
    """Set the mesh that the functions use; None: no mesh."""
    _Job.mesh, _Job.alone = mesh, None


def model_parallel_is_initialized() -> bool:
    return _Job.mesh is not None


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def get_tensor_model_parallel_group() -> Any:
    return _group(_axis("tp"))


def get_tensor_model_parallel_world_size() -> int:
    return _axis("tp").size


def get_tensor_model_parallel_rank() -> int:
    return _axis("tp").rank


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the group's first rank."""
    return _axis("tp").ranks[0]


# ---- pipeline parallelism --------------------------------------------------------------------------------------------


def get_pipeline_model_parallel_group() -> Any:
    return _group(_axis("pp"))


def get_pipeline_model_parallel_world_size() -> int:
    return _axis("pp").size


def get_pipeline_model_parallel_rank() -> int:
    return _axis("pp").rank


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of the first stage; the next three functions also return global ranks."""
    return _axis("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return _axis("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    axis = _axis("pp")
    return axis.ranks[(axis.rank + 1) % axis.size]


def get_pipeline_model_parallel_prev_rank() -> int:
    axis = _axis("pp")
    return axis.ranks[axis.rank - 1]


def is_pipeline_first_stage() -> bool:
    return _axis("pp").rank == 0


def is_pipeline_last_stage() -> bool:
    axis = _axis("pp")
    return axis.rank == axis.size - 1


def get_embedding_group() -> Any:
    """The group of the first and last stage, which share a tied embedding."""
    return _group(_axis("tied"))


def is_rank_in_embedding_group() -> bool:
    return is_pipeline_first_stage() or is_pipeline_last_stage()


# ---- data and context parallelism ------------------------------------------------------------------------------------


def get_data_parallel_group(with_context_parallel: bool = False) -> Any:
    return _group(_data_parallel(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).rank


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return _data_parallel(with_context_parallel).ranks[0]


def get_context_parallel_group() -> Any:
    return _group(_axis("cp"))


def get_context_parallel_world_size() -> int:
    return _axis("cp").size


def get_context_parallel_rank() -> int:
    return _axis("cp").rank


def get_context_parallel_global_ranks() -> list[int]:
    return list(_axis("cp").ranks)


# ---- experts ---------------------------------------------------------------------------------------------------------


def get_expert_model_parallel_group() -> Any:
    """The group of ranks that have different experts (ep)."""
    return _group(_axis("ep"))


def get_expert_model_parallel_world_size() -> int:
    return _axis("ep").size


def get_expert_model_parallel_rank() -> int:
    return _axis("ep").rank


def get_expert_model_parallel_src_rank() -> int:
    return _axis("ep").ranks[0]


def get_expert_tensor_parallel_group() -> Any:
    """The group of ranks that have parts of the same experts (etp)."""
    return _group(_axis("etp"))


def get_expert_tensor_parallel_world_size() -> int:
    return _axis("etp").size


def get_expert_tensor_parallel_rank() -> int:
    return _axis("etp").rank


def get_expert_data_parallel_group() -> Any:
    """The group of ranks that have the same parts of the same experts."""
    return _group(_axis("expert_dp"))


def get_expert_data_parallel_world_size() -> int:
    return _axis("expert_dp").size


def get_expert_data_parallel_rank() -> int:
    return _axis("expert_dp").rank


# ---- the mesh --------------------------------------------------------------------------------------------------------


def _data_parallel(with_context_parallel: bool) -> Axis:
    return _axis("dp_cp" if with_context_parallel else "dp")


def _axis(name: str) -> Axis:
    if _Job.mesh is None:
        raise RuntimeError("this process has not joined a job yet: call build_run or initialize.join_job first")
    return getattr(_Job.mesh, name)


def _group(axis: Axis) -> Any:
    """The group of an axis. For torch, None means all ranks, so an axis of size 1 gets a group of only this rank."""
    if axis.group is None and dist.is_initialized():
        _Job.alone = _Job.alone or new_group(axis.ranks, "alone", _Job.mesh.timeout)
        return _Job.alone
    return axis.group
