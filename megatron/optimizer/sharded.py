# SPDX-License-Identifier: Apache-2.0
"""ZeRO for any torch model in a custom training loop. The model is built in shards and never exists whole.

    context = join_job(Parallel(), Kernels())
    model, optimizer = sharded_init(lambda: MyModel(...), context.mesh, device=context.device)

docs/parallelism.md shows the loop.
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
    """Build a model whose parameters, gradients and optimizer state are sharded over the ranks of `mesh.shard`.

    build:     builds the model. It runs with the meta device as default: parameters take no memory, and the values that
               it assigns are lost
    parallel:  the ZeRO stage and its overlaps; default: stage 3
    dtype:     number format of the model's parameters; main weights are fp32, moments too unless `settings` say bf16
    seed:      initial values depend on it and on a parameter's name only, so they are the same on any number of ranks
    init_std:  matrices are drawn from N(0, init_std); other biases are 0, other weights 1
    init:      "module": keep the values that `build` assigns instead. It then runs on the CPU of every rank, after
               torch.manual_seed(seed), and the whole model exists until its shards are filled

    A module that lists `placements` (`mpu.placement`) defines initial values, weight decay and tensor parallel sharding
    itself. Otherwise matrices have weight decay, and only ZeRO shards parameters. Stage 3 gathers and frees the children
    of a ModuleList or ModuleDict named `blocks` one at a time; their forward takes a tensor first and returns one. All
    other parameters are gathered for a whole pass. Peak memory of the build: the rank's shards, and one of these units.

    Raises SettingsError for buffers that `build` created on the meta device: their values are lost.
    """
    model = build_stage(build, init_std, init=init, seed=seed)
    parallel = parallel or schema.Parallel(sharding_stage=3)
    settings = settings or schema.Optimizer()
    return model, DistributedOptimizer(model, mesh, settings, parallel, dtype=dtype, device=device, seed=seed)
