# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of experts that ranks divide in one way, read in another: weights, moments and buffers, to the bit."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import torch

from megatron.checkpoint.folder import Saver, restore
from megatron.mpu.mesh import mesh_of
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.build import build_stages
from megatron.pipeline.stages import Pipeline
from megatron.settings.schema import Config
from tests.checkpoint.test_elastic import Ranks, truth
from tests.models.plain_state import LAYERS


def ranks_of(config: Config, world: int, build_model: Callable) -> Ranks:
    """The optimizers of all ranks of a layout, one after the other, without process groups."""
    kind, optimizers = dict(dtype=torch.float32, device="cpu", seed=1, draws=False), []
    for rank in range(world):
        mesh = mesh_of(config.parallel, rank, world, create_groups=False)
        build = partial(build_model, config, mesh, 101, dtype=torch.float32, device="meta")
        stages = build_stages(build, Pipeline.of(config.parallel, LAYERS, 2), mesh)
        optimizers.append(DistributedOptimizer(stages, mesh, config.optimizer, config.parallel, **kind))
    return Ranks(optimizers)


def check_divisions(layouts: Mapping[str, Ranks], folder: Path) -> None:
    """Each layout writes each element once, by one rank, and all others read it."""
    names = list(layouts)
    for number, (name, ranks) in enumerate(layouts.items()):
        ranks.fill(truth)
        files = [optimizer.pieces(unique=True, shared=True) for optimizer in ranks.optimizers]
        written = Counter()
        for piece in (piece for pieces in files for piece in pieces):
            written[piece.name, tuple(piece.shape)] += piece.tensor.numel()
        assert all(count == math.prod(shape) for (_, shape), count in written.items()), name
        assert {of for of, _ in written} == ranks.names
        with Saver(folder / str(number)) as saver:
            saver.write(7, files, {})
    for (name, after), number in product(layouts.items(), range(len(names))):
        if name == names[number]:
            continue
        after.fill(lambda name, shape: torch.full(shape, -1.0))
        for optimizer in after.optimizers:
            restore(folder / str(number), pieces := optimizer.pieces(), names=after.names)
            for piece in pieces:
                wanted = truth(piece.name, piece.shape)[piece.box.slices()].to(piece.tensor.dtype)
                assert torch.equal(piece.tensor, wanted), (names[number], piece.name, piece.box)
