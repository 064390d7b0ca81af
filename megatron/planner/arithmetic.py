# SPDX-License-Identifier: Apache-2.0
"""Quick estimates from a number of parameters: bytes of training state, and the fewest devices that hold them.

>>> f"{100e9 * 4 / 2**30:.1f} GiB"
'372.5 GiB'
>>> least_devices(1.2e12, 31e9)
(39, 64)
"""

import math

from megatron.telemetry.figures import WIDTH, count, sentence, table

STATES = (  # description, bytes per parameter
    ("weights in bf16 or fp16", 2),
    ("weights in fp32", 4),
    ("gradients in fp32", 4),
    ("main weights in fp32", 4),
    ("Adam's two moments in fp32", 8),
    ("checkpoint: weights, moments", 12),
    ("all of training in fp32", 16),
    ("all of training in bf16", 18),
)


def least_devices(size: float, memory: float) -> tuple[int, int]:
    """The fewest devices of `memory` bytes that hold `size` bytes, and the fewest that are a power of two."""
    least = max(1, math.ceil(size / memory))
    return least, 2 ** (least - 1).bit_length()


def states(parameters: float, memory: float, width: int = WIDTH) -> str:
    """The number of devices that hold the state of a training, then a table of its parts in GB and GiB."""
    rows = []
    for what, each in STATES:
        size = parameters * each
        least, power = least_devices(size, memory)
        rows.append([what, each, f"{size / 1e9:,.1f}", f"{size / 2**30:,.1f}", f"{least:,}", f"{power:,}"])
    head = [f"{count(parameters)} parameters", "bytes each", "GB", "GiB", "devices", "power of 2"]
    verdict = (
        f"{count(parameters)} parameters: {least:,} devices of {memory / 1e9:g} GB hold a training in bf16 "
        f"({power:,} as a power of two)"
    )
    return f"{sentence(verdict, width)}\n\n{table(rows, head, width=width)}"


CHECKPOINT, TRAINING = 12, 18  # bytes per parameter: see STATES
SHARDED = {0: 0, 1: 12, 2: 16, 3: 18}  # ZeRO stage -> the part of TRAINING that is divided among all ranks


def fewest(parameters: float, memory: float, width: int = WIDTH) -> str:
    """A sentence with the fewest devices."""
    words = []
    for what, each in (
        ("weights and moments in fp32", CHECKPOINT),
        ("training in fp32", 16),
        ("training in bf16", TRAINING),
    ):
        least, power = least_devices(parameters * each, memory)
        words.append(f"{least:,} ({power:,} as a power of two) for {what}")
    return sentence(f"fewest devices of {memory / 1e9:g} GB, by state alone: {', '.join(words)}", width)


def divisions(parameters: float, memory: float, world: int) -> list[tuple[int, int, int, float]]:
    """[(model parallel size, data parallel size, ZeRO stage, bytes per rank)] that fit, best first.

    Model parallel sizes are powers of two, each with the lowest stage that fits. The order is by stage, then by model
    parallel size: both cost communication.

    >>> divisions(100e9, 31e9, 64)[:2]
    [(64, 1, 0, 28125000000.0), (1, 64, 3, 28125000000.0)]
    """
    result = []
    for model in (2**n for n in range(world.bit_length()) if world % 2**n == 0):
        for stage, shared in SHARDED.items():
            size = parameters * ((TRAINING - shared) / model + shared / world)
            if size <= memory:
                result.append((model, world // model, stage, size))
                break
    return sorted(result, key=lambda one: (one[2], one[0]))


def on_ranks(parameters: float, memory: float, world: int) -> str:
    """The estimate for a number of ranks: the part of a checkpoint that each writes, and the divisions that fit."""
    size = parameters * CHECKPOINT / world
    text = f"on {world:,} ranks: {size / 1e9:,.3f} GB ({size / 2**30:,.3f} GiB) of a checkpoint from each\n"
    fitting = divisions(parameters, memory, world)
    if not fitting:
        return text + sentence(f"training in bf16 does not fit: {fewest(parameters, memory)}")
    rows = [[model, data, stage, f"{each / 1e9:,.1f}"] for model, data, stage, each in fitting]
    return text + table(rows, ["model parallel", "data parallel", "ZeRO stage", "GB of state a rank, in bf16"])


def days(parameters: float, tokens: float, flops: float, share: float, devices: int) -> float:
    """Days of a training of 6 x parameters x tokens FLOPs on devices that reach `share` of `flops`."""
    return 6 * parameters * tokens / (flops * share * devices) / 86400
