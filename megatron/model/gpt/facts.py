# SPDX-License-Identifier: Apache-2.0
"""The facts of GPT: a layer is self-attention, then an MLP, each after a norm. Tests compare them with the tensors that
autograd saves, the messages of ranks and the counts of published models.

    >>> gpt_175b = GPTFacts(Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048), 51200)
    >>> f"{gpt_175b.parameters / 1e9:.1f} B, {gpt_175b.flops() / 1e12:.3f} TFLOP per token"
    '174.6 B, 1.076 TFLOP per token'
"""

from dataclasses import replace
from typing import Any, Optional

from megatron.model.branches import Branch
from megatron.model.facts import Facts
from megatron.model.kinds import KINDS, Mixer
from megatron.model.kinds.attention.kind import causal_kernel
from megatron.model.layer_ops import NORM, RankSetup
from megatron.mpu.placement import elements
from megatron.settings.hybrid_pattern import shortened
from megatron.settings.schema import Config, Model

HEAD = 8  # width of a head in a shrunk model


class GPTFacts(Facts):
    """See `Facts`."""

    name = "GPT"
    recomputes = frozenset({NORM}).union(*(kind.recomputes for kind in KINDS.values()))
    mixers = KINDS  # a variant may have others

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "GPTFacts":
        """The facts of a run; a variant may read its own settings in `config.extra`."""
        return cls(config.model, vocab_size)

    def branches(self, layer: int) -> tuple[Branch, ...]:
        if letters := self.settings.letters:
            return (Branch.at(self.settings.norm_position, *self.of_letter(letters[layer])),)
        second = self.mixers["experts" if self.settings.has_experts(layer) else "mlp"]
        pairs = ("attention", self.mixers["attention"]), ("mlp", second)
        return tuple(Branch.at(self.settings.norm_position, slot, mixer) for slot, mixer in pairs)

    def of_letter(self, letter: str) -> tuple[str, Mixer]:
        """(slot, mixer) of a character of --hybrid-layer-pattern."""
        mixer = next(mixer for mixer in self.mixers.values() if mixer.symbol == letter)
        return mixer.slot, mixer

    @property
    def has_shape(self) -> bool:
        m = self.settings
        if m.num_attention_heads < 1 or (m.num_query_groups is not None and m.num_query_groups < 1):
            return False
        try:
            m.window_of(0), m.expert_layers
        except (ValueError, ZeroDivisionError):
            return False
        return m.kv_channels is not None or m.hidden_size % m.num_attention_heads == 0

    def shrunk(self, num_layers: int, tp: int) -> Model:
        """Keeps the ratios: groups of heads, heads wider than hidden / heads, more positions than sequence."""
        m, shared = self.settings, self.settings.num_attention_heads // self.settings.query_groups
        groups = 1 if m.query_groups == 1 else 2 * max(2, tp) // (2 if shared > 1 else 1)
        heads = max(2, tp) * 2 if shared > 1 else groups
        wide = m.kv_channels is not None and m.kv_channels * m.num_attention_heads != m.hidden_size
        head, s = (HEAD + 4 if wide else HEAD), 8 * max(2, tp)
        rotary = int(head * m.rotary_percent)
        learned = m.position_embedding_type == "learned_absolute"
        return replace(
            m,
            num_layers=num_layers,
            hybrid_layer_pattern=m.letters and shortened(m.letters, num_layers) or None,
            hidden_size=HEAD * heads,
            num_attention_heads=heads,
            num_query_groups=groups if shared > 1 else None,
            group_query_attention=shared > 1,
            kv_channels=head if wide else None,
            ffn_hidden_size=2 * HEAD * heads if m.ffn_hidden_size or m.gated else None,
            seq_length=s,
            max_position_embeddings=(s + 8 if m.position_table > m.seq_length else s) if learned else None,
            window_size=None if m.window is None else f"{min(m.window, s // 2)},0",
            rotary_percent=m.rotary_percent if rotary % 2 == 0 and rotary > 1 else 0.5,
            make_vocab_size_divisible_by=min(m.make_vocab_size_divisible_by, 8),
            model_name_or_path=None,
            **self._shrunk_experts(num_layers, HEAD * heads),
        )

    def _shrunk_experts(self, num_layers: int, width: int) -> dict[str, Any]:
        """The experts of `shrunk`: as many, narrow ones; a dense layer first if some are dense."""
        m = self.settings
        if not m.mixture:
            return {}
        dense = num_layers > 1 and len(m.expert_layers) < m.num_layers and not m.letters
        shared = width if m.moe_shared_expert_intermediate_size else None
        return dict(
            moe_layer_freq=f"[0]+[1]*{num_layers - 1}" if dense else "1",
            moe_ffn_hidden_size=width,
            moe_shared_expert_intermediate_size=shared,
        )

    def divisible_by_tp(self) -> dict[str, int]:
        branches = [branch for kind in sorted(self.layer_kinds) for branch in kind.branches]
        sizes = [mixer.divided(self.settings) for branch in branches for mixer in branch.mixers]
        return {name: size for own in sizes for name, size in own.items()}

    def shares_heads(self, tp: int, cp: int) -> bool:
        return self.settings.query_groups % (tp * cp) == 0

    def describe(self, count: str) -> str:
        m, active = self.settings, ""
        if m.mixture:
            share = self.active_parameters / self.parameters
            active = f", {m.moe_router_topk} of {m.num_experts} experts for each token ({share:.1%} of the parameters)"
        return (
            f"{self.name} of {count} parameters{active}: {m.num_layers} layers, hidden {m.hidden_size}, "
            f"{m.num_attention_heads} heads, sequence {m.seq_length}, vocabulary {self.vocab_size}"
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: those of its experts only."""
        m = self.settings
        if not m.mixture:
            return self.parameters
        all_experts = len(m.expert_layers) * elements(self.experts)
        return self.parameters - all_experts + all_experts * m.moe_router_topk // m.num_experts

    def attention_kernel(self, share: RankSetup, window: Optional[int] = None) -> str:
        return causal_kernel(self.settings, share, window)
