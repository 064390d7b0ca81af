# SPDX-License-Identifier: Apache-2.0
"""Offload of optimizer state: divide the state of a rank between its device, host memory and a file."""

from collections.abc import Callable, Sequence
from typing import Optional

import torch

from megatron.optimizer.disk import DiskState
from megatron.optimizer.state import MemoryState, OwnedState, divide
from megatron.optimizer.units import OwnedRange
from megatron.optimizer.update import UpdateRule
from megatron.settings import schema

MemoryOf = Callable[[list[OwnedRange], bool], Optional[torch.Tensor]]


def build_states(
    owned: Sequence[OwnedRange],
    rule: UpdateRule,
    reduced: torch.Tensor,
    settings: schema.Optimizer,
    memory_of: MemoryOf,
    *,
    whole: bool,
    copies: int,
) -> list[OwnedState]:
    """Build the state of all owned ranges, divided by `--optimizer-offload-fraction` and `--nvme-offload-fraction`.

    rule:       the update rule
    reduced:    gradients of the rank's whole shard
    memory_of:  (ranges, whether every rank keeps the model's weights whole) -> fp32 model weights that also serve as main
                weights
    whole:      every rank keeps the model's weights whole
    copies:     copies of the state in a file: 2 for pieces that remain valid during later steps (`OwnedState.keep`)
    """
    states: list[OwnedState] = []
    on_host, on_disk, others = divide(owned, settings.host_share, settings.nvme_offload_fraction)
    if on_host:
        states.append(MemoryState(on_host, rule, reduced, offload=True))
    if on_disk:
        memory = memory_of(on_disk, whole)
        states.append(DiskState(on_disk, rule, reduced, settings.nvme_offload_dir, memory=memory, copies=copies))
    if others:
        memory = memory_of(others, True) if whole else None
        states.append(MemoryState(others, rule, reduced, offload=False, memory=memory))
    return states
