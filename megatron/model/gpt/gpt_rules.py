# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings that all kinds of layers share (`settings.rules`)."""

from types import SimpleNamespace

from megatron.model.kinds.attention.attention_rules import has_heads
from megatron.settings.declare import declared
from megatron.settings.network import last_of_each
from megatron.settings.rules import Rule
from megatron.settings.schema import GROUPS


def _scalings(s: SimpleNamespace) -> dict[str, bool]:
    """The ways to scale rotary frequencies, and whether each is enabled."""
    return {
        "--rotary-seq-len-interpolation-factor": s.rotary_seq_len_interpolation_factor is not None,
        "--use-rope-scaling": s.use_rope_scaling,
        "--rope-type yarn": s.rope_type == "yarn",
    }


def _rotation_error(s: SimpleNamespace) -> str:
    """What is wrong with --no-rope-freq; "" if nothing is."""
    try:
        return s.no_rope_freq and last_of_each(s.no_rope_freq, s.num_layers) and ""
    except ValueError as error:
        return str(error)


NO_RELATIVE = Rule(
    lambda s: s.position_embedding_type == "relative",
    lambda s: (
        f"--position-embedding-type relative belongs to encoder-decoders; --model-type {s.model_type} has "
        "learned_absolute, rope and none"
    ),
)
RULES = (
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
        lambda s: s.position_embedding_type == "rope" and has_heads(s) and (s.rotary % 2 or s.rotary < 2),
        lambda s: (
            f"rotary positions turn pairs: {s.rotary} of {s.head} (--rotary-percent {s.rotary_percent:g} of the "
            f"width of a head) is not an even number above zero; {_even_rotary(s)}"
        ),
    ),
    Rule(
        lambda s: s.mtp_num_layers and s.pp > 1 and s.position_embedding_type == "learned_absolute",
        lambda s: (
            f"--mtp-num-layers {s.mtp_num_layers} embeds tokens on the last stage, which has no learned positions; use "
            "--position-embedding-type rope, or --pipeline-model-parallel-size 1"
        ),
    ),
    Rule(
        lambda s: (s.mtp_num_layers or 0) >= s.seq_length,
        lambda s: (
            f"--mtp-num-layers {s.mtp_num_layers}: a sample of --seq-length {s.seq_length} has no tokens so far ahead; "
            f"give at most {s.seq_length - 1}"
        ),
    ),
    Rule(
        lambda s: _rotation_error(s),
        lambda s: (
            f"--no-rope-freq {s.no_rope_freq} for --num-layers {s.num_layers}: {_rotation_error(s)}; give N for the last "
            "of each N layers, or a 0 or 1 for each layer, as [0]*3+[1]"
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
        lambda s: s.rope_type == "yarn" and s.yarn_beta_slow > s.yarn_beta_fast,
        lambda s: (
            f"--yarn-beta-slow {s.yarn_beta_slow:g} must be at most --yarn-beta-fast {s.yarn_beta_fast:g}, as 1 and 32 are"
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
