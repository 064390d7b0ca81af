# SPDX-License-Identifier: Apache-2.0
"""Compare replicas: ranks that hold the same parameter have to hold the same bits.

Replicas never exchange parameters: they stay equal because each applies the same update. A broken reduction, a flipped
bit or non-deterministic arithmetic makes them drift apart silently, and the training is then worthless. The check
compares a checksum of each parameter along the axes over which it is replicated: one small message per axis.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron.errors import NumericsError
from megatron.mpu import collectives
from megatron.mpu.bits_sum import bits_sum
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Placement
from megatron.optimizer.zero import DistributedOptimizer

AXES = ("replicate", "shard", "dp_cp", "tp", "expert_replicate", "expert_shard", "expert_dp", "ep", "etp", "tied")


class Copy(NamedTuple):
    """A tensor that other ranks hold too."""

    name: str
    values: torch.Tensor
    axes: tuple[str, ...]


def check_replicas(optimizer: DistributedOptimizer, iteration: int) -> None:
    """Compare parameters, main weights and buffers with those of other ranks. All ranks call it, between two steps.

    Raises NumericsError, on every rank, that names each tensor that differs and the ranks whose bits are in the minority.
    """
    with torch.no_grad(), optimizer.gathered_parameters():
        sums = checksums(optimizer)
    _refuse_differences(
        optimizer,
        sums,
        f"iteration {iteration}: ranks that hold the same parameters hold different bits",
        "go back to an earlier checkpoint (--ckpt-step); then check the hardware of these ranks, "
        "and the last change of the code",
    )


def check_buffers(optimizer: DistributedOptimizer, iteration: int) -> None:
    """Compare only buffers, as `check_replicas` does, before they are saved. All ranks call it: some stages have none."""
    _refuse_differences(
        optimizer,
        [_summed(optimizer, copy) for copy in buffer_copies(optimizer)],
        f"iteration {iteration}: ranks hold different values of a buffer, and a checkpoint has room for one",
        "register it with a rule that makes one value of theirs: max, min, sum or mean (docs/extending.md#buffers)",
    )


def _refuse_differences(
    optimizer: DistributedOptimizer, sums: list[tuple[str, tuple[str, ...], torch.Tensor]], what: str, do: str
) -> None:
    """Raise NumericsError if checksums differ on any rank. sums: the result of `checksums`."""
    mesh = optimizer.mesh
    different = [
        text for axis in AXES for text in _compare(mesh, axis, [(n, s) for n, axes, s in sums if axis in axes])
    ]
    bad = torch.tensor([float(bool(different))], device=optimizer.device)
    if not collectives.all_reduce(bad, mesh.world, "max").item():
        return
    lines = sorted({line for lines in collectives.all_gather_object(different, mesh.world) for line in lines})
    more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
    raise NumericsError(what, "\n  ".join(lines[:8] + more), do)


def checksums(optimizer: DistributedOptimizer) -> list[tuple[str, tuple[str, ...], torch.Tensor]]:
    """Compute (name, axes, checksum) of each tensor that other ranks hold too. Checksums are tensors on the device."""
    return [_summed(optimizer, copy) for copy in copies(optimizer)]


def _summed(optimizer: DistributedOptimizer, copy: Copy) -> tuple[str, tuple[str, ...], torch.Tensor]:
    return copy.name, copy.axes, bits_sum(copy.values).to(optimizer.device)


def buffer_copies(optimizer: DistributedOptimizer) -> Iterable[Copy]:
    """The buffers that other ranks hold too."""
    for held, axes in optimizer.buffers.shared():
        yield Copy(held.name, held.tensor, axes)


def copies(optimizer: DistributedOptimizer) -> Iterable[Copy]:
    """The tensors that other ranks hold too: the model's parameters, shards of main and frozen weights, buffers."""
    yield from buffer_copies(optimizer)
    for unit in optimizer.units if optimizer.weights.keep else ():
        for slot in unit.slots:
            yield Copy(slot.name, slot.parameter, (*unit.axes, *_shared(slot.placement)))
    for state in optimizer.states if optimizer.weights.keep else optimizer.everything:
        for own in state.owned:
            kind = "shard" if own.unit.frozen else "main weights"
            for slot, where in own.slots():
                values = state.main[where.start - state.span.start : where.stop - state.span.start]
                yield Copy(f"{slot.name} ({kind})", values, (own.unit.replicate, *_shared(slot.placement)))


def _shared(placement: Placement) -> tuple[str, ...]:
    """The axes over which ranks hold equal pieces, without the data parallel axes."""
    shared = {*placement.model_axes, *placement.partial} - set(placement.cut)
    return tuple(axis for axis in AXES if axis in shared)


def _compare(mesh: Mesh, name: str, own: list[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each tensor whose checksum is not the same on all ranks of an axis."""
    axis = getattr(mesh, name)
    if axis.size == 1 or not own:
        return []
    sums = collectives.all_gather(torch.stack([total for _, total in own]).unsqueeze(0), axis).tolist()
    lines = []
    for (tensor, _), seen in zip(own, zip(*sums)):
        if len(set(seen)) > 1:
            (usual, votes), *_ = Counter(seen).most_common()
            odd = [rank for rank, value in zip(axis.ranks, seen) if value != usual]
            # Without a majority, any of the ranks may be wrong.
            ranks = odd if 2 * votes > len(seen) else axis.ranks
            against = f"differs on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            lines.append(f"{tensor} {against} of {', '.join(map(str, axis.ranks))} ({name})")
    return lines
