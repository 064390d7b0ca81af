# SPDX-License-Identifier: Apache-2.0
"""Small models and micro-batches for the tests of the network."""

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import init_parameter
from megatron.settings.schema import Model

VOCABULARY = 100  # padded to 128


def _tiny(
    mesh=None,
    *,
    scale: float = 1.0,
    layers=None,
    first=True,
    last=True,
    sequence_parallel=False,
    dtype=torch.float32,
    recompute=None,
    autocast=None,
    **settings,
) -> GPT:
    """A two-layer GPT with reproducible weights (`scale` times larger than usual, biases too) and no dropout."""
    mesh = mesh or Mesh()
    plain = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, hidden_dropout=0.0, attention_dropout=0.0
    )
    model = GPT(
        Model(**plain | settings),
        mesh,
        VOCABULARY,
        layers=layers,
        first=first,
        last=last,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        autocast=autocast,
        dtype=dtype,
    )
    for name, (parameter, placement) in placements(model).items():
        init_parameter(name, parameter, placement, mesh.coordinates, seed=7)
        with torch.no_grad():
            parameter.mul_(scale if parameter.dim() > 1 else 1.0)
    return model


def _batch(s: int = 16, b: int = 3, seed: int = 0, **more) -> MicroBatch:
    """Random tokens with random labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (s + 1, b), generator=generator)
    return MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(b), **more)


@pytest.fixture(scope="session")
def tiny():
    """`tiny(mesh, **settings)` makes a model: see `_tiny`."""
    return _tiny


@pytest.fixture(scope="session")
def batch():
    """`batch(s, b, seed, loss_mask=..., ...)` makes a MicroBatch: see `_batch`."""
    return _batch
