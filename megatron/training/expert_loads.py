# SPDX-License-Identifier: Apache-2.0
"""The tokens that each expert of each layer got in a step, for metrics.jsonl, and a note if experts get none."""

import torch

from megatron.mpu import collectives
from megatron.mpu.placement import DATA_PARALLEL

ENOUGH = 20  # tokens of an expert on average: with fewer, one without tokens may be chance


def expert_loads(run) -> dict[str, list[int]]:
    """Layer -> tokens of each expert in the last step, over all ranks: {"blocks.1": [12, 9, ...]}, and "mtp.0.layers.0" of
    a depth of multi-token prediction. {} without experts.

    All ranks call it. run: `training.state.Run`
    """
    model, mesh = run.config.model, run.context.mesh
    if not model.mixture:
        return {}
    names = {layer: f"blocks.{layer}" for layer in model.expert_layers}
    ahead = [model.has_experts(layer) for layer in model.layers_ahead]
    for depth in range(model.own_depths):
        first = model.num_layers + depth * len(ahead)
        names |= {first + number: f"mtp.{depth}.layers.{number}" for number, has in enumerate(ahead) if has}
    layers = list(names)
    loads = torch.zeros((len(layers), model.num_experts), dtype=torch.int64, device=run.context.device)
    if all(mesh.coordinates[axis] == 0 for axis in (*DATA_PARALLEL, "cp", "tp")):  # others of the stage have the same
        for module in run.optimizer.buffers.updating:
            if getattr(module, "last_load", None) is not None:
                loads[layers.index(module.layer)] = module.last_load
    total = collectives.all_reduce(loads, mesh.world)
    return dict(zip(names.values(), total.tolist()))


def idle_experts(layer: str, loads: list[int], iteration: int) -> str:
    """A note about experts of a layer that got no token in a step; "" if all have some, or few tokens are expected.

    >>> idle_experts("blocks.1", [50, 0, 70, 40], 7)[:50]
    'blocks.1: 1 of 4 experts got no token in step 7 (1'
    """
    idle = [number for number, load in enumerate(loads) if load == 0]
    mean = sum(loads) / len(loads)
    if not idle or mean < ENOUGH:
        return ""
    shown = ", ".join(map(str, idle[:8])) + ", ..." * (len(idle) > 8)
    return (
        f"{layer}: {len(idle)} of {len(loads)} experts got no token in step {iteration} ({shown}; the mean is {mean:.0f} "
        "tokens), and do not learn; raise --moe-aux-loss-coeff, or use --moe-router-enable-expert-bias"
    )
