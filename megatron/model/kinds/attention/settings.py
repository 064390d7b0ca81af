# SPDX-License-Identifier: Apache-2.0
"""The settings of self-attention. Needs no torch."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Fraction, Positive, shown_by
from megatron.settings.groups.precision import HALF
from megatron.settings.network import Network, formula, shape


def window_numbers(text: str) -> tuple[int, int]:
    """(keys before, keys after) of --window-size. Raises ValueError.

    >>> window_numbers("(127, 0)")
    (127, 0)
    """
    left, right = text.strip(" ()[]").split(",")
    return int(left), int(right)


def bad_window(text: Optional[str]) -> bool:
    """Whether --window-size is no window of a causal model."""
    try:
        left, right = (-1, 0) if text is None else window_numbers(text)
    except ValueError:
        return True
    return left < -1 or right not in (-1, 0)


NO_BIAS = Network("--disable-bias-linear", lambda s: s.disable_bias_linear)
QK_NORM = Network("--qk-layernorm", lambda s: s.qk_layernorm)
HEADS = Network(
    "heads of one size: those of --multi-latent-attention have others", lambda s: not s.multi_latent_attention
)
WINDOW = Network("--window-size", lambda s: s.window_size is not None)
NARROW = Network(
    "a --seq-length that is longer than the window",
    lambda s: bad_window(s.window_size) or (s.settings.model.window or s.seq_length) < s.seq_length - 1,
)


@dataclass(frozen=True)
class AttentionSettings:
    """The heads of self-attention, and the arithmetic of its scores."""

    kv_channels: Optional[Count] = shape("size of an attention head (default: hidden size / heads)", None, needs=HEADS)
    group_query_attention: bool = shown_by("test_groups_need_a_number")(
        "grouped-query attention (see --num-query-groups)", False
    )
    num_query_groups: Optional[Count] = shape(
        "key-value heads (default: one per query head)", None, "--num-key-value-heads", by_layer=int
    )
    qk_layernorm: bool = shape("normalize the queries and keys of each head", False)
    qk_layernorm_across_heads: bool = shape(
        "--qk-layernorm normalizes over all heads together, as in OLMo 2", False, needs=QK_NORM
    )
    add_qkv_bias: bool = shape(
        "with --disable-bias-linear: a bias for queries, keys and values alone, as in Qwen2",
        False,
        "--qkv-bias",
        needs=NO_BIAS,
    )
    apply_query_key_layer_scaling: bool = shown_by("test_query_key_layer_scaling_keeps_scores_in_the_range_of_fp16")(
        "scale attention scores by 1 / layer number and compute their softmax in fp32 (for fp16)",
        False,
        "--no-query-key-layer-scaling=false",
        "--scale-qk-by-layer-num",
    )
    query_pre_attn_scalar: Optional[Positive] = formula(
        "divide attention scores by the root of this (default: size of an attention head)", None
    )
    attention_softmax_in_fp32: bool = shown_by("test_softmax_in_fp32_is_that_of_the_rounded_scores")(
        "compute the softmax of attention in fp32", False, needs=HALF._replace(of_network=True)
    )
    window_size: Optional[str] = formula(
        "sliding window attention: keys before and after a token that it sees, as 4095,0 (default, or -1: all before)",
        None,
        needs=NARROW,
        by_layer=str,
    )
    window_attn_skip_freq: Optional[Count] = formula(
        "with --window-size: every N-th layer uses full attention (4: the 4th, the 8th ...)", None, needs=WINDOW
    )
    attn_logit_softcapping: Optional[Positive] = formula(
        "attention scores become cap x tanh(score / cap), as in Gemma 2", None, "--attention-logit-softcapping"
    )
    attention_output_gate: bool = shape(
        "each head's output is multiplied by the sigmoid of a product of the layer's input, as in Qwen3-Next", False
    )
    softmax_type: Literal["vanilla", "learnable", "off-by-one"] = shape(
        "softmax of attention over the keys alone, or with a sink: a logit of each head without a value, learned as in "
        "gpt-oss, or 0",
        "vanilla",
    )
    attention_dropout: Fraction = shown_by("test_attention_dropout_drops_attention_weights")(
        "dropout of attention weights; 0: none", 0.1, "--attention-probs-dropout-prob"
    )

    @property
    def qkv_bias(self) -> bool:
        """Whether the product for queries, keys and values has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def qkv_parts(self) -> tuple[int, ...]:
        """The heads of each part of a group in the first product: queries, their gates if they have some, key, value."""
        queries = self.num_attention_heads // self.query_groups
        return (queries, queries, 1, 1) if self.attention_output_gate else (queries, 1, 1)

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def window(self) -> Optional[int]:
        """Number of keys before a token that it attends to in layers with a window; None: all of them."""
        left = -1 if self.window_size is None else window_numbers(self.window_size)[0]
        return None if left < 0 else left

    def window_of(self, layer: int) -> Optional[int]:
        """The `window` of a layer, numbered from 0."""
        skipped = self.window_attn_skip_freq is not None and (layer + 1) % self.window_attn_skip_freq == 0
        return None if skipped else self.window
