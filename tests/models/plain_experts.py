# SPDX-License-Identifier: Apache-2.0
"""A GPT with experts in plain torch, in one process, in fp64: every expert computes every token, and its output counts as
much as the router says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.mpu.random import seed_of
from tests.models.plain_state import HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, Tensors, train

RATE = 0.004


@dataclass(frozen=True)
class Family:
    """A kind of model: its flags, and the same in plain torch.

    router:   logits [b, s, E], bias [E] -> the weight of each expert, [b, s, E], 0 for others
    losses:   (logits, which experts are chosen) -> name -> (value, weight)
    gated:    SwiGLU, without biases; or GeLU with biases
    capacity: of an expert, from a micro-batch of `rows` sequences
    """

    flags: str
    router: Callable
    losses: Callable = lambda logits, chosen: {}
    layers: tuple[int, ...] = tuple(range(LAYERS))
    experts: int = 8
    width: int = 16
    gated: bool = True
    shared: int = 0
    latent: int = 0
    bias: bool = False
    capacity: int = 0
    rows: int = 2
    by_position: bool = False

    def initial_weights(self) -> Tensors:
        small, weights = 0.05 / math.sqrt(2 * LAYERS), {}
        drawn = {
            "embedding.word.weight": ((VOCABULARY, HIDDEN), 0.05),
            "embedding.position.weight": ((LENGTH, HIDDEN), 0.05),
        }
        for n in range(LAYERS):
            own = {
                "attention.qkv": ((HEADS, 3, HIDDEN // HEADS, HIDDEN), 0.05),
                "attention.output": ((HIDDEN, HIDDEN), small),
            }
            up = lambda width, h=HIDDEN: ((2, width, h) if self.gated else (width, h), 0.05)
            if n in self.layers:
                (shape, std), number = up(self.width, self.latent or HIDDEN), (self.experts,)
                own["mlp.router"] = (*number, HIDDEN), 0.05
                own["mlp.experts.up"] = (*number, *shape), std
                own["mlp.experts.down"] = (*number, self.latent or HIDDEN, self.width), small
                if self.latent:
                    own["mlp.latent_down"] = (self.latent, HIDDEN), 0.05
                    own["mlp.latent_up"] = (HIDDEN, self.latent), small
                if self.shared:
                    own |= {"mlp.shared.up": up(self.shared), "mlp.shared.down": ((HIDDEN, self.shared), small)}
                    own["mlp.shared_gate"] = (1, HIDDEN), 0.05
            else:
                width = 64 if self.gated else 4 * HIDDEN
                own |= {"mlp.up": up(width), "mlp.down": ((HIDDEN, width), small)}
            drawn |= {f"blocks.{n}.{name}.weight": how for name, how in own.items()}
            biased = {} if self.gated else own.items()
            weights |= {f"blocks.{n}.{name}.bias": torch.zeros(how[0][:-1]) for name, how in biased}
        norms = ["final_norm", *(f"blocks.{n}.{half}_norm" for n in range(LAYERS) for half in ("attention", "mlp"))]
        for norm in norms:
            weights |= {f"{norm}.weight": torch.ones(HIDDEN), f"{norm}.bias": torch.zeros(HIDDEN)}
        for name, (shape, std) in drawn.items():
            generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
            weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
        return {name: values.double() for name, values in weights.items()}

    def initial_buffers(self) -> Tensors:
        found = {}
        for n in self.layers:
            found[f"blocks.{n}.mlp.router.load"] = torch.zeros(self.experts, dtype=torch.int64)
            if "global_aux_loss" in self.flags:
                found[f"blocks.{n}.mlp.router.scored_load"] = torch.zeros(self.experts, dtype=torch.int64)  # of a step
            if self.bias:
                found[f"blocks.{n}.mlp.router.expert_bias"] = torch.zeros(self.experts).double()
        return found

    def update_buffers(self, buffers: Tensors, seen: list[dict]) -> None:
        seen.append({f"blocks.{n}": buffers[f"blocks.{n}.mlp.router.load"].tolist() for n in self.layers})
        for n in self.layers:
            load = buffers[f"blocks.{n}.mlp.router.load"]
            if self.bias:
                buffers[f"blocks.{n}.mlp.router.expert_bias"] += RATE * (load.double().mean() - load).sign()
            load.zero_()

    def network(self, weights: Tensors, tokens: torch.Tensor, buffers: Tensors):
        """Tokens [b, s] -> (logits, {name of a mean: (its value, its weight in the loss)})."""

        def linear(name, x):
            weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
            y = x @ weight.reshape(-1, weight.shape[-1]).T
            return y if bias is None else y + bias.reshape(-1)

        def norm(name, x):
            return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

        def activation(x):
            return F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1] if self.gated else F.gelu(x, approximate="tanh")

        def experts(own, x):
            logits = linear(f"{own}.router", x)  # [b, s, E]
            bias = buffers.get(f"{own}.router.expert_bias", torch.zeros(self.experts))
            parts = self.router(logits, bias)
            chosen = (parts != 0).double().detach()
            buffers[f"{own}.router.load"] += chosen.sum((0, 1)).long()
            for name, (value, weight) in self.losses(logits, chosen).items():
                sums.setdefault(name, []).append((value, weight))
            parts = parts * self.kept(parts) if self.capacity else parts
            y, states = 0, x
            x = linear(f"{own}.latent_down", x) if self.latent else x
            for e in range(self.experts):
                of = lambda name, e=e: (
                    weights[f"{own}.experts.{name}.weight"][e],
                    weights.get(f"{own}.experts.{name}.bias"),
                )
                up, up_bias = of("up")
                down, down_bias = of("down")
                inner = x @ up.reshape(-1, x.shape[-1]).T + (0 if up_bias is None else up_bias[e].reshape(-1))
                outer = activation(inner) @ down.T + (0 if down_bias is None else down_bias[e])
                y = y + parts[..., e : e + 1] * outer
            x, y = states, linear(f"{own}.latent_up", y) if self.latent else y
            if self.shared:
                also = linear(f"{own}.shared.down", activation(linear(f"{own}.shared.up", x)))
                y = y + linear(f"{own}.shared_gate", x).sigmoid() * also
            return y

        (b, s), sums = tokens.shape, {}
        x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][:s]
        hidden = torch.ones(s, s).triu(1) > 0
        for n in range(LAYERS):
            own = f"blocks.{n}."
            qkv = linear(own + "attention.qkv", norm(own + "attention_norm", x)).view(b, s, HEADS, 3, -1)
            q, k, v = qkv.permute(3, 0, 2, 1, 4)
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
            x = x + linear(own + "attention.output", (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))
            u = norm(own + "mlp_norm", x)
            if n in self.layers:
                x = x + experts(f"{own}mlp", u)
            else:
                x = x + linear(own + "mlp.down", activation(linear(own + "mlp.up", u)))
        mean = lambda pairs: (sum(value for value, _ in pairs) / len(pairs), pairs[0][1] * len(pairs))
        means = {name: mean(pairs) for name, pairs in sums.items()}
        return norm("final_norm", x) @ weights["embedding.word.weight"].T, means

    def kept(self, parts: torch.Tensor) -> torch.Tensor:
        """[b, s, E]: 1 for the `capacity` pairs of each expert that come first in each micro-batch."""
        result = torch.zeros_like(parts)
        for start in range(0, len(parts), self.rows):
            # The rows of a micro-batch are [s, b]: tokens of all its samples, position by position.
            own = parts[start : start + self.rows].detach().transpose(0, 1).reshape(-1, self.experts)
            first = torch.arange(len(own), 0, -1).double() if self.by_position else None
            keep = torch.zeros_like(own)
            for e in range(self.experts):
                rank = (own[:, e] != 0) * (own[:, e] if first is None else first)
                best = rank.argsort(descending=True, stable=True)[: self.capacity]
                keep[best, e] = (rank[best] > 0).double()
            result[start : start + self.rows] = keep.view(parts.shape[1], self.rows, -1).transpose(0, 1)
        return result

    def train(self):
        """As `plain_state.train`; and the loads of experts in each step, by layer."""
        seen: list[dict] = []
        return *train(
            self.initial_weights(),
            lambda name: True,
            self.initial_buffers(),
            network=self.network,
            update_buffers=lambda buffers: self.update_buffers(buffers, seen),
        ), seen


# ---- routers ---------------------------------------------------------------------------------------------------------


def highest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[b, s, E]: 1 for the k highest."""
    return torch.zeros_like(scores).scatter(-1, scores.topk(k, -1).indices, 1.0).detach()


def softmax_of_chosen(k: int):
    """As Mixtral."""
    return lambda logits, bias: logits.masked_fill(highest(logits, k) == 0, -torch.inf).softmax(-1)


def softmax_of_all(k: int, factor: float = 1.0):
    """As OLMoE and DeepSeek-MoE."""
    return lambda logits, bias: factor * logits.softmax(-1) * highest(logits, k)


def sigmoid(k: int, factor: float):
    """As DeepSeek-V3, with a bias that counts for the choice only."""

    def route(logits, bias):
        scores = logits.sigmoid()
        chosen = scores * highest(scores + bias, k)
        return factor * chosen / chosen.sum(-1, keepdim=True)

    return route


def sequence_balance(weight: float, k: int):
    """The balance loss of each sequence (arXiv:2405.04434, eq. 17-19)."""

    def losses(logits, chosen):
        shares = chosen.sum(1) / (k * chosen.shape[1])
        return {
            "seq load balancing loss": ((shares * logits.softmax(-1).mean(1)).sum(-1).mean() * chosen.shape[-1], weight)
        }

    return losses


def batch_balance(name: str, weight: float, rows: int):
    """The balance loss of each `rows` sequences (arXiv:2101.03961, eq. 4), by their loads: "load balancing loss". Or by the
    loads of these and all before in the step (arXiv:2501.11873): "global load balancing loss".
    """

    def losses(logits, chosen):
        of_parts = lambda x: x.unflatten(0, (-1, rows)).sum((1, 2))  # [parts, E]
        loads = of_parts(chosen).cumsum(0) if name.startswith("global") else of_parts(chosen)
        means = of_parts(logits.softmax(-1)) / (rows * chosen.shape[1])
        value = (loads / loads.sum(-1, keepdim=True) * means).sum(-1).mean() * chosen.shape[-1]
        return {name: (value, weight)}

    return losses


def z_loss(weight: float):
    return lambda logits, chosen: {"router z loss": (logits.logsumexp(-1).square().mean(), weight)}


def both(*parts):
    return lambda logits, chosen: {name: pair for part in parts for name, pair in part(logits, chosen).items()}
