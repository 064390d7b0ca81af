# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder built from GPT's parts; the whole model, or a pipeline stage of it.

The first stage embeds source and target. Every stage takes both, runs its layers on the half that they belong to, and
sends both on, in one tensor [source + target, b, h]. So every decoder layer has the encoder's output, autograd sums the
gradients of that over all layers, and schedules do not depend on the two kinds of layers.

Tables of relative positions belong to the first stage and are sent in the same tensor, with their gradients.

Legend: s tokens of a source, t of a target, b micro-batch, h hidden, g key-value groups, q queries per group, d channels
per head, tp ranks that divide the groups. With sequence parallelism a rank has s/tp and t/tp rows between layers.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.context import ForwardContext
from megatron.model.language_model import LanguageModel, Sums
from megatron.model.packed_rows import PackedRows, may_pack
from megatron.model.positions import LearnedPositions, Rotary
from megatron.model.recompute import recompute as recomputed
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.layers import DecoderCache
from megatron.model.t5.positions import RelativeTables, relative_bias
from megatron.model.t5.settings import own_settings
from megatron.model.weights import Table, take_prefix
from megatron.mpu import mappings
from megatron.mpu.layers import VocabParallelEmbedding, linear
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import Dropout
from megatron.settings.schema import Config


@dataclass(frozen=True)
class T5Context:
    """The shared inputs of all layers of a pass: for the encoder's attention, the decoder's own, and cross-attention.

    rows: the rows of the source that the encoder's layers compute; None: all
    """

    encoder: ForwardContext
    decoder: ForwardContext
    cross: ForwardContext
    rows: Optional[PackedRows] = None


class Halves(NamedTuple):
    """The input of layers: states of the source [s, b, h] and of the target [t, b, h], without a decoder [0, b, h]."""

    source: torch.Tensor
    target: torch.Tensor


class EncodedSource(NamedTuple):
    """The encoder's output for sources, [s, b, h], and its padding: [b, s] bool, True at tokens; None: no padding."""

    memory: torch.Tensor
    padding: Optional[torch.Tensor]


class PairEmbedding(nn.Module):
    """Tokens of source and target -> `Halves`. A last stage with a tied output has only the word table."""

    def __init__(
        self, facts: T5Facts, mesh: Mesh, tables: dict[str, Table], seed: int, sequence_parallel: bool, **factory
    ):
        super().__init__()
        weights, settings = tables["embedding.word"], facts.settings
        self.word = VocabParallelEmbedding(weights, mesh.tp, sequence_parallel=sequence_parallel, **factory)
        self.position = self.decoder_position = None
        if "embedding" in tables:
            self.position = LearnedPositions(take_prefix(tables["embedding"], "position"), **factory)
            if facts.has_decoder:
                self.decoder_position = LearnedPositions(
                    take_prefix(tables["embedding"], "decoder_position"), **factory
                )
        self.tp, self.sequence_parallel = mesh.tp, sequence_parallel
        axis = mesh.tp if sequence_parallel else None
        self.dropout = Dropout(settings.hidden_dropout, "embedding", -1, seed, axis=axis)
        self.decoder_dropout = Dropout(settings.hidden_dropout, "decoder embedding", -1, seed, axis=axis)

    def source(self, tokens: torch.Tensor, samples) -> torch.Tensor:
        """tokens [s, b] -> [s, b, h]."""
        return self.dropout(self._placed(self.word(tokens), self.position, 0), samples)

    def target(self, tokens: torch.Tensor, samples, first: int = 0) -> torch.Tensor:
        """tokens [t, b], from position `first` -> [t, b, h]."""
        return self.decoder_dropout(self._placed(self.word(tokens), self.decoder_position, first), samples)

    def _placed(self, x: torch.Tensor, table: Optional[LearnedPositions], first: int) -> torch.Tensor:
        """Add positions to embedded words x, [t, b, h] or [t/tp, b, h]."""
        if table is None:
            return x
        if self.sequence_parallel:
            first += self.tp.rank * x.shape[0]
        return x + table(torch.arange(first, first + x.shape[0], device=x.device).unsqueeze(1))

    def forward(self, source: torch.Tensor, target: torch.Tensor, samples) -> Halves:
        if self.sequence_parallel:
            return Halves(self.source(source, samples), self.target(target, samples))
        # Looked up together: each look-up's gradient is as large as the table, mostly zeros.
        words = self.word(torch.cat((source, target))).split((len(source), len(target)))
        x, y = (self._placed(*half, 0) for half in zip(words, (self.position, self.decoder_position), strict=True))
        return Halves(self.dropout(x, samples), self.decoder_dropout(y, samples))


class T5(LanguageModel):
    """See `LanguageModel` for its keywords; layers are numbered through, the encoder's first.

    own_target: tokens of a sample's target, if the model pads it to more rows for sequence parallelism
    """

    facts: T5Facts

    def __init__(self, facts: T5Facts, mesh: Mesh, **keywords):
        super().__init__(facts, mesh, **keywords)
        settings, tables = facts.settings, {unit.name: unit.weights for unit in self.units}
        self.rotary = Rotary(settings) if settings.position_embedding_type == "rope" else None
        self.relative = None
        if "relative" in tables:
            self.relative = RelativeTables(tables["relative"], facts.halves, mesh.tp, **self.factory_kwargs)
        self.output_scale = settings.hidden_size**-0.5 if facts.own.scale_tied_output and facts.tied else 1.0
        self.own_target = facts.target

    @classmethod
    def of(cls, config: Config, mesh: Mesh, facts: T5Facts, **stage) -> "T5":
        model = super().of(config, mesh, facts, **stage)
        model.own_target = own_settings(config).decoder_seq_length or facts.target
        return model

    # ---- parts -------------------------------------------------------------------------------------------------------

    def build_embedding(self, mesh: Mesh, tables: dict[str, Table]) -> nn.Module:
        return PairEmbedding(self.facts, mesh, tables, self.seed, self.sequence_parallel, **self.factory_kwargs)

    # ---- passes ------------------------------------------------------------------------------------------------------

    def trunk(self, x, batch) -> tuple[torch.Tensor, Sums]:
        """Like `LanguageModel.trunk`: the message with source, target and tables, or the target's states [t, b, h] (without
        a decoder, the source's).
        """
        tables = None
        if self.first:
            halves = self._embedded(batch)
            tables = self.tables()
        else:
            halves, tables = self._unpacked(x)
        halves = self._through(halves, self.shared(batch, tables))
        if not self.last:
            return self._packed(halves, tables), {}
        return (self.final_norm(halves.target) if self.facts.has_decoder else halves.source), {}

    def word_states(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.output_scale == 1.0 else x * self.output_scale

    def shared(self, batch, tables: Optional[torch.Tensor]) -> T5Context:
        """The context of a pass. tables: of relative positions, [halves, buckets, heads/tp], or None."""
        padding = attended(batch.arrays["enc_mask"])
        s, t, common = len(batch.arrays["text_enc"]), self.facts.target, self._common(batch)
        packs = may_pack(self.facts.settings, self.kernels, self.training, self.sequence_parallel)
        return T5Context(
            ForwardContext(angles=self._angles(s), bias=self._bias(tables, 0, s), padding=padding, **common),
            ForwardContext(
                angles=self._angles(t), bias=self._bias(tables, 1, t), drawn=self._drawn(self.own_target), **common
            ),
            ForwardContext(padding=padding, drawn=self._drawn(s), **common),
            rows=PackedRows.of(padding) if packs else None,
        )

    def _drawn(self, keys: int) -> Optional[tuple[int, int]]:
        """`ForwardContext.drawn` of the target's queries over this many keys."""
        return (self.own_target, keys) if self.own_target < self.facts.target else None

    def _embedded(self, batch) -> Halves:
        """Embed source and target. The target is padded to the rows in the facts; its tokens do not see the padding."""
        source = batch.arrays["text_enc"]
        if not self.facts.has_decoder:
            x = self.embedding.source(source, batch.samples)
            return Halves(x, x[:0])
        target = batch.arrays["text_dec"]
        target = F.pad(target, (0, 0, 0, max(0, self.facts.target - len(target))))
        return self.embedding(source, target, batch.samples)

    def _common(self, batch) -> dict:
        return dict(samples=batch.samples, region=self.region, batch=batch)

    def _angles(self, s: int, first: int = 0):
        if self.rotary is None:
            return None
        device = next(self.parameters()).device
        return self.rotary.angles(torch.arange(first, first + s, device=device).unsqueeze(1), self.dtype)

    def _bias(self, tables: Optional[torch.Tensor], half: int, s: int) -> Optional[torch.Tensor]:
        """The relative position bias of all pairs of s tokens; None if the stage has no layer of that half."""
        if tables is None or not any(self.facts.decodes(int(n)) == (half == 1) for n in self.blocks):
            return None
        return relative_bias(tables[half], self.facts.own, s, s, both_ways=half == 0)

    def _through(self, halves: Halves, context: T5Context) -> Halves:
        for group in self.recompute_groups:
            if "full" in group.modules:
                more = dict(inside=self.region, of=self._blocks(group.layers))
                halves = Halves(*recomputed(self._some_layers, group.layers, *halves, context, **more))
            else:
                halves = self._some_layers(group.layers, *halves, context)
        return halves

    def _some_layers(self, layers, source: torch.Tensor, target: torch.Tensor, context: T5Context) -> Halves:
        encoder = [n for n in layers if not self.facts.decodes(n)]
        rows, own = context.rows if encoder else None, context.encoder
        if rows is not None:
            source, own = rows.pack(source), rows.context(own)
        for n in encoder:
            source = self.blocks[str(n)](source, own)
        source = source if rows is None else rows.unpack(source)
        own = replace(context.decoder, cross=(source, context.cross))
        for n in layers[len(encoder) :]:
            target = self.blocks[str(n)](target, own)
        return Halves(source, target)

    # ---- inference ---------------------------------------------------------------------------------------------------

    def encode(self, tokens: torch.Tensor, mask: Optional[torch.Tensor] = None) -> "EncodedSource":
        """Encode sources [s, b]; their mask [s, b] is 0 at padding (default: no padding)."""
        self._whole()
        padding = None if mask is None else attended(mask)
        return EncodedSource(self.encoder_pass(None, tokens, padding, self.tables()), padding)

    def decode(
        self,
        tokens: torch.Tensor,
        encoded: "EncodedSource",
        cache: Optional[DecoderCache] = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Scores of the next token: tokens [t, b] of targets -> [t, b, vocabulary] fp32 ([1, b, vocabulary] `last_only`).

        With a cache, `tokens` follow the cached ones and are added to them; only the first call computes keys and values
        of the source.
        """
        self._whole()
        scores = self.decoder_pass(None, tokens, encoded, cache, self.tables(), last_only)
        if cache is not None:
            cache.length += len(tokens)
        return scores

    def tables(self) -> Optional[torch.Tensor]:
        """The relative position tables, [halves, buckets, heads/tp]; None if there are none, or not on this stage."""
        return None if self.relative is None else self.relative()

    def encoder_pass(
        self,
        x: Optional[torch.Tensor],
        tokens: torch.Tensor,
        padding: Optional[torch.Tensor],
        tables: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Run the encoder's layers of this stage: -> [s, b, h].

        x: [s, b, h] of the previous stage; None on the first, which embeds the sources [s, b]. padding: True at tokens;
        tables: `tables` of the first stage.
        """
        with self.region():
            s = tokens.shape[0]
            bias, angles = self._bias(tables, 0, s), self._angles(s)
            context = ForwardContext(angles=angles, bias=bias, padding=padding, region=self.region)
            if self.first:
                x = self.embedding.source(tokens, None)
            for n in map(int, self.blocks):
                if not self.facts.decodes(n):
                    x = self.blocks[str(n)](x, context)
            return x.to(self.dtype)

    def decoder_pass(
        self,
        x: Optional[torch.Tensor],
        tokens: torch.Tensor,
        encoded: "EncodedSource",
        cache: Optional[DecoderCache],
        tables: Optional[torch.Tensor],
        last_only: bool = False,
    ) -> torch.Tensor:
        """Run the decoder's layers of this stage: -> [t, b, h], or the scores of `decode` on the last stage.

        x: [t, b, h] of the previous stage; None on the first, which embeds tokens [t, b]. The caller advances the cache.
        """
        first = 0 if cache is None else cache.length
        t, end = tokens.shape[0], first + tokens.shape[0]
        with self.region():
            bias = None
            if tables is not None:
                bias = relative_bias(tables[1], self.facts.own, t, end, both_ways=False, first=first)
            common = dict(cache=cache, region=self.region)
            cross = encoded.memory, ForwardContext(padding=encoded.padding, **common)
            context = ForwardContext(angles=self._angles(t, first), bias=bias, cross=cross, **common)
            if self.first:
                x = self.embedding.target(tokens, None, first)
            for n in map(int, self.blocks):
                if self.facts.decodes(n):
                    x = self.blocks[str(n)](x, context)
            if not self.last:
                return x.to(self.dtype)
            x = self.gather_input(self.word_states(self.final_norm(x[-1:] if last_only else x)), self.tp)
            scores = mappings.gather_from_tensor_model_parallel_region(linear(x, self.output_weight), self.tp)
            scores = scores[..., : self.vocab_size].float()
            return scores if self.softcap is None else (scores / self.softcap).tanh() * self.softcap

    def logits(self, source: torch.Tensor, target: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Scores of each target's next token, [t, b, vocabulary] fp32. Call `eval()` first: dropout needs a sample."""
        return self.decode(target, self.encode(source, mask))

    def _whole(self) -> None:
        assert self.first and self.last and not self.sequence_parallel, "inference needs a whole model"

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _packed(self, halves: Halves, tables: Optional[torch.Tensor]) -> torch.Tensor:
        """The message to the next stage, of the shape `T5Facts.message`."""
        parts = [half.to(self.dtype) for half in halves]
        if tables is not None:
            b, h = halves.source.shape[1:]
            rows = self.facts.table_rows(self.tp.size, b)
            parts.append(F.pad(tables.flatten(), (0, rows * b * h - tables.numel())).view(rows, b, h).to(self.dtype))
        return torch.cat(parts)

    def _unpacked(self, x: torch.Tensor) -> tuple[Halves, Optional[torch.Tensor]]:
        pieces = self.tp.size if self.sequence_parallel else 1
        s, t = self.facts.source // pieces, self.facts.target // pieces
        source, target, rows = x.split((s, t, len(x) - s - t))
        tables = None
        if len(rows):
            halves, buckets = len(self.facts.halves), self.facts.own.relative_attention_num_buckets
            heads = self.facts.settings.num_attention_heads // self.tp.size
            tables = rows.flatten()[: halves * buckets * heads].view(halves, buckets, heads)
        return Halves(source, target), tables


def attended(mask: torch.Tensor) -> Optional[torch.Tensor]:
    """The keys that are tokens, [b, s] bool, from a mask [s, b] of 0 and 1; None if all are (on a GPU never None, to avoid
    a synchronization). In a sample without tokens every position is attended to: a softmax over nothing is NaN.
    """
    tokens = mask.t() > 0
    if tokens.device.type == "cpu" and tokens.all():
        return None
    return tokens | ~tokens.any(1, keepdim=True)
