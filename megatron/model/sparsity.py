# SPDX-License-Identifier: Apache-2.0
"""Masks during training: linear layers multiply with some of their weights, and the others count as 0. Needs no torch.

    y = x (mask * W)^T + b        the mask keeps the largest |w|: a share of a whole weight, or 2 of each 4 inputs

`--sparsity 0.75` or `--sparsity 2:4` selects it; the layers are those of `--sparsity-layers` without those of
`--sparsity-skip`. It is a kind of linear layer: `--linear PATTERN=sparse` selects the same. The share of zeros grows by
the cubic schedule of Zhu & Gupta (arXiv:1710.01878), and masks are computed anew each --sparsity-frequency steps:

    >>> [round(share(Model(1, 8, 1, sparsity="0.8", sparsity_end_step=400), step), 3) for step in range(0, 500, 100)]
    [0.0, 0.463, 0.7, 0.788, 0.8]

A layer has two buffers, `sparsity_mask` and `sparsity_step`, the number of its updates. The products:
`model/sparse_product.py`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Optional

from megatron.model.quantization import implied_linear, skipped_layers
from megatron.mpu.placement import Buffer, Constant, Placement
from megatron.settings.schema import Config, Model

KIND = "sparse"
MASK, STEP = "sparsity_mask", "sparsity_step"


class GroupPattern(NamedTuple):
    """`kept` weights of each `group` consecutive inputs stay."""

    kept: int
    group: int


def pattern_of(settings: Model) -> Optional[GroupPattern]:
    """The pattern of --sparsity N:M; None if it is a share of zeros.

    >>> pattern_of(Model(1, 8, 1, sparsity="2:4"))
    GroupPattern(kept=2, group=4)
    """
    found = re.fullmatch(r"(\d+):(\d+)", settings.sparsity or "")
    return GroupPattern(*map(int, found.groups())) if found else None


def is_due(settings: Model, step: int) -> bool:
    """Whether masks are computed anew before this step. step: the number of steps before it."""
    begin, end = settings.sparsity_begin_step, last_step(settings)
    return begin <= step <= end and ((step - begin) % settings.sparsity_frequency == 0 or step == end)


def last_step(settings: Model) -> int:
    """The step before which masks are computed for the last time."""
    return max(settings.sparsity_begin_step, settings.sparsity_end_step)


def share(settings: Model, step: int) -> float:
    """The share of zeros at a step at which masks are computed."""
    begin, length = settings.sparsity_begin_step, last_step(settings) - settings.sparsity_begin_step
    final, first = float(settings.sparsity or 0), settings.initial_sparsity
    left = 1 - (step - begin) / length if length else 0.0
    return final + (first - final) * left**3


def own_weights(settings: Model, weight: Placement) -> Mapping[str, Placement]:
    """The buffers of a layer with this weight. Each rank has the mask of its piece."""
    return {
        MASK: Placement(weight.shape, Constant(1.0), cut=weight.cut, decay=False, buffer=Buffer("same", "bool")),
        STEP: Placement((), Constant(0.0), decay=False, buffer=Buffer("same", "int64")),
    }


def with_sparsity(config: Config) -> Config:
    """The settings with the kinds of layers that --sparsity implies, in addition to --quantization. Patterns of --linear
    come after it.
    """
    model = config.model
    skip = skipped_layers(model.sparsity_skip, "--sparsity-skip")
    linear = implied_linear(model.linear, KIND, model.sparsity_layers, skip, added=model.quantization)
    return config.derive("--sparsity", linear=linear, sparsity_skip=",".join(skip) or None)


def problems(settings: Model, chosen: Iterable[tuple[str, Placement]], tp: int) -> list[str]:
    """The problems of the flags of sparsity, as messages. chosen: (name, weight) of the sparse layers; tp: ranks."""
    if settings.sparsity is None:
        return [f"--linear PATTERN={KIND} needs --sparsity: 2:4, or a share of zeros"] if list(chosen) else []
    begin, end = settings.sparsity_begin_step, settings.sparsity_end_step
    if 0 < end < begin:
        return [f"--sparsity-end-step {end} is before --sparsity-begin-step {begin}"]
    pattern = pattern_of(settings)
    if pattern is None:
        try:
            good = 0 <= settings.initial_sparsity <= float(settings.sparsity) < 1
        except ValueError:
            good = False
        return (
            []
            if good
            else [
                f"--sparsity {settings.sparsity} has to be a pattern such as 2:4, or a share of zeros below 1 and at least "
                f"--initial-sparsity {settings.initial_sparsity:g}"
            ]
        )
    if not 0 < pattern.kept < pattern.group:
        return [f"--sparsity {settings.sparsity} has to keep some weights of each group, and not all: 2:4, 1:4"]
    found = []
    for name, weight in chosen:
        last = len(weight.shape) - 1
        inputs = weight.shape[-1] // (tp if last in weight.cut.values() else 1)
        if inputs % pattern.group:
            found.append(
                f"--sparsity {settings.sparsity}: {name} has {inputs} inputs on a rank, which groups of {pattern.group} do "
                "not divide"
            )
    return found[:1]
