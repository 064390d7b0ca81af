# SPDX-License-Identifier: Apache-2.0
"""The settings of recomputation."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, shown_by

# Tests that show effects
AGAIN = "test_what_is_computed_again"

again = shown_by(AGAIN)


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation in the backward pass, which saves memory."""

    recompute_granularity: Optional[Literal["full", "full_attn", "core_attn"]] = again(
        "part of a layer to recompute in the backward pass: all of it, its attention half, or the --recompute-modules "
        "(core_attn, or selective)",
        None,
        "--recompute-activations=core_attn/",
        "--use-recompute~=full/",
        "--checkpoint-activations~=full/",
        also=dict(selective="core_attn"),
    )
    recompute_method: Optional[Literal["uniform", "block"]] = again(
        "uniform (the default): keep only the input of each --recompute-num-layers layers; block: recompute the first "
        "--recompute-num-layers layers of each stage only",
        None,
        "--activations-checkpoint-method",
        also_sets={"--activations-checkpoint-method": dict(recompute_granularity="full")},
    )
    recompute_num_layers: Optional[Count] = again(
        "see --recompute-method", None, "--checkpoint-num-layers", "--activations-checkpoint-num-layers"
    )
    no_recompute_layers: Optional[str] = again(
        "layers not to recompute, numbered from 0: 0,1,5", None, needs="recompute_granularity"
    )
    recompute_modules: Optional[list[Literal["core_attn", "layernorm", "mlp_act", "mlp", "mla_up_proj"]]] = again(
        "--recompute-granularity selective: modules of a layer to recompute: softmax(q k) v, the norms before attention "
        "and MLP, the activation of MLP and experts, the MLP or all of a layer's experts, the heads' queries, keys and "
        "values of multi-latent attention (default: core_attn)",
        None,
        also=dict(moe="mlp", moe_act="mlp_act"),
    )

    def __hash__(self):  # of a list there is none
        return hash((self.modules, self.recompute_method, self.recompute_num_layers, self.no_recompute_layers))

    @property
    def modules(self) -> tuple[str, ...]:
        """The recomputed parts of a layer, in a fixed order; whole layers are "full", attention halves "full_attn".

        >>> Recompute("core_attn", recompute_modules=["mlp", "layernorm"]).modules
        ('layernorm', 'mlp')
        """
        if self.recompute_granularity == "core_attn" and self.recompute_modules:
            return tuple(sorted(set(self.recompute_modules)))
        return (self.recompute_granularity,) if self.recompute_granularity else ()

    @property
    def words(self) -> str:
        """The recomputed parts for messages; "" for none."""
        return "+".join(self.modules)

    @property
    def exempt_layers(self) -> frozenset[int]:
        """--no-recompute-layers as numbers. Raises ValueError for other words."""
        # Brackets are allowed: files of other suites write lists so.
        words = (self.no_recompute_layers or "").strip("[] ").split(",")
        return frozenset(int(word) for word in words if word.strip())
