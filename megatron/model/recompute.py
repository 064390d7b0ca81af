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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.mpu.placement import PlacedBuffer, placed_buffers


def recompute(function: Callable, *args, inside: Callable = nullcontext, of: Sequence[nn.Module] = ()):
    """`function(*args)`, whose activations are computed again when the backward pass asks for them.

    inside() -> the context in which the second run happens, for what the first has around it and autograd forgets.
    of: the modules that it runs. Their buffers are in the second run what they were in the first, and what the second
    changes in them does not count.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    kept = [(held, held.tensor, held.tensor._version, held.tensor.clone()) for held in _buffers(of)]
    changed: list[tuple[PlacedBuffer, torch.Tensor]] = []
    again = _then(inside, changed) if kept else inside
    more = {} if again is nullcontext else dict(context_fn=lambda: (nullcontext(), again()))
    found = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **more)
    changed += [(held, was) for held, tensor, version, was in kept if _is_another(held, tensor, version)]
    return found


def _buffers(modules: Sequence[nn.Module]) -> list[PlacedBuffer]:
    """The placed buffers of modules, in which nothing is registered later."""
    for module in modules:
        if not hasattr(module, "own_buffers"):
            module.own_buffers = tuple(placed_buffers(module).values())
    return [held for module in modules for held in module.own_buffers]


def _is_another(held: PlacedBuffer, tensor: torch.Tensor, version: int) -> bool:
    """Whether a pass has changed a buffer, or put another tensor in its place."""
    return held.tensor is not tensor or tensor._version != version


@contextmanager
def _with_buffers(before: Sequence[tuple[PlacedBuffer, torch.Tensor]]) -> Iterator[None]:
    """Inside, buffers have the values that are given with them; what is done to these is lost."""
    now = [held.tensor for held, _ in before]
    for held, was in before:
        held.module._buffers[held.attribute] = was
    try:
        yield
    finally:
        for (held, _), tensor in zip(before, now):
            held.module._buffers[held.attribute] = tensor


def _then(inside: Callable, before: Sequence[tuple[PlacedBuffer, torch.Tensor]]) -> Callable:
    """`inside`, with the buffers of the first run."""

    @contextmanager
    def both() -> Iterator[None]:
        with inside(), _with_buffers(before):
            yield

    return both
