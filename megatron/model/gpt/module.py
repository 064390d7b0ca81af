# SPDX-License-Identifier: Apache-2.0
"""GPT: a causal language model of `Layer`s with learned or rotary positions; training, and generation with a cache."""

from typing import Any, Optional, Union

import torch

from megatron.fused_kernels.documents import Documents, starts_of
from megatron.model.cache import PagedCache
from megatron.model.context import ForwardContext, sharing_of
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.attention.module import allowed_pairs, documents_of_chunks
from megatron.model.language_model import LanguageModel
from megatron.model.passed_states import documents_of_halves
from megatron.model.positions import Rotary
from megatron.model.ring_attention import ring_steps_of_documents
from megatron.mpu import mappings
from megatron.mpu.cross_entropy import ordered_logits
from megatron.mpu.layers import LinearOptions, linear
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model


class GPT(LanguageModel):
    """See `LanguageModel` for its keywords. A variant has facts with other mixers or branches, or another `layer_class`:
    docs/extending.md.

    model: its facts; or settings, of a GPT with `vocab_size` rows of the embedding
    """

    def __init__(self, model: Union[Model, GPTFacts], mesh: Mesh, vocab_size: int = 0, **keywords):
        super().__init__(model if isinstance(model, GPTFacts) else GPTFacts(model, vocab_size), mesh, **keywords)
        model = self.facts.settings
        self.rotary = self.local_rotary = None
        if model.position_embedding_type == "rope":
            width = self.facts.rotated
            self.rotary = Rotary(model, width=width)
            if model.rope_local_base_freq is not None:
                self.local_rotary = Rotary(model, model.rope_local_base_freq, width)

    def context(self, batch) -> ForwardContext:
        angles = self._angles(len(batch.tokens), batch.position_ids)
        return ForwardContext(batch.samples, **angles, region=self.region, batch=batch, **self._documents(batch))

    def logits(
        self,
        tokens: torch.Tensor,
        *,
        cache: Optional[PagedCache] = None,
        position_ids=None,
        document_ids=None,
        last_only: bool = False,
        wanted: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Scores of the next token: tokens [s, b] -> [s, b, vocabulary] fp32 ([1, b, vocabulary] with `last_only`;
        [k, vocabulary] with `wanted`: for its k true positions, in the order of `tokens[wanted]`, or for k rows).

        wanted: bool [s, b], or the indices [k] of rows among the s b ones.
        position_ids [s, b]: by default they count from 0. document_ids [s, b]: tokens see only tokens of the same id;
        padding gets its own. With a cache, `tokens` [n, 1] are new ones of several texts, which follow those in the cache
        and are added to it; `cache.begin` has specified texts and positions.
        Call `eval()` first: dropout needs a training sample.
        """
        assert self.first and self.last and self.cp.size == 1, "logits need a whole model and whole sequences"
        places = dict(position_ids=position_ids, document_ids=document_ids)
        return self.cached_pass(None, tokens, cache=cache, **places, last_only=last_only, wanted=wanted)

    def cached_pass(
        self,
        x: Optional[torch.Tensor],
        tokens: torch.Tensor,
        *,
        cache: Optional[PagedCache],
        position_ids=None,
        document_ids=None,
        last_only: bool = False,
        wanted: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """The part of `logits` that this stage computes: [s, b, h], or the scores on the last stage.

        x: [s, b, h] of the previous stage; None on the first, which embeds the tokens.
        """
        if cache is not None:
            position_ids = cache.position_ids(tokens.device)
        with self.region():
            if self.first:
                x = self.embedding(tokens, self.positions(tokens.shape[0], position_ids), None)
            x, _ = self.run_layers(x, self._context(tokens.shape[0], position_ids, document_ids, cache))
            if not self.last:
                return x.to(self.dtype)
            x = self.gather_input(self.final_norm(x), self.tp)
            x = x[-1 if last_only else 0 :] if wanted is None else x.flatten(0, 1)[wanted.flatten()]
            if x.shape[0] == 0:
                return x.new_empty((0, self.vocab_size), dtype=torch.float32)
            if self.ordered:
                scores = ordered_logits(x.flatten(0, -2), self.output_weight, self.tp, self.output_layer.packed)
                scores = scores.unflatten(0, x.shape[:-1])
            else:
                scores = linear(x, self.output_weight, None, LinearOptions(packed=self.output_layer.packed))
            scores = mappings.gather_from_tensor_model_parallel_region(scores, self.tp)
            scores = scores[..., : self.vocab_size].float()
            return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def _angles(self, s: int, position_ids) -> dict[str, Any]:
        """The fields of a context for rotary positions."""
        if self.rotary is None:
            return {}
        positions = self.positions(s, position_ids)
        local = self.local_rotary and self.local_rotary.angles(positions, self.dtype)
        return dict(angles=self.rotary.angles(positions, self.dtype), local_angles=local)

    def _context(self, s: int, position_ids, document_ids, cache: Optional[PagedCache]) -> ForwardContext:
        """The context of s tokens without labels. Documents are a mask of all pairs."""
        allowed = None if document_ids is None else allowed_pairs(document_ids)
        return ForwardContext(**self._angles(s, position_ids), allowed=allowed, cache=cache, region=self.region)

    def _documents(self, batch) -> dict[str, Any]:
        """The fields of a context for packed documents that the layers need."""
        if batch.document_ids is None:
            return {}
        device = batch.document_ids.device
        starts = starts_of(batch.document_ids) if batch.document_starts is None else batch.document_starts
        by_sharing = {}  # the windows of mixers with the same way to share sequences
        for layer in (*map(int, self.blocks), *(self.facts.settings.layers_ahead if self.mtp else ())):
            for model, mixer in self.facts.mixers_of([layer]):
                if mixer.mixes_tokens:
                    sharing = sharing_of(mixer, model, self.mesh, self.sharing(layer))
                    by_sharing.setdefault((mixer.scans, sharing), set()).add(model.window)
        whole, of_chunks, of_ring, of_halves = None, {}, {}, {}
        for (scans, sharing), windows in by_sharing.items():
            rows = sharing.rows
            if rows.size == 1:
                whole = whole or Documents.of(starts, device)
            elif scans:
                of_halves[rows.size] = documents_of_halves(starts, rows, device)
            elif sharing.ring:
                of_ring |= {(rows.size, w): ring_steps_of_documents(starts, rows, w, device) for w in windows}
            else:
                of_chunks |= documents_of_chunks(starts, rows, windows, device)
        found = dict(of_chunks=of_chunks, of_ring=of_ring, of_halves=of_halves)
        return dict(documents=whole, **{name: of or None for name, of in found.items()})
