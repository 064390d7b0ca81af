# SPDX-License-Identifier: Apache-2.0
"""ZeRO for any torch model in a user's own training loop: the model is built in shards and never exists whole.

    context = join_job(Parallel(), Kernels())
    model, optimizer = sharded_init(lambda: MyModel(...), context.mesh, device=context.device)

docs/parallelism.md has the loop to it.
"""

from collections.abc import Callable
from typing import Optional

import torch

from megatron.model.plain import build_stage
from megatron.mpu.mesh import Mesh
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings import schema


def sharded_init(
    build: Callable[[], torch.nn.Module],
    mesh: Mesh,
    settings: Optional[schema.Optimizer] = None,
    parallel: Optional[schema.Parallel] = None,
    *,
    dtype=torch.float32,
    device="cpu",
    seed: int = 1234,
    init_std: float = 0.02,
    init: str = "suite",
) -> tuple[torch.nn.Module, DistributedOptimizer]:
    """A model whose parameters, gradients and optimizer state are divided among the ranks of `mesh.shard`.

    build:     makes the model; it runs with the meta device as default, so that its parameters take no memory, and the
               values that it gives them are lost
    parallel:  the ZeRO stage and what overlaps; stage 3 without it
    dtype:     of the parameters as the model uses them; main weights and moments are fp32
    seed:      initial values are a function of it and of a parameter's name, the same on any number of ranks
    init_std:  matrices are drawn from N(0, init_std); other biases are 0, other weights 1
    init:      "module": the values that `build` gives are kept instead. It runs on the CPU of every rank, after
               torch.manual_seed(seed), and the whole model is there until its shards are filled

    A module that lists `placements` (`mpu.placement`) has its own initial values, weight decay and tensor parallel cuts;
    of others matrices are decayed, and nothing is cut but for ZeRO. What stage 3 gathers and frees one at a time are the
    children of a ModuleList or ModuleDict called `blocks`, whose forward takes a tensor first and returns one; all else
    is gathered for the whole of a pass. Memory while it is built: the rank's shards, and one of these units.

    Raises SettingsError for buffers that `build` made on the meta device: nobody knows their values any more.
    """
    model = build_stage(build, init_std, init=init, seed=seed)
    parallel = parallel or schema.Parallel(sharding_stage=3)
    settings = settings or schema.Optimizer()
    return model, DistributedOptimizer(model, mesh, settings, parallel, dtype=dtype, device=device, seed=seed)
