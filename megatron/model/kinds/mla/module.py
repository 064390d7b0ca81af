# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (arXiv:2405.04434, section 2.1): keys and values of all heads come from one narrow latent of each
token, and one rotary key is shared by all heads.

    c_q = norm(x Wdq)      q = c_q Wuq             (or q = x Wq)
    c, k_r = x Wdkv        k, v = norm(c) Wukv
    scores = q . (rotate(k_r), k) scale

Down products and norms are replicated over tp, up products divide the heads. The latents reach the ranks through the up
products, whose backward passes sum their gradients; the rotary key has no such product, and is copied by itself.

Ranks of context parallelism that gather (`allgather`) send latents and rotated keys, and each expands those of all ranks
for its heads; the backward pass gathers and expands them again.

Legend: s new tokens, b micro-batch, h hidden, g heads, of a head's keys d = ro + no channels, of its values v, kv channels
of the latent, tp ranks that divide the heads, t tokens of all ranks of context parallelism.
"""

from contextlib import nullcontext

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
from megatron.mpu.context_parallel import gather_from_context_parallel_region, in_order
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
        self.sequence_parallel = sequence_parallel
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
        elif self.sends_latents:  # `gathered` expands them
            query = source if self.recompute_up else self.rotated_queries(source, context.angles)
            attended = self.attended(query, latent, self.rotated_key(shared, context.angles), context)
        elif self.recompute_up:
            joined, reading = recompute_output(
                self.joined, source, latent, shared, context.angles, inside=context.region, of=(self,)
            )
            with reading:
                attended = self.attended(*self.split(joined), context)
        else:
            attended = self.attended(*self.of_heads(source, latent, shared, context.angles), context)
        return self.project(attended, x)

    @property
    def sends_latents(self) -> bool:
        """Whether ranks of context parallelism send latents, not keys and values: not if the product that expands them
        draws random numbers for the rank's own rows.
        """
        sharing, product = self.sharing, self.kv_up.product
        return sharing.rows.size > 1 and not sharing.ring and not (product is not None and product.draws_samples)

    def gathered(self, query, key, value, context: ForwardContext):
        """As that of `Attention`. If it sends latents: key: latents [s, b, kv] ([s/tp, b, kv] with sequence parallelism);
        value: rotated keys [s, b, 1, ro]; query: with `recompute_up` the input of its product.
        """
        if not self.sends_latents:
            return super().gathered(query, key, value, context)
        g, t = self.groups, len(value) * self.sharing.rows.size
        if not self.gather_again:
            query = self.rotated_queries(query, context.angles) if self.recompute_up else query
            return (query, *self.keys_and_values_of_all(key, value)), nullcontext()

        def flat(latent, shared, *source) -> torch.Tensor:
            """In one tensor, which the backward pass computes again."""
            queries = [self.rotated_queries(*source, context.angles)] if source else []
            return torch.cat([part.flatten() for part in (*self.keys_and_values_of_all(latent, shared), *queries)])

        given = (key, value, query) if self.recompute_up else (key, value)
        joined, reading = recompute_output(flat, *given, inside=context.region, of=(self,))
        d, v, b = self.row_width - self.latent + self.key_width, self.value_dim, value.shape[1]
        sizes = t * b * g * d, t * b * g * v, len(value) * b * g * d * self.recompute_up
        key, value, queries = joined.split(sizes)
        query = queries.view(-1, b, g, 1, d) if self.recompute_up else query
        return (query, key.view(t, b, g, d), value.view(t, b, g, v)), reading

    def keys_and_values_of_all(self, latent, shared) -> tuple[torch.Tensor, torch.Tensor]:
        """`keys_and_values` of all ranks of context parallelism, in the sequence's order: [t, b, g/tp, d] and [..., v]."""
        rows, shared = self.sharing.rows, gather_from_context_parallel_region(shared, self.sharing.rows)
        if not self.sequence_parallel:
            return self.keys_and_values(gather_from_context_parallel_region(latent, rows), shared)
        latent = mappings.gather_from_sequence_parallel_region(latent, rows)  # [t/tp, b, kv], rank after rank of cp
        expanded = self.kv_up(latent).unflatten(0, (self.tp.size, rows.size, -1)).transpose(0, 1).flatten(0, 2)
        return self._joined_with(in_order(expanded, rows.size), shared)

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
        return self._joined_with(self.kv_up(latent), shared)

    def _joined_with(self, expanded, shared) -> tuple[torch.Tensor, torch.Tensor]:
        own, value = expanded.unflatten(-1, (self.groups, -1)).split((self.key_width, self.value_dim), -1)
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
