# SPDX-License-Identifier: Apache-2.0
"""The settings of Mamba-2. Needs no torch."""

from dataclasses import dataclass
from typing import Optional

from megatron.settings.declare import Count, shown_by
from megatron.settings.network import Network

SYMBOL = "M"
PRESENT = Network(f"a Mamba-2 layer ({SYMBOL} in --hybrid-layer-pattern)", lambda s: SYMBOL in s.settings.model.letters)
shape = shown_by("test_scan_layouts::test_any_layout_is_the_plain_loop", on_resume="another model", needs=PRESENT)


@dataclass(frozen=True)
class MambaSettings:
    """The heads of Mamba-2 layers."""

    mamba_num_heads: Optional[Count] = shape("heads of a Mamba-2 layer (default: 2 x hidden size / head dim)", None)
    mamba_head_dim: Count = shape("channels of a head of a Mamba-2 layer", 64)
    mamba_state_dim: Count = shape("channels of the state of a head of a Mamba-2 layer, for each of the head's", 128)
    mamba_num_groups: Count = shape("groups of heads of a Mamba-2 layer, which share what reads and writes states", 8)

    @property
    def mamba_heads(self) -> int:
        """Heads of a layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim
