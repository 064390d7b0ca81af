# SPDX-License-Identifier: Apache-2.0
"""GPTs in plain torch, in one process, in fp64, whose queries and keys are clipped after each update: QK-clip as
arXiv:2507.20534 (section 2.1) and Megatron-LM have it, head by head.
"""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from megatron.mpu.random import seed_of
from tests.models.plain_latent import FAMILIES as LATENTS
from tests.models.plain_latent import Latent
from tests.models.plain_state import EOD, HEADS, HIDDEN, LAYERS, LENGTH, Tensors, initial_weights, train

ALPHA = 0.3
WIDTH = HIDDEN // HEADS


class Largest(dict):
    """(layer's prefix, head) -> the largest logit of a step."""

    def see(self, own: str, head: int, scores: torch.Tensor) -> None:
        self[own, head] = max(self.get((own, head), 0.0), scores.max().item())

    def eta(self, own: str, heads: range, threshold: float) -> float:
        largest = max(self[own, head] for head in heads)
        return min(threshold / largest, 1.0) if largest > 0 else 1.0


@dataclass(frozen=True)
class Heads:
    """Self-attention with `groups` keys and values, and the same in flags."""

    threshold: float
    flags: str = ""
    groups: int = HEADS
    gated: bool = False
    window: int = LENGTH
    cap: float = 0.0
    apart: bool = False
    ffn: int = 4 * HIDDEN
    lacks: str = ""
    own: dict[int, dict] = field(default_factory=dict)  # layer -> what it has for itself
    largest: Largest = field(default_factory=Largest)

    @property
    def queries(self) -> int:
        return HEADS // self.groups

    def at(self, layer: int) -> "Heads":
        """What a layer is."""
        return replace(self, own={}, **self.own.get(layer, {}))

    def matrices(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Name in a layer -> shape and standard deviation."""
        small, rows = 0.05 / math.sqrt(2 * LAYERS), self.queries * (1 + self.gated) + 2
        return {
            "attention.qkv": ((self.groups, rows, WIDTH, HIDDEN), 0.05),
            "mlp.up": ((self.ffn, HIDDEN), 0.05),
            "mlp.down": ((HIDDEN, self.ffn), small),
        }

    def initial_weights(self) -> Tensors:
        weights = initial_weights()
        for name, (shape, std) in (
            (f"blocks.{n}.{name}", how) for n in range(LAYERS) for name, how in self.at(n).matrices().items()
        ):
            generator = torch.Generator().manual_seed(seed_of(1234, f"{name}.weight", 0))
            weights[f"{name}.weight"] = torch.empty(shape).normal_(0.0, std, generator=generator).double()
            weights[f"{name}.bias"] = torch.zeros(shape[:-1]).double()
        gone = tuple(f"blocks.{n}.{part}" for n in range(LAYERS) if (part := self.at(n).lacks))
        return {name: values for name, values in weights.items() if not (gone and name.startswith(gone))}

    def network(self, weights: Tensors, tokens: torch.Tensor, buffers=None) -> torch.Tensor:
        """Tokens [b, s] -> logits [b, s, vocabulary]."""

        def linear(name, x):
            weight = weights[f"{name}.weight"]
            return x @ weight.reshape(-1, weight.shape[-1]).T + weights[f"{name}.bias"].reshape(-1)

        def norm(name, x):
            return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

        b, s = tokens.shape
        x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][:s]
        for n in range(LAYERS):
            own, layer = f"blocks.{n}.", self.at(n)
            if layer.lacks != "attention":
                attended = layer.attention(own, linear(f"{own}attention.qkv", norm(f"{own}attention_norm", x)), tokens)
                x = x + linear(f"{own}attention.output", attended)
            if layer.lacks != "mlp":
                wide = F.gelu(linear(f"{own}mlp.up", norm(f"{own}mlp_norm", x)), approximate="tanh")
                x = x + linear(f"{own}mlp.down", wide)
        return norm("final_norm", x) @ weights["embedding.word.weight"].T

    def attention(self, own: str, qkv: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The outputs of all heads, from their queries, keys and values."""
        b, s = tokens.shape
        seen = torch.ones(s, s, dtype=torch.bool).tril().triu(-self.window).repeat(b, 1, 1)
        for row, at in (tokens == EOD).nonzero().tolist() if self.apart else ():
            seen[row, at + 1 :, : at + 1] = False
        parts, results = qkv.view(b, s, self.groups, -1, WIDTH), []
        for head in range(HEADS):
            group, place = divmod(head, self.queries)
            query, (key, value) = parts[:, :, group, place], parts[:, :, group, -2:].unbind(2)
            scores = (query @ key.transpose(1, 2) / math.sqrt(WIDTH)).masked_fill(~seen, -torch.inf)
            self.largest.see(own, head, scores)
            scores = self.cap * (scores / self.cap).tanh() if self.cap else scores
            result = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
            if self.gated:
                result = result * parts[:, :, group, self.queries + place].sigmoid()
            results.append(result)
        return torch.cat(results, -1)

    def clip(self, weights: Tensors) -> dict:
        """Scale the weights of heads, and forget their logits."""
        for n in range(LAYERS):
            own, layer = f"blocks.{n}.", self.at(n)
            for group in range(layer.groups if layer.lacks != "attention" else 0):
                first = group * layer.queries
                eta = self.largest.eta(own, range(first, first + layer.queries), self.threshold)
                rows = weights[f"{own}attention.qkv.weight"][group]
                rows[: layer.queries] *= eta**ALPHA
                rows[-2] *= eta ** (1 - ALPHA)
        return forget(self.largest)

    def train(self):
        return train(self.initial_weights(), lambda name: True, network=self.network, after_update=self.clip)


@dataclass(frozen=True)
class ClippedLatent(Latent):
    """Multi-latent attention: the rotary key, which all heads share, stays."""

    threshold: float = 0.0
    largest: Largest = field(default_factory=Largest)

    def watch(self, own: str, head: int, scores: torch.Tensor) -> None:
        self.largest.see(own, head, scores)

    def clip(self, weights: Tensors) -> dict:
        for n in range(LAYERS):
            own = f"blocks.{n}.attention."
            for head in range(HEADS):
                eta = self.largest.eta(own, range(head, head + 1), self.threshold)
                queries = weights[f"{own}{'q_up' if self.q else 'q'}.weight"][head]
                queries[: self.rotated] *= eta
                queries[self.rotated :] *= eta**ALPHA
                weights[f"{own}kv_up.weight"][head, : self.own] *= eta ** (1 - ALPHA)
        return forget(self.largest)

    def train(self):
        return train(self.initial_weights(), lambda name: True, network=self.network, after_update=self.clip)


def forget(largest: Largest) -> dict:
    """What a step logs. The next one begins without logits."""
    value = max(largest.values())
    largest.clear()
    return {"max_attention_logit": value}


def latent(name: str, threshold: float) -> ClippedLatent:
    return ClippedLatent(**{k: v for k, v in vars(LATENTS[name]).items()}, threshold=threshold)


GROUPS = "--group-query-attention --num-query-groups 2"
FAMILIES = {
    "heads": Heads(0.2),
    "groups": Heads(0.2, GROUPS, groups=2),
    # Shards of ZeRO end inside the weights of queries and keys, and inside a head.
    "narrow": Heads(0.2, f"{GROUPS} --ffn-hidden-size 8", groups=2, ffn=8),
    "gates": Heads(0.15, f"{GROUPS} --attention-output-gate", groups=2, gated=True),
    "documents, window": Heads(0.15, "--reset-attention-mask --window-size 3,0", window=3, apart=True),
    "cap": Heads(0.2, "--attn-logit-softcapping 0.1", cap=0.1),
    "latent": latent("both", 0.05),
    "latent, one product for queries": latent("keys and values", 0.02),
}
