# SPDX-License-Identifier: Apache-2.0
"""The table of all settings, each declared once.

A setting is one field of a frozen dataclass, its group. Its name is its attribute, its YAML key and (with dashes) its flag:
`tensor_model_parallel_size` is `--tensor-model-parallel-size`. Names, defaults and meanings are Megatron-LM's
wherever Megatron-LM has the setting. A bool that is true by default becomes `--no-...`.

    >>> Model(num_layers=2, hidden_size=8, num_attention_heads=2).ffn_size
    32

To add a flag: add a field here; a row of RULES in `rules.py` if it can be invalid; a row in `effects.py` if it has an
effect only in some combinations; and in tests/settings/test_every_setting.py the name of the test that shows its effect.
Then run `python -m megatron.tools.flag_docs --output docs/flags.md`.

This module does not import torch or read the command line or the environment: `parse.py` does.
"""

import ast
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Optional

from megatron.settings.statements import SaidBy, Statement

# What happens if a run resumes from a checkpoint with another value: another model, whose weights do not fit (refused with
# --finetune, too); refused unless --override names it, because results would silently change; the same in training, and
# logged in evaluation (--skip-train); logged; or irrelevant to the result.
ON_RESUME = ("another model", "refused", "refused in training", "logged", "irrelevant")


def setting(help: str, default=MISSING, *alias: str, **metadata):
    """A dataclass field that is also a flag.

    alias: other spellings of the flag. `--other=value` implies a value; `--other~=value` does, too, but any other spelling
    overrides it. `--other false` means "not this value", or `off` for `--other=value/off` (the default for `value/`).
    `--other~=value/off` is a switch: if it is off, anywhere on the command line, the other spellings have no effect.
    also: other words for a value, as `{"gpu": "cuda"}`. on_resume: one of ON_RESUME (default: see `guard/changes.py`).
    """
    return field(default=default, metadata=dict(help=help, alias=alias, **metadata))


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


QUICK = 1.702  # x sigmoid(1.702 x) is close to GeLU (arXiv:1606.08415, section 2)


@dataclass(frozen=True)
class Model:
    """The shape and the arithmetic of the network."""

    # A recipe's kinds of linear layers: name -> `mpu.linear_product.LinearProduct` (`own_choices.model_group`).
    own_linears: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    own_experts: ClassVar[Any] = None  # its parts of layers with experts: `model.experts.parts.ExpertParts`

    num_layers: int = setting("number of transformer layers", on_resume="another model")
    hidden_size: int = setting("transformer hidden size", on_resume="another model")
    num_attention_heads: int = setting("number of attention heads", on_resume="another model")
    seq_length: int = setting(
        "maximum sequence length, in tokens", 1024, "--max-seq-len", "--encoder-seq-length", on_resume="refused"
    )
    max_position_embeddings: Optional[int] = setting(
        "size of the learned position embedding (default: --seq-length)", None, on_resume="refused"
    )
    ffn_hidden_size: Optional[int] = setting(
        "hidden size of the MLP (default: 4 x hidden size, 8/3 x with --swiglu or --geglu)",
        None,
        on_resume="another model",
    )
    kv_channels: Optional[int] = setting(
        "size of an attention head (default: hidden size / heads)", None, on_resume="another model"
    )
    group_query_attention: bool = setting("grouped-query attention (see --num-query-groups)", False)
    num_query_groups: Optional[int] = setting(
        "key-value heads (default: one per query head)", None, "--num-key-value-heads", on_resume="another model"
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none", "relative"] = setting(
        "position embedding type (relative: encoder-decoder models only)",
        "learned_absolute",
        "--use-rotary-position-embeddings=rope",
        "--no-position-embedding~=none",
        on_resume="another model",
    )
    rotary_base: float = setting(
        "base of the rotary frequencies",
        10000.0,
        "--rope-theta",
        "--rotary-position-embeddings-theta",
        on_resume="refused",
    )
    rope_local_base_freq: Optional[float] = setting(
        "base of the rotary frequencies in layers with --window-size, which are not scaled then, as in Gemma 3 (default: "
        "--rotary-base, scaled)",
        None,
        on_resume="refused",
    )
    rotary_percent: float = setting("fraction of each head to rotate", 1.0, on_resume="refused")
    rotary_seq_len_interpolation_factor: Optional[float] = setting(
        "linear scaling of RoPE: divide positions by this", None, on_resume="refused"
    )
    use_rope_scaling: bool = setting("scale the low rotary frequencies as in Llama 3.1", False, on_resume="refused")
    rope_scaling_factor: float = setting("--use-rope-scaling: divisor of the low frequencies", 8.0, on_resume="refused")
    rope_scaling_low_freq_factor: float = setting(
        "--use-rope-scaling: scale wavelengths above the original length / this", 1.0, on_resume="refused"
    )
    rope_scaling_high_freq_factor: float = setting(
        "--use-rope-scaling: keep wavelengths below the original length / this", 4.0, on_resume="refused"
    )
    rope_scaling_original_max_position_embeddings: int = setting(
        "--use-rope-scaling: sequence length of the original model", 8192, on_resume="refused"
    )
    rope_type: Literal["rope", "yarn"] = setting(
        "kind of rotary embedding; yarn: scale frequencies by their rotations over the original length (arXiv:2309.00071)",
        "rope",
        on_resume="refused",
    )
    rotary_scaling_factor: float = setting(
        "--rope-type yarn: maximum sequence length / original length", 1.0, on_resume="refused"
    )
    yarn_original_max_position_embeddings: int = setting(
        "--rope-type yarn: sequence length of the original model", 4096, on_resume="refused"
    )
    yarn_beta_fast: float = setting(
        "--rope-type yarn: keep frequencies with more rotations than this", 32.0, on_resume="refused"
    )
    yarn_beta_slow: float = setting(
        "--rope-type yarn: divide frequencies with fewer rotations than this by the factor", 1.0, on_resume="refused"
    )
    yarn_correction_range_round_to_int: bool = setting(
        "--rope-type yarn: round the two limits to whole channels", True, on_resume="refused"
    )
    mscale: float = setting(
        "--rope-type yarn: scale rotated queries and keys by 0.1 x this x ln(factor) + 1; 0: off",
        1.0,
        on_resume="refused",
    )
    mscale_all_dim: float = setting(
        "--rope-type yarn: divide that scale by the one of this --mscale", 0.0, on_resume="refused"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = setting("type of norm", "LayerNorm", on_resume="another model")
    norm_epsilon: float = setting("epsilon of the norms", 1e-5, "--layernorm-epsilon", on_resume="refused")
    norm_position: Literal["pre", "post", "sandwich"] = setting(
        "norms of a layer: before attention and before MLP (pre), after them and before the sum with their input, as in "
        "OLMo 2 (post), or both, as in Gemma 2 (sandwich)",
        "pre",
        on_resume="another model",
    )
    qk_layernorm: bool = setting("normalize the queries and keys of each head", False, on_resume="another model")
    qk_layernorm_across_heads: bool = setting(
        "--qk-layernorm normalizes over all heads together, as in OLMo 2", False, on_resume="another model"
    )
    swiglu: bool = setting("gated SiLU in the MLP instead of GeLU", False, on_resume="another model")
    geglu: bool = setting("gated GeLU in the MLP instead of GeLU", False, on_resume="another model")
    squared_relu: bool = setting("relu(x)^2 in the MLP instead of GeLU", False, on_resume="another model")
    quick_geglu: bool = setting(
        "gated x sigmoid(1.702 x) in the MLP instead of GeLU, as in gpt-oss", False, on_resume="another model"
    )
    activation_func_clamp_value: Optional[float] = setting(
        "with --swiglu or --quick-geglu: gates are at most this, and values between minus this and this",
        None,
        on_resume="refused",
    )
    glu_linear_offset: float = setting(
        "with --swiglu or --quick-geglu: any number, added to the values after the clamp", 0.0, on_resume="refused"
    )
    num_experts: Optional[int] = setting(
        "experts of a layer that has them instead of an MLP; 0 or 1: none (docs/experts.md)",
        None,
        "--num-moe-experts",
        on_resume="another model",
    )
    moe_layer_freq: str = setting(
        "layers with experts: every N-th, the first included, or a pattern such as [0]*1+[1]*27 or ([1]*3+[0])*2",
        "1",
        on_resume="another model",
    )
    moe_ffn_hidden_size: Optional[int] = setting(
        "hidden size of each expert (default: --ffn-hidden-size)", None, on_resume="another model"
    )
    moe_shared_expert_intermediate_size: Optional[int] = setting(
        "hidden size of an MLP that sees every token beside the experts, of all shared experts together",
        None,
        on_resume="another model",
    )
    moe_shared_expert_gate: bool = setting(
        "multiply the output of the shared expert by the sigmoid of a product of its input",
        False,
        on_resume="another model",
    )
    moe_router_topk: int = setting("experts that each token goes to", 2, on_resume="refused")
    moe_router_score_function: Literal["softmax", "sigmoid"] = setting(
        "scores of experts from the router's logits", "softmax", on_resume="refused"
    )
    moe_router_pre_softmax: bool = setting(
        "softmax over all experts before the choice, instead of over the chosen ones", False, on_resume="refused"
    )
    moe_router_num_groups: Optional[int] = setting(
        "groups of experts, of which a token chooses --moe-router-group-topk first", None, on_resume="refused"
    )
    moe_router_group_topk: Optional[int] = setting(
        "groups that each token chooses experts from", None, on_resume="refused"
    )
    moe_router_topk_scaling_factor: Optional[float] = setting(
        "multiply the weights of the chosen experts by this", None, on_resume="refused"
    )
    moe_router_dtype: Literal["fp32", "fp64"] = setting("format of the router's logits and scores", "fp32")
    moe_router_load_balancing_type: Optional[
        list[Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]]
    ] = setting(
        "how experts get equally many tokens, one word or several: a loss over each micro-batch, each sequence or the "
        "global batch, by sinkhorn, or not at all (default: aux_loss)",
        None,
    )
    moe_aux_loss_coeff: Optional[list[float]] = setting(
        "weight of each balancing loss; 0: it is only logged (default: 0)", None
    )
    moe_z_loss_coeff: Optional[float] = setting(
        "weight of the square of log sum exp of the router's logits, which keeps them small; 0: none", None
    )
    moe_router_enable_expert_bias: bool = setting(
        "balance by a bias of each expert's score, which counts for the choice only and rises for experts with few tokens",
        False,
        on_resume="another model",
    )
    moe_router_bias_update_rate: float = setting("by how much a step changes these biases; 0: they are constant", 1e-3)
    moe_input_jitter_eps: Optional[float] = setting(
        "multiply the router's input by random numbers between 1 - this and 1 + this; 0: do not", None
    )
    moe_router_force_load_balancing: bool = setting(
        "choose experts by random numbers, so that they get equally many tokens on average, for measurements",
        False,
        on_resume="refused",
    )
    moe_expert_capacity_factor: Optional[float] = setting(
        "drop an expert's tokens above this x its equal share of a rank's micro-batch (default: none are dropped)",
        None,
        on_resume="refused",
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        "pad each expert's tokens to its capacity, so that no size depends on the data", False
    )
    moe_token_drop_policy: Literal["probs", "position"] = setting(
        "tokens that are dropped above the capacity: those with the lowest probability, or the last",
        "probs",
        on_resume="refused",
    )
    bias_gelu_fusion: bool = setting("fuse the bias with tanh GeLU; off: erf GeLU", True, on_resume="refused")
    disable_bias_linear: bool = setting(
        "linear layers without bias", False, "--add-bias-linear=false", on_resume="another model"
    )
    add_qkv_bias: bool = setting(
        "with --disable-bias-linear: a bias for queries, keys and values alone, as in Qwen2",
        False,
        "--qkv-bias",
        on_resume="another model",
    )
    linear: Optional[str] = setting(
        "PATTERN=KIND, ...: the kind of the linear layers that match, such as mlp.*=mask; kinds are plain, lora, "
        "fake_quantize (--quantization), sparse (--sparsity) and those that the recipe defines; +KIND adds one",
        None,
        on_resume="refused",
    )
    kd_hidden_projections: Optional[str] = setting(
        "LAYER:SIZE, ...: layers whose output a learned matrix projects to the teacher's hidden size; it follows from "
        "--kd-hidden-layers and the teacher",
        None,
        on_resume="refused",
    )
    quantization: bool = setting(
        "quantization aware training: linear layers round their weights and inputs (docs/compression.md)",
        False,
        on_resume="refused",
    )
    weight_quantize_type: Literal["channel_wise_abs_max", "abs_max"] = setting(
        "--quantization: a scale for each output channel of a weight, or one for all of it",
        "channel_wise_abs_max",
        on_resume="refused",
    )
    activation_quantize_type: Literal["moving_average_abs_max", "token_wise_min_max", "none"] = setting(
        "--quantization: scale of a layer's inputs: one for all, by the moving average of steps, or a scale and a zero for "
        "each token; none: they are not rounded",
        "moving_average_abs_max",
        on_resume="refused",
    )
    activation_preprocess_type: Literal["none", "PACT"] = setting(
        "--quantization: PACT clips a layer's inputs to a trained bound before they are rounded",
        "none",
        on_resume="refused",
    )
    weight_bits: int = setting("--quantization: bits of a weight, 2 to 8", 8, on_resume="refused")
    activation_bits: int = setting("--quantization: bits of an input, 2 to 8", 8, on_resume="refused")
    quantization_layers: Optional[str] = setting(
        "--quantization: patterns of the layers that are quantized, as mlp.*,attention.qkv (default: all linear layers of "
        "blocks)",
        None,
        on_resume="refused",
    )
    quantization_skip: Optional[str] = setting(
        "--quantization: patterns of the layers that are not, as blocks.0.*, or the file of tools.sensitivity --output",
        None,
        on_resume="refused",
    )
    sparsity: Optional[str] = setting(
        "masks: weights of linear layers that count as 0: 2:4 keeps the 2 largest of each 4 inputs, 0.8 the largest fifth "
        "of each weight (docs/compression.md)",
        None,
        on_resume="refused",
    )
    initial_sparsity: float = setting(
        "share of zeros at --sparsity-begin-step; it grows by a cubic schedule", 0.0, on_resume="refused"
    )
    sparsity_begin_step: int = setting("steps before the first masks", 0, on_resume="refused")
    sparsity_end_step: int = setting(
        "steps before the last masks, which have --sparsity (default: the first ones are the last)",
        0,
        on_resume="refused",
    )
    sparsity_frequency: int = setting("steps between new masks", 100, on_resume="refused")
    sparsity_layers: Optional[str] = setting(
        "--sparsity: patterns of the layers that have masks, as mlp.*,attention.qkv (default: all linear layers of blocks)",
        None,
        on_resume="refused",
    )
    sparsity_skip: Optional[str] = setting(
        "--sparsity: patterns of the layers that have none, as blocks.0.*, or the file of tools.sensitivity --output",
        None,
        on_resume="refused",
    )
    lora_rank: Optional[int] = setting(
        "train a pair of matrices of this rank beside each linear layer, and freeze everything else (docs/lora.md)",
        None,
        on_resume="refused",
    )
    lora_alpha: Optional[float] = setting(
        "the product of a pair is multiplied by this / --lora-rank (default: --lora-rank)", None, on_resume="refused"
    )
    lora_dropout: float = setting("dropout of the input of a pair", 0.0)
    lora_target: Optional[str] = setting(
        "patterns of the linear layers that get a pair: 'attention.qkv, mlp.*, blocks.[01].*' (default: all in blocks)",
        None,
        joined=True,
        on_resume="refused",
    )
    lora_split_fused: bool = setting(
        "separate pairs for queries, keys and values, and for the two matrices of a gated MLP, as in PEFT for Llama",
        False,
        on_resume="refused",
    )
    use_rslora: bool = setting("divide --lora-alpha by the square root of the rank", False, on_resume="refused")
    use_dora: bool = setting(
        "DoRA: pairs change the directions of a weight's rows, and a number for each row its norm",
        False,
        "--lora-use-dora",
        on_resume="refused",
    )
    scale_embedding: bool = setting(
        "multiply the embeddings of tokens by the root of --hidden-size, as in Gemma", False, on_resume="refused"
    )
    untie_embeddings_and_output_weights: bool = setting(
        "give the output layer its own weight", False, on_resume="another model"
    )
    apply_query_key_layer_scaling: bool = setting(
        "scale attention scores by 1 / layer number and compute their softmax in fp32 (for fp16)",
        False,
        "--no-query-key-layer-scaling=false",
        "--scale-qk-by-layer-num",
    )
    query_pre_attn_scalar: Optional[float] = setting(
        "divide attention scores by the root of this (default: size of an attention head)", None, on_resume="refused"
    )
    attention_softmax_in_fp32: bool = setting("compute the softmax of attention in fp32", False)
    window_size: Optional[str] = setting(
        "sliding window attention: keys before and after a token that it sees, as 4095,0 (default, or -1: all before)",
        None,
        on_resume="refused",
    )
    window_attn_skip_freq: Optional[int] = setting(
        "with --window-size: every N-th layer uses full attention (4: the 4th, the 8th ...)", None, on_resume="refused"
    )
    attn_logit_softcapping: Optional[float] = setting(
        "attention scores become cap x tanh(score / cap), as in Gemma 2",
        None,
        "--attention-logit-softcapping",
        on_resume="refused",
    )
    softmax_type: Literal["vanilla", "learnable", "off-by-one"] = setting(
        "softmax of attention over the keys alone, or with a sink: a logit of each head without a value, learned as in "
        "gpt-oss, or 0",
        "vanilla",
        on_resume="another model",
    )
    final_logit_softcapping: Optional[float] = setting(
        "logits become cap x tanh(logit / cap), as in Gemma 2", None, "--output-logit-softcapping", on_resume="refused"
    )
    hidden_dropout: float = setting(
        "dropout after embedding, attention and MLP; 0: none", 0.1, "--check-accuracy~=0", "--hidden-dropout-prob"
    )
    attention_dropout: float = setting("dropout of attention weights; 0: none", 0.1, "--attention-probs-dropout-prob")
    label_smoothing: float = setting("label smoothing in training: target probability spread over the vocabulary", 0.0)
    z_loss_coeff: float = setting(
        "coefficient of the z-loss, the square of log sum exp of each token's logits, which keeps them small",
        0.0,
        "--z-loss-coef",
        "--z-loss-weight",
    )
    init_method_std: float = setting("standard deviation of the initial weights", 0.02)
    make_vocab_size_divisible_by: int = setting(
        "pad the vocabulary to a multiple of this x tensor parallel size", 128, "--vocab-size-divisible-unit"
    )
    model_type: str = setting(
        "model type: GPT, or a Python module with a function recipe()",
        "GPT",
        on_resume="another model",
        also={"gpt": "GPT", "gpt-cn": "GPT"},
    )
    model_name_or_path: Optional[str] = setting(
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
        return tuple(
            n for n, has in enumerate(layer_pattern(self.moe_layer_freq, self.num_layers)) if has and self.mixture
        )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, numbered from 0, has experts instead of an MLP."""
        return self.mixture and layer_pattern(self.moe_layer_freq, self.num_layers)[layer]

    @property
    def expert_ffn_size(self) -> int:
        """Width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def balancing(self) -> tuple[tuple[str, float], ...]:
        """The ways in which experts are balanced, each with its coefficient."""
        kinds = self.moe_router_load_balancing_type or ["aux_loss"]
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

    @property
    def yarn_stretch(self) -> float:
        """YaRN's attention factor, which multiplies rotated queries and keys."""
        stretch = lambda mscale: 0.1 * mscale * math.log(self.rotary_scaling_factor) + 1.0
        return stretch(self.mscale) / stretch(self.mscale_all_dim) if self.rotary_scaling_factor > 1 else 1.0

    @property
    def position_table(self) -> int:
        """Rows of the learned position embedding."""
        return self.max_position_embeddings or self.seq_length

    @property
    def context_length(self) -> int:
        """Tokens of a text: rows of the learned position embedding, or the sequence length of training."""
        return self.position_table if self.position_embedding_type == "learned_absolute" else self.seq_length


# The settings of layers with experts.
EXPERT_SETTINGS = tuple(f.name for f in fields(Model) if f.name == "num_experts" or f.name.startswith("moe_"))


@dataclass(frozen=True)
class Parallel:
    """Parallelism. The order of the grid of ranks is tp (fastest), cp, dp, pp."""

    tensor_model_parallel_size: int = setting(
        "degree of tensor model parallelism", 1, "--tp", "--mp-degree", "--model-parallel-size"
    )
    pipeline_model_parallel_size: int = setting("degree of pipeline model parallelism", 1, "--pp", "--pp-degree")
    context_parallel_size: int = setting("degree of context parallelism", 1, "--cp")
    cp_comm_type: Optional[list[Literal["p2p", "a2a", "allgather", "a2a+p2p"]]] = setting(
        "communication of context parallelism, for all layers or one word for each: p2p sends keys and values round a "
        "ring, allgather gathers them, a2a exchanges tokens for heads, a2a+p2p does that in groups with a ring between "
        "them (default: p2p)",
        None,
        also=dict(all_gather="allgather"),
    )
    hierarchical_context_parallel_sizes: Optional[list[int]] = setting(
        "ranks that exchange tokens for heads, and ranks of a ring, with --cp-comm-type a2a+p2p: two numbers, whose "
        "product is the context parallel size",
        None,
    )
    expert_model_parallel_size: int = setting(
        "degree of expert model parallelism", 1, "--ep", "--moe-expert-parallel-size"
    )
    expert_tensor_parallel_size: Optional[int] = setting(
        "degree of tensor parallelism of experts (default: --tensor-model-parallel-size)", None, "--etp"
    )
    overlap_moe_expert_parallel_comm: bool = setting(
        "the forward pass of a micro-batch and the backward pass of another one take turns: while experts' tokens of one "
        "are exchanged, the other computes",
        False,
    )
    data_parallel_size: Optional[int] = setting("only checked: must be world size / (tp x pp x cp)", None)
    dp_degree: Optional[int] = setting(
        "only checked: PaddlePaddle's data parallel size, must be world size / (mp x pp x --sharding-degree)", None
    )
    sequence_parallel: bool = setting("enable sequence parallelism in tensor parallel groups", False)
    pipeline_schedule: str = setting(
        "pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half, or a FILE.txt with a line of ops per rank",
        "1f1b",
    )
    num_layers_per_virtual_pipeline_stage: Optional[int] = setting(
        "number of layers per model chunk (interleaved schedule)", None
    )
    num_virtual_stages_per_pipeline_rank: Optional[int] = setting(
        "number of model chunks per rank (interleaved schedule)", None, "--virtual-pp-degree"
    )
    pipeline_stage_layers: Optional[str] = setting("number of layers of each pipeline stage: 2,1,1,1", None)
    decoder_first_pipeline_num_layers: Optional[int] = setting("number of layers of the first pipeline rank", None)
    decoder_last_pipeline_num_layers: Optional[int] = setting("number of layers of the last pipeline rank", None)
    account_for_embedding_in_pipeline_split: bool = setting("count the embedding as a layer of the first stage", False)
    account_for_loss_in_pipeline_split: bool = setting(
        "count output layer and loss as a layer of the last stage", False
    )
    pipeline_timeline: Optional[str] = setting(
        "file for a record of a step's passes, for megatron.pipeline.check", None
    )
    sharding_stage: Literal[0, 1, 2, 3] = setting(
        "ZeRO stage: shard optimizer state (1), gradients (2), parameters (3)",
        0,
        "--use-distributed-optimizer~=1/0",
        "--use-sharding~=1/0",
        "--zero-stage",
        "--data-parallel-sharding-strategy",
        also=dict(no_shard=0, optim=1, optim_grads=2, optim_grads_params=3),
    )
    sharding_degree: Optional[int] = setting("number of ranks to shard over (default: data parallel size)", None)
    overlap_grad_reduce: bool = setting(
        "overlap the reduction of gradients with the backward pass", False, "--reduce-overlap"
    )
    overlap_param_gather: bool = setting(
        "overlap the all-gather of parameters with the forward pass", False, "--broadcast-overlap"
    )
    print_topology: bool = setting("print the ranks of every group and exit", False)
    distributed_backend: Optional[Literal["gloo", "nccl"]] = setting(
        "backend of torch.distributed (default: nccl on CUDA, gloo on CPU)", None, "--backend"
    )
    distributed_timeout_minutes: float = setting("timeout of communication between ranks", 10.0)

    @property
    def asserted_data_parallel(self) -> Optional[int]:
        """The data parallel size that `--data-parallel-size` or `--dp-degree` asserts; None: neither was given."""
        if self.data_parallel_size or not self.dp_degree:
            return self.data_parallel_size
        return self.dp_degree * (self.sharding_degree or 1)

    @property
    def cp_comm_types(self) -> tuple[str, ...]:
        """`cp_comm_type` with its default: one word for all layers, or one for each."""
        return tuple(self.cp_comm_type or ["p2p"])

    @property
    def cp_levels(self) -> Optional[tuple[int, ...]]:
        """`hierarchical_context_parallel_sizes`, if a layer uses them."""
        sizes = self.hierarchical_context_parallel_sizes
        return tuple(sizes) if sizes and self.context_parallel_size > 1 and "a2a+p2p" in self.cp_comm_types else None


WORD_PIECE = ("BertWordPieceLowerCase", "BertWordPieceCase", "BertTokenizer", "ErnieTokenizer", "ElectraTokenizer")


@dataclass(frozen=True)
class TokenizerSettings:
    """The tokenizer and its files."""

    tokenizer_type: Optional[
        Literal[
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "GPTChineseTokenizer",
            "TikTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "BertTokenizer",
            "ErnieTokenizer",
            "ElectraTokenizer",
            "NullTokenizer",
        ]
    ] = setting(
        "type of tokenizer (NullTokenizer: text is numbers)",
        None,
        "--tokenizer-name",
        also=dict(GPTTokenizer="GPT2BPETokenizer"),
        on_resume="refused",
    )
    vocab_file: Optional[str] = setting(
        "vocab.json of a byte-level BPE, or vocab.txt of WordPiece", None, on_resume="refused"
    )
    merge_file: Optional[str] = setting("merges.txt of a byte-level BPE", None, on_resume="refused")
    tokenizer_model: Optional[str] = setting(
        "tokenizer.json, SentencePiece model or tiktoken ranks; or a vocabulary's folder, or its name in $MEGATRON_CACHE",
        None,
        "--tokenizer-name-or-path",
        on_resume="refused",
    )
    vocab_size: Optional[int] = setting("size of the vocabulary, if there is no tokenizer", None, on_resume="refused")
    vocab_extra_ids: int = setting(
        "number of sentinel tokens <extra_id_0> ... to add for T5's masked spans; also adds missing special tokens ([CLS], "
        "[SEP], [MASK], [PAD], [BOS], [EOS])",
        0,
        on_resume="refused",
    )
    tiktoken_pattern: Optional[str] = setting(
        "gpt2, cl100k, o200k, v1, v2 or a pattern (default: by the ranks)", None, on_resume="refused"
    )
    parse_special: bool = setting(
        "names of special tokens in documents and messages become these tokens (default: in prompts alone; elsewhere they "
        "are ordinary text)",
        False,
        on_resume="refused",
    )

    @property
    def of_texts(self) -> bool:
        """Whether they name a vocabulary of texts: not NullTokenizer's numbers, nor none at all."""
        files = self.vocab_file or self.merge_file or self.tokenizer_model
        return self.tokenizer_type != "NullTokenizer" and bool(self.tokenizer_type or files)


@dataclass(frozen=True)
class Data:
    """Datasets, and the order of their samples."""

    data_path: Optional[list[str]] = setting(
        "dataset prefix (a path or an s3:// URL), or weight prefix weight prefix ...; a folder: all its datasets, by "
        "size; --data-args-path FILE reads these words from a file",
        None,
        "--input-dir",
        on_resume="refused",
    )
    train_data_path: Optional[list[str]] = setting(
        "dataset or blend for training only; --per-split-data-args-path FILE reads those of each split from JSON",
        None,
        on_resume="refused",
    )
    valid_data_path: Optional[list[str]] = setting("dataset or blend for validation only", None)
    test_data_path: Optional[list[str]] = setting("dataset or blend for testing only", None)
    split: str = setting("proportions of train,valid,test in each dataset", "969,30,1", on_resume="refused")
    data_cache_path: Optional[str] = setting(
        "folder for index maps (default: next to the data), and for data downloaded from an object store",
        None,
        on_resume="irrelevant",
    )
    verify_data: bool = setting("verify the checksums of the token files before training", False)
    mock_data: bool = setting("train on deterministic synthetic samples, without files", False, on_resume="refused")
    full_validation: bool = setting(
        "validate on the whole validation set, each sample once, instead of --eval-iters batches", False
    )
    dataset_type: Literal["gpt", "webtext"] = setting(
        "kind of samples. gpt: --seq-length tokens of concatenated documents; webtext: one document, truncated, or padded "
        "with end-of-document tokens that have no loss",
        "gpt",
        also=dict(WebtextDataset="webtext"),
        on_resume="refused",
    )
    dataloader_type: Literal["single", "cyclic"] = setting(
        "single: in index order; cyclic: shuffled each epoch",
        "single",
        "--dataloader-shuffle~=cyclic/single",
        on_resume="refused",
    )
    collate_fn: Optional[str] = setting(
        "your own function that turns the items of a dataset into the samples of a micro-batch: MODULE:FUNCTION "
        "(docs/extending.md)",
        None,
        on_resume="logged",
    )
    num_workers: int = setting(
        "number of threads that prefetch batches; 0: load them in the training loop", 2, on_resume="irrelevant"
    )
    reset_position_ids: bool = setting("reset position ids after each end of document", False, on_resume="refused")
    reset_attention_mask: bool = setting("mask attention between documents", False, on_resume="refused")
    eod_mask_loss: bool = setting("mask the loss of end-of-document tokens in the input", False, on_resume="refused")

    @property
    def files(self) -> bool:
        """Whether any token files are given."""
        return any((self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path))


AUTO = -1  # --micro-batch-size auto, --save-interval auto


@dataclass(frozen=True)
class Batch:
    """Batch sizes, the length of training, and evaluation."""

    micro_batch_size: int = setting(
        "samples per forward pass and rank; auto: the planner chooses", 1, "--batch-size", also=dict(auto=AUTO)
    )
    global_batch_size: Optional[int] = setting("samples per step (default: micro batch x data parallel)", None)
    local_batch_size: Optional[int] = setting("--global-batch-size / data parallel size; sets or checks it", None)
    gradient_accumulation_steps: Optional[int] = setting(
        "micro-batches per step; sets or checks --global-batch-size", None, "--accumulate-steps"
    )
    rampup_batch_size: Optional[list[int]] = setting("START INCREMENT SAMPLES: ramp up the global batch size", None)
    train_iters: Optional[int] = setting("number of steps to train; 0 only with --skip-train", None, "--max-steps")
    train_samples: Optional[int] = setting("number of samples to train on, instead of steps", None)
    train_epochs: Optional[int] = setting(
        "epochs to train, instead of steps; schedule lengths may then be in steps or samples",
        None,
        "--num-train-epochs",
        "--num-epochs",
        "--epochs",
    )
    eval_interval: int = setting("number of steps between evaluations", 1000, "--eval-freq")
    eval_epoch: Optional[int] = setting("also evaluate every so many epochs (--train-epochs)", None)
    eval_iters: int = setting("number of batches per evaluation; 0: no evaluation", 100)
    test_iters: Optional[int] = setting(
        "number of batches of the final evaluation on test data; 0: no evaluation (default: --eval-iters)", None
    )
    eval_same_samples: bool = setting(
        "validate on the first --eval-iters batches each time; otherwise each validation continues after the last",
        False,
    )
    eval_requests: Optional[str] = setting(
        "file of multiple-choice requests (JSON lines: context, continuations, gold), whose accuracy each evaluation logs",
        None,
    )
    stop_at_loss: Optional[float] = setting(
        "stop training when the validation loss (the first in the log) is at most this", None, on_resume="logged"
    )
    skip_train: bool = setting(
        "do not train; evaluate on --eval-iters batches of validation and test data", False, on_resume="irrelevant"
    )
    exit_interval: Optional[int] = setting("save and exit after a step divisible by this", None, on_resume="irrelevant")
    exit_duration_in_mins: Optional[float] = setting(
        "save and exit after this many minutes", None, on_resume="irrelevant"
    )

    @property
    def tested_batches(self) -> int:
        """Number of batches of the evaluation on test data."""
        return self.eval_iters if self.test_iters is None else self.test_iters

    @property
    def has_length(self) -> bool:
        """Whether the length of training is given, in steps or samples."""
        return self.train_iters is not None or self.train_samples is not None


@dataclass(frozen=True)
class Precision:
    """Number formats, and fp16's loss scale."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "format of weights and activations; auto: bf16 if it is faster than fp32",
        "fp32",
        "--bf16=bf16",
        "--fp16=fp16",
        "--use-amp~=fp16/fp32",
        "--use-pure-fp16=fp16",
    )
    amp_level: Literal["O1", "O2"] = setting(
        "O2: weights in bf16 or fp16, with fp32 main weights; O1: weights in fp32, and autocast", "O2"
    )
    amp_custom_black_list: Optional[list[str]] = setting(
        "O1: ops to compute in fp32, with torch's or Paddle's names", None
    )
    amp_custom_white_list: Optional[list[str]] = setting("O1: ops to compute in half precision", None)
    loss_scale: Optional[float] = setting("static loss scale for fp16 (default: dynamic)", None)
    initial_loss_scale: float = setting("initial dynamic loss scale", 2.0**32, "--scale-loss")
    min_loss_scale: float = setting("minimum dynamic loss scale", 1.0)
    loss_scale_window: int = setting("steps without overflow before the scale doubles", 1000)
    hysteresis: int = setting("number of overflows before the scale halves", 2)


@dataclass(frozen=True)
class Kernels:
    """The device, the implementations of operations, and garbage collection."""

    device: Literal["auto", "cpu", "cuda"] = setting("device; auto: CUDA if available", "auto", also=dict(gpu="cuda"))
    torch_compile: bool = setting(
        "compile the layers with torch.compile; auto: if the first steps show that it pays",
        False,
        also=dict(auto="auto"),
    )
    dump_graph: Optional[str] = setting(
        "folder for the generated code of --torch-compile, with a subfolder per rank", None, on_resume="irrelevant"
    )
    attention_backend: Literal["auto", "explicit", "sdpa", "flash"] = setting(
        "implementation of attention",
        "auto",
        "--use-flash-attn=flash",
        "--use-flash-attn-v2=flash",
        also=dict(fused="sdpa", unfused="explicit", local="explicit"),
    )
    flash_attention_version: Literal[2, 3, 4] = setting(
        "version of FlashAttention for torch's attention on CUDA; 3 and 4 need their package", 2
    )
    cross_entropy_chunk: Optional[int] = setting("tokens per chunk of logits (default: automatic)", None)
    # Fusions, which change only the speed; off: separate torch ops. Most have no fused form on CPUs.
    masked_softmax_fusion: bool = setting("compute explicit attention in blocks; off: all scores together", True)
    bias_dropout_fusion: bool = setting("fuse dropout with the residual addition", True)
    bias_swiglu_fusion: bool = setting("fuse the activation of --swiglu", True)
    rope_fusion: bool = setting("fuse the rotary embedding", True, "--apply-rope-fusion~=true")
    persist_layer_norm: bool = setting("use the suite's norm kernels; off: apex's or torch's", True)
    cross_entropy_loss_fusion: bool = setting("fuse softmax, cross-entropy and its gradient", True)
    fused_linear: bool = setting("add biases inside the matrix product", True)
    fuse_attn_qkv: bool = setting("compute queries, keys and values with one matrix product", True)
    deterministic_mode: bool = setting(
        "on CUDA: use deterministic kernels; an error if torch has none (CPUs are always deterministic)", False
    )
    manual_gc_interval: int = setting(
        "steps between garbage collections, on all ranks at the same step; 0: Python decides", 100
    )


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation in the backward pass, which saves memory."""

    recompute_granularity: Optional[Literal["full", "full_attn", "core_attn"]] = setting(
        "part of a layer to recompute in the backward pass: all of it, its attention half, or the --recompute-modules "
        "(core_attn, or selective)",
        None,
        "--recompute-activations=core_attn/",
        "--use-recompute~=full/",
        "--checkpoint-activations~=full/",
        also=dict(selective="core_attn"),
    )
    recompute_method: Optional[Literal["uniform", "block"]] = setting(
        "uniform (the default): keep only the input of each --recompute-num-layers layers; block: recompute the first "
        "--recompute-num-layers layers of each stage only",
        None,
        "--activations-checkpoint-method",
    )
    recompute_num_layers: Optional[int] = setting(
        "see --recompute-method", None, "--checkpoint-num-layers", "--activations-checkpoint-num-layers"
    )
    no_recompute_layers: Optional[str] = setting("layers not to recompute, numbered from 0: 0,1,5", None)
    recompute_modules: Optional[list[Literal["core_attn", "layernorm", "mlp_act", "mlp"]]] = setting(
        "--recompute-granularity selective: modules of a layer to recompute: softmax(q k) v, the norms before attention "
        "and MLP, the activation of MLP and experts, the MLP or all of a layer's experts (default: core_attn)",
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


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints: where and when they are saved, and what a run loads from them."""

    save: Optional[str] = setting(
        "folder to save checkpoints to, or its URL in an object store (s3://bucket/run)", None, "--output-dir"
    )
    load: Optional[str] = setting("folder or URL to load a checkpoint from", None)
    save_interval: Optional[int] = setting(
        "number of steps between checkpoints; auto: from the cost of a save (see --mean-time-to-interruption)",
        None,
        "--save-steps",
        "--persistent-save-interval",
        also=dict(auto=AUTO),
    )
    save_epoch: Optional[int] = setting("also save every so many epochs (--train-epochs)", None)
    mean_time_to_interruption: float = setting("mean hours between failures of the job, for --save-interval auto", 24.0)
    keep_last: Optional[int] = setting("keep only this many newest checkpoints", None)
    save_retain_interval: Optional[int] = setting(
        "also keep the checkpoints at multiples of this step, next to the --keep-last (default: 1) newest", None
    )
    async_save: bool = setting("copy the state to CPU memory and write it in the background", False)
    save_retries: int = setting("number of retries of a failed save; 0: none", 2)
    save_mirror: Optional[str] = setting("folder or URL to save to if --save fails after all retries", None)
    save_copy: Optional[str] = setting(
        "folder or URL to copy each checkpoint to, or a command that copies it, with {} for its path", None
    )
    max_failed_saves: int = setting("stop training after this many failed saves in a row", 3)
    ckpt_step: Optional[int] = setting(
        "step of the checkpoint to load (default: the newest); 0: an imported model", None
    )
    auto_resume: bool = setting(
        "with --load: start from iteration 0 if the folder has no checkpoint; not needed if it is new and --save, too",
        False,
    )
    exit_on_missing_checkpoint: bool = setting(
        "exit if --load has no checkpoint, even if it is a new folder and --save, too", False
    )
    resume_schedule: Optional[Literal["checkpoint", "command"]] = setting(
        "schedule of learning rate and weight decay when resuming: the checkpoint's, or this command's (the default; warns "
        "if a length that was not given has changed)",
        None,
        "--use-checkpoint-opt-param-scheduler=checkpoint",
        "--use-checkpoint-lr-scheduler=checkpoint",
        "--override-opt-param-scheduler=command",
        "--override-lr-scheduler=command",
    )
    finetune: bool = setting("load only the weights and start from iteration 0", False)
    moe_use_upcycling: bool = setting(
        "with --finetune and --num-experts: --load may be a dense model, whose MLPs become the experts (docs/experts.md)",
        False,
    )
    use_checkpoint_args: bool = setting(
        "use the model shape and tokenizer of the checkpoint at --load where no flag sets them (--finetune does if no flag "
        "sets the shape)",
        False,
        on_resume="irrelevant",
    )
    load_strictness: Literal["strict", "warn-missing", "warn-extra", "warn-all"] = setting(
        "tensors that the checkpoint or the model lacks: an error, or a warning for those that are missing, extra or both",
        "strict",
        "--dist-ckpt-strictness",
        also=dict(
            raise_all="strict",
            raise_unexpected="warn-extra",
            assume_ok_unexpected="warn-extra",
            log_unexpected="warn-all",
            log_all="warn-all",
            ignore_all="warn-all",
        ),
    )
    no_load_optim: bool = setting("do not load optimizer state", False)
    no_save_optim: bool = setting("do not save optimizer state", False)


@dataclass(frozen=True)
class Guard:
    """Checks while a run trains, and the reactions to failures."""

    check_replicas_interval: Optional[int] = setting(
        "number of steps between bitwise comparisons of parameters across replicas",
        None,
        "--check-weight-hash-across-dp-replicas-interval",
    )
    exit_signal_handler: bool = setting(
        "on SIGTERM or SIGUSR1: save after the current step and exit with code 9", False, on_resume="irrelevant"
    )
    kill_switch_file: Optional[str] = setting(
        "save and exit when this file appears", None, "--kill-switch-path", on_resume="irrelevant"
    )
    heartbeat_dir: Optional[str] = setting(
        "folder where each rank records its current state (megatron.tools.supervise sets and reads it)",
        None,
        on_resume="irrelevant",
    )
    on_nan: Literal["stop", "skip"] = setting(
        "action on a loss or gradient that is not finite: stop before the update, or skip the step and count it",
        "stop",
        "--check-for-nan-in-loss-and-grad=stop/skip",
        "--no-check-for-nan-in-loss-and-grad=skip/stop",
    )
    on_spike: Literal["continue", "skip", "rollback"] = setting(
        "action on a spike of loss or gradient norm: log it, skip the update, or load an earlier checkpoint and skip "
        "the steps before the spike",
        "continue",
    )
    spike_window: int = setting("number of previous steps to compare a step with, at least 32", 128)
    spike_threshold: float = setting("deviations above the window's median that count as a spike", 10.0)
    spike_skip_steps: int = setting("number of steps up to a spike that a rollback skips", 8)
    max_rollbacks: int = setting("maximum number of rollbacks; the next spike stops the run (0: the first one)", 3)
    iterations_to_skip: Optional[list[int]] = setting("steps to skip: their samples are not trained on", None)
    override: Optional[str] = setting(
        "settings (separated by commas) that may differ from the checkpoint although they change results",
        None,
        on_resume="irrelevant",
    )


@dataclass(frozen=True)
class Optimizer:
    """The update rule, its learning rate and its weight decay."""

    # A recipe's own choices: name -> schedule or optimizer (`own_choices.optimizer_group`).
    own_schedules: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    own_optimizers: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    optimizer: Literal["adam", "cpu_adam", "sgd", "lion", "muon"] = setting(
        "optimizer: adam is AdamW, as in Megatron-LM; cpu_adam: with --optimizer-cpu-offload; the others: "
        "docs/optimizers.md",
        "adam",
        also=dict(adamw="adam", fused_adam="adam", hybrid_adam="adam", dist_muon="muon"),
    )
    freeze: Optional[list[str]] = setting(
        "patterns of names of parameters to freeze: 'embedding.*' 'blocks.[01].*' "
        "(docs/finetuning.md#frozen-parameters)",
        None,
        on_resume="refused",
    )
    train_only: Optional[list[str]] = setting(
        "patterns of names of parameters to train; all others are frozen", None, on_resume="refused"
    )
    lr: Optional[float] = setting("maximum learning rate", None, "--max-lr", "--learning-rate")
    min_lr: float = setting("minimum learning rate", 0.0)
    decoupled_lr: Optional[float] = setting(
        "maximum learning rate of the input embedding and the output layer (default: --lr)", None
    )
    decoupled_min_lr: Optional[float] = setting("minimum learning rate of these (default: --min-lr)", None)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = setting(
        "learning rate decay function", "linear", also=dict(none="constant")
    )
    lr_step_unit: Literal["iter", "sample", "epoch"] = setting(
        "update the learning rate at each step (iter, sample), or at the start of each epoch", "iter"
    )
    lr_decay_iters: Optional[int] = setting("number of steps to decay over (default: all)", None, "--decay-steps")
    lr_decay_samples: Optional[int] = setting("number of samples to decay over", None)
    lr_warmup_iters: int = setting("number of steps of linear warm-up", 0)
    lr_warmup_samples: int = setting("number of samples of linear warm-up", 0)
    lr_warmup_fraction: Optional[float] = setting(
        "fraction of the decay length to use for linear warm-up; 0: none", None, "--warmup-rate", "--warmup"
    )
    lr_warmup_init: float = setting("initial learning rate of warm-up", 0.0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "annealing function of WSD", "exponential"
    )
    lr_wsd_decay_iters: Optional[int] = setting("number of steps of WSD's annealing", None)
    lr_wsd_decay_samples: Optional[int] = setting("number of samples of WSD's annealing", None)
    weight_decay: float = setting("decoupled weight decay of matrices; 0: none", 0.01)
    start_weight_decay: Optional[float] = setting("initial weight decay (with --weight-decay-incr-style)", None)
    end_weight_decay: Optional[float] = setting("final weight decay", None)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting("weight decay schedule", "constant")
    clip_grad: float = setting("gradient clipping by global norm; 0: off", 1.0, "--grad-clip")
    adam_beta1: float = setting("decay rate of Adam's first moment; 0: none", 0.9)
    adam_beta2: float = setting("decay rate of Adam's second moment; 0: none", 0.999)
    adam_eps: float = setting("epsilon of Adam", 1e-8, "--adam-epsilon")
    sgd_momentum: float = setting("momentum of --optimizer sgd; 0: none, without state", 0.9)
    lion_beta1: float = setting("weight of the momentum in the update of --optimizer lion; 0: none", 0.95)
    lion_beta2: float = setting("decay rate of Lion's momentum; 0: none", 0.98)
    muon_momentum: float = setting("momentum of --optimizer muon; 0: none", 0.95)
    muon_nesterov: bool = setting("Nesterov momentum in Muon", False, "--muon-use-nesterov")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting(
        "scale of Muon's update of r rows and c columns: the root of max(r, c), r/c, or max(1, r/c)", "spectral"
    )
    muon_extra_scale_factor: float = setting("extra factor of Muon's update; 0.2 with spectral matches AdamW's", 1.0)
    muon_num_ns_steps: int = setting("number of Newton-Schulz steps in Muon", 5)
    muon_coefficient_type: Literal["quintic", "simple", "polar_express"] = setting(
        "Newton-Schulz coefficients: five polynomials in turn, one for all steps, or eight in turn", "quintic"
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = setting(
        "precision of Newton-Schulz products: bf16; TF32 if the device has it; fp32", "medium", also=dict(low="medium")
    )
    optimizer_cpu_offload: bool = setting(
        "keep optimizer state in CPU memory and update it there", False, "--sharding-offload"
    )
    optimizer_offload_fraction: float = setting(
        "fraction of the state that --optimizer-cpu-offload moves; 0: none; 1: all that is not on disk", 1.0
    )
    nvme_offload_fraction: float = setting(
        "fraction of optimizer state to keep in files, read and updated by the CPU at each step", 0.0
    )
    nvme_offload_dir: Optional[str] = setting("folder for these files, on a fast disk of the node", None)
    param_cpu_offload: bool = setting("keep the shards of --sharding-stage 3 in CPU memory", False)
    exp_avg_dtype: Literal["fp32", "bf16"] = setting(
        "format of the first moment: exp_avg of adam, lion and muon, momentum_buffer of sgd and muon", "fp32"
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = setting("format of the second moment, exp_avg_sq", "fp32")
    stochastic_rounding: bool = setting(
        "round bf16 moments up or down at random, which is right in the mean; off: to the nearest", True
    )
    grad_reduce_in_bf16: bool = setting("accumulate gradients in bf16, and reduce them so", False)
    main_grads_dtype: Literal["fp32", "bf16"] = setting(
        "bf16: --grad-reduce-in-bf16, and the sums over micro-batches of --sharding-stage 2 and 3 are bf16 as well",
        "fp32",
    )
    accumulate_allreduce_grads_in_fp32: bool = setting(
        "only checked: gradients are fp32 unless --grad-reduce-in-bf16 says otherwise", False
    )
    gradient_accumulation_fusion: bool = setting(
        "accumulate weight gradients into their buffer in the matrix product (CPU: slower; not in W passes)", False
    )
    loss_averaging: Literal["token", "micro-batch"] = setting(
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


@dataclass(frozen=True)
class Distillation:
    """Learning from another model: docs/distillation.md."""

    teacher_load: Optional[str] = setting(
        "folder or URL of the checkpoint of a teacher, of any size and layout: the student also learns its logits",
        None,
        "--export-kd-teacher-load",
    )
    teacher_logits: Optional[str] = setting(
        "folder of a teacher's logits, from megatron.tools.teacher_logits, in place of the teacher; its seed defines the "
        "order of samples",
        None,
        "--logits-load-dir",
    )
    kd_alpha: float = setting("share of the loss on the teacher's logits; the language model's loss has the rest", 0.5)
    kd_temperature: float = setting(
        "divisor of the logits of teacher and student in that loss, which is multiplied by its square", 1.0
    )
    kd_loss: Literal["forward_kl", "reverse_kl", "js"] = setting(
        "loss on the teacher's logits: KL(teacher || student), KL(student || teacher), or Jensen-Shannon divergence",
        "forward_kl",
    )
    kd_hidden_layers: Optional[str] = setting(
        "with --teacher-load, layers of the student whose output also learns that of a layer of the teacher, numbered from "
        "0: 0:1,1:3 (student:teacher); even: all of them, spread over the teacher's",
        None,
    )
    kd_hidden_loss: Literal["mse", "cosine"] = setting(
        "loss on hidden states: mean of the squares of differences, or 1 - cosine", "mse"
    )
    kd_hidden_coeff: float = setting("weight of the loss on hidden states, which is added", 1.0)

    @property
    def distils(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_load is not None or self.teacher_logits is not None

    @property
    def source(self) -> str:
        """The teacher, as a flag."""
        return f"--teacher-load {self.teacher_load}" if self.teacher_load else f"--teacher-logits {self.teacher_logits}"


@dataclass(frozen=True)
class Planner:
    """The planner: search for a layout, or check a run without training."""

    auto_parallel: bool = setting("search for the best layout for this job's ranks, and train in it", False)
    max_global_batch_size: Optional[int] = setting("let --auto-parallel choose the global batch size, up to this", None)
    tune_steps: int = setting(
        "with --auto-parallel or --micro-batch-size auto: measure the best three layouts for this many steps each", 0
    )
    parallel_plan: Optional[str] = setting(
        "train in the best layout of this file, from megatron.tools.plan --emit PLAN.json", None
    )
    dry_run: bool = setting("print settings, layout, memory, time and all problems, and exit; uses no device", False)
    wide: bool = setting("do not wrap the output of plan and --dry-run at 80 columns", False)
    preflight: bool = setting(
        "check settings, every rank's shapes, a small copy of the job and the machines, and exit", False
    )
    allow_memory_overcommit: bool = setting("train even if less memory is free than predicted", False)
    world_size: Optional[int] = setting("number of ranks to plan for (default: those of this job)", None, "--num-gpus")
    local_world_size: Optional[int] = setting(
        "number of ranks per node (default: this job's, else at most 8)", None, "--gpus-per-node"
    )
    device_name: Optional[str] = setting("device to plan for, such as A100-80GB (default: this machine's)", None)
    device_memory_gb: Optional[float] = setting(
        "memory of a device in GB, 10^9 bytes (default: DEVICE_MEMORY_GB, or the device's own)", None
    )
    memory_margin: Optional[float] = setting(
        "share of a device's memory to leave free (default: 0.08 in a search, 0.03 beside a given layout)", None
    )
    mtbf: Optional[float] = setting(
        "mean hours between failures of a node: plan and --dry-run then show the best save interval and the goodput",
        None,
    )
    calibration: Optional[str] = setting("file of measured speeds, written by megatron.tools.plan --calibrate", None)


@dataclass(frozen=True)
class Profiling:
    """Profiling of some steps with torch.profiler: a Chrome trace and tables."""

    profile: bool = setting("profile some steps on some ranks", False, "--use-pytorch-profiler")
    profile_step_start: int = setting("first iteration to profile", 10)
    profile_step_end: int = setting("iteration to stop profiling before", 12)
    profile_ranks: Optional[list[int]] = setting("ranks to profile (default: 0)", None)
    profile_dir: Optional[str] = setting("folder for traces and tables (default: profile under --save)", None)
    profile_detailed: bool = setting(
        "also record shapes: slower, and larger files", False, "--pytorch-profiler-collect-shapes"
    )


@dataclass(frozen=True)
class Logging:
    """Log output: its contents, and where it goes."""

    log_ranks: Optional[list[int]] = setting(
        "ranks that log to stdout, with their rank on each line (default: 0, without it); log files are those of rank 0",
        None,
        on_resume="irrelevant",
    )
    log_interval: int = setting("steps between log lines; the last step is always logged", 100, "--logging-freq")
    timing_log_level: Literal[0, 1, 2] = setting(
        "timers to log: 0: only the time of a step; 1: also its main parts; 2: also the parts of those", 0
    )
    timing_log_option: Literal["minmax", "max", "all"] = setting(
        "times to log across ranks: minimum and maximum, maximum, or all ranks", "minmax"
    )
    barrier_with_level_1_timing: bool = setting("use a barrier before timers of level 1", True)
    log_timers_to_tensorboard: bool = setting("also write timers to TensorBoard and Weights & Biases", False)
    console: Literal["auto", "short", "megatron"] = setting(
        "log lines on stdout: short, or Megatron-LM's; auto: short on a terminal", "auto"
    )
    log_file: Optional[str] = setting(
        "file to append Megatron-LM's log lines to (default: train.log under --save)", None
    )
    progress_bar: bool = setting("show a progress bar on a terminal", True)
    log_progress: bool = setting(
        "write progress.txt under --save, as Megatron-LM does: starts and saves, with FLOPs and tokens", False
    )
    log_throughput: bool = setting(
        "log TFLOP/s per rank (where Megatron-LM's line has it), samples and steps per second, and tokens per second of a "
        "data parallel rank; at the end of training, their means",
        False,
    )
    throughput_ignore_steps: int = setting(
        "--log-throughput: number of first steps to exclude from the mean throughput", 0
    )
    log_epoch: bool = setting("log the mean losses of each epoch at its end (--train-epochs)", False)
    log_memory_interval: Optional[int] = setting(
        "number of steps between log lines of memory: current, peak and planned, of the rank that uses most", None
    )
    log_params_norm: bool = setting("log the norm of all parameters every --log-interval steps", False)
    log_num_zeros_in_grad: bool = setting("log the number of zeros in the gradient every --log-interval steps", False)
    straggler_detection: bool = setting(
        "measure each rank's own time in the parts of a step; report slow ranks, data and stages", True
    )
    log_straggler: bool = setting(
        "every --log-interval steps, log the ranks with the least and the most own time (--straggler-minmax-count)",
        False,
    )
    straggler_minmax_count: int = setting("--log-straggler: number of ranks to log at each end", 1)
    metrics_file: Optional[str] = setting("JSON lines file of logged steps (default: metrics.jsonl under --save)", None)
    tensorboard_dir: Optional[str] = setting("folder for TensorBoard logs", None)
    visualdl_dir: Optional[str] = setting("folder for VisualDL logs (PaddlePaddle's TensorBoard)", None)
    wandb_project: Optional[str] = setting("project name for Weights & Biases", None)
    wandb_exp_name: Optional[str] = setting("run name for Weights & Biases", None)
    metrics_port: Optional[int] = setting(
        "port where rank 0 serves its current loss, speed, memory etc. to Prometheus, at /metrics; 0: a free one, which "
        "the log names (docs/watching.md)",
        None,
        on_resume="irrelevant",
    )
    metrics_host: str = setting(
        "address to listen on for --metrics-port; 0.0.0.0: all networks of the machine, without a password",
        "127.0.0.1",
        on_resume="irrelevant",
    )
    peak_tflops: Optional[float] = setting(
        "peak TFLOP/s of a rank's device, for MFU (default: of known GPUs; CPUs have no MFU)", None
    )
    hooks: Optional[list[str]] = setting(
        "your own classes to call at named points of the training loop: MODULE:CLASS ... (docs/extending.md)",
        None,
        on_resume="irrelevant",
    )
    on_event: Optional[str] = setting(
        "shell command to run for events of --event-level: their JSON is on its stdin, EVENT, EVENT_LEVEL, EVENT_MESSAGE "
        "and others are in its environment (docs/events.md)",
        None,
        on_resume="irrelevant",
    )
    webhook: Optional[str] = setting(
        "URL to which events of --event-level are sent as JSON (POST); @FILE: a file with the URL",
        None,
        on_resume="irrelevant",
    )
    event_level: Literal["info", "warning", "error"] = setting(
        "least level of the events for --on-event and --webhook; the end of a run is always sent",
        "warning",
        on_resume="irrelevant",
    )
    event_rules: Optional[str] = setting(
        "YAML file of thresholds and levels of events, and of events that are off (docs/events.md)",
        None,
        on_resume="irrelevant",
    )
    seed: int = setting("random seed of weights, data order and dropout, 0 or above", 1234, on_resume="refused")
    debug: bool = setting("print tracebacks of errors", False)


GROUPS = dict(
    model=Model,
    parallel=Parallel,
    tokenizer=TokenizerSettings,
    data=Data,
    batch=Batch,
    optimizer=Optimizer,
    recompute=Recompute,
    precision=Precision,
    kernels=Kernels,
    checkpoint=Checkpoint,
    guard=Guard,
    logging=Logging,
    distillation=Distillation,
    planner=Planner,
    profiling=Profiling,
)


@dataclass(frozen=True)
class Config:
    """All groups of a pretraining run."""

    model: Model
    parallel: Parallel
    tokenizer: TokenizerSettings
    data: Data
    batch: Batch
    optimizer: Optimizer
    recompute: Recompute
    precision: Precision
    kernels: Kernels
    checkpoint: Checkpoint
    guard: Guard
    logging: Logging
    distillation: Distillation = Distillation()
    planner: Planner = Planner()
    profiling: Profiling = Profiling()
    extra: dict = field(default_factory=dict, hash=False)  # a recipe's own groups, by name
    # Setting -> its source, except for defaults: the record that `said` reads.
    statements: Mapping[str, Statement] = field(default_factory=dict, hash=False, compare=False)

    @property
    def groups(self) -> dict[str, object]:
        """All groups by name; a recipe's own come last."""
        return {name: getattr(self, name) for name in GROUPS} | self.extra

    def said(self, name: str) -> Optional[Statement]:
        """The statement that gave a setting its value; None if it has its default because nothing set it.

        >>> shape = Model(num_layers=2, hidden_size=8, num_attention_heads=2)
        >>> config = from_record(dict(model=vars(shape))).derive("--auto-parallel", micro_batch_size=4)
        >>> config.said("micro_batch_size").words, config.said("seed")
        ('--auto-parallel', None)
        """
        return self.statements.get(name)

    def given(self, name: str) -> Optional[Statement]:
        """The user's statement of a setting, on the command line or in a file, even if a derived value replaced it."""
        statement = self.said(name)
        return statement and statement.by_user

    @property
    def given_words(self) -> dict[str, str]:
        """Setting -> the words that the user gave it with: `--max-steps 0`."""
        return {name: one.words for name in self.statements if (one := self.given(name))}

    def derive(self, by: str, **values) -> "Config":
        """A copy with these values, and a record of their source. by: the flag or feature that derives them."""
        statements, groups = dict(self.statements), {}
        for name, group in self.groups.items():
            own = {one.name: values[one.name] for one in fields(group) if one.name in values}
            changed = {key: value for key, value in own.items() if value != getattr(group, key)}
            if changed:
                groups[name] = replace(group, **changed)
            for key, value in changed.items():
                statements[key] = Statement(key, value, SaidBy.DERIVED, words=by, earlier=statements.get(key))
        extra = {name: groups.pop(name, group) for name, group in self.extra.items()}
        return replace(self, **groups, extra=extra, statements=statements)

    def to_record(self) -> dict[str, Any]:
        """All settings as JSON values, for checkpoints and logs; `given`: the words that the user gave them with."""
        groups = {name: asdict(group) for name, group in self.groups.items() if name not in self.extra}
        return groups | dict(extra={name: asdict(group) for name, group in self.extra.items()}, given=self.given_words)


def from_record(record: dict, own_groups: Mapping[str, type] = MappingProxyType({})) -> Config:
    """The settings in the record of a checkpoint. Settings that it does not have keep their defaults.

    own_groups: the recipe's groups (see `model.recipe.config_of`).

    >>> from_record(dict(model=dict(num_layers=2, hidden_size=8, num_attention_heads=2, gone=1))).model.num_layers
    2
    """

    def made(group: type, values: dict):
        known = {f.name for f in fields(group)}
        return group(**{key: value for key, value in values.items() if key in known})

    extra = record.get("extra", {})
    return Config(
        **{name: made(own_groups.get(name, group), record.get(name, {})) for name, group in GROUPS.items()},
        extra={name: made(group, extra.get(name, {})) for name, group in own_groups.items() if name not in GROUPS},
    )
