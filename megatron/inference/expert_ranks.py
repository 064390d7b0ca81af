# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the experts of a model in generation: all of them run each step together. Needs no torch."""

import math
from collections.abc import Mapping

from megatron.errors import SettingsError
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Placement


def expert_parallel(tp: int, ep: int) -> dict[str, int]:
    """Settings of ranks that share a model's experts: `ep` of the `tp` ranks hold different ones. Raises SettingsError.

    >>> expert_parallel(4, 2)
    {'expert_model_parallel_size': 2, 'expert_tensor_parallel_size': 2}
    """
    if ep < 1 or tp % ep:
        raise SettingsError(
            f"--expert-model-parallel-size {ep} does not divide the {tp} ranks of --tensor-model-parallel-size",
            "in generation experts are divided over tensor parallel ranks",
            "leave it out, or give --tensor-model-parallel-size as a multiple of it",
        )
    return dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=tp // ep)


def refuse_experts(experts: Mapping[str, Placement], mesh: Mesh) -> None:
    """Raise SettingsError if ranks cannot divide the experts of a model evenly."""
    if mesh.ep.size > 1 and not experts:
        raise SettingsError(f"--expert-model-parallel-size {mesh.ep.size}: the model has no experts", do="leave it out")
    for name, placed in experts.items():
        for dim, axes in placed.cut_dims:
            if placed.shape[dim] % (ranks := math.prod(getattr(mesh, axis).size for axis in axes)):
                raise SettingsError(
                    f"{ranks} ranks do not divide dim {dim} of {name}, {' x '.join(map(str, placed.shape))}"
                )
