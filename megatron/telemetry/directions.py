# SPDX-License-Identifier: Apache-2.0
"""Whether the smaller or the larger of two values of a figure is better: declared here, once for each figure.

    >>> direction_of("mse"), direction_of("accuracy and f1 matched"), direction_of("lm loss ppl"), direction_of("length")
    ('smaller', 'larger', 'smaller', None)

Best checkpoints, early stopping, events and reports read it. A figure without a direction has no best value. A recipe's own
figure gets one by `Measures.better`.
"""

import math
from collections.abc import Sequence
from typing import Optional

SMALLER, LARGER = "smaller", "larger"
DIRECTIONS = {  # a figure, and the same of a set: "accuracy", "accuracy matched"
    "loss": SMALLER,
    "ppl": SMALLER,
    "perplexity": SMALLER,
    "mse": SMALLER,
    "acc": LARGER,
    "accuracy": LARGER,
    "normalised accuracy": LARGER,
    "f1": LARGER,
    "em": LARGER,
    "macro_f1": LARGER,
    "mcc": LARGER,
    "matthews": LARGER,
    "pearson": LARGER,
    "spearman": LARGER,
}
LOSSES = (" loss", " ppl", " perplexity")  # endings of names of losses, such as "lm loss", and of their perplexities


def direction_of(figure: str) -> Optional[str]:
    """SMALLER, LARGER, or None for a figure that is not known. "a and b", a mean, has the direction that both share."""
    if " and " in figure:
        found = {direction_of(part) for part in figure.split(" and ")}
        return found.pop() if len(found) == 1 else None
    if figure.endswith(LOSSES):
        return SMALLER
    words = figure.split(" ")
    names = (" ".join(words[:count]) for count in range(len(words), 0, -1))
    return next((DIRECTIONS[name] for name in names if name in DIRECTIONS), None)


def is_better(value: float, than: Optional[float], direction: str) -> bool:
    """Whether a value is better than another one, or the first. A value that is not finite never is."""
    if than is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < than if direction == SMALLER else value > than


def best_of(points: Sequence[tuple[int, float]], direction: str) -> tuple[int, float]:
    """The (iteration, value) of the best value, the first of equal ones."""
    return (min if direction == SMALLER else max)(points, key=lambda point: point[1])
