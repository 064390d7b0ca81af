# SPDX-License-Identifier: Apache-2.0
"""BERT: layers with bidirectional attention, a head that predicts masked tokens, and one that predicts whether the second
sentence follows; the whole model, or a pipeline stage of it.

Norms are before each branch and after the last layer (Megatron-LM), or after each addition and after the embedding
(`--post-norm`, as published).

Legend: s sequence, b micro-batch, h hidden, v vocabulary, n masked positions.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.bert.facts import HEAD, BertFacts
from megatron.model.context import ForwardContext
from megatron.model.kinds.attention.module import BidirectionalAttention
from megatron.model.language_model import LanguageModel, Sums
from megatron.model.layer import Layer
from megatron.model.norms import NORMS
from megatron.model.packed_rows import PackedRows, may_pack
from megatron.model.positions import LearnedPositions, Rotary
from megatron.model.t5.module import attended
from megatron.model.weights import Table, take_prefix
from megatron.mpu import mappings
from megatron.mpu.layers import VocabParallelEmbedding, create_parameters, linear
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import Dropout

FOLLOWS = "sop loss"  # Megatron-LM's name of the second head's loss


class Dense(nn.Module):
    """A linear layer that is replicated on every rank. weights: `bert.facts.dense(...)`."""

    def __init__(self, weights: Table, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class TokenTypes(nn.Module):
    """The embedding of a token's sentence, [types, h]."""

    def __init__(self, weights: Table, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, None, **factory_kwargs)

    def forward(self, types: torch.Tensor) -> torch.Tensor:
        return F.embedding(types, self.weight)


class OutputBias(nn.Module):
    """The bias of the logits, [v/tp]."""

    def __init__(self, weights: Table, tp, **factory_kwargs):
        super().__init__()
        create_parameters(self, weights, tp, **factory_kwargs)


class WordHead(nn.Module):
    """The transform before the output layer, norm(gelu(dense(x))) of hidden states [.., h]."""

    def __init__(self, facts: BertFacts, weights: Table, tp, **factory_kwargs):
        super().__init__()
        model = facts.settings
        self.dense = Dense(take_prefix(weights, "dense"), **factory_kwargs)
        kind = NORMS[model.normalization]
        self.norm = kind(take_prefix(weights, "norm"), model.norm_epsilon, **factory_kwargs)
        self.output = OutputBias(take_prefix(weights, "output"), tp, **factory_kwargs)
        self.approximate = "tanh" if model.bias_gelu_fusion else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.gelu(self.dense(x), approximate=self.approximate))


class BinaryHead(nn.Module):
    """Scores [b, 2] from the first token's hidden state [b, h]: the second sentence follows, or it is a random one."""

    def __init__(self, weights: Table, **factory_kwargs):
        super().__init__()
        self.pooler = Dense(take_prefix(weights, "pooler"), **factory_kwargs)
        self.scores = Dense(take_prefix(weights, "scores"), **factory_kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.pooler(x).tanh())


class BertEmbedding(nn.Module):
    """Tokens, positions and sentences -> [s, b, h] (or [s/tp, b, h]). A last stage with a tied output has only words."""

    def __init__(
        self, facts: BertFacts, mesh: Mesh, tables: dict[str, Table], seed: int, sequence_parallel: bool, **factory
    ):
        super().__init__()
        settings, inside = facts.settings, tables.get("embedding", {})
        self.word = VocabParallelEmbedding(
            tables["embedding.word"], mesh.tp, sequence_parallel=sequence_parallel, **factory
        )
        of = lambda name: take_prefix(inside, name)
        self.position = LearnedPositions(of("position"), **factory) if of("position") else None
        self.tokentype = TokenTypes(of("tokentype"), **factory) if of("tokentype") else None
        kind = NORMS[settings.normalization]
        self.norm = kind(of("norm"), settings.norm_epsilon, **factory) if of("norm") else None
        self.tp, self.sequence_parallel = mesh.tp, sequence_parallel
        axis = mesh.tp if sequence_parallel else None
        self.dropout = Dropout(settings.hidden_dropout, "embedding", -1, seed, axis=axis)

    def forward(self, tokens: torch.Tensor, types: Optional[torch.Tensor], samples) -> torch.Tensor:
        """tokens, types [s, b]."""
        x = self.word(tokens)
        own = lambda rows: rows.chunk(self.tp.size)[self.tp.rank] if self.sequence_parallel else rows
        if self.position is not None:
            x = x + self.position(own(torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1)))
        if self.tokentype is not None:
            x = x + self.tokentype(own(torch.zeros_like(tokens) if types is None else types))
        x = x if self.norm is None else self.norm(x)
        return self.dropout(x, samples)


class Bert(LanguageModel):
    """See `LanguageModel`, whose keywords it takes."""

    facts: BertFacts

    def __init__(self, facts: BertFacts, mesh: Mesh, **keywords):
        super().__init__(facts, mesh, **keywords)
        settings, tables = facts.settings, {unit.name: unit.weights for unit in self.units}
        self.rotary = Rotary(settings) if settings.position_embedding_type == "rope" else None
        self.head = self.binary = None
        if self.last and facts.word_head:
            self.head = WordHead(facts, tables[HEAD], mesh.tp, **self.factory_kwargs)
        if "binary" in tables:
            self.binary = BinaryHead(tables["binary"], **self.factory_kwargs)

    def build_embedding(self, mesh: Mesh, tables: dict[str, Table]) -> nn.Module:
        return BertEmbedding(self.facts, mesh, tables, self.seed, self.sequence_parallel, **self.factory_kwargs)

    # ---- passes ------------------------------------------------------------------------------------------------------

    def context(self, batch) -> ForwardContext:
        return self._context(len(batch.tokens), batch.arrays["padding_mask"], batch)

    def _context(self, s: int, mask: Optional[torch.Tensor], batch=None) -> ForwardContext:
        angles = None
        if self.rotary is not None:
            places = torch.arange(s, device=next(self.parameters()).device).unsqueeze(1)
            angles = self.rotary.angles(places, self.dtype)
        padding = None if mask is None else attended(mask)
        samples = None if batch is None else batch.samples
        return ForwardContext(samples, angles, padding=padding, region=self.region, batch=batch)

    def trunk(self, x, batch) -> tuple[torch.Tensor, Sums]:
        if self.first:
            x = self.embedding(batch.arrays["text"], batch.arrays["types"], batch.samples)
        context = self.context(batch)
        rows = PackedRows.of(context.padding) if self.packs else None
        if rows is None:
            x, sums = self.run_layers(x, context)
        else:
            x, sums = self.run_layers(rows.pack(x), rows.context(context))
            x = rows.unpack(x)
        if not self.last:
            return x.to(self.dtype), sums
        return (x if self.final_norm is None else self.final_norm(x)), sums

    def _hidden(self, x, batch, gather: bool = True) -> tuple[torch.Tensor, Sums]:
        x, sums = self.trunk(x, batch)
        if not self.last:
            return x, sums
        if self.pools:
            sums = {**sums, **self.head_sums(self._pooled(x), batch)}
        if self.selects_masked:
            return x, sums  # `counted` applies the head
        x = self.word_states(x)
        return (self.gather_input(x, self.tp) if gather else x), sums

    def word_states(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    @property
    def packs(self) -> bool:
        """Whether layers may compute packed rows; other classes of layers may depend on positions in samples."""
        own = all(
            type(block) is Layer and type(block.attention) is BidirectionalAttention for block in self.blocks.values()
        )
        return own and may_pack(self.facts.settings, self.kernels, self.training, self.sequence_parallel)

    @property
    def selects_masked(self) -> bool:
        """Whether the head computes only the masked positions. On a GPU their number would need a synchronization, and with
        sequence parallelism ranks would have unequal numbers.
        """
        return self.on_cpu and not self.sequence_parallel

    @property
    def on_cpu(self) -> bool:
        return self.head.dense.weight.device.type == "cpu"

    def counted(self, x: torch.Tensor, batch) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        rows, labels, mask = super().counted(x, batch)
        if not self.selects_masked:
            return rows, labels, mask
        places = mask.nonzero().squeeze(1)
        places = places if len(places) else places.new_zeros(1)  # a product of no rows has no gradient
        x = self.head(rows[places])
        return x if self.overlap else self.gather_input(x, self.tp), labels[places], mask[places]

    def _token_losses(self, x: torch.Tensor, batch) -> torch.Tensor:
        return super()._token_losses(self.head(x) if self.selects_masked else x, batch)

    @property
    def pools(self) -> bool:
        """Whether there are heads on the first token."""
        return self.binary is not None

    def head_sums(self, pooled: torch.Tensor, batch) -> Sums:
        """The sums of those heads, from the first token's hidden state [b, h]."""
        return {} if self.binary is None else {FOLLOWS: self._follows(pooled, batch)}

    def _follows(self, pooled: torch.Tensor, batch) -> torch.Tensor:
        """The sum of the second head's losses, each times the number of tokens that count in its sample. Divided by all
        these tokens, it is a mean that does not depend on micro-batches. Samples without masked tokens do not contribute.
        """
        losses = F.cross_entropy(self.binary(pooled).float(), batch.arrays["is_random"], reduction="none")
        return (losses * batch.loss_mask.sum(0)).sum()

    def _pooled(self, x: torch.Tensor) -> torch.Tensor:
        """The first token's hidden state, [b, h], on every rank."""
        first = x[0]
        if self.sequence_parallel:  # the first rank has it
            first = mappings.reduce_from_tensor_model_parallel_region(first * (self.tp.rank == 0), self.tp)
        return first

    # ---- inference ---------------------------------------------------------------------------------------------------

    def hidden(self, tokens: torch.Tensor, mask=None, types=None) -> torch.Tensor:
        """The last layer's output [s, b, h] for tokens and types [s, b]; the mask [s, b] is 0 at padding."""
        assert self.first and self.last and not self.sequence_parallel, "inference needs a whole model"
        with self.region():
            x = self.embedding(tokens, types, None)
            x, _ = self.run_layers(x, self._context(tokens.shape[0], mask))
            return x if self.final_norm is None else self.final_norm(x)

    def logits(self, tokens: torch.Tensor, mask=None, types=None) -> torch.Tensor:
        """Scores of the word at each position, [s, b, vocabulary] fp32. Call `eval()` first."""
        with self.region():
            x = self.head(self.hidden(tokens, mask, types))
            scores = linear(x, self.output_weight, self.output_bias)
            return mappings.gather_from_tensor_model_parallel_region(scores, self.tp)[..., : self.vocab_size].float()

    def follows(self, tokens: torch.Tensor, mask=None, types=None) -> torch.Tensor:
        """Next-sentence scores, [b, 2] fp32: it follows, it does not."""
        with self.region():
            return self.binary(self._pooled(self.hidden(tokens, mask, types))).float()

    @property
    def output_bias(self) -> Optional[torch.Tensor]:
        return self.head.output.bias
