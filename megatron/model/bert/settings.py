# SPDX-License-Identifier: Apache-2.0
"""BERT's own settings, with Megatron-LM's names if it has them."""

from dataclasses import dataclass

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
