# SPDX-License-Identifier: Apache-2.0
"""Numbers from the host to the device and back, without waiting for what the device has still to do."""

from collections.abc import Sequence

import torch


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(numbers)] on the device. From pageable memory, as `torch.tensor(..., device=)` copies, the host would wait."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Arriving:
    """Numbers of the device on their way to the host, behind what the device has been given to do so far.

    numbers: [n] on the device, or on the host, where they are
    """

    def __init__(self, numbers: torch.Tensor):
        self._numbers, self._arrived = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype).pin_memory()
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers; waits until they are there. Of a step before, they are: the device is busy with the next."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()
