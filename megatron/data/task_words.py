# SPDX-License-Identifier: Apache-2.0
"""Parse the arguments of --task-mixture: names, weights and paths of tasks (mixture.py). Needs no files, no numpy."""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Optional

from megatron.errors import SettingsError, did_you_mean

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
