# SPDX-License-Identifier: Apache-2.0
"""What is known of each `--optimizer` before there is a model: the state that it keeps, its own settings. Needs no torch.

What each computes is in `update.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from megatron.settings.schema import Optimizer


class Kind(NamedTuple):
    """state: settings -> names of its state tensors, each fp32 and as large as the weights; settings: those of its own."""

    state: Callable[[Optimizer], tuple[str, ...]]
    settings: tuple[str, ...] = ()


KINDS = {
    "adam": Kind(lambda s: ("exp_avg", "exp_avg_sq"), ("adam_beta1", "adam_beta2", "adam_eps")),
    "sgd": Kind(lambda s: ("momentum_buffer",) if s.sgd_momentum else (), ("sgd_momentum",)),
    "lion": Kind(lambda s: ("exp_avg",), ("lion_beta1", "lion_beta2")),
}


def state_of(settings: Optimizer) -> tuple[str, ...]:
    """Names of the state tensors that an optimizer keeps.

    >>> state_of(Optimizer(optimizer="lion"))
    ('exp_avg',)
    """
    return KINDS[settings.rule].state(settings)
