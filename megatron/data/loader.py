# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: what a model's forward pass is given."""

from dataclasses import dataclass, fields
from typing import Optional

import torch


@dataclass(frozen=True)
class MicroBatch:
    """One rank's samples of one micro-step. s: sequence, b: micro-batch.

    tokens, labels  [s, b] int64; labels are the tokens one position later
    loss_mask       [s, b] float32, or None where every position counts
    position_ids    [s, b] int64, or None for 0, 1, ..., s - 1
    document_ids    [s, b] int32, or None; attention is allowed only between equal ids
    samples         [b] int64: place in the order of training, for dropout and for the ledger of what was seen
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor
    loss_mask: Optional[torch.Tensor] = None
    position_ids: Optional[torch.Tensor] = None
    document_ids: Optional[torch.Tensor] = None

    def to(self, device) -> "MicroBatch":
        """The same on `device`; to CUDA through pinned memory, without waiting for the copy."""
        device = torch.device(device)
        if device.type == self.tokens.device.type:
            return self

        def move(tensor):
            if tensor is None:
                return None
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return MicroBatch(**{field.name: move(getattr(self, field.name)) for field in fields(self)})
