# SPDX-License-Identifier: Apache-2.0
"""The settings of the network: its shape and its arithmetic. Those of a kind of mixer are in the kind's folder,
`megatron/model/kinds/NAME/settings.py`: a frozen dataclass, whose fields `Model` has, too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from importlib import import_module
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
    Share,
    shown_by,
)
from megatron.settings.hybrid_pattern import AHEAD as DEPTH
from megatron.settings.hybrid_pattern import letters_ahead, letters_of, shortened
from megatron.settings.layer_settings import NO_OP, read_layer_settings
from megatron.settings.network import PLAIN, Network, formula, last_of_each, shape

# Conditions for effects --------------------------------------------------------------------------------------------------

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
QUANTIZING = "test_quantization::test_any_layout_is_the_plain_loop"
MASKING = "test_sparsity::test_any_layout_is_the_plain_loop"
SCALING = "test_frequencies_and_stretch"
AHEAD = "test_mtp::test_any_layout_is_the_plain_loop"
PAIRS = "test_lora::test_any_layout_is_the_plain_loop"

scaling = shown_by(SCALING, on_resume="refused")
llama3 = shown_by(SCALING, needs=LLAMA3, on_resume="refused")
yarn = shown_by(SCALING, needs=YARN, on_resume="refused")
quantized = shown_by(QUANTIZING, on_resume="refused")
masked = shown_by(MASKING, on_resume="refused")
ratio = shown_by("test_ratios_are_the_pattern_that_they_spread", on_resume="irrelevant")
blocks = shown_by("test_files_of_blocks_become_settings_of_layers", on_resume="irrelevant")
pair = shown_by(PAIRS, on_resume="refused")


def _of_kinds() -> list[type]:
    """The settings of each kind that has its own."""
    modules = import_module("megatron.model.kinds").parts("settings")
    found = [(module.__name__, one) for module in modules for one in vars(module).values()]
    return [one for name, one in found if is_dataclass(one) and one.__module__ == name]


@dataclass(frozen=True)
class Shape:
    """The settings that all kinds of mixers share."""

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
        gives=("num_layers",),
    )
    layer_settings: Optional[str] = shown_by("test_layer_settings::test_any_layout_is_the_plain_loop")(
        "settings of single layers: '3,7-9: ffn_hidden_size=1024; 0: num_query_groups=2 no_op=mlp'; layers count from 0 "
        "(docs/hybrid.md#layers-of-other-sizes)",
        None,
        on_resume="another model",
    )
    heterogeneous_layers_config_path: Optional[str] = blocks(
        "JSON file whose block_configs become --layer-settings, as Megatron-LM and Llama-Nemotron have it", None
    )
    heterogeneous_layers_config_encoded_json: Optional[str] = blocks(
        "the content of --heterogeneous-layers-config-path", None
    )
    hybrid_attention_ratio: Share = ratio(
        "share of layers with attention, evenly among Mamba layers; the pattern that Megatron-LM made of it up to 0.16",
        0.0,
    )
    hybrid_mlp_ratio: Share = ratio("share of layers with an MLP, as --hybrid-attention-ratio", 0.0)
    max_position_embeddings: Optional[Count] = formula(
        "size of the learned position embedding (default: --seq-length)", None
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
    no_rope_freq: Optional[str] = formula(
        "layers without rotation: the last of each N, or a list such as [0]*3+[1] with a 1 for each of them",
        None,
        needs=ROPE,
    )
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
    disable_bias_linear: bool = shape("linear layers without bias", False, "--add-bias-linear=false")
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
    mtp_num_layers: Optional[Natural] = shown_by(AHEAD)(
        "multi-token prediction: depths after the network, each of which predicts one token further (arXiv:2412.19437); 0: "
        "none",
        None,
        on_resume="another model",
    )
    mtp_loss_scaling_factor: FromZero = shown_by(AHEAD)(
        "weight of the mean loss of all depths of --mtp-num-layers; 0: it is only logged", 0.1, needs="mtp_num_layers"
    )
    mtp_use_repeated_layer: bool = shown_by(AHEAD)(
        "all depths of --mtp-num-layers are one, with the same weights, applied again and again",
        False,
        needs="mtp_num_layers",
        on_resume="another model",
    )
    mtp_detach_heads: bool = shown_by(AHEAD)(
        "the losses of depths train the depths alone, and not the network, the embedding or the output layer",
        False,
        needs="mtp_num_layers",
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

    @property
    def depths(self) -> int:
        """Depths of multi-token prediction."""
        return self.mtp_num_layers or 0

    @property
    def own_depths(self) -> int:
        """Depths with weights of their own."""
        return min(self.depths, 1) if self.mtp_use_repeated_layer else self.depths

    @property
    def published_shape(self) -> Optional[str]:
        """The name that may have the rows of a published embedding (`presets.published_rows`); None for other models."""
        return self.model_name_or_path if self.model_type == "GPT" else None

    @property
    def letters(self) -> str:
        """The kinds of the layers, a character for each, of `hybrid_layer_pattern`; "": a layer is attention and MLP."""
        return letters_of(self.hybrid_layer_pattern or "")

    @property
    def letters_ahead(self) -> str:
        """The kinds of the layers of a depth of multi-token prediction; "": one layer, as the last of the network."""
        return letters_ahead(self.hybrid_layer_pattern or "")

    @property
    def all_letters(self) -> str:
        """The kinds of all layers that a pattern lists, those of a depth of multi-token prediction last."""
        return self.letters + self.letters_ahead

    @property
    def layers_ahead(self) -> range:
        """The numbers of the layers of a depth of multi-token prediction, after those of the network."""
        return range(self.num_layers, self.num_layers + (len(self.letters_ahead) or 1) * bool(self.depths))

    def pattern_of(self, num_layers: int) -> Optional[str]:
        """The pattern of a model like this one with so many layers; None: it has none."""
        if not self.letters:
            return None
        return DEPTH.join([shortened(self.letters, num_layers), *[self.letters_ahead] * self.depths])

    @property
    def residual_sums(self) -> int:
        """How many sums the residual stream has from the embedding to the final norm."""
        return self.num_layers if self.letters else 2 * self.num_layers

    def rotates(self, layer: int) -> bool:
        """Whether a layer, numbered from 0, rotates queries and keys. Raises ValueError for a bad `no_rope_freq`."""
        without = self.no_rope_freq and last_of_each(self.no_rope_freq, self.num_layers)[layer]
        return self.position_embedding_type == "rope" and not without

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


@dataclass(frozen=True)
class Model(*reversed(_of_kinds()), Shape):
    """The shape and the arithmetic of the network."""

    # A recipe's kinds of linear layers: name -> `mpu.linear_product.LinearProduct` (`own_choices.model_group`).
    own_linears: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    own_experts: ClassVar[Any] = None  # its parts of layers with experts: `model.kinds.experts.parts.ExpertParts`
    own_kinds: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # its kinds of mixers: name -> `kinds.mixer.Mixer`

    def __hash__(self):  # lists have none; equal settings have equal sizes
        return hash((self.num_layers, self.hidden_size, self.seq_length, self.ffn_hidden_size, self.num_experts))

    def overrides(self, layer: int) -> tuple[tuple[str, Any], ...]:
        """The settings of a layer that differ from the model's. Raises ValueError for a bad `layer_settings`."""
        own = {} if self.window_of(layer) == self.window else {"window_size": None}
        if self.position_embedding_type == "rope" and not self.rotates(layer):
            own["position_embedding_type"] = "none"
        if self.layer_settings:
            own |= self.settings_of_layer(layer)
        return tuple((name, value) for name, value in own.items() if value != getattr(self, name))

    @cached_property
    def by_layer(self) -> Mapping[str, type]:
        """The settings that layers may have for themselves -> the types of their values."""
        return {one.name: read for one in fields(self) if (read := one.metadata.get("by_layer"))}

    def settings_of_layer(self, layer: int) -> dict[str, Any]:
        """What --layer-settings says of a layer, but for `NO_OP`. Raises ValueError."""
        own = read_layer_settings(self.layer_settings).get(layer, {}) if self.layer_settings else {}
        return {name: self.by_layer[name](value) for name, value in own.items() if name != NO_OP}

    def lacks(self, layer: int) -> str:
        """The part of a transformer layer that it does not have, attention or mlp; "": it has both."""
        return read_layer_settings(self.layer_settings).get(layer, {}).get(NO_OP, "") if self.layer_settings else ""
