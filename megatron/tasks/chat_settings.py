# SPDX-License-Identifier: Apache-2.0
"""Settings of instruction tuning: conversations, their template, and pairs of answers. Needs no torch."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.schema import Config, setting

GROUP = "chat"  # name of the group in the recipe
TASKS = ("chat", "dpo")
DPO_LOSS = "dpo loss"  # name of the sum over pairs
# Names of further sums over pairs: the rewards of both answers, the share of pairs whose chosen answer has more, the gap.
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")


@dataclass(frozen=True)
class ChatSettings:
    """Settings of instruction tuning."""

    task: Literal["chat", "dpo"] = setting(
        "chat: conversations, of which the assistant's answers are learned; dpo: pairs of answers, of which the chosen one "
        "is to be more likely than the rejected one (arXiv:2305.18290)",
        on_resume="refused",
    )
    train_data: Optional[list[str]] = setting(
        "files of conversations, or of pairs: JSON lines, Parquet; folders of them; hf://datasets/ORG/NAME",
        None,
        on_resume="refused in training",
    )
    valid_data: Optional[list[str]] = setting("files that are evaluated", None, on_resume="logged")
    test_data: Optional[list[str]] = setting("files that are evaluated at the end", None, on_resume="logged")
    chat_template: Optional[str] = setting(
        "Jinja file, or a name: chatml, plain, qwen3 (default: the template in the model's folder or the tokenizer's)",
        None,
        on_resume="logged",
    )
    packing: bool = setting(
        "several conversations in a sample, which do not see each other", False, on_resume="refused in training"
    )
    train_on_prompt: bool = setting(
        "the loss is on all tokens, not on the answers alone", False, on_resume="refused in training"
    )
    dpo_beta: float = setting(
        "how strongly a preference counts against distance from the reference", 0.1, on_resume="refused in training"
    )
    dpo_label_smoothing: float = setting(
        "share of pairs that are assumed to be the wrong way round", 0.0, on_resume="refused in training"
    )
    reference_load: Optional[str] = setting(
        "folder of the checkpoint of the reference (default: the one that the run begins with)",
        None,
        on_resume="logged",
    )


def chat_settings(config: Config) -> ChatSettings:
    return config.extra[GROUP]
