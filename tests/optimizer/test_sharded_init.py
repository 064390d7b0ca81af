# SPDX-License-Identifier: Apache-2.0
"""A model of one's own under ZeRO: it trains like torch's, and is never whole while it is built."""

import pytest
import torch

from megatron.errors import SettingsError
from megatron.mpu.mesh import Mesh
from megatron.optimizer.sharded import sharded_init
from megatron.settings import schema


class Block(torch.nn.Module):
    """A layer that knows nothing of this suite."""

    def __init__(self, width, scale=None):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(1, device=scale))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Plain(torch.nn.Module):
    def __init__(self, width=16, depth=3, scale="cpu"):
        super().__init__()
        self.table = torch.nn.Embedding(32, width)
        self.blocks = torch.nn.ModuleList(Block(width, scale) for _ in range(depth))

    def forward(self, numbers):
        x = self.table(numbers)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def numbers(step, part):
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(2 * step + part))


def trained(rank, stage, ranks):
    """Losses of a few steps, and weights behind them."""
    axis = "shard" if stage else "replicate"
    model, optimizer = sharded_init(
        Plain, Mesh(rank, **{axis: ranks}), schema.Optimizer(), schema.Parallel(sharding_stage=stage), init_std=0.2
    )
    losses = []
    for step in range(4):
        loss = torch.zeros(1, dtype=torch.float64)
        for part in range(rank, 2, ranks):
            value = model(numbers(step, part))
            value.backward()
            loss += value.detach()
        total, norm = optimizer.finalize_grads(loss)
        optimizer.step(1e-2, 0.1, 0.5)
        losses.append(total.item() / 2)
    with optimizer.gathered_parameters():
        return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_it_trains_as_torch_does(run_ranks):
    """From the same weights, with torch's own AdamW, decay of matrices alone."""
    model, optimizer = sharded_init(Plain, Mesh(), init_std=0.2)
    reference = Plain()
    with optimizer.gathered_parameters():
        reference.load_state_dict(model.state_dict())
    groups = [
        dict(params=[p for p in reference.parameters() if (p.dim() > 1) == decay], weight_decay=0.1 * decay)
        for decay in (True, False)
    ]
    adam, expected = torch.optim.AdamW(groups, lr=1e-2, eps=schema.Optimizer().adam_eps), []
    for step in range(4):
        adam.zero_grad()
        loss = sum(reference(numbers(step, part)) for part in range(2)) / 2
        loss.backward()
        adam.step()
        expected.append(loss.item())
    for stage in (0, 3):
        for losses, weights in run_ranks(2, trained, stage, 2):
            assert losses == pytest.approx(expected, rel=1e-4)
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-5)


def test_the_model_is_never_whole(run_ranks, most_allocated):
    """One of 32 ranks of a model of 34 million parameters; beside it, that model by itself."""

    def large():
        return Plain(512, 16)

    (sharded,) = run_ranks(1, lambda rank: most_allocated(lambda: sharded_init(large, Mesh(3, shard=32))))
    (whole,) = run_ranks(1, lambda rank: most_allocated(large))
    with torch.device("meta"):
        model = large()
    count, block = (sum(parameter.numel() for parameter in of.parameters()) for of in (model, model.blocks[0]))
    assert 4 * count <= whole < 4.1 * count  # fp32: the measure sees what is there
    # the rank's own: main weights, two moments and gradients; and a layer, while it is drawn and while it is cut
    assert sharded < 4 * (4 * count / 32 + 2.1 * block)


def test_a_buffer_without_values_is_told():
    with pytest.raises(SettingsError, match="blocks.0.scale, blocks.1.scale"):
        sharded_init(lambda: Plain(scale="meta"), Mesh())
