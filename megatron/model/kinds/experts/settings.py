# SPDX-License-Identifier: Apache-2.0
"""The settings of layers with experts. Needs no torch."""

from dataclasses import dataclass
from typing import Any, Literal, Optional

from megatron.settings.declare import Count, Fraction, FromZero, Natural, Positive, shown_by
from megatron.settings.network import Network, layer_pattern

SYMBOL = "E"  # of layers with experts, in --hybrid-layer-pattern


def any_way(s: Any, attribute: str, suites: str) -> bool:
    """Whether a chosen way to balance has an attribute of `model.kinds.experts.parts.Balancing`; the suite's own have it if
    `suites` is in their names.
    """
    own = getattr(s.settings.model.own_experts, "balancing", {})
    return any(getattr(own.get(kind), attribute, suites in kind) for kind in s.settings.model.balancing_kinds)


GROUPS_OF_EXPERTS = Network("--moe-router-group-topk", lambda s: MIXED.met(s) and s.moe_router_group_topk)
MIXED = Network("--num-experts above 1", lambda s: s.settings.model.mixture)
SCORED = Network(
    "--num-experts above 1, and with --moe-router-load-balancing-type sinkhorn",
    lambda s: MIXED.met(s) and not any_way(s, "chooses", "sinkhorn"),
)
BEFORE = Network(
    "--num-experts above 1 and --moe-router-score-function softmax, and with --moe-router-load-balancing-type sinkhorn",
    lambda s: SCORED.met(s) and s.moe_router_score_function == "softmax",
)
LOSSES = Network(
    "--num-experts above 1 and a --moe-router-load-balancing-type with a loss",
    lambda s: MIXED.met(s) and (any_way(s, "label", "aux_loss") or not any(s.moe_aux_loss_coeff or ())),
)
BIASED = Network("--moe-router-enable-expert-bias", lambda s: MIXED.met(s) and s.moe_router_enable_expert_bias)
CAPPED = Network("--moe-expert-capacity-factor", lambda s: MIXED.met(s) and s.moe_expert_capacity_factor is not None)

EXPERT = "test_expert_layouts::test_any_layout_is_the_plain_loop"  # the test that shows their effects
expert = shown_by(EXPERT, needs=MIXED)
router = shown_by(EXPERT, needs=MIXED, on_resume="refused")
expert_shape = shown_by(EXPERT, needs=MIXED, on_resume="another model")


@dataclass(frozen=True)
class ExpertSettings:
    """The experts of a layer, their router, and how they get equally many tokens."""

    num_experts: Optional[Natural] = shown_by(EXPERT)(
        "experts of a layer that has them instead of an MLP; 0 or 1: none (docs/experts.md)",
        None,
        "--num-moe-experts",
        on_resume="another model",
    )
    moe_layer_freq: str = expert_shape(
        "layers with experts: every N-th, the first included, or a pattern such as [0]*1+[1]*27 or ([1]*3+[0])*2", "1"
    )
    moe_ffn_hidden_size: Optional[Count] = expert_shape(
        "hidden size of each expert (default: --ffn-hidden-size)", None, by_layer=int
    )
    moe_latent_size: Optional[Count] = expert_shape(
        "size of the latents in which experts compute: a product of each token's hidden states before they are sent, and "
        "one back to hidden states (default: none)",
        None,
    )
    moe_shared_expert_intermediate_size: Optional[Count] = expert_shape(
        "hidden size of an MLP that sees every token beside the experts, of all shared experts together", None
    )
    moe_shared_expert_gate: bool = expert_shape(
        "multiply the output of the shared expert by the sigmoid of a product of its input", False
    )
    moe_router_topk: Count = router("experts that each token goes to", 2)
    moe_router_score_function: Literal["softmax", "sigmoid"] = shown_by(EXPERT)(
        "scores of experts from the router's logits", "softmax", needs=SCORED, on_resume="refused"
    )
    moe_router_pre_softmax: bool = shown_by(EXPERT)(
        "softmax over all experts before the choice, instead of over the chosen ones",
        False,
        needs=BEFORE,
        on_resume="refused",
    )
    moe_router_num_groups: Optional[Count] = shown_by("test_choices_and_weights_are_those_of_megatron_core")(
        "groups of experts, of which a token chooses --moe-router-group-topk first",
        None,
        needs=MIXED,
        on_resume="refused",
    )
    moe_router_group_topk: Optional[Count] = shown_by("test_choices_and_weights_are_those_of_megatron_core")(
        "groups that each token chooses experts from", None, needs=MIXED, on_resume="refused"
    )
    moe_router_group_score_topk: Optional[Count] = shown_by("test_routers_of_transformers_choose_the_same")(
        "a group of experts is chosen by the sum of its best so many scores (default: --moe-router-topk / "
        "--moe-router-group-topk)",
        None,
        needs=GROUPS_OF_EXPERTS,
        on_resume="refused",
    )
    moe_router_topk_scaling_factor: Optional[Positive] = shown_by(EXPERT)(
        "multiply the weights of the chosen experts by this", None, needs=SCORED, on_resume="refused"
    )
    moe_router_dtype: Literal["fp32", "fp64"] = shown_by("test_logits_are_fp32_whatever_the_format")(
        "format of the router's logits and scores", "fp32", needs=MIXED
    )
    moe_router_load_balancing_type: Optional[
        list[Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]]
    ] = expert(
        "how experts get equally many tokens, one word or several: a loss over each micro-batch, each sequence or the "
        "global batch, by sinkhorn, or not at all (default: aux_loss)",
        None,
    )
    moe_aux_loss_coeff: Optional[list[float]] = shown_by(EXPERT)(
        "weight of each balancing loss; 0: it is only logged (default: 0)", None, needs=LOSSES
    )
    moe_z_loss_coeff: Optional[FromZero] = expert(
        "weight of the square of log sum exp of the router's logits, which keeps them small; 0: none", None
    )
    moe_router_enable_expert_bias: bool = expert_shape(
        "balance by a bias of each expert's score, which counts for the choice only and rises for experts with few tokens",
        False,
    )
    moe_router_bias_update_rate: FromZero = shown_by(EXPERT)(
        "by how much a step changes these biases; 0: they are constant", 1e-3, needs=BIASED
    )
    moe_input_jitter_eps: Optional[Fraction] = shown_by("test_jitter_is_drawn_by_sample_and_only_in_training")(
        "multiply the router's input by random numbers between 1 - this and 1 + this; 0: do not", None, needs=MIXED
    )
    moe_router_force_load_balancing: bool = shown_by("test_forced_balance_chooses_by_numbers_and_keeps_the_gradient")(
        "choose experts by random numbers, so that they get equally many tokens on average, for measurements",
        False,
        needs=MIXED,
        on_resume="refused",
    )
    moe_expert_capacity_factor: Optional[Positive] = router(
        "drop an expert's tokens above this x its equal share of a rank's micro-batch (default: none are dropped)", None
    )
    moe_pad_expert_input_to_capacity: bool = expert(
        "pad each expert's tokens to its capacity, so that no size depends on the data", False
    )
    moe_token_drop_policy: Literal["probs", "position"] = shown_by(EXPERT)(
        "tokens that are dropped above the capacity: those with the lowest probability, or the last",
        "probs",
        needs=CAPPED,
        on_resume="refused",
    )

    @property
    def mixture(self) -> bool:
        """Whether layers have experts."""
        return (self.num_experts or 0) > 1

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, numbered from 0. Raises ValueError for a bad `moe_layer_freq`."""
        return tuple(n for n, has in enumerate(self._which_have_experts) if has and self.mixture)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, numbered from 0, has experts instead of an MLP; after the network: one of a depth of multi-token
        prediction.
        """
        if layer >= self.num_layers and self.letters_ahead:
            return self.mixture and self.letters_ahead[layer - self.num_layers] == SYMBOL
        return self.mixture and self._which_have_experts[min(layer, self.num_layers - 1)]

    @property
    def _which_have_experts(self) -> tuple[bool, ...]:
        if self.letters:
            return tuple(letter == SYMBOL for letter in self.letters)
        return layer_pattern(self.moe_layer_freq, self.num_layers)

    @property
    def expert_hidden_size(self) -> int:
        """Channels that an expert reads and writes: the hidden size, or that of latents."""
        return self.moe_latent_size or self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def balancing_kinds(self) -> list[str]:
        """The ways in which experts are balanced."""
        return self.moe_router_load_balancing_type or ["aux_loss"]

    @property
    def balancing(self) -> tuple[tuple[str, float], ...]:
        """The ways in which experts are balanced, each with its coefficient."""
        kinds = self.balancing_kinds
        coefficients = self.moe_aux_loss_coeff or [0.0]
        return tuple(zip(kinds, coefficients if len(coefficients) > 1 else coefficients * len(kinds)))
