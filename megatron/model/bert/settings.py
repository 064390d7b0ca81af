# SPDX-License-Identifier: Apache-2.0
"""Settings that only BERT has. Megatron-LM's names, where it has them."""

from dataclasses import dataclass

from megatron.settings.schema import Config, setting

GROUP = "BERT"  # of the settings, in `Config.extra`


@dataclass(frozen=True)
class BertSettings:
    """What an encoder of masked words has beside `settings.schema.Model`."""

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
        "norms behind each addition and behind the embedding, as in BERT's own publication; off: before each branch",
        False,
        on_resume="another model",
    )


def own_settings(config: Config) -> BertSettings:
    """Those of a run."""
    return config.extra.get(GROUP) or BertSettings()
