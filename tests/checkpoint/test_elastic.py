# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of any layout loads into any other: every ordered pair of eleven, weights and optimizer, to the bit.

Ranks are built one after the other in this process, without process groups: a rank's share of the model and of its
optimizer state, what it writes and what it reads do not need the others. What follows a load (parameters handed to the
model, training that goes on) is tested with real ranks in tests/layouts/test_reload.py.
"""

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.folder import Saver, restore
from megatron.checkpoint.store import share
from megatron.mpu.mesh import mesh_of
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.build import build_stages
from megatron.pipeline.stages import Pipeline
from megatron.planner.parity import laid_out, parse_layout
from megatron.settings.parse import parse_pretrain
from megatron.training.state import State

LAYOUTS = [
    "",
    "dp2",
    "tp2sp",
    "pp4",
    "pp2vp2",
    "pp2-zbv",
    "dp4-zero3",
    "tp2-dp2-zero2",
    "tp4-zero1",
    "tp2sp-pp2vp2-dp2-zero1",
    "cp2-pp2-zero2",
]
FLAGS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 90 --lr 1e-3
    --global-batch-size 16 --micro-batch-size 1 --train-iters 6 --precision fp32 --device cpu"""
KINDS = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")


@dataclass
class Ranks:
    """The optimizers of all ranks of a layout."""

    optimizers: list[DistributedOptimizer]

    @property
    def names(self) -> set[str]:
        return {piece.name for optimizer in self.optimizers for piece in optimizer.pieces()}

    def fill(self, truth) -> None:
        """Every rank gets its part of the logical tensors."""
        for optimizer in self.optimizers:
            for piece in optimizer.pieces():
                piece.tensor.copy_(truth(piece.name, piece.shape)[piece.box.slices()])

    def shards(self) -> list[list]:
        """What each rank writes, as `Run.save` has it."""
        found = []
        for optimizer in self.optimizers:
            replicate = optimizer.mesh.replicate
            found.append(share(optimizer.pieces(unique=True), replicate.rank, replicate.size))
        return found


@cache
def truth(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The logical tensor of a name: no two values of all tensors are likely to be equal."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) * 7919 + len(name)))


@pytest.fixture(scope="module")
def ranks_of():
    """Layout -> its ranks, built once."""

    @cache
    def build(text: str) -> Ranks:
        layout = parse_layout(text)
        config = laid_out(parse_pretrain(FLAGS.split()), layout)
        return Ranks([_optimizer(config, layout.world_size, rank) for rank in range(layout.world_size)])

    return build


def _optimizer(config, world_size: int, rank: int) -> DistributedOptimizer:
    mesh = mesh_of(config.parallel, rank, world_size, create_groups=False)
    pipeline = Pipeline.of(config.parallel, config.model.num_layers, 16 // mesh.dp.size)
    build = partial(pretrain_gpt.build_model, config, mesh, 90, dtype=torch.float32, device="meta")
    stages = build_stages(build, pipeline, mesh)
    return DistributedOptimizer(
        stages, mesh, config.optimizer, config.parallel, dtype=torch.float32, device="cpu", seed=1, draws=False
    )


@pytest.fixture(scope="module")
def save_on_record(ranks_of, tmp_path_factory):
    """Layout -> folder of the checkpoint that its ranks wrote."""

    @cache
    def save(text: str):
        folder, ranks = tmp_path_factory.mktemp("saved"), ranks_of(text)
        ranks.fill(truth)
        with Saver(folder) as saver:
            saver.write(7, ranks.shards(), dict(state=STATE.record()))
        return folder

    return save


STATE = State(
    LossScaler(scale=64.0, window=10, good_steps=3),
    iteration=7,
    consumed_samples=112,
    scheduled_samples=96,
    skipped_iterations=1,
    left_out=(3,),
)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_every_layout_loads_what_every_other_wrote(before, after, save_on_record, ranks_of):
    folder, ranks = save_on_record(before), ranks_of(after)
    ranks.fill(lambda name, shape: torch.full(shape, float("nan")))
    for rank, optimizer in enumerate(ranks.optimizers):
        pieces = optimizer.pieces()
        found = restore(folder, pieces, names=ranks.names)
        wrong = [
            f"{piece.name} {piece.box}"
            for piece in pieces
            if not torch.equal(piece.tensor, truth(piece.name, piece.shape)[piece.box.slices()])
        ]
        assert wrong == [], f"rank {rank}"
        own = sum(piece.tensor.nbytes for piece in pieces)
        if before == after:  # a rank reads what is its own and nothing else
            sized = lambda count: f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"  # not 0.0 MB
            assert found.bytes_read == (own,) and str(found).endswith(
                f"(a rank read {sized(own)} of {sized(found.size)})"
            )
        assert (
            own <= found.bytes_read[0] <= found.size
            and found.notices == ()
            and State(LossScaler(window=10)).restored(found.state["state"]) == STATE
        )


def test_the_layouts_are_as_different_as_they_look(ranks_of):
    """Every rank holds moments, all of them together hold every element, and no two layouts cut in the same way."""
    cuts = {}
    for text in LAYOUTS:
        boxes = [
            sorted((piece.name, piece.box) for piece in optimizer.pieces()) for optimizer in ranks_of(text).optimizers
        ]
        assert len(boxes) == parse_layout(text).world_size
        assert all({kind for kind in KINDS for name, _ in own if name.startswith(kind)} == set(KINDS) for own in boxes)
        cuts[text] = str(boxes)
    assert len(set(cuts.values())) == len(LAYOUTS)
    assert len({frozenset(ranks_of(text).names) for text in LAYOUTS}) == 1
