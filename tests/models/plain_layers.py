# SPDX-License-Identifier: Apache-2.0
"""Networks of listed layers in plain torch, in fp64, and their training: what runs of such networks are compared with.

kinds = {"*": ATTENTION, "-": MLP}
steps, weights = train(letters("*-*"), kinds, packed=False, steps=3)
compare(folder, steps, weights)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F

from megatron.inference.load import load_model
from megatron.mpu.random import seed_of
from tests.models import plain_gpt
from tests.models.plain_gpt import Weights, linear
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LENGTH, VOCABULARY
from tests.training.test_plain_loop import records

SEED, STD = 1234, 0.02
# (prefix of its weights, kind) of each; or kinds, which are summed after one norm
Branches = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Plain:
    """A kind of layers.

    products: linear layers, whose output dims come first; the last one adds to the hidden states. biased: all have biases
    others:   prefix of the layer -> its other weights, as they start
    adds:     (weights, prefix, normalized states [b, s, h], ids of documents [b, s]) -> what is added to the states
    """

    slot: str
    products: Mapping[str, tuple[int, ...]]
    adds: Callable[[Weights, str, torch.Tensor, torch.Tensor], torch.Tensor]
    biased: bool = True
    others: Callable[[str], Weights] = lambda own: {}


def attend(weights: Weights, own: str, u: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    b, s, _ = u.shape
    q, k, v = linear(weights, own + "qkv", u).view(b, s, HEADS, 3, -1).permute(3, 0, 2, 1, 4)
    hidden = (ids[:, None, :, None] != ids[:, None, None, :]) | (torch.ones(s, s).triu(1) > 0)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return linear(weights, own + "output", (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))


def widen(weights: Weights, own: str, u: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return linear(weights, own + "down", F.gelu(linear(weights, own + "up", u), approximate="tanh"))


ATTENTION = Plain("attention", {"qkv": (HEADS, 3, HIDDEN // HEADS, HIDDEN), "output": (HIDDEN, HIDDEN)}, attend)
MLP = Plain("mlp", {"up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 4 * HIDDEN)}, widen)


def letters(pattern: str, several: Mapping[str, str] = MappingProxyType({})) -> Branches:
    """several: letter -> the kinds that it stands for, if it is none itself."""
    return tuple((f"blocks.{n}.", several.get(letter, letter)) for n, letter in enumerate(pattern))


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(SEED, name, 0))


def uniform(name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    return torch.empty(shape).uniform_(low, high, generator=generator(name))


def initial_weights(branches: Branches, kinds: Mapping[str, Plain]) -> Weights:
    """Products that add to the hidden states start with the standard deviation divided by the root of their number."""
    drawn = {"embedding.word.weight": ((VOCABULARY, HIDDEN), STD), "embedding.position.weight": ((LENGTH, HIDDEN), STD)}
    weights, norms = {}, ["final_norm"]
    for prefix, beside in branches:
        for kind in map(kinds.get, beside):
            own, last = f"{prefix}{kind.slot}.", list(kind.products)[-1]
            for name, shape in kind.products.items():
                drawn[f"{own}{name}.weight"] = shape, STD / len(branches) ** 0.5 if name == last else STD
                weights |= {f"{own}{name}.bias": torch.zeros(shape[:-1])} if kind.biased else {}
            weights |= kind.others(own)
        norms.append(f"{prefix}{kinds[beside[0]].slot}_norm")
    for name in norms:
        weights |= {f"{name}.weight": torch.ones(HIDDEN), f"{name}.bias": torch.zeros(HIDDEN)}
    for name, (shape, scale) in drawn.items():
        weights[name] = torch.empty(shape).normal_(0.0, scale, generator=generator(name))
    return {name: values.double() for name, values in weights.items()}


def network(weights: Weights, branches: Branches, kinds, tokens: torch.Tensor, packed: bool) -> torch.Tensor:
    """Tokens [b, s] -> logits [b, s, vocabulary]. packed: a document begins after each end of one."""
    norm, s = partial(plain_gpt.norm, weights), tokens.shape[1]
    ids = F.pad((tokens == EOD).long().cumsum(1), (1, 0))[:, :-1] * packed
    x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][:s]
    for prefix, beside in branches:
        u = norm(f"{prefix}{kinds[beside[0]].slot}_norm", x)
        x = x + sum(kind.adds(weights, f"{prefix}{kind.slot}.", u, ids) for kind in map(kinds.get, beside))
    return norm("final_norm", x) @ weights["embedding.word.weight"].T


def train(branches: Branches, kinds: Mapping[str, Plain], packed: bool, steps: int) -> tuple[list[dict], Weights]:
    """(`lm loss` and `grad_norm` of each step, weights at the end)."""

    def losses(weights, samples, counts):
        scores = network(weights, branches, kinds, samples[:, :-1], packed)
        return {"lm loss": plain_gpt.cross_entropies(scores, samples[:, 1:])[counts].mean()}

    return plain_gpt.train(initial_weights(branches, kinds), losses, steps, 0.0)


def compare(folder, steps: Sequence[dict], weights: Weights) -> None:
    """A run's steps, and the model that it saved."""
    found = [{name: step[name] for name in ("lm loss", "grad_norm")} for step in records(folder, "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    loaded = load_model(str(folder))
    assert {name for name, _ in loaded.model.named_parameters()} == set(weights)
    for name, parameter in loaded.model.named_parameters():
        wanted = weights[name]
        assert (parameter[: len(wanted)].double() - wanted).abs().max() < 2e-5, name  # rows that pad the vocabulary
