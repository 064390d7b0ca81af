# SPDX-License-Identifier: Apache-2.0
"""Non-blocking copies of small lists of numbers between host and device."""

from collections.abc import Sequence

import torch


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers to the device, from pinned memory: `torch.tensor(..., device=)` would synchronize."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Arriving:
    """A pending copy of numbers from the device to the host, after the operations queued so far.

    numbers: [n] on the device, or on the host, where no copy is needed
    """

    def __init__(self, numbers: torch.Tensor):
        self._numbers, self._arrived = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype).pin_memory()
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers. Those of a previous step have arrived: the device runs the next one."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
