# SPDX-License-Identifier: Apache-2.0
"""The values of heat maps: the time of each rank against that of its peers, the tokens of each expert against their mean.

The peers of a rank are the other ranks of its pipeline stage. A rank alone on its stage is compared with its own median
over the run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.telemetry.stragglers import median_of_others

ROWS, LAYERS = 32, 6  # ranks, and layers of a report, that are shown: of more, those that differ most


def against_peers(times: np.ndarray, stages: Sequence[int]) -> np.ndarray:
    """The time of each rank above that of its peers, as a share of the peers' time. times: seconds [ranks, records]"""
    usual, stages = np.empty_like(times), np.asarray(stages)
    for stage in np.unique(stages):
        ranks = np.flatnonzero(stages == stage)
        if len(ranks) == 1:
            usual[ranks] = np.median(times[ranks])
        else:
            usual[ranks] = np.array([median_of_others(column) for column in times[ranks].T]).T
    return times / np.maximum(usual, 1e-9) - 1


def stages_of(run: dict, ranks: int) -> list[int]:
    """The pipeline stage of each rank of a run, from its record: the axis pp is the slowest one."""
    pp = int((run.get("mesh") or {}).get("pp") or 1)
    return [rank * pp // ranks for rank in range(ranks)]


def shown_ranks(values: np.ndarray) -> list[int]:
    """The ranks to show, in order: all, or those with the largest excess in any column."""
    if len(values) <= ROWS:
        return list(range(len(values)))
    return sorted(int(rank) for rank in np.argsort(-values.max(1), kind="stable")[:ROWS])


def relative(loads: np.ndarray) -> np.ndarray:
    """Loads [experts, records] in means over experts; 1 where no expert has tokens."""
    mean = loads.mean(0)
    return np.where(mean > 0, loads / np.maximum(mean, 1e-9), 1.0)


class Imbalance(NamedTuple):
    """The loads of a layer's experts in its last records, in means. idle: experts without tokens in all of them"""

    layer: str
    largest: float
    smallest: float
    idle: list[int]


def imbalance(layer: str, loads: np.ndarray) -> Imbalance:
    """How unequal the loads of a layer are in the last tenth of its records. loads: [experts, records]"""
    last = loads[:, -max(1, loads.shape[1] // 10) :]
    means = relative(last.sum(1, keepdims=True))[:, 0]
    return Imbalance(layer, float(means.max()), float(means.min()), np.flatnonzero(last.sum(1) == 0).tolist())


def shown_layers(layers: dict[str, np.ndarray]) -> list[str]:
    """The layers of a report, in order: all, or of many those whose loads are the most unequal at the end."""
    found = [imbalance(layer, loads) for layer, loads in layers.items()]
    worst = sorted(found, key=lambda one: -one.largest)[:LAYERS]
    return [one.layer for one in found if one in worst]
