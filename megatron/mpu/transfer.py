# SPDX-License-Identifier: Apache-2.0
"""Numbers from the host to the device, without waiting for what the device has still to do."""

from collections.abc import Sequence

import torch


def to_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[len(numbers)] on the device. From pageable memory, as `torch.tensor(..., device=)` copies, the host would wait."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
