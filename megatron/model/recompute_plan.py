# SPDX-License-Identifier: Apache-2.0
"""The layers that are recomputed in the backward pass, and their groups. Pure; used by the model and the planner."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from megatron.settings.schema import Recompute


class RecomputeGroup(NamedTuple):
    """Consecutive layers that run together, and their recomputed parts (`Recompute.modules`)."""

    layers: tuple[int, ...]
    modules: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.layers)


def recompute_groups(layers: Sequence[int], settings: Recompute) -> list[RecomputeGroup]:
    """Group the layers of a stage (by their index in the whole network), in order.

    `--no-recompute-layers` counts over the whole network; `--recompute-method block --recompute-num-layers 2` selects the
    first two layers of this stage, including exempt ones.

    >>> from megatron.settings.schema import Recompute
    >>> for group in recompute_groups(range(4, 8), Recompute("full", recompute_num_layers=2, no_recompute_layers="0,5")):
    ...     print(*group)
    (4,) ('full',)
    (5,) ()
    (6, 7) ('full',)
    """
    layers, size = list(layers), 1
    chosen = layers if settings.recompute_granularity else []
    if settings.recompute_method == "block":
        chosen = chosen[: settings.recompute_num_layers]
    elif settings.recompute_granularity == "full":
        size = settings.recompute_num_layers or 1
    chosen = set(chosen) - settings.exempt_layers
    groups = []
    for recomputed, run in groupby(layers, chosen.__contains__):
        members = tuple(run)
        modules, step = (settings.modules, size) if recomputed else ((), 1)
        groups += [RecomputeGroup(members[at : at + step], modules) for at in range(0, len(members), step)]
    return groups


def last_modules(layers: Sequence[int], settings: Recompute) -> tuple[str, ...]:
    """The recomputed parts of the last of these layers; the depths of multi-token prediction after it have the same."""
    groups = recompute_groups(layers, settings)
    return groups[-1].modules if groups else ()
