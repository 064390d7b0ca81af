# SPDX-License-Identifier: Apache-2.0
"""Back-of-an-envelope answers: bytes of a number of parameters, and the fewest devices that hold them.

>>> f"{100e9 * 4 / 2**30:.1f} GiB"
'372.5 GiB'
>>> least_devices(1.2e12, 31e9)
(39, 64)
"""

import math

from megatron.planner.text import table

STATES = (  # what, bytes of a parameter
    ("weights in bf16 or fp16", 2),
    ("weights in fp32", 4),
    ("gradients in fp32", 4),
    ("main weights in fp32", 4),
    ("Adam's two moments in fp32", 8),
    ("checkpoint: fp32 weights and moments", 12),
    ("training in fp32: weights, gradients, moments", 16),
    ("training in bf16: weights, main weights, gradients, moments", 18),
)


def least_devices(size: float, memory: float) -> tuple[int, int]:
    """(fewest devices of `memory` bytes that hold `size` bytes, fewest that are a power of two)."""
    least = max(1, math.ceil(size / memory))
    return least, 2 ** (least - 1).bit_length()


def states(parameters: float, memory: float) -> str:
    """A table of what a number of parameters needs, in GB and GiB, and the devices that hold it."""
    rows = []
    for what, each in STATES:
        size = parameters * each
        least, power = least_devices(size, memory)
        rows.append([what, each, f"{size / 1e9:,.1f}", f"{size / 2**30:,.1f}", f"{least:,}", f"{power:,}"])
    head = [f"{parameters / 1e9:,.3f} billion parameters", "bytes each", "GB", "GiB", f"devices of {memory / 1e9:g} GB",
            "power of two"]  # fmt: skip
    return table(rows, head)


def days(parameters: float, tokens: float, flops: float, share: float, devices: int) -> float:
    """Days of a training of 6 x parameters x tokens FLOPs on devices of `flops`, of which `share` is reached."""
    return 6 * parameters * tokens / (flops * share * devices) / 86400
