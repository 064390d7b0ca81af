# SPDX-License-Identifier: Apache-2.0
"""Settings of encoder-decoders only, with Megatron-LM's names if it has them."""

from dataclasses import dataclass
from typing import Literal, Optional

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
