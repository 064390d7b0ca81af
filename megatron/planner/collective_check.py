# SPDX-License-Identifier: Apache-2.0
"""Check the sums over ranks of a few steps: what each rank adds, and what all ranks must hold alike afterwards.

On each axis a tensor is the same on all ranks, a part of a sum, a shard, or different. A wrong reduction mixes these up:

    a sum of what is already the same    the result is too large by the number of ranks: named with the line that sums
    a sum that is missing                the outputs of a layer, or the gradients that arrive there, differ over ranks that
                                         should hold the same, or from those of one process; or the replicas of a weight
                                         do: named with the module
    a sum over other ranks               these, or both

Ranks record checksums and squares in the first step (`SumRecord`), and `problems_of` compares them.
"""

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from megatron.errors import NumericsError
from megatron.guard.replicas import check_replicas
from megatron.mpu import collectives
from megatron.mpu.bits_sum import bits_sum
from megatron.mpu.mesh import Axis, Mesh

ROOT = Path(__file__).resolve().parents[1]
PLUMBING = ("mpu/collectives.py", "mpu/mappings.py", "planner/collective_check.py")  # files that are no place of a sum
SUMS = ("all-reduce", "reduce-scatter")
LEAST = 8  # elements of a tensor whose bits are equal on several ranks only if it is the same tensor
OUTPUT, GRADIENT = "the output", "the gradient of the output"
NEAR = dict(fp32=1e-5)  # relative difference of mean squares that is rounding; in other formats:
NEAR_OTHERS = 0.02
LAYER = re.compile(r"(^|\.)blocks\.\d+$")


class SumCall(NamedTuple):
    """What a rank has added to one sum. bits: a checksum; zero: all its elements are zero"""

    axis: str
    ranks: tuple[int, ...]
    place: str
    elements: int
    bits: int
    zero: bool


class Boundary(NamedTuple):
    """A tensor at the end of a layer. ranks: those that hold the same. bits: a checksum. squares: the sum of its squares"""

    ranks: tuple[int, ...]
    what: str  # OUTPUT or GRADIENT
    layer: str  # blocks.3
    bits: int
    squares: float
    elements: int


class SumRecord:
    """What one rank has recorded."""

    def __init__(self):
        self.sums: list[SumCall] = []
        self.boundaries: list[Boundary] = []
        self.replicas = ""  # the first difference between weights that ranks should hold alike

    def heard(self, way: str, what: str, x: torch.Tensor, axis: Axis) -> None:
        """Record what this rank adds to a sum."""
        if way == collectives.SENT and what in SUMS and x.is_floating_point() and x.numel() >= LEAST:
            zero = not bool(x.any())
            self.sums.append(SumCall(axis.name, tuple(axis.ranks), _place(), x.numel(), bits_sum(x).item(), zero))

    @contextlib.contextmanager
    def watching(self, stages: Sequence[torch.nn.Module], mesh: Mesh, sequence_parallel: bool) -> Iterator[None]:
        """A context in which sums, and ends of layers, are recorded."""
        handles = []
        alike = () if sequence_parallel else tuple(mesh.tp.ranks)  # with sequence_parallel each rank has some tokens
        for stage in stages:
            handles += [
                self._watch(name, module, alike) for name, module in stage.named_modules() if LAYER.search(name)
            ]
        try:
            with collectives.Traffic.heard_by(self.heard):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, name: str, module: torch.nn.Module, ranks: tuple[int, ...]):
        def note(what: str, x: torch.Tensor) -> None:
            squares = x.detach().double().square().sum().item()
            self.boundaries.append(Boundary(ranks, what, name, bits_sum(x).item(), squares, x.numel()))

        def ended(module, given, output) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                note(OUTPUT, first)
                if first.requires_grad:
                    first.register_hook(lambda gradient: note(GRADIENT, gradient))

        return module.register_forward_hook(ended)

    def after_step(self, optimizer, iteration: int) -> None:
        """Compare the replicas of weights. All ranks call it."""
        try:
            check_replicas(optimizer, iteration)
        except NumericsError as error:
            self.replicas = self.replicas or (error.why or error.what).splitlines()[0].strip()


def problems_of(records: Sequence[SumRecord], alone: Optional[SumRecord] = None, precision: str = "fp32") -> list[str]:
    """One sentence for each place and kind of mistake. records: of all ranks, in order; alone: of one process"""
    problems = [*_summed_twice(records), *_not_alike(records)]
    if alone is not None and len(records) > 1:
        problems += _not_as_alone(records, alone, NEAR.get(precision, NEAR_OTHERS))
    return problems + sorted({f"replicas differ: {record.replicas}" for record in records if record.replicas})


def _summed_twice(records: Sequence[SumRecord]) -> list[str]:
    found: Counter[str] = Counter()
    for axis, ranks in sorted({(call.axis, call.ranks) for record in records for call in record.sums}):
        calls = [[call for call in records[rank].sums if (call.axis, call.ranks) == (axis, ranks)] for rank in ranks]
        for row in zip(*calls, strict=False):
            if len({(call.bits, call.elements) for call in row}) == 1 and not row[0].zero:
                found[
                    f"{row[0].place}: a sum over {axis} of what its {len(ranks)} ranks hold alike, so it is {len(ranks)} "
                    "times too large"
                ] += 1
    return [line if count == 1 else f"{line} ({count} times)" for line, count in found.items()]


def _not_alike(records: Sequence[SumRecord]) -> list[str]:
    """The first layer whose output, and gradient, differs over ranks that should hold the same."""
    lines = []
    for ranks in sorted({one.ranks for record in records for one in record.boundaries if len(one.ranks) > 1}):
        for what in (OUTPUT, GRADIENT):
            own = (
                [one for one in records[rank].boundaries if (one.ranks, one.what) == (ranks, what)] for rank in ranks
            )
            for row in zip(*own, strict=False):
                if len({one.bits for one in row}) > 1:  # what comes after it differs, too
                    lines.append(f"{what} of {row[0].layer} differs over tp: a sum over tp is missing before it")
                    break
    return list(dict.fromkeys(lines))


def _not_as_alone(records: Sequence[SumRecord], alone: SumRecord, near: float) -> list[str]:
    """The first layer whose output, and the last whose gradient, has other squares than in one process."""
    lines = []
    for what in (OUTPUT, GRADIENT):
        expected, found = _mean_squares([alone], what), _mean_squares(records, what)
        wrong = [
            layer
            for layer, value in expected.items()
            if layer in found and not abs(found[layer] - value) <= near * abs(value)
        ]
        if wrong:
            layer = (min if what == OUTPUT else max)(wrong, key=lambda name: int(name.rpartition(".")[2]))
            lines.append(
                f"{what} of {layer} has a mean square of {found[layer]:.4g}, {expected[layer]:.4g} in one process: a sum "
                "before it is wrong"
            )
    return lines


def _mean_squares(records: Sequence[SumRecord], what: str) -> dict[str, float]:
    """Layer -> mean square over all ranks; those that hold the same change no mean."""
    squares, elements = Counter(), Counter()
    for one in (one for record in records for one in record.boundaries if one.what == what):
        squares[one.layer] += one.squares
        elements[one.layer] += one.elements
    return {layer: squares[layer] / elements[layer] for layer in squares}


def _place() -> str:
    """The line of this suite, or of the user's code, that asked for a sum: "mpu/layers.py:312 in backward"."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and not path.as_posix().endswith(PLUMBING):
            name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "a backward pass"
