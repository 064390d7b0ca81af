# SPDX-License-Identifier: Apache-2.0
"""Activations that are computed again in the backward pass instead of kept (arXiv:1604.06174, 2205.05198).

| granularity | is computed again                   | is kept of a layer                                     |
|-------------|-------------------------------------|--------------------------------------------------------|
| (none)      | nothing                             | everything that its backward pass reads                |
| `core_attn` | softmax(q k) v                      | queries, keys and values instead of attention weights  |
| `full_attn` | first norm and attention            | the layer's input in place of its attention half       |
| `full`      | the layer, or a group of layers     | the input of the layer, or of the group                |

The second time gives the same bits: dropout depends on position, not on the state of a generator (mpu/random.py), so
there is none to save. A module that runs again runs with its hooks, inside the backward pass, and stops as soon as
everything that was not kept is there again: forward hooks that follow may not come.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from megatron.config import Recompute


class Group(NamedTuple):
    """Consecutive layers that run as one; `again`: the granularity at which they are computed again, "" for not."""

    layers: tuple[int, ...]
    again: str


def plan(layers: Sequence[int], settings: Recompute) -> list[Group]:
    """The layers of a stage (by their number in the whole network) in order, grouped.

    `--no-recompute-layers` counts over the whole network; `--recompute-method block --recompute-num-layers 2` are the
    first two layers of this stage, those that are exempt included.

    >>> plan(range(4, 8), Recompute("full", recompute_num_layers=2, no_recompute_layers="0,5"))
    [Group(layers=(4,), again='full'), Group(layers=(5,), again=''), Group(layers=(6, 7), again='full')]
    """
    layers, size = list(layers), 1
    chosen = layers if settings.recompute_granularity else []
    if settings.recompute_method == "block":
        chosen = chosen[: settings.recompute_num_layers]
    elif settings.recompute_granularity == "full":
        size = settings.recompute_num_layers or 1
    chosen = set(chosen) - settings.exempt_layers
    groups = []
    for again, run in groupby(layers, chosen.__contains__):
        members = tuple(run)
        name, step = (settings.recompute_granularity, size) if again else ("", 1)
        groups += [Group(members[at : at + step], name) for at in range(0, len(members), step)]
    return groups


def again(function: Callable, *args, inside: Callable = nullcontext):
    """`function(*args)`, whose activations are computed again when the backward pass asks for them.

    inside() -> the context in which the second run happens, for what the first has around it and autograd forgets.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    more = {} if inside is nullcontext else dict(context_fn=lambda: (nullcontext(), inside()))
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **more)
