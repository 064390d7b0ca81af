# SPDX-License-Identifier: Apache-2.0
"""Which settings of a GPT work together (`settings.rules`)."""

from types import SimpleNamespace

from megatron.settings.effects import HALF, Needs
from megatron.settings.rules import Rule, divisors, either, multiples

RULES = (
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
        lambda s: (
            s.position_embedding_type == "learned_absolute"
            and s.max_position_embeddings
            and s.seq_length > s.max_position_embeddings
        ),
        lambda s: (
            f"--seq-length {s.seq_length} is longer than --max-position-embeddings {s.max_position_embeddings}; "
            f"lower the one, raise the other to {s.seq_length}, or use --position-embedding-type rope"
        ),
    ),
    Rule(
        lambda s: s.position_embedding_type == "rope" and (s.rotary % 2 or s.rotary < 2),
        lambda s: (
            f"rotary positions turn pairs: {s.rotary} of {s.head} (--rotary-percent {s.rotary_percent:g} of the "
            f"width of a head) is not an even number above zero; {_even_rotary(s)}"
        ),
    ),
)

_ROPE = Needs("--position-embedding-type rope", lambda s: s.position_embedding_type == "rope")
IDLE = {
    "rotary_base": _ROPE,
    "rotary_percent": _ROPE,
    "bias_gelu_fusion": Needs("GeLU (no --swiglu)", lambda s: not s.swiglu),
    "attention_softmax_in_fp32": HALF,
    "reset_position_ids": Needs(
        "--position-embedding-type learned_absolute or rope", lambda s: s.position_embedding_type != "none"
    ),
}


def _even_rotary(s: SimpleNamespace) -> str:
    even = max(2, s.rotary // 2 * 2)
    return (
        f"--rotary-percent {even / s.head:g} rotates {even}" if even < s.head else f"choose heads wider than {s.head}"
    )
