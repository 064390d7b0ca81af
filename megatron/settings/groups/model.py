# SPDX-License-Identifier: Apache-2.0
"""The settings of the network: its shape and its arithmetic."""

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Optional

from megatron.settings.declare import (
    Bits,
    Count,
    Fraction,
    FromOne,
    FromZero,
    Natural,
    Needs,
    Positive,
    PositiveShare,
    shown_by,
)
from megatron.settings.groups.precision import HALF
from megatron.settings.hybrid_pattern import letters_of


def window_numbers(text: str) -> tuple[int, int]:
    """(keys before, keys after) of --window-size. Raises ValueError.

    >>> window_numbers("(127, 0)")
    (127, 0)
    """
    left, right = text.strip(" ()[]").split(",")
    return int(left), int(right)


@lru_cache
def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts, from --moe-layer-freq: every N-th, or sums and multiples of lists of 0 and 1.

    Raises ValueError.

    >>> layer_pattern("[0]*1+[1]*2", 3), layer_pattern("2", 3), layer_pattern("([1]+[0])*2", 4)
    ((False, True, True), (True, False, True), (True, False, True, False))
    """
    words = text.strip(" '\"")
    if words.isdecimal() and int(words):
        return tuple(n % int(words) == 0 for n in range(num_layers))
    try:
        result = _listed(ast.parse(words, mode="eval").body, num_layers)
    except (SyntaxError, RecursionError, MemoryError):
        result = None
    if result is None:
        raise ValueError("no list of 0 and 1")
    if len(result) != num_layers:
        raise ValueError(f"it is for {len(result)} layers")
    return result


def _listed(node: ast.expr, most: int) -> Optional[tuple[bool, ...]]:
    """The value of an expression of lists of 0 and 1, + and *; None: it is another one. Raises ValueError above `most`."""
    match node:
        case ast.List(elements):
            values = [element.value if isinstance(element, ast.Constant) else None for element in elements]
            return tuple(map(bool, values)) if all(value in (0, 1) for value in values) else None
        case ast.BinOp(left, ast.Add(), right):
            parts = _listed(left, most), _listed(right, most)
            return None if None in parts else parts[0] + parts[1]
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))):
            once = _listed(left, most)
            if once and len(once) * times > most:
                raise ValueError(f"it is for {len(once) * times} layers")
            return None if once is None else once * times
    return None


EXPERTS = "E"  # of --hybrid-layer-pattern
QUICK = 1.702  # x sigmoid(1.702 x) is close to GeLU (arXiv:1606.08415, section 2)


def bad_window(text: Optional[str]) -> bool:
    """Whether --window-size is no window of a causal model."""
    try:
        left, right = (-1, 0) if text is None else window_numbers(text)
    except ValueError:
        return True
    return left < -1 or right not in (-1, 0)


# Conditions for effects --------------------------------------------------------------------------------------------------

Network = partial(Needs, of_network=True)
ROPE = Network("--position-embedding-type rope", lambda s: s.position_embedding_type == "rope")
LOCAL_ROPE = Network(
    "--position-embedding-type rope and a --window-size",
    lambda s: s.position_embedding_type == "rope" and s.window_size is not None,
)
SCALABLE = Network(
    "--position-embedding-type rope, and --rotary-scaling-factor above 1 for yarn",
    lambda s: s.position_embedding_type == "rope" and (s.rope_type == "rope" or s.rotary_scaling_factor != 1),
)
LLAMA3 = Network("--use-rope-scaling", lambda s: s.use_rope_scaling)
YARN = Network("--rope-type yarn", lambda s: s.rope_type == "yarn")
QK_NORM = Network("--qk-layernorm", lambda s: s.qk_layernorm)
NO_BIAS = Network("--disable-bias-linear", lambda s: s.disable_bias_linear)
GELU = Network(
    "GeLU (no --swiglu, --squared-relu or --quick-geglu)", lambda s: not (s.swiglu or s.squared_relu or s.quick_geglu)
)
SIGMOID_GATE = Network("--swiglu or --quick-geglu", lambda s: s.swiglu or s.quick_geglu)
WINDOW = Network("--window-size", lambda s: s.window_size is not None)
NARROW = Network(
    "a --seq-length that is longer than the window",
    lambda s: bad_window(s.window_size) or (s.settings.model.window or s.seq_length) < s.seq_length - 1,
)


def any_way(s: Any, attribute: str, suites: str) -> bool:
    """Whether a chosen way to balance has an attribute of `model.kinds.experts.parts.Balancing`; the suite's own have it if
    `suites` is in their names.
    """
    own = getattr(s.settings.model.own_experts, "balancing", {})
    return any(getattr(own.get(kind), attribute, suites in kind) for kind in s.settings.model.balancing_kinds)


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

FAKE_QUANTIZE = "fake_quantize"  # the kind of linear layers that --quantization chooses
QUANTIZED = Needs("--quantization", lambda s: s.quantization or FAKE_QUANTIZE in (s.linear or ""))
INPUTS = Needs("--quantization that rounds inputs", lambda s: QUANTIZED.met(s) and s.activation_quantize_type != "none")
FREQUENCY = Needs(
    "--sparsity, and --sparsity-end-step after --sparsity-begin-step",
    lambda s: s.sparsity and s.sparsity_end_step > s.sparsity_begin_step,
)
GROWS = Needs(
    "--sparsity that is a number, and --sparsity-end-step after --sparsity-begin-step",
    lambda s: s.sparsity and ":" not in s.sparsity and s.sparsity_end_step > s.sparsity_begin_step,
)

# Tests that show effects
PLAIN = "test_a_network_is_the_plain_one"
EXPERT = "test_expert_layouts::test_any_layout_is_the_plain_loop"
QUANTIZING = "test_quantization::test_any_layout_is_the_plain_loop"
MASKING = "test_sparsity::test_any_layout_is_the_plain_loop"
SCALING = "test_frequencies_and_stretch"
PAIRS = "test_lora::test_any_layout_is_the_plain_loop"

shape = shown_by(PLAIN, on_resume="another model")
formula = shown_by(PLAIN, on_resume="refused")
scaling = shown_by(SCALING, on_resume="refused")
llama3 = shown_by(SCALING, needs=LLAMA3, on_resume="refused")
yarn = shown_by(SCALING, needs=YARN, on_resume="refused")
expert = shown_by(EXPERT, needs=MIXED)
router = shown_by(EXPERT, needs=MIXED, on_resume="refused")
expert_shape = shown_by(EXPERT, needs=MIXED, on_resume="another model")
quantized = shown_by(QUANTIZING, on_resume="refused")
masked = shown_by(MASKING, on_resume="refused")
pair = shown_by(PAIRS, on_resume="refused")


@dataclass(frozen=True)
class Model:
    """The shape and the arithmetic of the network."""

    # A recipe's kinds of linear layers: name -> `mpu.linear_product.LinearProduct` (`own_choices.model_group`).
    own_linears: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    own_experts: ClassVar[Any] = None  # its parts of layers with experts: `model.kinds.experts.parts.ExpertParts`

    num_layers: Count = shape("number of transformer layers")
    hidden_size: Count = shape("transformer hidden size")
    num_attention_heads: Count = shape("number of attention heads")
    seq_length: Count = shown_by("test_seq_length_is_that_of_the_samples")(
        "maximum sequence length, in tokens", 1024, "--max-seq-len", "--encoder-seq-length", on_resume="refused"
    )
    hybrid_layer_pattern: Optional[str] = shown_by("test_hybrid_patterns::test_any_layout_is_the_plain_loop")(
        "the kind of each layer, a character for each: * attention, - an MLP, E experts; | cuts pipeline stages "
        "(docs/hybrid.md)",
        None,
        "--hybrid-override-pattern",
        on_resume="another model",
    )
    max_position_embeddings: Optional[Count] = formula(
        "size of the learned position embedding (default: --seq-length)", None
    )
    ffn_hidden_size: Optional[Count] = shape(
        "hidden size of the MLP (default: 4 x hidden size, 8/3 x with --swiglu or --geglu)", None
    )
    kv_channels: Optional[Count] = shape("size of an attention head (default: hidden size / heads)", None)
    group_query_attention: bool = shown_by("test_groups_need_a_number")(
        "grouped-query attention (see --num-query-groups)", False
    )
    num_query_groups: Optional[Count] = shape(
        "key-value heads (default: one per query head)", None, "--num-key-value-heads"
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none", "relative"] = shape(
        "position embedding type (relative: encoder-decoder models only)",
        "learned_absolute",
        "--use-rotary-position-embeddings=rope",
        "--no-position-embedding~=none",
    )
    rotary_base: Positive = formula(
        "base of the rotary frequencies", 10000.0, "--rope-theta", "--rotary-position-embeddings-theta", needs=ROPE
    )
    rope_local_base_freq: Optional[Positive] = formula(
        "base of the rotary frequencies in layers with --window-size, which are not scaled then, as in Gemma 3 (default: "
        "--rotary-base, scaled)",
        None,
        needs=LOCAL_ROPE,
    )
    rotary_percent: PositiveShare = formula("fraction of each head to rotate", 1.0, needs=ROPE)
    rotary_seq_len_interpolation_factor: Optional[FromOne] = scaling(
        "linear scaling of RoPE: divide positions by this", None, needs=ROPE
    )
    use_rope_scaling: bool = scaling("scale the low rotary frequencies as in Llama 3.1", False, needs=ROPE)
    rope_scaling_factor: FromOne = llama3("--use-rope-scaling: divisor of the low frequencies", 8.0)
    rope_scaling_low_freq_factor: Positive = llama3(
        "--use-rope-scaling: scale wavelengths above the original length / this", 1.0
    )
    rope_scaling_high_freq_factor: Positive = llama3(
        "--use-rope-scaling: keep wavelengths below the original length / this", 4.0
    )
    rope_scaling_original_max_position_embeddings: Count = llama3(
        "--use-rope-scaling: sequence length of the original model", 8192
    )
    rope_type: Literal["rope", "yarn"] = scaling(
        "kind of rotary embedding; yarn: scale frequencies by their rotations over the original length (arXiv:2309.00071)",
        "rope",
        needs=SCALABLE,
    )
    rotary_scaling_factor: FromOne = yarn("--rope-type yarn: maximum sequence length / original length", 1.0)
    yarn_original_max_position_embeddings: Count = yarn("--rope-type yarn: sequence length of the original model", 4096)
    yarn_beta_fast: Positive = yarn("--rope-type yarn: keep frequencies with more rotations than this", 32.0)
    yarn_beta_slow: Positive = yarn(
        "--rope-type yarn: divide frequencies with fewer rotations than this by the factor", 1.0
    )
    yarn_correction_range_round_to_int: bool = yarn("--rope-type yarn: round the two limits to whole channels", True)
    mscale: FromZero = yarn(
        "--rope-type yarn: scale rotated queries and keys by 0.1 x this x ln(factor) + 1; 0: off", 1.0
    )
    mscale_all_dim: FromZero = yarn("--rope-type yarn: divide that scale by the one of this --mscale", 0.0)
    normalization: Literal["LayerNorm", "RMSNorm"] = shape("type of norm", "LayerNorm")
    norm_epsilon: Positive = formula("epsilon of the norms", 1e-5, "--layernorm-epsilon")
    norm_position: Literal["pre", "post", "sandwich"] = shape(
        "norms of a layer: before attention and before MLP (pre), after them and before the sum with their input, as in "
        "OLMo 2 (post), or both, as in Gemma 2 (sandwich)",
        "pre",
    )
    qk_layernorm: bool = shape("normalize the queries and keys of each head", False)
    qk_layernorm_across_heads: bool = shape(
        "--qk-layernorm normalizes over all heads together, as in OLMo 2", False, needs=QK_NORM
    )
    swiglu: bool = shape("gated SiLU in the MLP instead of GeLU", False)
    geglu: bool = shape("gated GeLU in the MLP instead of GeLU", False)
    squared_relu: bool = shape("relu(x)^2 in the MLP instead of GeLU", False)
    quick_geglu: bool = shape("gated x sigmoid(1.702 x) in the MLP instead of GeLU, as in gpt-oss", False)
    activation_func_clamp_value: Optional[Positive] = formula(
        "with --swiglu or --quick-geglu: gates are at most this, and values between minus this and this",
        None,
        needs=SIGMOID_GATE,
    )
    glu_linear_offset: float = formula(
        "with --swiglu or --quick-geglu: any number, added to the values after the clamp", 0.0, needs=SIGMOID_GATE
    )
    num_experts: Optional[Natural] = shown_by(EXPERT)(
        "experts of a layer that has them instead of an MLP; 0 or 1: none (docs/experts.md)",
        None,
        "--num-moe-experts",
        on_resume="another model",
    )
    moe_layer_freq: str = expert_shape(
        "layers with experts: every N-th, the first included, or a pattern such as [0]*1+[1]*27 or ([1]*3+[0])*2", "1"
    )
    moe_ffn_hidden_size: Optional[Count] = expert_shape("hidden size of each expert (default: --ffn-hidden-size)", None)
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
    bias_gelu_fusion: bool = formula("fuse the bias with tanh GeLU; off: erf GeLU", True, needs=GELU)
    disable_bias_linear: bool = shape("linear layers without bias", False, "--add-bias-linear=false")
    add_qkv_bias: bool = shape(
        "with --disable-bias-linear: a bias for queries, keys and values alone, as in Qwen2",
        False,
        "--qkv-bias",
        needs=NO_BIAS,
    )
    linear: Optional[str] = shown_by("test_linear_kinds::test_any_layout_is_the_plain_loop")(
        "PATTERN=KIND, ...: the kind of the linear layers that match, such as mlp.*=mask; kinds are plain, lora, "
        "fake_quantize (--quantization), sparse (--sparsity) and those that the recipe defines; +KIND adds one",
        None,
        on_resume="refused",
    )
    kd_hidden_projections: Optional[str] = shown_by("test_narrow_states_are_projected_to_those_of_the_teacher")(
        "LAYER:SIZE, ...: layers whose output a learned matrix projects to the teacher's hidden size; it follows from "
        "--kd-hidden-layers and the teacher",
        None,
        on_resume="refused",
    )
    quantization: bool = quantized(
        "quantization aware training: linear layers round their weights and inputs (docs/compression.md)", False
    )
    weight_quantize_type: Literal["channel_wise_abs_max", "abs_max"] = quantized(
        "--quantization: a scale for each output channel of a weight, or one for all of it",
        "channel_wise_abs_max",
        needs=QUANTIZED,
    )
    activation_quantize_type: Literal["moving_average_abs_max", "token_wise_min_max", "none"] = shown_by(
        "test_weights_alone"
    )(
        "--quantization: scale of a layer's inputs: one for all, by the moving average of steps, or a scale and a zero for "
        "each token; none: they are not rounded",
        "moving_average_abs_max",
        needs=QUANTIZED,
        on_resume="refused",
    )
    activation_preprocess_type: Literal["none", "PACT"] = quantized(
        "--quantization: PACT clips a layer's inputs to a trained bound before they are rounded", "none", needs=INPUTS
    )
    weight_bits: Bits = quantized("--quantization: bits of a weight, 2 to 8", 8, needs=QUANTIZED)
    activation_bits: Bits = quantized("--quantization: bits of an input, 2 to 8", 8, needs=INPUTS)
    quantization_layers: Optional[str] = shown_by("test_quantization::test_what_cannot_be_is_said")(
        "--quantization: patterns of the layers that are quantized, as mlp.*,attention.qkv (default: all linear layers of "
        "blocks)",
        None,
        needs="quantization",
        on_resume="refused",
    )
    quantization_skip: Optional[str] = quantized(
        "--quantization: patterns of the layers that are not, as blocks.0.*, or the file of tools.sensitivity --output",
        None,
        needs="quantization",
    )
    sparsity: Optional[str] = masked(
        "masks: weights of linear layers that count as 0: 2:4 keeps the 2 largest of each 4 inputs, 0.8 the largest fifth "
        "of each weight (docs/compression.md)",
        None,
    )
    initial_sparsity: Fraction = masked(
        "share of zeros at --sparsity-begin-step; it grows by a cubic schedule", 0.0, needs=GROWS
    )
    sparsity_begin_step: Natural = masked("steps before the first masks", 0, needs="sparsity")
    sparsity_end_step: Natural = masked(
        "steps before the last masks, which have --sparsity (default: the first ones are the last)", 0, needs="sparsity"
    )
    sparsity_frequency: Count = masked("steps between new masks", 100, needs=FREQUENCY)
    sparsity_layers: Optional[str] = shown_by("test_sparsity::test_what_cannot_be_is_said")(
        "--sparsity: patterns of the layers that have masks, as mlp.*,attention.qkv (default: all linear layers of blocks)",
        None,
        needs="sparsity",
        on_resume="refused",
    )
    sparsity_skip: Optional[str] = masked(
        "--sparsity: patterns of the layers that have none, as blocks.0.*, or the file of tools.sensitivity --output",
        None,
        needs="sparsity",
    )
    lora_rank: Optional[Count] = pair(
        "train a pair of matrices of this rank beside each linear layer, and freeze everything else (docs/lora.md)",
        None,
    )
    lora_alpha: Optional[Positive] = pair(
        "the product of a pair is multiplied by this / --lora-rank (default: --lora-rank)", None
    )
    lora_dropout: Fraction = shown_by("test_products_against_autograd")("dropout of the input of a pair", 0.0)
    lora_target: Optional[str] = pair(
        "patterns of the linear layers that get a pair: 'attention.qkv, mlp.*, blocks.[01].*' (default: all in blocks)",
        None,
        joined=True,
    )
    lora_split_fused: bool = shown_by("test_pairs_of_queries_keys_and_values_apart")(
        "separate pairs for queries, keys and values, and for the two matrices of a gated MLP, as in PEFT for Llama",
        False,
        on_resume="refused",
    )
    use_rslora: bool = shown_by("test_our_adapters_in_peft")(
        "divide --lora-alpha by the square root of the rank", False, on_resume="refused"
    )
    use_dora: bool = shown_by("test_our_adapters_in_peft")(
        "DoRA: pairs change the directions of a weight's rows, and a number for each row its norm",
        False,
        "--lora-use-dora",
        on_resume="refused",
    )
    scale_embedding: bool = formula(
        "multiply the embeddings of tokens by the root of --hidden-size, as in Gemma", False
    )
    untie_embeddings_and_output_weights: bool = shape("give the output layer its own weight", False)
    apply_query_key_layer_scaling: bool = shown_by("test_query_key_layer_scaling_keeps_scores_in_the_range_of_fp16")(
        "scale attention scores by 1 / layer number and compute their softmax in fp32 (for fp16)",
        False,
        "--no-query-key-layer-scaling=false",
        "--scale-qk-by-layer-num",
    )
    query_pre_attn_scalar: Optional[Positive] = formula(
        "divide attention scores by the root of this (default: size of an attention head)", None
    )
    attention_softmax_in_fp32: bool = shown_by("test_softmax_in_fp32_is_that_of_the_rounded_scores")(
        "compute the softmax of attention in fp32", False, needs=HALF._replace(of_network=True)
    )
    window_size: Optional[str] = formula(
        "sliding window attention: keys before and after a token that it sees, as 4095,0 (default, or -1: all before)",
        None,
        needs=NARROW,
    )
    window_attn_skip_freq: Optional[Count] = formula(
        "with --window-size: every N-th layer uses full attention (4: the 4th, the 8th ...)", None, needs=WINDOW
    )
    attn_logit_softcapping: Optional[Positive] = formula(
        "attention scores become cap x tanh(score / cap), as in Gemma 2", None, "--attention-logit-softcapping"
    )
    softmax_type: Literal["vanilla", "learnable", "off-by-one"] = shape(
        "softmax of attention over the keys alone, or with a sink: a logit of each head without a value, learned as in "
        "gpt-oss, or 0",
        "vanilla",
    )
    final_logit_softcapping: Optional[Positive] = formula(
        "logits become cap x tanh(logit / cap), as in Gemma 2", None, "--output-logit-softcapping"
    )
    hidden_dropout: Fraction = shown_by("test_hidden_dropout_is_at_its_three_sites")(
        "dropout after embedding, attention and MLP; 0: none",
        0.1,
        "--check-accuracy~=0",
        "--hidden-dropout-prob",
        also_sets={"--check-accuracy": dict(attention_dropout=0.0)},
    )
    attention_dropout: Fraction = shown_by("test_attention_dropout_drops_attention_weights")(
        "dropout of attention weights; 0: none", 0.1, "--attention-probs-dropout-prob"
    )
    label_smoothing: Fraction = shown_by("test_label_smoothing_is_torchs_in_training_alone")(
        "label smoothing in training: target probability spread over the vocabulary", 0.0
    )
    z_loss_coeff: FromZero = shown_by("test_z_loss_is_added_to_the_loss")(
        "coefficient of the z-loss, the square of log sum exp of each token's logits, which keeps them small",
        0.0,
        "--z-loss-coef",
        "--z-loss-weight",
    )
    init_method_std: Positive = shown_by("test_initial_weights_have_their_standard_deviation")(
        "standard deviation of the initial weights", 0.02
    )
    make_vocab_size_divisible_by: Count = shown_by(PLAIN)(
        "pad the vocabulary to a multiple of this x tensor parallel size", 128, "--vocab-size-divisible-unit"
    )
    model_type: str = shown_by("test_a_script_trains_its_own_model_type")(
        "model type: GPT, or a Python module with a function recipe()",
        "GPT",
        also={"gpt": "GPT", "gpt-cn": "GPT"},
        on_resume="another model",
    )
    model_name_or_path: Optional[str] = shown_by("test_a_named_shape_has_the_published_sizes")(
        "a named shape (gpt2-medium, gpt3-6.7B ...; other flags override it), or a folder to --load", None, "--preset"
    )

    def __hash__(self):  # lists have none; equal settings have equal sizes
        return hash((self.num_layers, self.hidden_size, self.seq_length, self.ffn_hidden_size, self.num_experts))

    @property
    def published_shape(self) -> Optional[str]:
        """The name that may have the rows of a published embedding (`presets.published_rows`); None for other models."""
        return self.model_name_or_path if self.model_type == "GPT" else None

    @property
    def mixture(self) -> bool:
        """Whether layers have experts."""
        return (self.num_experts or 0) > 1

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, numbered from 0. Raises ValueError for a bad `moe_layer_freq`."""
        return tuple(n for n, has in enumerate(self._which_have_experts) if has and self.mixture)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, numbered from 0, has experts instead of an MLP."""
        return self.mixture and self._which_have_experts[layer]

    @property
    def _which_have_experts(self) -> tuple[bool, ...]:
        if self.letters:
            return tuple(letter == EXPERTS for letter in self.letters)
        return layer_pattern(self.moe_layer_freq, self.num_layers)

    @property
    def letters(self) -> str:
        """The kinds of the layers, a character for each, of `hybrid_layer_pattern`; "": a layer is attention and MLP."""
        return letters_of(self.hybrid_layer_pattern or "")

    @property
    def residual_sums(self) -> int:
        """How many sums the residual stream has from the embedding to the final norm."""
        return self.num_layers if self.letters else 2 * self.num_layers

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

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP; a gate keeps the parameter count of 4h with 8/3 h, rounded down to 64 (Megatron)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        narrow = self.swiglu or self.geglu
        return max(64, self.hidden_size * 8 // 3 // 64 * 64) if narrow else 4 * self.hidden_size

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def sigmoid_gate(self) -> Optional[tuple[float, Optional[float], float]]:
        """(alpha, limit, offset) of a gate with x sigmoid(alpha x), unless it is that of plain SwiGLU, or another one."""
        changed = self.activation_func_clamp_value is not None or self.glu_linear_offset != 0
        if not (self.quick_geglu or self.swiglu and changed):
            return None
        return QUICK if self.quick_geglu else 1.0, self.activation_func_clamp_value, self.glu_linear_offset

    @property
    def qkv_bias(self) -> bool:
        """Whether the product for queries, keys and values has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def window(self) -> Optional[int]:
        """Number of keys before a token that it attends to in layers with a window; None: all of them."""
        left = -1 if self.window_size is None else window_numbers(self.window_size)[0]
        return None if left < 0 else left

    def window_of(self, layer: int) -> Optional[int]:
        """The `window` of a layer, numbered from 0."""
        skipped = self.window_attn_skip_freq is not None and (layer + 1) % self.window_attn_skip_freq == 0
        return None if skipped else self.window

    def overrides(self, layer: int) -> tuple[tuple[str, Any], ...]:
        """The settings of a layer that differ from the model's."""
        return () if self.window_of(layer) == self.window else (("window_size", None),)

    @property
    def yarn_stretch(self) -> float:
        """YaRN's attention factor, which multiplies rotated queries and keys."""
        stretch = lambda mscale: 0.1 * mscale * math.log(self.rotary_scaling_factor) + 1.0
        return stretch(self.mscale) / stretch(self.mscale_all_dim) if self.rotary_scaling_factor > 1 else 1.0

    @property
    def position_table(self) -> int:
        """Rows of the learned position embedding; of other positions those that the model has seen."""
        known = self.max_position_embeddings or self.seq_length
        return known if self.position_embedding_type == "learned_absolute" else max(known, self.seq_length)

    @property
    def context_length(self) -> int:
        """Tokens of a text: rows of the learned position embedding, or the sequence length of training."""
        return self.position_table if self.position_embedding_type == "learned_absolute" else self.seq_length


# The settings of layers with experts.
EXPERT_SETTINGS = tuple(f.name for f in fields(Model) if f.name == "num_experts" or f.name.startswith("moe_"))
