# SPDX-License-Identifier: Apache-2.0
"""Lengths of training that share the order of their samples.

Epochs are shuffled together, except for a partly read last one (`index_maps.make_epoch_plan`). So the order of all samples
changes if one more sample needs another epoch of a file, or more of its last one.
"""

from collections.abc import Callable
from typing import Optional

import numpy as np

from megatron.data.blend import parse_blend, share_sizes
from megatron.data.index_maps import make_epoch_plan
from megatron.settings.schema import Data

LONGEST = 1 << 60  # samples that nobody trains on


def same_order(dataset, data: Data, samples: int) -> Optional[range]:
    """The numbers of training samples with the same order as `samples`; None for datasets without an epoch plan.

    dataset: training dataset, built from these settings for any number of samples
    """
    files, words = getattr(dataset, "datasets", [dataset]), data.data_path or data.train_data_path
    if words is None or not all(hasattr(one, "plan") for one in files):
        return None
    weights = parse_blend(words, "--data-path").weights
    if len(files) == 1 and not data.data_path:  # the only file, whatever its weight
        weights = None
    if weights is None and len(files) > 1:  # one epoch of each file
        return None

    def epochs(count: int) -> list[tuple[int, bool]]:
        counts = [count] if weights is None else share_sizes(weights, count)[1]
        tokens = [(np.array([one.plan.tokens]), one.plan.seq_length) for one in files]
        plans = [make_epoch_plan(range(1), *of_file, 0, own) for of_file, own in zip(tokens, counts, strict=True)]
        return [(plan.epochs, plan.separate_last) for plan in plans]

    wanted = epochs(samples)
    first = _first(1, samples, lambda count: epochs(count) == wanted)
    return range(first, _first(samples, LONGEST, lambda count: epochs(count) != wanted))


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number in [low, high] for which `holds` is True, by bisection."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
