# SPDX-License-Identifier: Apache-2.0
"""Kinds of mixers, a folder each: `kind.py` has its record, `KIND`: weights, ops, and the class of its module. `KINDS` are
those that have a folder. Needs no torch.
"""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Union

from megatron.model.layer_ops import LayerOp, Residual
from megatron.mpu.placement import Table
from megatron.settings.schema import Model


@dataclass(frozen=True)
class Mixer:
    """What a branch computes from normalized hidden states: attention, an MLP, experts.

    name:    of its folder
    symbol:  its character in --hybrid-layer-pattern; "": it is in none
    slot:    the name of its module in the layer, and of its weights
    module:  its class, or "module:class", imported when a layer is built. It is called with (weights, `LayerSetup`), its
             forward function with (x, context); that returns y, or (y, {name: sum})
    weights: (facts, settings of the layer, sequence_parallel) -> its table
    ops:     (facts, hidden states of the layer) -> its ops
    mixes_tokens: whether a token's output depends on other tokens: `full_attn` recomputes it with its norm, `mlp` not
    sums:    whether its forward function returns sums
    recomputes: the words of `Recompute.modules` that select parts of it
    divided: settings of the layer -> the sizes that tensor parallelism divides, by name
    """

    name: str
    slot: str
    module: Union[str, type]
    weights: Callable[[Any, Model, bool], Table]
    ops: Callable[[Any, Residual], Sequence[LayerOp]]
    mixes_tokens: bool = False
    sums: bool = False
    recomputes: tuple[str, ...] = ()
    divided: Callable[[Model], dict[str, int]] = lambda model: {}
    symbol: str = ""


def _found() -> dict[str, Mixer]:
    folders = sorted(entry.name for entry in pkgutil.iter_modules(__path__) if entry.ispkg)
    kinds = [import_module(f"{__name__}.{folder}.kind").KIND for folder in folders]
    return {kind.name: kind for kind in kinds}


KINDS = _found()  # by name
