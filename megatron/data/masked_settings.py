# SPDX-License-Identifier: Apache-2.0
"""Settings for the data of masked models: a group for `Recipe.groups`, and its checks for `Recipe.rules`.

Recipe(..., groups={"masked": MaskedSettings, ...}, rules=(*MASKED_RULES, ...))    # config.extra["masked"]

The words of --task-mixture are parsed here, too. Needs no files, no numpy.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Literal, Optional

from megatron.errors import SettingsError, did_you_mean
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


OWN = "masked"  # the task on --data-path
LONGEST_PERIOD = 100_000  # samples after which the order of tasks repeats
NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{0,12})?|\.[0-9]{1,12}|[0-9]{1,12}/[0-9]{1,12}")  # 4, 0.5, 1/3
FORM = "--task-mixture NAME=WEIGHT:PATH ..., and masked=WEIGHT for --data-path"


def parsed_tasks(words: Sequence[str]) -> list[tuple[str, Fraction, Optional[str]]]:
    """(name, weight, path) of each task; reads no files. Raises SettingsError for invalid arguments."""
    parsed = [_parsed(word) for word in words]
    names = [name for name, _, _ in parsed]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"--task-mixture names {twice!r} twice", do="give each task a name of its own")
    for name, _, path in parsed:
        if name != OWN and not path:
            near = did_you_mean(name, [OWN])
            raise SettingsError(f"--task-mixture: task {name!r} has no path{near}", do=f"{name}=WEIGHT:PATH; {FORM}")
        if name == OWN and path:
            raise SettingsError(f"--task-mixture: {OWN!r} is the task of --data-path, it has no path", do=FORM)
    if OWN not in names:
        raise SettingsError(
            f"--task-mixture has no task {OWN!r}", "that of --data-path", f"add {OWN}=WEIGHT to the others"
        )
    whole_weights([weight for _, weight, _ in parsed])
    return parsed


def _parsed(word: str) -> tuple[str, Fraction, Optional[str]]:
    """(name, weight, path) of one argument of --task-mixture."""
    match = re.fullmatch(r"([A-Za-z][\w-]*)=([^:]*)(?::(.*))?", word)
    if not match:
        raise SettingsError(f"--task-mixture {word!r} is no task", do=FORM)
    name, number, path = match.groups()
    try:
        weight = Fraction(number) if NUMBER.fullmatch(number) else None
    except ZeroDivisionError:
        weight = None
    if not weight:
        raise SettingsError(
            f"--task-mixture: the weight {number!r} of {name!r} is no number above 0",
            do="give the samples that it has out of a round, as 4, or leave the task out",
        )
    return name, weight, path or None


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers in the same ratio. Raises SettingsError if their sum is too large.

    >>> whole_weights([Fraction("0.5"), Fraction("1.5"), Fraction(1)])
    [1, 3, 2]
    """
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    whole = [weight // gcd(*whole) for weight in whole]
    if sum(whole) > LONGEST_PERIOD:
        raise SettingsError(
            f"--task-mixture: weights in the ratio {':'.join(map(str, whole))} come round after {sum(whole):,} samples",
            do=f"round them: the sum of their smallest whole numbers may be {LONGEST_PERIOD:,}",
        )
    return whole
