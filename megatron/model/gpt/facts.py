# SPDX-License-Identifier: Apache-2.0
"""The facts of GPT: a layer is self-attention, then an MLP, each after a norm. Tests compare them with the tensors that
autograd saves, the messages of ranks and the counts of published models.

    >>> gpt_175b = GPTFacts(Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048), 51200)
    >>> f"{gpt_175b.parameters / 1e9:.1f} B, {gpt_175b.flops() / 1e12:.3f} TFLOP per token"
    '174.6 B, 1.076 TFLOP per token'
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Optional

from megatron.model.branches import Branch
from megatron.model.facts import Facts, experts_in
from megatron.model.kinds.mixer import PLACES, Mixer
from megatron.model.kinds.table import KINDS, chosen, letters_of
from megatron.model.layer_ops import NORM
from megatron.model.layer_rules import problem_of
from megatron.mpu.placement import elements
from megatron.settings.layer_settings import NO_OP, written
from megatron.settings.rules import out_of_range
from megatron.settings.schema import Config, Model

HEAD = 8  # width of a head in a shrunk model


class GPTFacts(Facts):
    """See `Facts`."""

    name = "GPT"
    kinds: ClassVar[Mapping[str, Mixer]] = KINDS  # that its layers choose from; a subclass may have others

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "GPTFacts":
        """The facts of a run; a variant may read its own settings in `config.extra`."""
        return cls(config.model, vocab_size)

    @cached_property
    def mixers(self) -> Mapping[str, Mixer]:
        """All kinds, a recipe's own first."""
        own = self.settings.own_kinds
        return {**own, **{name: kind for name, kind in self.kinds.items() if name not in own}}

    @property
    def recomputes(self) -> frozenset[str]:
        return frozenset({NORM}).union(*(kind.recomputes for kind in self.mixers.values()))

    def branches(self, layer: int) -> tuple[Branch, ...]:
        if letters := self.settings.letters:
            own, layer = (
                (letters, layer) if layer < len(letters) else (self.settings.letters_ahead, layer - len(letters))
            )
            branches = [letters_of(self.mixers)[own[layer]]]
        else:
            layer = min(layer, self.num_layers - 1)  # a depth of multi-token prediction has a layer as the last one
            places = [place for place in PLACES if place != self.settings.lacks(layer)]
            branches = [(chosen(self.mixers, place, self.settings, layer),) for place in places]
        return tuple(Branch.at(self.settings.norm_position, mixers[0].slot, *mixers) for mixers in branches)

    @property
    def has_shape(self) -> bool:
        m = self.settings
        try:
            if out_of_range(m) or problem_of(m):
                return False
            alone = {m.overrides(layer) for layer in range(m.num_layers)}
            sizes = [m, *(replace(m, layer_settings=None, **dict(own)) for own in alone if own)]
            return all(kind.has_shape(of_layer) for of_layer in sizes for kind in self.mixers.values())
        except (ValueError, ZeroDivisionError):
            return False

    def shrunk(self, num_layers: int, tp: int) -> Model:
        """Keeps the ratios: more positions than sequence, and those of each kind."""
        m, s = self.settings, 8 * max(2, tp)
        heads = 1 if m.num_attention_heads == 1 else 2 * max(2, tp)
        learned = m.position_embedding_type == "learned_absolute"
        small = replace(
            m,
            num_layers=num_layers,
            hybrid_layer_pattern=m.pattern_of(num_layers),
            no_rope_freq=m.no_rope_freq and f"[0]*{num_layers - 1}+[1]",
            hidden_size=HEAD * heads,
            num_attention_heads=heads,
            seq_length=s,
            max_position_embeddings=(s + 8 if m.position_table > m.seq_length else s) if learned else None,
            make_vocab_size_divisible_by=min(m.make_vocab_size_divisible_by, 8),
            model_name_or_path=None,
        )
        own = {name: value for kind in self.mixers.values() for name, value in kind.shrunk(m, small, tp).items()}
        small = replace(small, **own, layer_settings=self._small_layers(small, tp))
        rotary = int(small.head_dim * m.rotary_percent)
        return replace(small, rotary_percent=m.rotary_percent if rotary % 2 == 0 and rotary > 1 else 0.5)

    def _small_layers(self, small: Model, tp: int) -> Optional[str]:
        """--layer-settings of a shrunk model: those of the first layers, with sizes that fit."""
        m, found = self.settings, {}
        for layer in range(min(small.num_layers, m.num_layers) if m.layer_settings else 0):
            if small.letters[layer : layer + 1] != m.letters[layer : layer + 1]:  # of another kind
                continue
            own = m.settings_of_layer(layer)
            of_layer, part = replace(m, layer_settings=None, **own), m.lacks(layer)
            found[layer] = {NO_OP: part} if part else {}
            for kind in self.mixers.values():
                sizes = kind.shrunk(of_layer, small, tp).items()
                found[layer] |= {name: value for name, value in sizes if name in own and value != getattr(small, name)}
        return written(found) or None

    def divisible_by_tp(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for settings, mixer in self._present:
            for name, size in mixer.divided(settings).items():  # layers may have other sizes
                found[name if found.get(name, size) == size else f"{name} of other layers ({size})"] = size
        return found

    @cached_property
    def _present(self) -> list[tuple[Model, Mixer]]:
        """The kinds of its layers, with the settings of these layers."""
        kinds = ((kind.settings(self.settings), kind) for kind in sorted(self.layer_kinds))
        return [(own, mixer) for own, kind in kinds for branch in kind.branches for mixer in branch.mixers]

    @property
    def rotated(self) -> Optional[int]:
        """The channels of each head that rotary positions turn; None: no layer has positions."""
        there = (*self._present, *self.mixers_of(self.settings.layers_ahead))
        return next((mixer.rotated(self.settings) for _, mixer in there if mixer.rotated), None)

    def shares_heads(self, tp: int, cp: int) -> bool:
        heads = [mixer.heads(own) for own, mixer in self._present if mixer.heads and not mixer.scans]
        return bool(heads) and all(number % (tp * cp) == 0 for number in heads)

    def describe(self, count: str) -> str:
        m, active = self.settings, ""
        for own, mixer in self._present:
            if mixer.used:
                used, of = mixer.used(own)
                share = self.active_parameters / self.parameters
                active = f", {used} of {of} {mixer.name} for each token ({share:.1%} of the parameters)"
        return (
            f"{self.name} of {count} parameters{active}: {m.num_layers} layers{f' {m.letters}' * bool(m.letters)}"
            f"{f' ({m.layer_settings})' * bool(m.layer_settings)}, "
            f"hidden {m.hidden_size}, {m.num_attention_heads} heads, sequence {m.seq_length}, vocabulary {self.vocab_size}"
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: those of its experts only."""
        unused = 0
        for layer in range(self.num_layers):
            for settings, mixer in self.mixers_of([layer]):
                if mixer.used:
                    used, of = mixer.used(settings)
                    unused += (
                        elements(experts_in(self.layer_weights(self.layer_kind(layer), False))) * (of - used) // of
                    )
        return self.parameters - unused
