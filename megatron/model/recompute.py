# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation: activations are computed again in the backward pass (arXiv:1604.06174, 2205.05198).

| part        | recomputed                          | saved of a layer                                       |
|-------------|-------------------------------------|--------------------------------------------------------|
| (none)      | nothing                             | everything that its backward pass reads                |
| `core_attn` | softmax(q k) v                      | queries, keys and values instead of attention weights  |
| `layernorm` | the norms before attention and MLP  | not their output, which the product after them reads   |
| `mlp_act`   | the MLP's activation                | its input, but not its output                          |
| `mlp`       | the MLP                             | its input                                              |
| `full_attn` | first norm and attention            | the layer's input in place of its attention half       |
| `full`      | the layer, or a group of layers     | the input of the layer, or of the group                |

A checkpoint (`recompute`) keeps the input of a part and its output, if the next op saves that. For a norm or an activation
this would save nothing: `recompute_output` discards the output, too.

Recomputation is bitwise equal: the suite's dropout depends on position, not on generator state (mpu/random.py), and
for a user's module that draws from torch's generators, their state is saved and restored. A recomputed module runs with its
hooks, inside the backward pass, and stops as soon as all missing tensors are there: later forward hooks may not run.
Which layers are recomputed: `recompute_plan.recompute_groups`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.mpu.discarded import Discarded
from megatron.mpu.placement import PlacedBuffer, placed_buffers
from megatron.mpu.random import Draws
from megatron.mpu.two_passes import swap, swap_attribute


def recompute(function: Callable, *args, inside: Callable = nullcontext, of: Sequence[nn.Module] = (), draws=True):
    """`function(*args)` with activation recomputation in the backward pass.

    inside() -> a context for the second run, for contexts around the first that autograd does not restore.
    of: the modules that it runs. In the second run their buffers have the values of the first, and changes to them
    are discarded; their products draw for the samples of the first (`mpu.random.Draws`). draws: whether it may
    draw from torch's generators, whose state (5 KB on a CPU) is then kept.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    kept = [(held, held.tensor, held.tensor._version, held.tensor.clone()) for held in _buffers(of)]
    changed: list[tuple[PlacedBuffer, torch.Tensor]] = []
    again = _then(inside, lambda: _with_buffers(changed)) if kept else inside
    if samples := [(one, one.samples) for one in dict.fromkeys(m.draws for m in of if hasattr(m, "draws"))]:
        again = _then(again, lambda: _with_samples(samples))
    more = {} if again is nullcontext else dict(context_fn=lambda: (nullcontext(), again()))
    result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws, **more)
    changed += [(held, was) for held, tensor, version, was in kept if _is_another(held, tensor, version)]
    return result


def recompute_output(
    function: Callable, *args, inside: Callable = nullcontext, of: Sequence[nn.Module] = ()
) -> tuple[torch.Tensor, AbstractContextManager]:
    """Like `recompute`; and a context for the ops that read the tensor that it returns. They do not save it:

        y, reading = recompute_output(norm, x)
        with reading:
            z = linear(y)

    The first of them that needs it in the backward pass recomputes it, together with what `function` saves. `function` does
    not draw from torch's generators.
    """
    y = recompute(lambda *args: _Saved.apply(function(*args)), *args, inside=inside, of=of, draws=False)
    node = y.grad_fn
    if node is None:
        return y, nullcontext()

    def again() -> torch.Tensor:
        if not hasattr(node, "over"):
            return node.saved_tensors[0]
        with inside(), torch.no_grad():  # for an op that read y outside its graph
            return function(*args)

    return y, Discarded(y, again)


class _Saved(torch.autograd.Function):
    """The identity. It saves its result, which a checkpoint around it discards and recomputes with all saved tensors."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        ctx.over = True
        return gradient


def _buffers(modules: Sequence[nn.Module]) -> list[PlacedBuffer]:
    """The placed buffers of modules, cached in each."""
    for module in modules:
        if not hasattr(module, "own_buffers"):
            module.own_buffers = tuple(placed_buffers(module).values())
    return [held for module in modules for held in module.own_buffers]


def _is_another(held: PlacedBuffer, tensor: torch.Tensor, version: int) -> bool:
    """Whether a pass has changed or replaced a buffer."""
    return held.tensor is not tensor or tensor._version != version


@contextmanager
def _with_buffers(before: Sequence[tuple[PlacedBuffer, torch.Tensor]]) -> Iterator[None]:
    """Set buffers to the given values inside; changes to these are discarded."""
    inside = [was for _, was in before]

    def exchange() -> None:
        for place, (held, _) in enumerate(before):
            held.module._buffers[held.attribute], inside[place] = inside[place], held.tensor

    with swap(exchange):
        yield


@contextmanager
def _with_samples(before: Sequence[tuple[Draws, torch.Tensor]]) -> Iterator[None]:
    """Set the samples that products draw for to the given ones inside."""
    with ExitStack() as stack:
        for draws, samples in before:
            stack.enter_context(swap_attribute(draws, "samples", samples))
        yield


def _then(inside: Callable, more: Callable) -> Callable:
    """A function that enters both contexts."""

    @contextmanager
    def both() -> Iterator[None]:
        with inside(), more():
            yield

    return both
