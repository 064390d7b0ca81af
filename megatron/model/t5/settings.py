# SPDX-License-Identifier: Apache-2.0
"""Settings of encoder-decoders only, with Megatron-LM's names, and the rules for their combinations (`settings.rules`)."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, Optional

from megatron.model.gpt.gpt_rules import IDLE as OF_GPT
from megatron.model.gpt.gpt_rules import RULES as GPT_RULES
from megatron.model.kinds.table import rules_of
from megatron.settings.declare import Needs, dashed
from megatron.settings.rules import Rule, either, multiples
from megatron.settings.schema import Config, setting

GROUP = "encoder-decoder"  # name of the group in `Config.extra`
SHORT = 128  # default tokens of a target


@dataclass(frozen=True)
class T5Settings:
    """The shape of an encoder-decoder in addition to `settings.schema.Model`, and the pipeline stages of its two halves."""

    encoder_num_layers: Optional[int] = setting(
        "encoder layers (default: --num-layers)", None, on_resume="another model"
    )
    decoder_num_layers: Optional[int] = setting(
        "decoder layers (default: as many as the encoder has)", None, on_resume="another model"
    )
    decoder_seq_length: Optional[int] = setting(
        "tokens of a target, which the decoder reads (default: 128, or --seq-length where that is less)",
        None,
        on_resume="refused",
    )
    feed_forward_proj: Literal["gelu", "relu", "gated-gelu"] = setting(
        "activation of the MLP: relu is T5's first, gated-gelu that of its version 1.1 (--swiglu: gated SiLU)",
        "gelu",
        on_resume="another model",
    )
    relative_attention_num_buckets: int = setting(
        "--position-embedding-type relative: number of distance buckets", 32, on_resume="another model"
    )
    relative_attention_max_distance: int = setting(
        "--position-embedding-type relative: longer distances share the last bucket", 128, on_resume="refused"
    )
    unscaled_attention: bool = setting(
        "scores are not divided by the root of a head's width, as in T5", False, on_resume="refused"
    )
    scale_tied_output: bool = setting(
        "hidden states are divided by the root of --hidden-size before a tied output layer, as in T5's first version",
        False,
        on_resume="refused",
    )
    pipeline_model_parallel_split_rank: Optional[int] = setting(
        "the first pipeline rank with decoder layers: those before it have the encoder (default: layers by their work)",
        None,
    )
    encoder_pipeline_model_parallel_size: int = setting(
        "pipeline ranks for the encoder, before the --pipeline-model-parallel-size ranks of the decoder", 0
    )


def own_settings(config: Config) -> T5Settings:
    """The encoder-decoder's own settings of a run."""
    return config.extra.get(GROUP) or T5Settings()


def _own(s: SimpleNamespace):
    return own_settings(s.settings)


def _target(s: SimpleNamespace) -> int:
    return _own(s).decoder_seq_length or 0


def refused(names: str, why: str) -> tuple[Rule, ...]:
    """Rules that refuse settings which the model does not support, one for each."""
    return tuple(
        Rule(lambda s, name=name: getattr(s, name), lambda s, name=name: f"{dashed(name)}: {why}; leave it out")
        for name in names.split()
    )


OF_GPT_ALONE = (  # settings that neither an encoder-decoder nor BERT has
    *refused(
        "window_size qk_layernorm apply_query_key_layer_scaling add_qkv_bias query_pre_attn_scalar attention_output_gate",
        "this model's attention does not have it",
    ),
    Rule(
        lambda s: s.softmax_type != "vanilla",
        lambda s: f"--softmax-type {s.softmax_type}: this model's attention does not have it; leave it out",
    ),
    *refused(
        "hybrid_layer_pattern hybrid_attention_ratio hybrid_mlp_ratio",
        "each layer of this model is attention and an MLP",
    ),
    *refused("mtp_num_layers", "this model does not predict tokens further ahead"),
    *refused("no_rope_freq", "all layers of this model have the same positions"),
    *refused(
        "layer_settings heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json",
        "all layers of this model have the same sizes",
    ),
)
DIVISIBLE_TARGET = Rule(
    lambda s: s.sequence_parallel and _target(s) % s.tp,
    lambda s: (
        f"--decoder-seq-length {_target(s)} cannot be divided by --tensor-model-parallel-size {s.tp}, as "
        f"--sequence-parallel needs; nearest: {either(multiples(_target(s), s.tp))}"
    ),
)
RULES = (
    *GPT_RULES,
    *rules_of("attention", "mlp", "cross"),
    Rule(lambda s: _target(s) < 1, lambda s: f"--decoder-seq-length {_target(s)} must be at least 1"),
    DIVISIBLE_TARGET,
    Rule(
        lambda s: _own(s).relative_attention_num_buckets < 4,
        lambda s: (
            f"--relative-attention-num-buckets {_own(s).relative_attention_num_buckets} must be at least 4: near and far "
            "keys, before the query and after it"
        ),
    ),
    Rule(
        lambda s: 2 * _own(s).relative_attention_max_distance <= _own(s).relative_attention_num_buckets,
        lambda s: (
            f"--relative-attention-max-distance {_own(s).relative_attention_max_distance} must be above "
            f"{_own(s).relative_attention_num_buckets // 2}, half of --relative-attention-num-buckets: each of "
            "the shorter distances has its own bucket"
        ),
    ),
    Rule(
        lambda s: (
            s.position_embedding_type == "learned_absolute"
            and s.max_position_embeddings
            and _target(s) > s.max_position_embeddings
        ),
        lambda s: (
            f"--decoder-seq-length {_target(s)} is longer than --max-position-embeddings {s.max_position_embeddings}; "
            f"lower the one, or raise the other to {_target(s)}"
        ),
    ),
    Rule(
        lambda s: _own(s).feed_forward_proj != "gelu" and (s.swiglu or s.squared_relu),
        lambda s: (
            f"--feed-forward-proj {_own(s).feed_forward_proj} and {'--swiglu' if s.swiglu else '--squared-relu'} are two "
            "activations of the MLP; give one of them"
        ),
    ),
    Rule(
        lambda s: _own(s).scale_tied_output and s.untie_embeddings_and_output_weights,
        lambda s: (
            "--scale-tied-output is for a tied output layer; leave it out, or leave out "
            "--untie-embeddings-and-output-weights"
        ),
    ),
    *refused(
        "reset_position_ids reset_attention_mask eod_mask_loss", "samples of an encoder-decoder hold one text each"
    ),
    *OF_GPT_ALONE,
    *refused("geglu", "say --feed-forward-proj gated-gelu"),
    *refused(
        "scale_embedding quick_geglu activation_func_clamp_value glu_linear_offset", "this model does not have it"
    ),
    Rule(
        lambda s: s.norm_position != "pre", lambda s: f"--norm-position {s.norm_position}: this model's layers are pre"
    ),
)

_RELATIVE = Needs("--position-embedding-type relative", lambda s: s.position_embedding_type == "relative")
IDLE = {**OF_GPT, "relative_attention_num_buckets": _RELATIVE, "relative_attention_max_distance": _RELATIVE}
