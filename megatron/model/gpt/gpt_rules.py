# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of GPT's settings (`settings.rules`)."""

from itertools import combinations
from types import SimpleNamespace

from megatron.settings.declare import dashed, declared
from megatron.settings.groups.model import bad_window
from megatron.settings.rules import Rule, divisors, either, multiples
from megatron.settings.schema import GROUPS


def _scalings(s: SimpleNamespace) -> dict[str, bool]:
    """The ways to scale rotary frequencies, and whether each is enabled."""
    return {
        "--rotary-seq-len-interpolation-factor": s.rotary_seq_len_interpolation_factor is not None,
        "--use-rope-scaling": s.use_rope_scaling,
        "--rope-type yarn": s.rope_type == "yarn",
    }


NO_RELATIVE = Rule(
    lambda s: s.position_embedding_type == "relative",
    lambda s: (
        f"--position-embedding-type relative belongs to encoder-decoders; --model-type {s.model_type} has "
        "learned_absolute, rope and none"
    ),
)
RULES = (
    Rule(
        lambda s: bad_window(s.window_size),
        lambda s: (
            f"--window-size {s.window_size} must be the keys before and after its own that a token sees, with a comma "
            "between, as 4095,0; before: -1 for all; after: 0, because attention is causal"
        ),
    ),
    Rule(
        lambda s: s.num_attention_heads % s.tp,
        lambda s: (
            f"--num-attention-heads {s.num_attention_heads} is not a multiple of --tensor-model-parallel-size "
            f"{s.tp}; nearest: {either(multiples(s.num_attention_heads, s.tp))} heads, or tensor parallel size "
            f"{either(divisors(s.num_attention_heads, s.tp))}"
        ),
    ),
    *(
        Rule(
            lambda s, name=name: s.tp > 1 and s.num_attention_heads % s.tp == 0 and getattr(s, name) % s.tp,
            lambda s, name=name, what=what: (
                f"{what.format(getattr(s, name))} cannot be divided by "
                f"--tensor-model-parallel-size {s.tp}; nearest: {either(multiples(getattr(s, name), s.tp))}, or tensor "
                f"parallel size {either(divisors(getattr(s, name), s.tp))}"
            ),
        )
        for name, what in (("groups", "--num-query-groups {}"), ("ffn", "--ffn-hidden-size {}"))
    ),
    Rule(
        lambda s: s.groups % s.tp == 0 and s.groups // s.tp % s.cp_inner,
        lambda s: (
            f"--cp-comm-type a2a+p2p divides the {s.groups // s.tp} key-value heads of each tensor parallel rank by the "
            f"first of --hierarchical-context-parallel-sizes, {s.cp_inner}; use p2p, or "
            f"{either(divisors(s.groups // s.tp, s.cp_inner))} there"
        ),
    ),
    Rule(
        lambda s: "a2a" in s.cp_comm and s.groups % s.tp == 0 and s.groups // s.tp % s.cp,
        lambda s: (
            f"--cp-comm-type a2a divides the {s.groups // s.tp} key-value heads of each tensor parallel rank by "
            f"--context-parallel-size {s.cp}; use p2p or allgather, or a context parallel size of "
            f"{either(divisors(s.groups // s.tp, s.cp))}"
        ),
    ),
    Rule(
        lambda s: s.kv_channels is None and s.hidden_size % s.num_attention_heads,
        lambda s: (
            f"--hidden-size {s.hidden_size} is not a multiple of --num-attention-heads {s.num_attention_heads}; "
            f"nearest: {either(multiples(s.hidden_size, s.num_attention_heads))}, or "
            f"{either(divisors(s.hidden_size, s.num_attention_heads))} heads (or set --kv-channels)"
        ),
    ),
    Rule(
        lambda s: s.num_query_groups and s.num_attention_heads % s.num_query_groups,
        lambda s: (
            f"--num-attention-heads {s.num_attention_heads} cannot be shared by --num-query-groups "
            f"{s.num_query_groups}; nearest: {either(divisors(s.num_attention_heads, s.num_query_groups))} groups"
        ),
    ),
    Rule(
        lambda s: s.group_query_attention and s.num_query_groups is None,
        lambda s: (
            "--group-query-attention needs --num-query-groups: 1, "
            f"{either(divisors(s.num_attention_heads, s.num_attention_heads**0.5))} ..."
        ),
    ),
    Rule(
        lambda s: s.attn_logit_softcapping and s.attention_backend == "sdpa",
        lambda s: (
            "--attention-backend sdpa has no --attn-logit-softcapping; use auto, explicit, or flash (with the package "
            "flash-attn)"
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
    Rule(
        lambda s: s.qk_layernorm and s.qk_layernorm_across_heads and s.normalization != "RMSNorm",
        lambda s: f"--qk-layernorm-across-heads is for --normalization RMSNorm; {s.normalization} is over each head",
    ),
    Rule(
        lambda s: (
            (s.position_embedding_type == "learned_absolute" or s.settings.given("max_position_embeddings"))
            and s.max_position_embeddings
            and s.seq_length > s.max_position_embeddings
        ),
        lambda s: (
            f"--seq-length {s.seq_length} is longer than --max-position-embeddings {s.max_position_embeddings}; "
            f"lower the one, or raise the other to {s.seq_length}"
            + ", or use --position-embedding-type rope"
            * (s.position_embedding_type == "learned_absolute")
        ),
    ),
    Rule(
        lambda s: s.position_embedding_type == "rope" and (s.rotary % 2 or s.rotary < 2),
        lambda s: (
            f"rotary positions turn pairs: {s.rotary} of {s.head} (--rotary-percent {s.rotary_percent:g} of the "
            f"width of a head) is not an even number above zero; {_even_rotary(s)}"
        ),
    ),
    Rule(
        lambda s: sum(_scalings(s).values()) > 1,
        lambda s: (
            "--rotary-seq-len-interpolation-factor, --use-rope-scaling and --rope-type yarn scale the same frequencies; "
            "give one of them"
        ),
    ),
    Rule(
        lambda s: s.use_rope_scaling and s.rope_scaling_low_freq_factor >= s.rope_scaling_high_freq_factor,
        lambda s: (
            f"--rope-scaling-low-freq-factor {s.rope_scaling_low_freq_factor:g} must be below "
            f"--rope-scaling-high-freq-factor {s.rope_scaling_high_freq_factor:g}, as 1 and 4 are"
        ),
    ),
    Rule(
        lambda s: s.rope_type == "yarn" and s.yarn_beta_slow >= s.yarn_beta_fast,
        lambda s: (
            f"--yarn-beta-slow {s.yarn_beta_slow:g} must be below --yarn-beta-fast {s.yarn_beta_fast:g}, as 1 and 32 are"
        ),
    ),
    Rule(
        lambda s: s.rope_type == "yarn" and s.rotary_base <= 1,
        lambda s: f"--rope-type yarn needs a --rotary-base above 1, as 10000 is; {s.rotary_base:g} is not",
    ),
)

# The conditions that the network decides, of all groups
IDLE = {name: needs for name, needs in declared("needs", *GROUPS.values()).items() if needs.of_network}


def _even_rotary(s: SimpleNamespace) -> str:
    even = max(2, s.rotary // 2 * 2)
    return (
        f"--rotary-percent {even / s.head:g} rotates {even}" if even < s.head else f"choose heads wider than {s.head}"
    )
