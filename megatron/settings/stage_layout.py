# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's --pipeline-model-parallel-layout: what each pipeline stage has, a character for each part.

    >>> layout = read_layout("Et*3|(tt|)*2m|L")
    >>> layout.counts, layout.ahead
    ((3, 2, 2, 0, 0), 3)

E is the embedding, t a layer, m a depth of multi-token prediction, L output layer and loss; `|` ends a stage, `x*3` repeats
a part and `(...)*3` several. Pure.
"""

import re
from dataclasses import dataclass
from typing import Optional

from megatron.errors import SettingsError

LAYOUT = "--pipeline-model-parallel-layout"
PARTS = frozenset("EtmL|")  # a value of --pipeline-stage-layers with one of them is a layout, and no list of numbers
REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)")


@dataclass(frozen=True)
class StageLayout:
    """counts: layers of each stage. ahead: the first stage with depths of multi-token prediction; None: there are none.
    depths: their number
    """

    counts: tuple[int, ...]
    ahead: Optional[int] = None
    depths: int = 0


def read_layout(text: str) -> StageLayout:
    """The layers of each stage that a layout lists. Raises SettingsError."""
    whole = re.sub(r"[\s,]", "", text)
    while found := REPEATED.search(whole):
        part, times = (found[1], found[2]) if found[1] is not None else (found[3], found[4])
        if len(whole) + len(part) * int(times) > 1 << 16:
            raise SettingsError(f"{LAYOUT} {text} has too many parts", do="give numbers that fit the layers")
        whole = whole[: found.start()] + part * int(times) + whole[found.end() :]
    if other := sorted(set(whole) - PARTS):
        raise SettingsError(
            f"{LAYOUT} {text}: {' '.join(other)} is no part of a stage",
            do="write E (embedding), t (a layer), m (a depth of multi-token prediction), L (loss), | between stages, and "
            "*3 after one of them or after (...)",
        )
    stages = whole.split("|")
    if whole.count("E") != 1 or whole.count("L") != 1 or not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise SettingsError(
            f"{LAYOUT} {text}: the first stage begins with the embedding (E), and the last ends with the loss (L)",
            do="write it as Et|tt|tt|tL",
        )
    ahead = next((number for number, stage in enumerate(stages) if "m" in stage), None)
    return StageLayout(tuple(stage.count("t") for stage in stages), ahead, whole.count("m"))
