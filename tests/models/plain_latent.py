# SPDX-License-Identifier: Apache-2.0
"""A GPT with multi-latent attention in plain torch, in one process, in fp64: head by head, from the formulas of
arXiv:2405.04434, section 2.1, and of YaRN's temperature in DeepSeek's own code.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.mpu.random import seed_of
from tests.models.plain_state import HEADS, HIDDEN, LAYERS, VOCABULARY, Tensors, train

FFN = 64


@dataclass(frozen=True)
class Latent:
    """A kind of model: its flags, and the same in plain torch. q: of the queries' latent, 0: none; scale: of scores;
    stretch: of rotated channels.
    """

    flags: str
    q: int
    kv: int
    own: int
    rotated: int
    value: int
    normed: bool = True
    scale: float = 0.0
    stretch: float = 1.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in a layer -> shape of each matrix."""
        keys = self.rotated + self.own
        down, up = ((self.q, HIDDEN), (HEADS, keys, self.q)) if self.q else (None, None)
        found = {"attention.q_down": down, "attention.q_up": up} if self.q else {"attention.q": (HEADS, keys, HIDDEN)}
        return found | {
            "attention.kv_down": (self.kv + self.rotated, HIDDEN),
            "attention.kv_up": (HEADS, self.own + self.value, self.kv),
            "attention.output": (HIDDEN, HEADS * self.value),
            "mlp.up": (2, FFN, HIDDEN),
            "mlp.down": (HIDDEN, FFN),
        }

    def initial_weights(self) -> Tensors:
        drawn, ones = {"embedding.word.weight": ((VOCABULARY, HIDDEN), 0.05)}, {"final_norm": HIDDEN}
        for n in range(LAYERS):
            for name, shape in self.shapes().items():
                std = 0.05 / math.sqrt(2 * LAYERS) if name in ("attention.output", "mlp.down") else 0.05
                drawn[f"blocks.{n}.{name}.weight"] = shape, std
            ones |= {f"blocks.{n}.{half}_norm": HIDDEN for half in ("attention", "mlp")}
            if self.normed:
                widths = {"q_norm": self.q, "kv_norm": self.kv}
                ones |= {f"blocks.{n}.attention.{name}": width for name, width in widths.items() if width}
        weights = {f"{name}.weight": torch.ones(width) for name, width in ones.items()}
        for name, (shape, std) in drawn.items():
            generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
            weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
        return {name: values.double() for name, values in weights.items()}

    def network(self, weights: Tensors, tokens: torch.Tensor, buffers=None) -> torch.Tensor:
        """Tokens [b, s] -> logits [b, s, vocabulary]."""

        def norm(name, x):
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

        hidden = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1) > 0
        x = weights["embedding.word.weight"][tokens]
        for n in range(LAYERS):
            own = f"blocks.{n}."
            attended = self.attention(weights, f"{own}attention.", norm(f"{own}attention_norm", x), hidden, norm)
            x = x + attended @ weights[f"{own}attention.output.weight"].T
            gate, value = torch.einsum("bsh,gfh->gbsf", norm(f"{own}mlp_norm", x), weights[f"{own}mlp.up.weight"])
            x = x + (F.silu(gate) * value) @ weights[f"{own}mlp.down.weight"].T
        return norm("final_norm", x) @ weights["embedding.word.weight"].T

    def attention(self, weights: Tensors, own: str, x, hidden, norm) -> torch.Tensor:
        """[b, s, h] -> [b, s, heads value]"""
        normed = lambda name, latent: norm(f"{own}{name}", latent) if self.normed else latent
        if self.q:
            source, of_queries = normed("q_norm", x @ weights[f"{own}q_down.weight"].T), weights[f"{own}q_up.weight"]
        else:
            source, of_queries = x, weights[f"{own}q.weight"]
        latent, shared = (x @ weights[f"{own}kv_down.weight"].T).split((self.kv, self.rotated), -1)
        latent, shared, heads = normed("kv_norm", latent), self.turned(shared), []
        for g in range(HEADS):
            turned, plain = (source @ of_queries[g].T).split((self.rotated, self.own), -1)
            key, value = (latent @ weights[f"{own}kv_up.weight"][g].T).split((self.own, self.value), -1)
            scores = self.turned(turned) @ shared.transpose(1, 2) + plain @ key.transpose(1, 2)
            scores = (scores * (self.scale or (self.own + self.rotated) ** -0.5)).masked_fill(hidden, -torch.inf)
            self.watch(own, g, scores)
            heads.append(scores.softmax(-1) @ value)
        return torch.cat(heads, -1)

    def watch(self, own: str, head: int, scores: torch.Tensor) -> None:
        """Called with the masked scores [b, s, s] of each head."""

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Pairs of channels (i, i + n/2) turned by position x 10000^(-2i/n), and stretched."""
        half = self.rotated // 2
        frequencies = 10000.0 ** -(torch.arange(half).double() / half)
        angles = torch.arange(x.shape[1]).double()[:, None] * frequencies
        a, b = x.split(half, -1)
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        return torch.cat(turned, -1) * self.stretch

    def train(self):
        return train(self.initial_weights(), lambda name: True, network=self.network)


COMMON = (
    "--multi-latent-attention --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--ffn-hidden-size 64"
)
_HEAT = lambda mscale: 0.1 * mscale * math.log(4) + 1
FAMILIES = {
    # As DeepSeek-V3. The one frequency of two rotated channels is above those that YaRN scales.
    "both": Latent(
        f"{COMMON} --qk-layernorm --q-lora-rank 10 --kv-lora-rank 6 --qk-head-dim 4 --qk-pos-emb-head-dim 2 "
        "--v-head-dim 3 --rotary-scaling-factor 4 --mscale 0.5 --mscale-all-dim 0.7",
        q=10,
        kv=6,
        own=4,
        rotated=2,
        value=3,
        scale=_HEAT(0.7) ** 2 / 6**0.5,
        stretch=_HEAT(0.5) / _HEAT(0.7),
    ),
    # As DeepSeek-V2-Lite, without norms, values as wide as keys.
    "keys and values": Latent(
        f"{COMMON} --kv-lora-rank 6 --qk-head-dim 3 --qk-pos-emb-head-dim 4 --v-head-dim 7",
        q=0,
        kv=6,
        own=3,
        rotated=4,
        value=7,
        normed=False,
    ),
}
