# SPDX-License-Identifier: Apache-2.0
"""The settings of the optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Optional

from megatron.settings.declare import Between, Count, Fraction, FromZero, Natural, Needs, Positive, Share, shown_by

FALLING = Needs("--lr-decay-style other than constant", lambda s: s.lr_decay_style != "constant")
DECAYING = Needs(
    "--lr-decay-style other than constant, or --lr-warmup-fraction",
    lambda s: s.lr_decay_style != "constant" or s.lr_warmup_fraction is not None,
)
WSD = Needs("--lr-decay-style WSD", lambda s: s.lr_decay_style == "WSD")

# Tests that show effects
RATES = "test_learning_rates_are_the_closed_forms"
UPDATES = "test_updates_are_those_of_torchs_adamw"
MUON = "test_muon_is_its_description"
ROUNDED = "test_updates_are_the_explicit_arithmetic"
IN_BF16 = "test_a_reduction_is_the_sum_in_bf16"
CLIP = "test_qk_clip::test_any_layout_is_the_plain_loop"
WHERE = "test_state_on_the_host_or_in_files_changes_nothing_else"

rate = shown_by(RATES)
update = shown_by(UPDATES)
wsd = shown_by(RATES, needs=WSD)
muon = shown_by(MUON)


@dataclass(frozen=True)
class Optimizer:
    """The update rule, its learning rate and its weight decay."""

    # A recipe's own choices: name -> schedule or optimizer (`own_choices.optimizer_group`).
    own_schedules: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    own_optimizers: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    optimizer: Literal["adam", "cpu_adam", "sgd", "lion", "muon"] = shown_by("test_sgd_is_torchs")(
        "optimizer: adam is AdamW, as in Megatron-LM; cpu_adam: with --optimizer-cpu-offload; the others: "
        "docs/optimizers.md",
        "adam",
        also=dict(adamw="adam", fused_adam="adam", hybrid_adam="adam", dist_muon="muon"),
    )
    freeze: Optional[list[str]] = shown_by("test_frozen::test_any_layout_is_the_plain_loop")(
        "patterns of names of parameters to freeze: 'embedding.*' 'blocks.[01].*' "
        "(docs/finetuning.md#frozen-parameters)",
        None,
        on_resume="refused",
    )
    train_only: Optional[list[str]] = shown_by("test_one_word_says_what_the_other_does")(
        "patterns of names of parameters to train; all others are frozen", None, on_resume="refused"
    )
    lr: Optional[Positive] = update("maximum learning rate", None, "--max-lr", "--learning-rate")
    min_lr: FromZero = rate("minimum learning rate", 0.0, needs=FALLING)
    decoupled_lr: Optional[Positive] = shown_by("test_embeddings_have_a_learning_rate_of_their_own")(
        "maximum learning rate of the input embedding and the output layer (default: --lr)", None
    )
    decoupled_min_lr: Optional[float] = shown_by("test_embeddings_have_a_learning_rate_of_their_own")(
        "minimum learning rate of these (default: --min-lr)", None
    )
    lr_decay_style: Literal["constant", "linear", "linear-from-start", "cosine", "inverse-square-root", "WSD"] = rate(
        "learning rate decay function; linear-from-start: the warm-up is a part of the decay, as in PaddleFleetX",
        "linear",
        also=dict(none="constant"),
    )
    lr_step_unit: Literal["iter", "sample", "epoch"] = shown_by("test_rates_that_change_with_the_epoch")(
        "update the learning rate at each step (iter, sample), or at the start of each epoch", "iter"
    )
    lr_decay_iters: Optional[Count] = rate(
        "number of steps to decay over (default: all)", None, "--decay-steps", needs=DECAYING
    )
    lr_decay_samples: Optional[Count] = rate("number of samples to decay over", None, needs=DECAYING)
    lr_warmup_iters: Natural = rate("number of steps of linear warm-up", 0)
    lr_warmup_samples: Natural = rate("number of samples of linear warm-up", 0)
    lr_warmup_fraction: Optional[Fraction] = rate(
        "fraction of the decay length to use for linear warm-up; 0: none", None, "--warmup-rate", "--warmup"
    )
    lr_warmup_init: float = rate(
        "initial learning rate of warm-up",
        0.0,
        needs=Needs(
            "a warm-up (--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction)",
            lambda s: s.lr_warmup_iters or s.lr_warmup_samples or s.lr_warmup_fraction,
        ),
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = wsd(
        "annealing function of WSD", "exponential"
    )
    lr_wsd_decay_iters: Optional[Count] = wsd("number of steps of WSD's annealing", None)
    lr_wsd_decay_samples: Optional[Count] = wsd("number of samples of WSD's annealing", None)
    weight_decay: FromZero = update(
        "decoupled weight decay of matrices; 0: none",
        0.01,
        needs=Needs("--weight-decay-incr-style constant", lambda s: s.weight_decay_incr_style == "constant"),
    )
    start_weight_decay: Optional[float] = update("initial weight decay (with --weight-decay-incr-style)", None)
    end_weight_decay: Optional[float] = update("final weight decay", None)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = update("weight decay schedule", "constant")
    clip_grad: FromZero = update("gradient clipping by global norm; 0: off", 1.0, "--grad-clip")
    adam_beta1: Fraction = update("decay rate of Adam's first moment; 0: none", 0.9)
    adam_beta2: Fraction = update("decay rate of Adam's second moment; 0: none", 0.999)
    adam_eps: Positive = update("epsilon of Adam", 1e-8, "--adam-epsilon")
    sgd_momentum: Fraction = shown_by("test_sgd_is_torchs")("momentum of --optimizer sgd; 0: none, without state", 0.9)
    lion_beta1: Fraction = shown_by("test_lion_is_the_published_formula")(
        "weight of the momentum in the update of --optimizer lion; 0: none", 0.95
    )
    lion_beta2: Fraction = shown_by("test_lion_is_the_published_formula")(
        "decay rate of Lion's momentum; 0: none", 0.98
    )
    muon_momentum: Fraction = muon("momentum of --optimizer muon; 0: none", 0.95)
    muon_nesterov: bool = muon("Nesterov momentum in Muon", False, "--muon-use-nesterov")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = shown_by(
        "test_plain_linear_weights_move_as_with_torchs_muon"
    )("scale of Muon's update of r rows and c columns: the root of max(r, c), r/c, or max(1, r/c)", "spectral")
    muon_extra_scale_factor: Positive = muon("extra factor of Muon's update; 0.2 with spectral matches AdamW's", 1.0)
    muon_num_ns_steps: Count = muon("number of Newton-Schulz steps in Muon", 5)
    muon_coefficient_type: Literal["quintic", "simple", "polar_express"] = muon(
        "Newton-Schulz coefficients: five polynomials in turn, one for all steps, or eight in turn", "quintic"
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = shown_by(
        "test_products_are_computed_as_they_are_told"
    )("precision of Newton-Schulz products: bf16; TF32 if the device has it; fp32", "medium", also=dict(low="medium"))
    qk_clip: bool = shown_by(CLIP)(
        "after each update, scale the weights of queries and keys of heads whose largest attention logit was above "
        "--qk-clip-threshold, as in MuonClip (arXiv:2507.20534)",
        False,
        on_resume="logged",
    )
    qk_clip_alpha: Between = shown_by(CLIP)(
        "share of --qk-clip that queries get: they are multiplied by eta ** alpha, keys by eta ** (1 - alpha)",
        0.5,
        needs="qk_clip",
    )
    qk_clip_threshold: Positive = shown_by(CLIP)(
        "largest attention logit that --qk-clip leaves alone: eta = min(threshold / largest logit, 1)",
        100.0,
        needs="qk_clip",
    )
    optimizer_cpu_offload: bool = shown_by(WHERE)(
        "keep optimizer state in CPU memory and update it there", False, "--sharding-offload"
    )
    optimizer_offload_fraction: Share = shown_by(WHERE)(
        "fraction of the state that --optimizer-cpu-offload moves; 0: none; 1: all that is not on disk",
        1.0,
        needs=Needs("--optimizer-cpu-offload", lambda s: s.optimizer_cpu_offload or s.optimizer == "cpu_adam"),
    )
    nvme_offload_fraction: Share = shown_by(WHERE)(
        "fraction of optimizer state to keep in files, read and updated by the CPU at each step", 0.0
    )
    nvme_offload_dir: Optional[str] = shown_by(WHERE)(
        "folder for these files, on a fast disk of the node", None, needs="nvme_offload_fraction"
    )
    param_cpu_offload: bool = shown_by("test_home_of_the_shards")(
        "keep the shards of --sharding-stage 3 in CPU memory", False
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = shown_by(ROUNDED)(
        "format of the first moment: exp_avg of adam, lion and muon, momentum_buffer of sgd and muon", "fp32"
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = shown_by(ROUNDED)("format of the second moment, exp_avg_sq", "fp32")
    stochastic_rounding: bool = shown_by(ROUNDED)(
        "round bf16 moments up or down at random, which is right in the mean; off: to the nearest", True
    )
    grad_reduce_in_bf16: bool = shown_by(IN_BF16)("accumulate gradients in bf16, and reduce them so", False)
    main_grads_dtype: Literal["fp32", "bf16"] = shown_by(IN_BF16)(
        "bf16: --grad-reduce-in-bf16, and the sums over micro-batches of --sharding-stage 2 and 3 are bf16 as well",
        "fp32",
    )
    accumulate_allreduce_grads_in_fp32: bool = shown_by("test_formats_that_contradict_each_other")(
        "only checked: gradients are fp32 unless --grad-reduce-in-bf16 says otherwise", False
    )
    gradient_accumulation_fusion: bool = shown_by("test_gradient_accumulation_fusion_trains_to_the_same_weights")(
        "accumulate weight gradients into their buffer in the matrix product (CPU: slower; not in W passes)", False
    )
    loss_averaging: Literal["token", "micro-batch"] = shown_by(
        "test_losses_are_averaged_over_tokens_or_over_micro_batches"
    )(
        "token: mean over all unmasked tokens of the global batch; micro-batch: Megatron-LM's mean of means",
        "token",
        "--calculate-per-token-loss=token/micro-batch",
    )

    @property
    def reduced_format(self) -> str:
        """Format in which gradients are accumulated and reduced."""
        return "bf16" if self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16" else "fp32"

    @property
    def rule(self) -> str:
        """The update rule: --optimizer without its place."""
        return "adam" if self.optimizer == "cpu_adam" else self.optimizer

    @property
    def host_share(self) -> float:
        """The fraction of optimizer state in CPU memory."""
        if not (self.optimizer_cpu_offload or self.optimizer == "cpu_adam"):
            return 0.0
        share = self.optimizer_offload_fraction
        return 1 - self.nvme_offload_fraction if share == 1 else share
