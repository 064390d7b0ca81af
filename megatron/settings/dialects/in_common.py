# SPDX-License-Identifier: Apache-2.0
"""A short form of translated runs: what several runs of a script say alike, and reasons that several settings share.

A script that starts one program nine times, in nine branches, translates to an array of shared flags and nine short ones:

    COMMON=(
        --hidden-size 1024  # base.yaml:34: Model.hidden_size: 1024
    )
    FLAGS=("${COMMON[@]}"
        --task SST2  # -o Data.Train.dataset.name: SST2
    )
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from megatron.settings.dialects.start import TranslatedRun, place_of
from megatron.settings.dialects.table import VARIABLE, FlagLine, TheirSetting

IN_A_FILE = re.compile(r"(-o |(?!command:)[^\s:]+:)((?<=-o )\S.*|\d+: .+)", re.DOTALL)
WIDTH = 120  # of a list
FEWEST = 5  # lines that are worth an array of their own

Reasons = list[tuple[TheirSetting, str]]


@dataclass
class InCommon:
    """The lines, and the settings without an effect or an equivalent, that all runs of one program have. name: the array"""

    name: str = ""
    lines: list[FlagLine] = field(default_factory=list)
    idle: Reasons = field(default_factory=list)
    lost: Reasons = field(default_factory=list)

    def without(self, own: Iterable[Any], which: str) -> list:
        """What a run has besides this."""
        here = getattr(self, which)
        return [one for one in own if one not in here]


NOTHING = InCommon()


def in_common(runs: Sequence[TranslatedRun]) -> list[InCommon]:
    """For each run, what it shares with the other ones of its program; runs that share it have one object.

    Lines with a variable of the shell are left to the runs: they may come before it has its value.
    """
    shared: dict[str, InCommon] = {}
    for program in dict.fromkeys(run.program for run in runs):
        first, *others = [run for run in runs if run.program == program]
        of_all = lambda one, which, others=others: all(one in getattr(other.found, which) for other in others)
        lines = [
            line
            for line in first.found.lines
            if of_all(line, "lines") and not any(VARIABLE.search(word) for word in line.words)
        ]
        shared[program] = InCommon()
        if others and len(lines) >= FEWEST:
            taken = sum(bool(one.name) for one in shared.values())
            idle = [one for one in first.found.idle if of_all(one, "idle")]
            lost = [one for one in first.found.lost if of_all(one, "lost")]
            shared[program] = InCommon("COMMON" + (f"_{taken + 1}" if taken else ""), lines, idle, lost)
    return [shared[run.program] for run in runs]


def reasons(pairs: Reasons) -> list[str]:
    """A line for each setting with its place and reason; for those of a file that share a reason, one and a list below it.

    >>> row = lambda line, text, why: (TheirSetting(text, [], f"a.yaml:{line}", text), why)
    >>> reasons([row(3, "x: 1", "it is done anyway"), row(4, "y: 2", "see z"), row(5, "v: 0", "it is done anyway")])
    ['a.yaml: it is done anyway:', '  3: x: 1; 5: v: 0', 'a.yaml:4: y: 2: see z']
    """
    groups: dict[tuple[str, str], list[tuple[str, tuple]]] = {}
    for pair in pairs:
        found = IN_A_FILE.fullmatch(place_of(pair[0]))
        file, place = (found[1], found[2]) if found else (place_of(pair[0]), "")
        groups.setdefault((pair[1], file), []).append((place, pair))
    lines = []
    for (why, file), ones in groups.items():
        if len(ones) == 1 or not ones[0][0]:
            lines += [place_and_why(pair) for _, pair in ones]
        else:
            listed = "; ".join(place.replace(" ", "\0") for place, _ in ones)  # lines end between places
            listed = wrap(listed, WIDTH, break_long_words=False, break_on_hyphens=False)
            lines += [f"{file.rstrip(': ')}: {why}:", *(f"  {line}".replace("\0", " ") for line in listed)]
    return lines


def place_and_why(pair: tuple[TheirSetting, str]) -> str:
    """A setting that is not translated, with its place and the reason."""
    source, why = pair
    return f"{place_of(source)}{' ' if why.startswith('is ') else ': '}{why}"
