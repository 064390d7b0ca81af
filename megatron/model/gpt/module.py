# SPDX-License-Identifier: Apache-2.0
"""GPT: embedding, blocks, final norm, output layer; whole, or the part of it that a pipeline stage holds.

Legend: s sequence, b micro-batch, h hidden, v vocabulary, tp ranks that divide each matrix. Activations are [s, b, h],
or [s/tp, b, h] between layers under sequence parallelism.
"""

from contextlib import nullcontext
from typing import Optional

import torch
from torch import nn

from megatron.fused_kernels.autocast import Autocast
from megatron.model import recompute as recomputation
from megatron.model.attention import Context, allowed_pairs
from megatron.model.block import Block
from megatron.model.cache import Cache
from megatron.model.norms import NORMS
from megatron.model.positions import LearnedPositions, Rotary
from megatron.model.recompute_plan import plan
from megatron.mpu import mappings
from megatron.mpu.cross_entropy import linear_cross_entropy, token_losses
from megatron.mpu.deferred_wgrad import WeightGradients
from megatron.mpu.layers import VocabParallelEmbedding, linear
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import Dropout
from megatron.settings.schema import Kernels, Model, Recompute


class GPT(nn.Module):
    """The layers `layers` (default: all) of a GPT, with the embedding if `first` and norm, output and loss if `last`.

    Parameters are created empty: `mpu.random.init_parameter` fills them as `mpu.placement.placements(model)` says.
    They are named by logical, global names (`blocks.17.attention.qkv.weight`), so a stage of any layout names them
    alike. A last stage that is not the first holds a copy of a tied `embedding.word.weight`.

    dtype: the format of weights and of what goes from stage to stage. autocast: other formats inside, op by op.
    """

    weight_gradients: Optional[WeightGradients] = (
        None  # of the output layer; set by `deferred.attach`, as those of others
    )

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        vocab_size: int,
        *,
        layers: Optional[range] = None,
        first: bool = True,
        last: bool = True,
        sequence_parallel: bool = False,
        kernels: Optional[Kernels] = None,
        recompute: Optional[Recompute] = None,
        autocast: Optional[Autocast] = None,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
        device=None,
    ):
        super().__init__()
        self.region = nullcontext if autocast is None else lambda: autocast  # that the layers run in
        self.first, self.last, self.tp, self.vocab_size = first, last, mesh.tp, vocab_size
        self.dtype, self.kernels, self.label_smoothing = dtype, kernels or Kernels(), model.label_smoothing
        sequence_parallel = sequence_parallel and mesh.tp.size > 1
        common = dict(sequence_parallel=sequence_parallel, dtype=dtype, device=device)
        tied = not model.untie_embeddings_and_output_weights
        if first or (last and tied):
            self.embedding = Embedding(model, mesh, vocab_size, seed=seed, only_output=not first, **common)
        self.rotary = None
        if model.position_embedding_type == "rope":
            self.rotary = Rotary(model.head_dim, model.rotary_base, model.rotary_percent)
        layers = range(model.num_layers) if layers is None else layers
        self.layer_groups = plan(layers, recompute or Recompute())
        again = {n: group.again for group in self.layer_groups for n in group.layers}
        self.blocks = nn.ModuleDict(
            {
                str(n): Block(model, n, mesh.tp, seed=seed, kernels=self.kernels, again=again[n], **common)
                for n in layers
            }
        )
        if self.kernels.torch_compile:
            for block in self.blocks.values():
                block.compile()
        if last:
            partial = ("tp",) if sequence_parallel else ()
            norm = NORMS[model.normalization]
            self.final_norm = norm(model.hidden_size, model.norm_epsilon, partial, dtype=dtype, device=device)
            self.output = None if tied else _word_table(model, mesh, vocab_size, **common)
            self.enter_output = mappings.gather_sequence if sequence_parallel else mappings.copy_to

    def forward(self, x: Optional[torch.Tensor], batch):
        """One micro-batch through these layers.

        x: None on the first stage, else what the stage before returned, [s, b, h]. batch: a `MicroBatch`.
        Returns [s, b, h], or on the last stage (sum of masked losses, number of tokens that count), fp32 scalars.
        """
        with self.region():
            x = self._hidden(x, batch)
            if not self.last:
                return x
            mask = None if batch.loss_mask is None else batch.loss_mask.reshape(-1)
            loss = linear_cross_entropy(
                x.flatten(0, 1),
                self._output_weight(),
                batch.labels.reshape(-1),
                mask=mask,
                vocab_size=self.vocab_size,
                tp=self.tp,
                label_smoothing=self.label_smoothing if self.training else 0.0,
                chunk=self.kernels.cross_entropy_chunk,
                later=self.weight_gradients,
            )
        return loss, loss.new_full((), batch.labels.numel()) if mask is None else mask.sum()

    @torch.no_grad()
    def token_losses(self, x: Optional[torch.Tensor], batch) -> torch.Tensor:
        """As `forward`, but the last stage returns the cross-entropy of each token, [s, b] fp32, unmasked."""
        with self.region():
            x = self._hidden(x, batch)
            if not self.last:
                return x
            losses = token_losses(
                x.flatten(0, 1),
                self._output_weight(),
                batch.labels.reshape(-1),
                vocab_size=self.vocab_size,
                tp=self.tp,
                chunk=self.kernels.cross_entropy_chunk,
            )
        return losses.view(batch.labels.shape)

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
        assert self.first and self.last, "logits need a whole model"
        with self.region():
            x = self.embedding(tokens, self._positions(tokens.shape[0], position_ids, cache), None)
            x = self._run(x, self._context(tokens.shape, position_ids, document_ids, None, cache))
            if cache is not None:
                cache.length += tokens.shape[0]
            x = self.enter_output(self.final_norm(x), self.tp)
            x = x[-1 if last_only else 0 :] if wanted is None else x[wanted]
            return mappings.join_last(linear(x, self._output_weight()), self.tp)[..., : self.vocab_size].float()

    def _hidden(self, x, batch) -> torch.Tensor:
        """The micro-batch up to the output layer: [s, b, h], whole along s on the last stage."""
        if self.first:
            x = self.embedding(batch.tokens, self._positions(len(batch.tokens), batch.position_ids), batch.samples)
        x = self._run(x, self._context(batch.tokens.shape, batch.position_ids, batch.document_ids, batch.samples))
        return self.enter_output(self.final_norm(x), self.tp) if self.last else x.to(self.dtype)

    def _positions(self, s: int, position_ids, cache: Optional[Cache] = None) -> torch.Tensor:
        """[s, b] as given, or [s, 1] counted on from the cache's length."""
        if position_ids is not None:
            return position_ids
        start = 0 if cache is None else cache.length
        return torch.arange(start, start + s, device=next(self.parameters()).device).unsqueeze(1)

    def _context(self, shape, position_ids, document_ids, samples, cache: Optional[Cache] = None) -> Context:
        angles = allowed = None
        if self.rotary is not None:
            angles = self.rotary.angles(self._positions(shape[0], position_ids, cache), self.dtype)
        keys = document_ids if cache is None else cache.extend_documents(document_ids, shape[0])
        if keys is not None:
            allowed = allowed_pairs(keys[-shape[0] :], keys)
        return Context(samples, angles, allowed, cache, self.region)

    def _run(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        for group in self.layer_groups:
            if group.again == "full":
                x = recomputation.again(self._layers, group.layers, x, context, inside=self.region)
            else:
                x = self._layers(group.layers, x, context)
        return x

    def _layers(self, layers, x: torch.Tensor, context: Context) -> torch.Tensor:
        for n in layers:
            x = self.blocks[str(n)](x, context)
        return x

    def _output_weight(self) -> torch.Tensor:
        return self.embedding.word.weight if self.output is None else self.output.weight


class Embedding(nn.Module):
    """Tokens and positions -> [s, b, h] (or [s/tp, b, h]); `only_output`: the word table alone, for a tied output."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        vocab_size: int,
        *,
        seed: int,
        only_output: bool,
        sequence_parallel: bool,
        dtype,
        device,
    ):
        super().__init__()
        common = dict(sequence_parallel=sequence_parallel, dtype=dtype, device=device)
        self.word = _word_table(model, mesh, vocab_size, **common)
        self.position = None
        if model.position_embedding_type == "learned_absolute" and not only_output:
            partial = ("tp",) if sequence_parallel else ()  # each rank looks up its own part of the sequence
            self.position = LearnedPositions(
                model.position_table, model.hidden_size, model.init_method_std, partial, dtype=dtype, device=device
            )
        self.tp, self.sequence_parallel = mesh.tp, sequence_parallel
        self.dropout = Dropout(model.hidden_dropout, "embedding", -1, seed, axis=mesh.tp if sequence_parallel else None)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, samples) -> torch.Tensor:
        """tokens [s, b], position_ids [s, b or 1]."""
        x = self.word(tokens)
        if self.position is not None:
            if self.sequence_parallel:
                position_ids = position_ids.chunk(self.tp.size)[self.tp.rank]
            x = x + self.position(position_ids)
        return self.dropout(x, samples)


def _word_table(model: Model, mesh: Mesh, vocab_size: int, **common) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(
        vocab_size,
        model.hidden_size,
        mesh.tp,
        std=model.init_method_std,
        divisible_by=model.make_vocab_size_divisible_by,
        **common,
    )
