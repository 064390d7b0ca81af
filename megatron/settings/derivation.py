# SPDX-License-Identifier: Apache-2.0
"""Values of settings that follow from other settings. A list of derivations is in the order in which they are filled in:

a command line is read:    `model.command_line.derivations`, by the recipe's model and what --lora-rank, ... imply
a training starts:         `data.epochs.in_samples`, the length of --train-epochs
                           `planner.tuning.tuned`, a layout, if it is open
its settings are checked:  `training.rules.DEFAULTS`, the defaults that other settings decide
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megatron.settings.schema import Config


class Derivation(NamedTuple):
    """reads, writes: names of settings; derive: (config, inputs of the list) -> config, by `Config.derive`"""

    reads: str
    writes: str
    derive: Callable[..., Config]


def default(reads: str, name: str, value: Callable[..., Any]) -> Derivation:
    """The derivation of one setting. value: (config, inputs of the list) -> its value"""
    return Derivation(
        reads, name, lambda config, *inputs: config.derive("other settings", **{name: value(config, *inputs)})
    )


def derived(config: Config, derivations: Iterable[Derivation], *inputs: Any) -> Config:
    """The settings with all values that follow from others."""
    for one in derivations:
        config = one.derive(config, *inputs)
    return config
