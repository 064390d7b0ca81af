# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (arXiv:2405.04434, section 2.1): keys and values of all heads come from one narrow latent of each
token, and one rotary key is shared by all heads.

    c_q = norm(x Wdq)      q = c_q Wuq             (or q = x Wq)
    c, k_r = x Wdkv        k, v = norm(c) Wukv
    scores = q . (rotate(k_r), k) scale

Down products and norms are replicated over tp, up products divide the heads. The latents reach the ranks through the up
products, whose backward passes sum their gradients; the rotary key has no such product, and is copied by itself.

Legend: s new tokens, b micro-batch, h hidden, g heads, of a head's keys d = ro + no channels, of its values v, kv channels
of the latent, tp ranks that divide the heads.
"""

import torch
from torch import nn

from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.kinds.attention.module import Attention
from megatron.model.kinds.mla.decode import CachedLatents
from megatron.model.layer_ops import UP
from megatron.model.norms import NORMS
from megatron.model.positions import rotate
from megatron.model.recompute import recompute_output
from megatron.model.weights import Table, take_prefix
from megatron.mpu import mappings
from megatron.mpu.layers import ColumnParallelLinear, ReplicatedLinear


class LatentAttention(Attention):
    """[s, b, h] -> [s, b, h]. weights: `kinds.mla.weights.latent_attention(...)`."""

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__(weights, setup)
        model = setup.model
        self.scale, self.queries, self.groups = model.latent_scale, 1, model.num_attention_heads // setup.tp.size
        self.latent, self.key_width, self.value_dim = model.kv_lora_rank, model.qk_head_dim, model.v_head_dim
        self.row_width = model.kv_lora_rank + model.qk_pos_emb_head_dim  # of a token in the cache
        self.recompute_up = UP in setup.recompute
        sequence_parallel = setup.sequence_parallel and setup.tp.size > 1
        self.tp, self.shared_by_heads = setup.tp, mappings.copy_to_tensor_model_parallel_region
        if sequence_parallel:
            self.shared_by_heads = mappings.gather_from_sequence_parallel_region

    def create_inputs(self, weights: Table, setup: LayerSetup) -> None:
        model, made = setup.model, lambda kind, name: kind(take_prefix(weights, name), setup.tp, **setup.linear)
        normed = lambda name: NORMS[model.normalization](
            take_prefix(weights, name), model.norm_epsilon, **setup.factory
        )
        norm = lambda name: normed(name) if model.qk_layernorm else nn.Identity()
        self.q = None
        if model.q_lora_rank is None:
            self.q = made(ColumnParallelLinear, "q")
        else:
            self.q_down, self.q_norm = made(ReplicatedLinear, "q_down"), norm("q_norm")
            self.q_up = made(ColumnParallelLinear, "q_up")
        self.kv_down, self.kv_norm = made(ReplicatedLinear, "kv_down"), norm("kv_norm")
        self.kv_up = made(ColumnParallelLinear, "kv_up")

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        source, latent, shared = self.latents(x)
        if context.cache is not None:
            row = torch.cat((latent, self.rotated_key(shared, context.angles).squeeze(2)), -1)
            query = self.rotated_queries(source, context.angles)
            attended = context.cache.attend(CachedLatents(self), query, row.unsqueeze(2), None, context)
        elif self.recompute_up:
            joined, reading = recompute_output(
                self.joined, source, latent, shared, context.angles, inside=context.region, of=(self,)
            )
            with reading:
                attended = self.attended(*self.split(joined), context)
        else:
            attended = self.attended(*self.of_heads(source, latent, shared, context.angles), context)
        return self.project(attended, x)

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(input of the queries' product [s, b, q_lora or h], latent [s, b, kv], rotary key [s, b, ro]).

        With sequence parallelism the first two are [s/tp, b, ...].
        """
        source = x if self.q is not None else self.q_norm(self.q_down(x))
        latent, shared = self.kv_down(x).split((self.latent, self.row_width - self.latent), -1)
        return source, self.kv_norm(latent), self.shared_by_heads(shared, self.tp)

    def of_heads(self, source, latent, shared, angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [s, b, g/tp, 1, d], keys [s, b, g/tp, d] and values [s, b, g/tp, v], from `latents`."""
        query = self.rotated_queries(source, angles)
        return query, *self.keys_and_values(latent, self.rotated_key(shared, angles))

    def rotated_queries(self, source, angles) -> torch.Tensor:
        """[s, b, g/tp, 1, d]"""
        query = (self.q_up if self.q is None else self.q)(source).unflatten(-1, (self.groups, 1, -1))
        return rotate(query, angles, self.plain_rope)

    def rotated_key(self, shared, angles) -> torch.Tensor:
        """[s, b, 1, ro]"""
        return rotate(shared[:, :, None, None], angles, self.plain_rope).squeeze(3)

    def keys_and_values(self, latent, shared) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all heads, from normalized latents [s, b, kv] and rotated keys [s, b, 1, ro]."""
        own, value = self.kv_up(latent).unflatten(-1, (self.groups, -1)).split((self.key_width, self.value_dim), -1)
        return torch.cat((shared.expand(-1, -1, self.groups, -1), own), -1), value

    def joined(self, source, latent, shared, angles) -> torch.Tensor:
        """`of_heads` as one tensor, [s, b, g/tp, 2 d + v], which the backward pass computes again."""
        query, key, value = self.of_heads(source, latent, shared, angles)
        return torch.cat((query.squeeze(3), key, value), -1)

    def split(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three tensors of `joined`."""
        d = (joined.shape[-1] - self.value_dim) // 2
        query, key, value = joined.split((d, d, self.value_dim), -1)
        return query.unsqueeze(3), key, value
