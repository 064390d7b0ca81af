# SPDX-License-Identifier: Apache-2.0
"""Settings for the data of masked models: a group for `Recipe.groups`, and its checks for `Recipe.rules`.

Recipe(..., groups={"masked": MaskedSettings, ...}, rules=(*MASKED_RULES, ...))    # config.extra["masked"]
"""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.data.task_words import parsed_tasks
from megatron.errors import SettingsError
from megatron.settings.declare import Needs
from megatron.settings.rules import Rule
from megatron.settings.schema import setting

GROUP = "masked"  # its name in `Config.extra`


@dataclass(frozen=True)
class MaskedSettings:
    """Masking of samples for models such as BERT and T5."""

    mask_prob: float = setting("share of the tokens of a sample that are masked", 0.15)
    short_seq_prob: float = setting("share of the samples that are made shorter than they could be; 0: none", 0.1)
    mask_spans: Optional[Literal["ngrams", "geometric", "words"]] = setting(
        "what is masked together. ngrams: up to --mask-max-ngram words, n of them with a probability proportional to 1/n; "
        "geometric: n by a geometric distribution of 0.2; words: single words, and --mask-prob is a share of the words "
        "(default: ngrams for BERT, geometric for T5, as in Megatron-LM)",
        None,
    )
    mask_max_ngram: Optional[int] = setting(
        "words that are masked together at most (default: 3 for BERT, 10 for T5, 1 with --mask-spans words)", None
    )
    mask_strategy: Literal["80/10/10", "all-mask"] = setting(
        "what BERT reads where a token is masked. 80/10/10: the mask, or in a tenth of cases a random token and in a tenth "
        "the token itself; all-mask: always the mask",
        "80/10/10",
    )
    task_mixture: Optional[list[str]] = setting(
        "tasks that are trained together, NAME=WEIGHT:PATH each: token files are for masked words, .tsv or .jsonl for "
        "classification; NAME=WEIGHT without a path means --data-path (docs/masked_data.md#mixtures-of-tasks)",
        None,
    )


def _own(s) -> MaskedSettings:
    return s.settings.extra[GROUP]


def _wrong_mixture(s) -> str:
    """The error in the arguments of --task-mixture, or ""; files are checked later."""
    if _own(s).task_mixture is None:
        return ""
    try:
        parsed_tasks(_own(s).task_mixture)
    except SettingsError as error:
        return f"{error.what}; {error.do}"
    return ""


MASKED_IDLE = {
    "split": Needs(
        "--data-path or --task-mixture",
        lambda s: s.data_path or getattr(s.settings.extra.get(GROUP), "task_mixture", None),
    )
}
MASKED_RULES = (
    Rule(
        lambda s: not 0 < _own(s).mask_prob < 1,
        lambda s: f"--mask-prob {_own(s).mask_prob} must be above 0 and below 1, as 0.15",
    ),
    Rule(
        lambda s: not 0 <= _own(s).short_seq_prob <= 1,
        lambda s: f"--short-seq-prob {_own(s).short_seq_prob} must be from 0 to 1",
    ),
    Rule(
        lambda s: _own(s).mask_max_ngram is not None and _own(s).mask_max_ngram < 1,
        lambda s: f"--mask-max-ngram {_own(s).mask_max_ngram} must be at least 1 word",
    ),
    Rule(
        lambda s: _own(s).mask_spans == "words" and (_own(s).mask_max_ngram or 1) > 1,
        lambda s: (
            f"--mask-spans words masks single words, --mask-max-ngram {_own(s).mask_max_ngram} masks several together; "
            "leave one of the two out"
        ),
    ),
    Rule(
        lambda s: s.seq_length < 8,
        lambda s: f"--seq-length {s.seq_length} is too short for a masked sample; 8 tokens are the least",
    ),
    Rule(
        lambda s: not s.mock_data and _own(s).mask_spans != "words" and 0 < _own(s).mask_prob * (s.seq_length - 3) < 1,
        lambda s: (
            f"--mask-prob {_own(s).mask_prob} of a sample's text is less than one token with --seq-length {s.seq_length}, "
            "so nothing would be masked; raise one of the two"
        ),
    ),
    Rule(
        lambda s: s.dataset_type == "webtext",
        lambda s: f"--dataset-type {s.dataset_type} is of models that predict the next token; leave it out",
    ),
    Rule(lambda s: _wrong_mixture(s), lambda s: _wrong_mixture(s)),
    Rule(
        lambda s: s.train_epochs,
        lambda s: (
            f"--train-epochs {s.train_epochs}: an epoch of masked samples has no number of samples of its own, the lengths "
            "of some are drawn; give --train-samples N or --train-iters N"
        ),
    ),
    Rule(
        lambda s: _own(s).task_mixture and s.dataloader_type == "cyclic",
        lambda s: "--dataloader-type cyclic shuffles what --task-mixture keeps in its ratio; leave it out",
    ),
    Rule(
        lambda s: _own(s).task_mixture and s.full_validation,
        lambda s: "--full-validation: a mixture of tasks (--task-mixture) has no end; give --eval-iters instead",
    ),
)
