# SPDX-License-Identifier: Apache-2.0
"""The content of a config.json that remembers which of its keys were read, so that the others can be named.

>>> config = WatchedConfig(n_layer=2, n_head=4, gating="ring", use_cache=True, extra=None)
>>> config["n_layer"], (dict(n_head=1) | config).get("n_head")
(2, 4)
>>> config.unread()
['gating']
"""

from typing import Any

# Keys that say nothing about the results of a model, or nothing that its tensors, tokenizer and other keys do not say.
ELSEWHERE = frozenset(
    """architectures auto_map bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id
    unk_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id torch_dtype dtype
    transformers_version use_cache model_type _name_or_path name_or_path _commit_hash id2label label2id
    num_labels task_specific_params finetuning_task pretraining_tp gradient_checkpointing output_attentions
    output_hidden_states output_past return_dict torchscript is_decoder is_encoder_decoder tokenizer_class
    prefix problem_type chunk_size_feed_forward tie_encoder_decoder tie_word_embeddings reorder_and_upcast_attn
    keys_to_ignore_at_inference _attn_implementation attn_implementation cache_implementation summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj initializer_factor
    initializer_range classifier_dropout n_ctx max_window_layers embd_pdrop dense_act_fn layer_types
    _sliding_window_pattern sliding_window_pattern original_max_position_embeddings rope_theta rope_parameters
    partial_rotary_factor initial_context_length experts_per_token chunk_size expand mamba_ssm_cache_dtype
    num_logits_to_keep rescale_prenorm_residual time_step_floor time_step_max time_step_min time_step_rank
    use_mamba_kernels""".split()
)


class WatchedConfig(dict):
    """See above. What `|` makes of it reports to the same record."""

    def __init__(self, *arguments, seen=None, **entries):
        super().__init__(*arguments, **entries)
        self.seen: set[str] = set() if seen is None else seen

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(key)
        return super().__contains__(key)

    def __or__(self, other: dict) -> "WatchedConfig":
        return WatchedConfig(dict(self.items()) | dict(other.items()), seen=self.seen)

    def __ror__(self, other: dict) -> "WatchedConfig":
        return WatchedConfig(dict(other.items()) | dict(self.items()), seen=self.seen)

    def unread(self) -> list[str]:
        """The keys with a value that nobody read, and that may mean something."""
        return [key for key, value in self.items() if key not in self.seen | ELSEWHERE and value not in NOTHING]


NOTHING = (None, False, "", [], {})
