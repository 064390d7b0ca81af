# SPDX-License-Identifier: Apache-2.0
"""--error-injection-rate: bits that flip on purpose in a rank's activations, to see that --rerun-mode finds them.

    drill = drill_at(iteration, rate=1000, kind="transient_error", seed=1234, world=8)
    with faulty(drill, stages, rank, first=True):
        ...                               # the passes of a step, on each rank

The step and the rank are drawn from the seed, so that all ranks know both. `correct_result` changes nothing: a step is
called suspicious, and computed again. A `transient_error` is in the first computation of a step alone, a
`persistent_error` in all of that rank, whosever samples it has. No update sees either.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import nn

TRANSIENT, PERSISTENT = "transient_error", "persistent_error"
BIT = 20  # of an fp32 number: one of its fraction. The same byte of other formats


class Drill(NamedTuple):
    """An error for one step. rank: where; kind: a value of --error-injection-type"""

    rank: int
    kind: str


def drill_at(iteration: int, rate: int, kind: str, seed: int, world: int) -> Optional[Drill]:
    """The error of a step: on average one in `rate` steps has one. None: it has none.

    >>> sum(drill_at(step, 10, TRANSIENT, 1234, 4) is not None for step in range(1000)) in range(70, 130)
    True
    >>> drill_at(3, 0, TRANSIENT, 1234, 4), drill_at(3, 1, TRANSIENT, 1234, 1)
    (None, Drill(rank=0, kind='transient_error'))
    """
    if rate == 0:
        return None
    drawn = int.from_bytes(hashlib.sha256(f"{seed} {iteration}".encode()).digest()[:8], "little")
    return Drill(drawn // rate % world, kind) if drawn % rate == 0 else None


@contextlib.contextmanager
def faulty(drill: Optional[Drill], stages: Sequence[nn.Module], rank: int, first: bool) -> Iterator[None]:
    """A context in which the passes of the drill's rank have its error. first: it is the first computation of the step"""
    flips = drill is not None and drill.rank == rank and (drill.kind == PERSISTENT or first and drill.kind == TRANSIENT)
    if not flips:
        yield
        return
    flip = _Flip()
    handle = stages[0].register_forward_hook(flip)
    try:
        yield
    finally:
        handle.remove()


class _Flip:
    """A forward hook that flips a bit of a stage's output once: two flips may cancel each other in a sum."""

    done = False

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        if self.done:
            return output
        self.done = True
        return _flipped(output)


def _flipped(output: Any) -> Any:
    """A stage's output with a flipped bit, in its activations, or else in its loss."""
    x, sums = output if isinstance(output, tuple) else (output, {})
    if isinstance(x, torch.Tensor) and x.is_floating_point() and not sums:
        return with_flipped_bit(x, x.numel() // 2)
    name = next(iter(sums))
    return x, {**sums, name: with_flipped_bit(sums[name], 0)}


def with_flipped_bit(x: torch.Tensor, element: int, bit: int = BIT) -> torch.Tensor:
    """x with a bit of an element flipped; its gradient is that of x."""
    return x + (flip_bit(x.detach().clone(), element, bit) - x.detach())


def flip_bit(x: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    """Flip a bit of an element of x, in place; returns x. bit: from the lowest one, modulo the number of bits

    >>> flip_bit(torch.ones(2), 1, 31).tolist(), flip_bit(torch.ones(2), 0, 22).tolist()
    ([1.0, -1.0], [1.5, 1.0])
    """
    at = bit % (8 * x.element_size())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(element), x.shape)) if x.dim() else ()
    byte = x[index].reshape(1).clone().view(torch.uint8)
    byte[at // 8] ^= 1 << at % 8
    x[index] = byte.view(x.dtype)[0]
    return x
