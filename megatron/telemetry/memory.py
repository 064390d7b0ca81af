# SPDX-License-Identifier: Apache-2.0
"""How much memory this rank has taken so far."""

import resource
import sys


def peak_bytes(device: str) -> int:
    """Of tensors on its GPU, or of the whole process on a CPU: the most that there was at a time."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024)
