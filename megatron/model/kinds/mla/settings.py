# SPDX-License-Identifier: Apache-2.0
"""The settings of multi-latent attention. Needs no torch."""

import math
from dataclasses import dataclass
from typing import Optional

from megatron.settings.declare import Count, shown_by
from megatron.settings.network import Network

LATENT = Network("--multi-latent-attention", lambda s: s.multi_latent_attention)
size = shown_by("test_mla::test_a_network_is_the_plain_loop", needs=LATENT, on_resume="another model")


@dataclass(frozen=True)
class LatentSettings:
    """Keys and values of all heads come from one narrow latent of each token."""

    multi_latent_attention: bool = shown_by("test_mla::test_a_network_is_the_plain_loop", on_resume="another model")(
        "multi-latent attention, as in DeepSeek-V2 and V3 (docs/hybrid.md)",
        False,
        also_sets={"--multi-latent-attention": dict(rope_type="yarn")},  # as in Megatron-LM
    )
    q_lora_rank: Optional[Count] = size("size of the latent of queries (default: none, one product)", None)
    kv_lora_rank: Count = size("size of the latent of keys and values", 32)
    qk_head_dim: Count = size("channels of a head's queries and keys that are not rotated", 128)
    qk_pos_emb_head_dim: Count = size("rotated channels of queries, and of the key that all heads share", 64)
    v_head_dim: Count = size("channels of a head's values", 128)

    @property
    def latent_key_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.qk_pos_emb_head_dim + self.qk_head_dim

    @property
    def latent_scale(self) -> float:
        """Of scores. YaRN's temperature is in it, as DeepSeek has it (`--mscale-all-dim`)."""
        stretch = 1.0
        if self.rope_type == "yarn" and self.rotary_scaling_factor > 1:
            stretch += 0.1 * self.mscale_all_dim * math.log(self.rotary_scaling_factor)
        return stretch**2 / math.sqrt(self.latent_key_dim)
