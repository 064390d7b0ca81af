# SPDX-License-Identifier: Apache-2.0
"""BERT's own settings, with Megatron-LM's names if it has them, and the rules for their combinations (`settings.rules`)."""

from dataclasses import dataclass

from megatron.model.gpt.gpt_rules import IDLE, NO_RELATIVE
from megatron.model.gpt.gpt_rules import RULES as GPT_RULES
from megatron.model.kinds.table import rules_of
from megatron.model.t5.settings import OF_GPT_ALONE, refused
from megatron.settings.rules import Rule
from megatron.settings.schema import Config, setting

GROUP = "BERT"  # name of the group in `Config.extra`


@dataclass(frozen=True)
class BertSettings:
    """Settings of BERT in addition to `settings.schema.Model`."""

    bert_binary_head: bool = setting(
        "a second loss: whether the second sentence follows the first",
        True,
        "--bert-no-binary-head=false",
        on_resume="another model",
    )
    num_tokentypes: int = setting(
        "kinds of tokens that have an embedding: the sentence that a token is in; 0: none", 2, on_resume="another model"
    )
    post_norm: bool = setting(
        "norms after each addition and after the embedding, as published; off: before each branch",
        False,
        on_resume="another model",
    )


def own_settings(config: Config) -> BertSettings:
    """BERT's own settings of a run."""
    return config.extra.get(GROUP) or BertSettings()


RULES = (
    *GPT_RULES,
    NO_RELATIVE,
    *rules_of("attention", "mlp"),
    Rule(
        lambda s: own_settings(s.settings).num_tokentypes < 0,
        lambda s: f"--num-tokentypes {own_settings(s.settings).num_tokentypes} must be 0 (none) or more",
    ),
    Rule(
        lambda s: own_settings(s.settings).bert_binary_head and own_settings(s.settings).num_tokentypes == 1,
        lambda s: (
            "--num-tokentypes 1: samples are pairs of sentences, which need 2 token types; give 2, 0, or "
            "--bert-no-binary-head"
        ),
    ),
    Rule(
        lambda s: s.seq_length < 8,
        lambda s: f"--seq-length {s.seq_length} must be at least 8: two sentences and three special tokens",
    ),
    *refused(
        "reset_position_ids reset_attention_mask eod_mask_loss", "samples of masked words hold one text or a pair"
    ),
    *OF_GPT_ALONE,
    *refused(
        "geglu scale_embedding quick_geglu activation_func_clamp_value glu_linear_offset", "this model does not have it"
    ),
    Rule(
        lambda s: s.norm_position != "pre",
        lambda s: f"--norm-position {s.norm_position} is for GPT; --post-norm puts norms after the sums",
    ),
)

__all__ = ["IDLE", "RULES"]
