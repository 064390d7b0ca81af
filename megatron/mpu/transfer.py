# SPDX-License-Identifier: Apache-2.0
"""Non-blocking copies between host and device: small lists of numbers, and memory of the host for large ones."""

import weakref
from collections.abc import Sequence

import torch


def page_locked(size: int) -> torch.Tensor:
    """Page-locked memory of so many bytes on the host, uint8 [size]. Raises RuntimeError if it cannot be locked.

    torch's `pin_memory` rounds up to a power of two: 33 GiB of a rank's state would take 64 GiB.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if size:
        address, cuda = memory.data_ptr(), torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(address, size, 0)))
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False  # before the memory is freed
    return memory


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
