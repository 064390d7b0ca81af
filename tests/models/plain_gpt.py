# SPDX-License-Identifier: Apache-2.0
"""What networks in plain torch share that stand for a GPT with something added: layers by name, and their training."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from megatron.data.mock import MockDataset
from tests.training.plain_loop import EOD, HIDDEN, LENGTH, VOCABULARY

Weights = dict[str, torch.Tensor]


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    weight = weights[f"{name}.weight"]
    return x @ weight.reshape(-1, weight.shape[-1]).T + weights[f"{name}.bias"].reshape(-1)


def norm(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def cross_entropies(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def train(weights: Weights, losses_of: Callable[..., dict], steps: int, coeff: float) -> tuple[list[dict], Weights]:
    """({its losses, grad_norm} of each step of 8 samples, weights at the end), with AdamW at 1e-2.

    losses_of: (weights, samples [b, s + 1], which of their tokens count) -> name of a loss -> its mean. All but `lm loss`
    are multiplied by coeff.
    """
    weights, found = {name: values.requires_grad_() for name, values in weights.items()}, []
    matrices = {name for name in weights if name.endswith("weight") and "norm" not in name}
    groups = [
        dict(params=[v for name, v in weights.items() if (name in matrices) == decays], weight_decay=0.01 * decays)
        for decays in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    data = MockDataset(1 << 20, LENGTH, VOCABULARY, EOD, 1234, 0)
    for number in range(steps):
        samples = torch.from_numpy(np.stack([data[place] for place in range(8 * number, 8 * number + 8)]))
        losses = losses_of(weights, samples, samples[:, :-1] != EOD)
        adam.zero_grad()
        sum(loss * (1 if name == "lm loss" else coeff) for name, loss in losses.items()).backward()
        size = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0).item()
        adam.step()
        found.append({name: loss.item() for name, loss in losses.items()} | {"grad_norm": size})
    return found, {name: values.detach() for name, values in weights.items()}
