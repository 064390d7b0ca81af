# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings of Mamba-2 (`settings.rules`)."""

from megatron.model.kinds.mamba.settings import PRESENT
from megatron.settings.rules import Rule, divisors, either, multiples


def _heads(s) -> int:
    return s.settings.model.mamba_heads


def _uneven(s) -> bool:
    """Whether no whole number of heads is the default."""
    return s.mamba_num_heads is None and 2 * s.hidden_size % s.mamba_head_dim != 0


def _words(s) -> str:
    return f"{_heads(s)} heads of a Mamba-2 layer" if s.mamba_num_heads is None else f"--mamba-num-heads {_heads(s)}"


RULES = (
    Rule(
        lambda s: PRESENT.met(s) and _uneven(s),
        lambda s: (
            f"--mamba-head-dim {s.mamba_head_dim} does not divide {2 * s.hidden_size}, twice --hidden-size; nearest: "
            f"{either(divisors(2 * s.hidden_size, s.mamba_head_dim))}, or give --mamba-num-heads"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and not _uneven(s) and _heads(s) % s.mamba_num_groups,
        lambda s: (
            f"{_words(s)} cannot be divided by --mamba-num-groups {s.mamba_num_groups}; nearest: "
            f"{either(divisors(_heads(s), s.mamba_num_groups))} groups"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and s.mamba_num_groups % s.tp,
        lambda s: (
            f"--mamba-num-groups {s.mamba_num_groups} cannot be divided by --tensor-model-parallel-size {s.tp}; nearest: "
            f"{either(multiples(s.mamba_num_groups, s.tp))}, or tensor parallel size "
            f"{either(divisors(s.mamba_num_groups, s.tp))}"
        ),
    ),
)
