# SPDX-License-Identifier: Apache-2.0
"""The facts of an encoder-decoder: encoder layers have bidirectional attention, then an MLP; decoder layers have causal
attention, attention over the encoder's output, then an MLP.

Layers are numbered through, the encoder's first. Every message between stages is source and target in one tensor,
[source + target, b, h], followed by the tables of relative positions, if there are any.

With --decoder-num-layers 0 it is only the encoder, for fine-tuning: no table, norm or target of a decoder.

    >>> facts = T5Facts(Model(num_layers=24, hidden_size=768, num_attention_heads=12, seq_length=512), 30592)
    >>> f"{facts.parameters / 1e6:.0f} M parameters, {facts.layer_flops(12) / facts.layer_flops(0):.2f} of an encoder layer"
    '223 M parameters, 0.44 of an encoder layer'

Legend: s tokens of a source, t of a target, b micro-batch, h hidden, e bytes per element.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.model.branches import Branch, LayerKind
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.attention.full import BIDIRECTIONAL, WIDE, attention_over_all
from megatron.model.kinds.attention.kind import causal_kernel
from megatron.model.kinds.mlp.kind import mlp, mlp_ops
from megatron.model.kinds.table import KINDS
from megatron.model.layer_ops import RankSetup, Residual
from megatron.model.t5.settings import GROUP, SHORT, T5Settings, own_settings
from megatron.model.weights import Table, Unit, add_prefix, positions
from megatron.mpu.placement import Normal, Placement
from megatron.settings.schema import Config, Model

DECODER_ATTENTION = replace(
    KINDS["attention"], ops=lambda facts, x: attention_over_all(x, causal_kernel(facts.settings, x.share))
)
FEED_FORWARD = replace(
    KINDS["mlp"],
    module="megatron.model.t5.layers:FeedForward",
    weights=lambda facts, model, sequence_parallel: mlp(
        replace(model, ffn_hidden_size=model.ffn_size, swiglu=facts.gated), sequence_parallel
    ),
    ops=lambda facts, x: mlp_ops(x, facts.gated),
)


@dataclass(frozen=True)
class T5Facts(GPTFacts):
    """See `Facts`. own: the settings of encoder-decoders."""

    own: T5Settings = T5Settings()

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "T5Facts":
        return cls(config.model, vocab_size, own_settings(config))

    @property
    def name(self) -> str:
        return "encoder-decoder" if self.has_decoder else "encoder"

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @property
    def has_decoder(self) -> bool:
        """False only for fine-tuning of an encoder."""
        return self.own.decoder_num_layers != 0

    @property
    def halves(self) -> tuple[str, ...]:
        """The parts of the model, in order."""
        return ("encoder", "decoder") if self.has_decoder else ("encoder",)

    @property
    def encoder_layers(self) -> int:
        """The encoder's or decoder's part of `num_layers`; in a shrunk model the same share, at least one layer each."""
        total, encoder, decoder = self.num_layers, self.own.encoder_num_layers, self.own.decoder_num_layers
        if not self.has_decoder:
            return total
        encoder = encoder or total // 2
        decoder = decoder or total - encoder
        if encoder + decoder == total or total < 2:
            return encoder
        return min(max(1, round(total * encoder / (encoder + decoder))), total - 1)

    @property
    def source(self) -> int:
        """Tokens of a source."""
        return self.settings.seq_length

    @property
    def target(self) -> int:
        """Tokens of a target; none without a decoder."""
        if not self.has_decoder:
            return 0
        given = self.own.decoder_seq_length
        return min(SHORT, self.source) if given is None else given

    @property
    def seq_length(self) -> int:
        """Tokens of a sample: its source and its target."""
        return self.source + self.target

    def decodes(self, layer: int) -> bool:
        """Whether a layer belongs to the decoder."""
        return layer >= self.encoder_layers

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.settings.swiglu or self.own.feed_forward_proj == "gated-gelu"

    @property
    def relative(self) -> bool:
        """Whether a relative position bias is added to scores."""
        return self.settings.position_embedding_type == WIDE

    def describe(self, count: str) -> str:
        if not self.has_decoder:
            return super().describe(count)
        m, encoder = self.settings, self.encoder_layers
        return (
            f"{self.name} of {count} parameters: {encoder} encoder and {self.num_layers - encoder} decoder layers, hidden "
            f"{m.hidden_size}, {m.num_attention_heads} heads, {self.source} + {self.target} tokens, vocabulary "
            f"{self.vocab_size}"
        )

    def shrunk(self, num_layers: int, tp: int) -> Model:
        return super().shrunk(max(num_layers, 2), tp)

    def shrunk_groups(self, extra: Mapping[str, Any], small: Model) -> dict[str, Any]:
        """Keeps the target shorter than its source, as long, or longer."""
        s, t = self.source, self.target
        short = small.seq_length * 2 if t > s else small.seq_length if t == s else small.seq_length // 2
        return {**extra, GROUP: replace(self.own, decoder_seq_length=short)}

    # ---- weights ----------------------------------------------------------------------------------------------------

    def branches(self, layer: int) -> tuple[Branch, ...]:
        closing = "encoder_norm" if layer == self.encoder_layers - 1 else ""
        fed = Branch("mlp", (FEED_FORWARD,), "mlp_norm", closing=closing)
        if not self.decodes(layer):
            return Branch.at("pre", "attention", BIDIRECTIONAL), fed
        crossed = Branch("cross", (KINDS["cross"],), "cross_norm", site="cross attention")
        return Branch.at("pre", "attention", DECODER_ATTENTION), crossed, fed

    def overrides(self, layer: int) -> tuple[tuple[str, Any], ...]:
        return (*super().overrides(layer), *[("query_pre_attn_scalar", 1)] * self.own.unscaled_attention)

    def layer_weights(self, kind: LayerKind, sequence_parallel: bool) -> Table:
        table = super().layer_weights(kind, sequence_parallel)
        return {name: table[name] for name in sorted(table, key=lambda name: name.startswith("cross"))}  # as stored

    def embedding_weights(self, sequence_parallel: bool) -> Table:
        m, table = self.settings, super().embedding_weights(sequence_parallel)
        if not (table and self.has_decoder):
            return table
        of_target = replace(m, max_position_embeddings=max(m.position_table, self.target))
        return table | add_prefix("decoder_position", positions(of_target, sequence_parallel))

    def front_units(self, sequence_parallel: bool) -> list[Unit]:
        m, units = self.settings, super().front_units(sequence_parallel)
        if self.relative:
            shape = (self.own.relative_attention_num_buckets, m.num_attention_heads)
            one = Placement(shape, Normal(m.init_method_std), cut={"tp": 1})
            units.append(Unit("relative", {f"{half}.weight": one for half in self.halves}, ends=("first",)))
        return units

    def back_units(self, sequence_parallel: bool) -> list[Unit]:
        return super().back_units(sequence_parallel)[not self.has_decoder :]

    # ---- messages ---------------------------------------------------------------------------------------------------

    def message(self, share: RankSetup) -> tuple[int, ...]:
        """Rows of source, target, and the tables of relative positions."""
        pieces = share.tp if share.sp else 1
        target = -(-self.target // pieces)  # a target of fine-tuning may have fewer tokens than there are ranks
        rows = self.source // pieces + target + self.table_rows(share.tp, share.micro_batch_size)
        return rows, share.micro_batch_size, self.settings.hidden_size

    def table_rows(self, tp: int, micro_batch_size: int) -> int:
        """Rows [b, h] of a message that hold the rank's part of the relative position tables."""
        if not self.relative:
            return 0
        numbers = len(self.halves) * self.own.relative_attention_num_buckets * self.settings.num_attention_heads // tp
        return -(-numbers // (micro_batch_size * self.settings.hidden_size))

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    @property
    def output_flops(self) -> float:
        return super().output_flops * self.target / self.seq_length

    # ---- memory -----------------------------------------------------------------------------------------------------

    def residual(self, share: RankSetup, kind: LayerKind) -> Residual:
        rows = self.target if any(branch.slot == "cross" for branch in kind.branches) else self.source
        return Residual(self.settings, share, rows * share.micro_batch_size)

    def embedded_tokens(self, share: RankSetup) -> int:
        return self.seq_length * share.micro_batch_size

    def loss_tokens(self, share: RankSetup) -> int:
        """The tokens of targets."""
        return self.target * share.micro_batch_size


def even(layers: int, stages: int) -> list[int]:
    """The layers of each stage, as evenly as possible.

    >>> even(5, 2)
    [3, 2]
    """
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]
