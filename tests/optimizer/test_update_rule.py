# SPDX-License-Identifier: Apache-2.0
"""A rule with state and a bias correction, as docs/optimizers.md writes it, against torch's Adam without momentum."""

import re

import pytest
import torch

from megatron.mpu.mesh import Mesh
from megatron.optimizer import update
from megatron.optimizer.kinds import KINDS, Kind
from megatron.optimizer.sharded import sharded_init
from megatron.optimizer.update import UpdateRule
from megatron.settings import schema


class CorrectedRMS(UpdateRule):
    """Gradients divided by the root of their mean square, whose mean begins at 0 and is corrected for it."""

    def update(self, weights, gradients, states, step, lr, decay):
        beta, eps = self.settings.adam_beta2, self.settings.adam_eps
        for weight, gradient, square in zip(weights, gradients, states[0], strict=True):
            square.lerp_(gradient.square(), 1 - beta)
            mean = square / (1 - beta ** (step + 1))
            weight.mul_(1 - lr * decay).addcdiv_(gradient, mean.sqrt_().add_(eps), value=-lr)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_rule_of_the_page_is_adam_without_momentum(stage, monkeypatch, run_ranks):
    """The first update divides by 1 - beta: with another count of steps it would be no number, or too small."""
    monkeypatch.setitem(KINDS, "rms", Kind(lambda settings: ("square",)))
    monkeypatch.setitem(update.RULES, "rms", CorrectedRMS)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    def body(rank):
        settings = schema.Optimizer(optimizer="rms", adam_beta2=0.9, adam_eps=1e-3)
        mesh, parallel = Mesh(rank, **{"shard" if stage else "replicate": 2}), schema.Parallel(sharding_stage=stage)
        model, optimizer = sharded_init(lambda: torch.nn.Linear(6, 6), mesh, settings, parallel, init="module")
        with optimizer.gathered_parameters():
            reference = torch.nn.Linear(6, 6)
            reference.load_state_dict(model.state_dict())
        groups = [dict(params=[reference.weight], weight_decay=0.1), dict(params=[reference.bias], weight_decay=0.0)]
        adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.0, 0.9), eps=1e-3)
        for _ in range(4):
            model(x[rank::2]).square().sum().backward()
            optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
            optimizer.step(1e-2, 0.1, 1.0)
            adam.zero_grad()
            reference(x).square().sum().backward()
            adam.step()
        with optimizer.gathered_parameters():
            return [(a - b).abs().max().item() for a, b in zip(model.parameters(), reference.parameters(), strict=True)]

    assert max(max(found) for found in run_ranks(2, body)) < 1e-6


def test_it_is_what_the_page_says(root):
    [block] = re.findall(
        r"^```python\n(class CorrectedRMS.*?)^```", (root / "docs/optimizers.md").read_text(), re.S | re.M
    )
    assert block in (root / "tests/optimizer/test_update_rule.py").read_text()
