# SPDX-License-Identifier: Apache-2.0
"""The settings of gated delta nets. Needs no torch."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, shown_by
from megatron.settings.network import Network, layer_pattern

SYMBOL = "G"  # in --hybrid-layer-pattern


def linear_layers(text: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers have no softmax attention, from --linear-attention-freq: all but every N-th, or lists of 0 and 1.

    Raises ValueError.

    >>> linear_layers("4", 5), linear_layers("[1]*2+[0]", 3)
    ((True, True, True, False, True), (True, True, False))
    """
    if text.strip().isdecimal() and int(text):
        return tuple((n + 1) % int(text) != 0 for n in range(num_layers))
    return layer_pattern(text, num_layers)


VARIANT = Network(
    "--experimental-attention-variant",
    lambda s: s.experimental_attention_variant is not None and not s.settings.model.letters,
)
PRESENT = Network(
    f"gated delta nets (--experimental-attention-variant, or {SYMBOL} in --hybrid-layer-pattern)",
    lambda s: s.settings.model.has_gdn,
)
TEST = "test_scan_layouts::test_any_layout_is_the_plain_loop"
shape = shown_by(TEST, on_resume="another model", needs=PRESENT)


@dataclass(frozen=True)
class GDNSettings:
    """Which layers of a transformer are gated delta nets, and their heads."""

    experimental_attention_variant: Optional[Literal["gated_delta_net", "gdn"]] = shown_by(
        TEST, on_resume="another model"
    )("linear attention in place of attention: gated delta nets, in the layers of --linear-attention-freq", None)
    linear_attention_freq: Optional[str] = shown_by(TEST, on_resume="another model", needs=VARIANT)(
        "layers with linear attention: all but every N-th, or a pattern, 1 for linear, such as ([1]*3+[0]*1)*12", None
    )
    linear_conv_kernel_dim: Count = shape("tokens that the convolution of a gated delta net sees", 4)
    linear_key_head_dim: Count = shape("channels of a key head of a gated delta net", 128)
    linear_value_head_dim: Count = shape("channels of a value head of a gated delta net", 128)
    linear_num_key_heads: Count = shape("key heads of a gated delta net", 16)
    linear_num_value_heads: Count = shape("value heads of a gated delta net, several for each key head", 32)

    @property
    def has_gdn(self) -> bool:
        """Whether layers are gated delta nets."""
        if self.letters:
            return SYMBOL in self.all_letters
        return self.experimental_attention_variant is not None

    def is_linear(self, layer: int) -> bool:
        """Whether the attention of a transformer layer is a gated delta net."""
        if self.letters or self.experimental_attention_variant is None or self.linear_attention_freq is None:
            return False
        try:
            return linear_layers(self.linear_attention_freq, self.num_layers)[layer]
        except ValueError:  # a rule refuses it
            return False
