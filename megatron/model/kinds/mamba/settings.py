# SPDX-License-Identifier: Apache-2.0
"""The settings of Mamba-2. Needs no torch."""

from dataclasses import dataclass
from typing import Optional

from megatron.settings.declare import Count, shown_by
from megatron.settings.network import Network

SYMBOL = "M"
BESIDE = "P"  # beside attention, after one norm
PRESENT = Network(
    f"a Mamba-2 layer ({SYMBOL} or {BESIDE} in --hybrid-layer-pattern)", lambda s: s.settings.model.has_mamba
)
NORMED = Network(
    "Mamba-2 layers with a norm, and without --no-mamba-rms-norm", lambda s: PRESENT.met(s) and s.mamba_rms_norm
)
shape = shown_by("test_scan_layouts::test_any_layout_is_the_plain_loop", on_resume="another model", needs=PRESENT)


@dataclass(frozen=True)
class MambaSettings:
    """The heads of Mamba-2 layers."""

    mamba_num_heads: Optional[Count] = shape("heads of a Mamba-2 layer (default: 2 x hidden size / head dim)", None)
    mamba_head_dim: Count = shape("channels of a head of a Mamba-2 layer", 64)
    mamba_state_dim: Count = shape("channels of the state of a head of a Mamba-2 layer, for each of the head's", 128)
    mamba_num_groups: Count = shape("groups of heads of a Mamba-2 layer, which share what reads and writes states", 8)
    mamba_rms_norm: bool = shape("the norm of what a Mamba-2 layer's gate lets through; Falcon-H1 has none", True)
    mamba_norm_before_gate: bool = shape(
        "this norm is that of the scan's output, and the gate follows", False, needs=NORMED
    )

    @property
    def has_mamba(self) -> bool:
        """Whether the pattern lists such layers."""
        return not {SYMBOL, BESIDE}.isdisjoint(self.all_letters)

    @property
    def mamba_heads(self) -> int:
        """Heads of a layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim
