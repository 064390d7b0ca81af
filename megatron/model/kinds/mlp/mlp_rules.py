# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings of the MLP (`settings.rules`)."""

from itertools import combinations

from megatron.settings.declare import dashed
from megatron.settings.rules import Rule, divisors, either, multiples

RULES = (
    Rule(
        lambda s: s.tp > 1 and s.num_attention_heads % s.tp == 0 and s.ffn % s.tp,
        lambda s: (
            f"--ffn-hidden-size {s.ffn} cannot be divided by --tensor-model-parallel-size {s.tp}; nearest: "
            f"{either(multiples(s.ffn, s.tp))}, or tensor parallel size {either(divisors(s.ffn, s.tp))}"
        ),
    ),
    *(
        Rule(
            lambda s, one=one, other=other: getattr(s, one) and getattr(s, other),
            lambda s, one=one, other=other: (
                f"{dashed(one)} and {dashed(other)} are two activations of the MLP; give one of them"
            ),
        )
        for one, other in combinations(("squared_relu", "swiglu", "geglu", "quick_geglu"), 2)
    ),
)
