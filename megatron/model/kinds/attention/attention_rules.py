# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings of self-attention (`settings.rules`)."""

from types import SimpleNamespace

from megatron.model.kinds.attention.settings import bad_window
from megatron.settings.rules import Rule, divisors, either, multiples


def has_heads(s: SimpleNamespace) -> bool:
    """Whether layers have heads of --hidden-size / --num-attention-heads channels, or --kv-channels."""
    return not s.settings.model.multi_latent_attention


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
    Rule(
        lambda s: s.tp > 1 and s.num_attention_heads % s.tp == 0 and s.groups % s.tp,
        lambda s: (
            f"--num-query-groups {s.groups} cannot be divided by --tensor-model-parallel-size {s.tp}; nearest: "
            f"{either(multiples(s.groups, s.tp))}, or tensor parallel size {either(divisors(s.groups, s.tp))}"
        ),
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
        lambda s: has_heads(s) and s.kv_channels is None and s.hidden_size % s.num_attention_heads,
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
    Rule(
        lambda s: s.qk_clip and s.qk_layernorm and has_heads(s),
        lambda s: (
            "--qk-clip scales weights of queries and keys, and --qk-layernorm normalizes queries and keys after them: no "
            "logit would become smaller, and weights would shrink at every step; leave one of them out, or say "
            "--log-max-attention-logit, which only logs"
        ),
    ),
    Rule(
        lambda s: s.qk_layernorm and s.qk_layernorm_across_heads and s.normalization != "RMSNorm",
        lambda s: f"--qk-layernorm-across-heads is for --normalization RMSNorm; {s.normalization} is over each head",
    ),
)
