# SPDX-License-Identifier: Apache-2.0
"""Activations that are computed again in the backward pass instead of kept (arXiv:1604.06174, 2205.05198).

| granularity | is computed again                   | is kept of a layer                                     |
|-------------|-------------------------------------|--------------------------------------------------------|
| (none)      | nothing                             | everything that its backward pass reads                |
| `core_attn` | softmax(q k) v                      | queries, keys and values instead of attention weights  |
| `full_attn` | first norm and attention            | the layer's input in place of its attention half       |
| `full`      | the layer, or a group of layers     | the input of the layer, or of the group                |

The second time gives the same bits: the suite's dropout depends on position, not on the state of a generator
(mpu/random.py), and for a user's module that draws from torch's generators their state is noted and set again. A module
that runs again runs with its hooks, inside the backward pass, and stops as soon as everything that was not kept is there
again: forward hooks that follow may not come. Which layers: `recompute_plan.recompute_groups`.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import checkpoint


def recompute(function: Callable, *args, inside: Callable = nullcontext):
    """`function(*args)`, whose activations are computed again when the backward pass asks for them.

    inside() -> the context in which the second run happens, for what the first has around it and autograd forgets.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    more = {} if inside is nullcontext else dict(context_fn=lambda: (nullcontext(), inside()))
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **more)
