# SPDX-License-Identifier: Apache-2.0
"""GPT: a language model of `Block`s, causal, with positions learned or rotary; training, and generation with a cache."""

from dataclasses import replace
from typing import Optional

import torch

from megatron.fused_kernels.autocast import autocast_of
from megatron.model.attention import ForwardContext, allowed_pairs
from megatron.model.block import Block
from megatron.model.cache import Cache
from megatron.model.gpt.facts import GPTFacts
from megatron.model.language_model import LanguageModel
from megatron.model.positions import Rotary
from megatron.model.weights import Table
from megatron.mpu import mappings
from megatron.mpu.context_parallel import own_rows
from megatron.mpu.layers import linear
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Config, Model


class GPT(LanguageModel):
    """See `LanguageModel`, whose keywords it takes. A variant is a subclass with another `block_class`, and facts of
    its own where its layers have other weights: docs/extending.md.

    facts: what the model says of itself (default: what a GPT does)
    """

    block_class: type[Block] = Block

    def __init__(self, model: Model, mesh: Mesh, vocab_size: int, *, facts: Optional[GPTFacts] = None, **keywords):
        super().__init__(facts or GPTFacts(model, vocab_size), mesh, **keywords)
        self.rotary = None
        if model.position_embedding_type == "rope":
            self.rotary = Rotary(model)

    @classmethod
    def of(cls, config: Config, mesh: Mesh, facts: GPTFacts, **stage) -> "GPT":
        """What all settings of a run say. stage: the keywords layers, first, last, dtype, device."""
        return cls(
            facts.settings,
            mesh,
            facts.vocab_size,
            facts=facts,
            sequence_parallel=config.parallel.sequence_parallel,
            cp_comm_type=config.parallel.cp_comm_types,
            kernels=config.kernels,
            recompute=config.recompute,
            autocast=autocast_of(config.precision),
            seed=config.logging.seed,
            **stage,
        )

    def build_layer(self, layer: int, weights: Table, granularity: str) -> Block:
        return self.block_class(
            self.facts.settings,
            layer,
            self.tp,
            weights,
            seed=self.seed,
            kernels=self.kernels,
            sequence_parallel=self.sequence_parallel,
            recompute=granularity,
            cp=self.cp,
            by_heads=self.by_heads(layer),
            **self.factory_kwargs,
        )

    def context(self, batch) -> ForwardContext:
        made = self._context(batch.tokens.shape, batch.position_ids, batch.document_ids, batch.samples)
        return replace(made, batch=batch)

    def logits(
        self,
        tokens: torch.Tensor,
        *,
        cache: Optional[Cache] = None,
        position_ids=None,
        document_ids=None,
        last_only: bool = False,
        wanted: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Scores of the next token: tokens [s, b] -> [s, b, vocabulary] fp32 ([1, b, vocabulary] with `last_only`;
        [k, vocabulary] with `wanted`, bool [s, b]: those of its k true places, in the order of `tokens[wanted]`).

        With a cache, `tokens` follow those that it holds and are added to it. position_ids [s, b]: default counts
        from the cache's length. document_ids [s, b]: tokens see only tokens of the same id; padding gets its own.
        Call `eval()` first: there is no sample to draw dropout for.
        """
        assert self.first and self.last and self.cp.size == 1, "logits need a whole model and whole sequences"
        with self.region():
            x = self.embedding(tokens, self._positions(tokens.shape[0], position_ids, cache), None)
            x, _ = self.run_layers(x, self._context(tokens.shape, position_ids, document_ids, None, cache))
            if cache is not None:
                cache.length += tokens.shape[0]
            x = self.gather_input(self.final_norm(x), self.tp)
            x = x[-1 if last_only else 0 :] if wanted is None else x[wanted]
            scores = mappings.gather_from_tensor_model_parallel_region(linear(x, self.output_weight), self.tp)[
                ..., : self.vocab_size
            ].float()
            return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def _positions(self, s: int, position_ids, cache: Optional[Cache] = None) -> torch.Tensor:
        return self.positions(s, position_ids, 0 if cache is None else cache.length)

    def _context(self, shape, position_ids, document_ids, samples, cache: Optional[Cache] = None) -> ForwardContext:
        angles = allowed = None
        if self.rotary is not None:
            angles = self.rotary.angles(self._positions(shape[0], position_ids, cache), self.dtype)
        keys = document_ids if cache is None else cache.extend_documents(document_ids, shape[0])
        allowed_of_all = None
        if keys is not None and self.cp.size > 1:
            ways = [self.by_heads(int(layer)) for layer in self.blocks]
            rows = own_rows(torch.arange(len(keys), device=keys.device), self.cp)
            allowed = None if all(ways) else allowed_pairs(keys[rows], keys, rows)
            allowed_of_all = allowed_pairs(keys, keys) if any(ways) else None
        elif keys is not None:
            allowed = allowed_pairs(keys[-shape[0] :], keys)
        return ForwardContext(samples, angles, allowed, allowed_of_all, cache, self.region)
