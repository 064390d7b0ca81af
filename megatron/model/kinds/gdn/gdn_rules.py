# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings of gated delta nets (`settings.rules`)."""

from megatron.model.kinds.gdn.settings import PRESENT, SYMBOL, VARIANT, linear_layers
from megatron.settings.rules import Rule, divisors, either, multiples


def _pattern_error(s) -> str:
    if not VARIANT.met(s) or s.linear_attention_freq is None:
        return ""
    try:
        linear = linear_layers(s.linear_attention_freq, s.num_layers)
    except ValueError as error:
        return str(error)
    return "" if any(linear) else "no layer has linear attention then"


RULES = (
    Rule(
        lambda s: VARIANT.met(s) and s.linear_attention_freq is None,
        lambda s: (
            f"--experimental-attention-variant {s.experimental_attention_variant} needs --linear-attention-freq: N for all "
            "layers but every N-th, or a 1 for each layer with linear attention and a 0 for others, as ([1]*3+[0])*12"
        ),
    ),
    Rule(
        lambda s: s.settings.model.letters and s.experimental_attention_variant,
        lambda s: (
            f"--experimental-attention-variant {s.experimental_attention_variant}: --hybrid-layer-pattern lists the gated "
            f"delta nets ({SYMBOL}); leave the one or the other out"
        ),
    ),
    Rule(
        _pattern_error,
        lambda s: (
            f"--linear-attention-freq {s.linear_attention_freq} for --num-layers {s.num_layers}: {_pattern_error(s)}; give "
            "N for all layers but every N-th, or a 0 or 1 for each layer, as ([1]*3+[0])*12"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and s.linear_num_value_heads % s.linear_num_key_heads,
        lambda s: (
            f"--linear-num-value-heads {s.linear_num_value_heads} is not a multiple of --linear-num-key-heads "
            f"{s.linear_num_key_heads}; nearest: {either(multiples(s.linear_num_value_heads, s.linear_num_key_heads))}, or "
            f"{either(divisors(s.linear_num_value_heads, s.linear_num_key_heads))} key heads"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and s.linear_num_key_heads % s.tp,
        lambda s: (
            f"--linear-num-key-heads {s.linear_num_key_heads} cannot be divided by --tensor-model-parallel-size {s.tp}; "
            f"nearest: {either(multiples(s.linear_num_key_heads, s.tp))}, or tensor parallel size "
            f"{either(divisors(s.linear_num_key_heads, s.tp))}"
        ),
    ),
)
