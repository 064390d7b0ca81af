# SPDX-License-Identifier: Apache-2.0
"""The device of a rank: memory, speeds, links. A table of known devices, and files that `plan --calibrate` writes.

    >>> find("A100-80GB").memory_bytes / 2**30, find("A100-80GB").peak("bf16") / 1e12
    (80.0, 312.0)

Memory, bandwidth and links are from data sheets, per device and direction (NVLink; one 200 or 400 Gbit/s adapter per
device). The share that training reaches was fitted to published runs (`reached_speed.py`); `plan --calibrate` measures it.
"""

import json
import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Optional

from megatron.errors import DataError, UsageError, did_you_mean
from megatron.model.layer_ops import IN_ROWS
from megatron.planner.reached_speed import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_TOKENS,
    EXPERTS,
    EXPOSED,
    FP8,
    LINEAR,
    MIXTURES,
    ROWS,
    UNFUSED,
    Accuracy,
    accuracies,
    generation,
)
from megatron.telemetry.peak_flops import PEAK_TFLOPS, fp8_peak, peak_flops

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One rank's device.

    flops:         FLOP/s that large matrix products reach, by precision; rows: a product with this many rows, columns or
                   terms of a sum reaches half of that
    attention:     FLOP/s that the forward pass of a flash kernel reaches, by precision. Only pairs that it computes count
    attention_tokens:    sequences of this length reach half of that
    attention_backward:  time of its backward pass, divided by the time of its forward pass
    bandwidth:     bytes/s of reads or writes of its memory
    update_bandwidth:    the same in the optimizer's update; 0: as `bandwidth`
    unfused:       elementwise traffic, as a multiple of the traffic of fused kernels
    exposed:       share of messages that passes do not hide, if both can run at the same time
    inner, outer:  bytes/s of a link inside a node and between nodes, per device and direction
    latency:       seconds of an empty collective, for each doubling of the ranks
    host:          bytes/s between device and host
    """

    name: str
    kind: str = "cuda"
    memory_gb: float = 80.0  # of 1e9 bytes, as in --device-memory-gb
    flops: dict = field(default_factory=dict, hash=False)
    attention: dict = field(default_factory=dict, hash=False)
    attention_tokens: float = 0.0
    attention_backward: float = 2.0
    rows: float = 96.0
    bandwidth: float = 1.6e12
    update_bandwidth: float = 0.0
    unfused: float = 1.0
    exposed: float = 0.3
    inner: float = 250e9
    outer: float = 20e9
    latency: float = 12e-6
    launch: float = 4e-6  # seconds to launch an op
    host: float = 20e9
    context_gb: float = 1.2  # driver, libraries and their workspaces
    communication_gb: float = 0.4  # buffers of a communication library, for each axis of more than one rank
    assumed: bool = True  # False if the speeds were measured
    mixture: bool = False  # whether the model has experts, for the errors of predictions
    margin: float = 0.03  # share of the memory that stays free: drivers reserve some of the data sheet's

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 1e9)

    @property
    def usable_bytes(self) -> int:
        """The bytes that a layout may use."""
        return int((1 - self.margin) * self.memory_bytes)

    @property
    def accuracies(self) -> dict[str, Accuracy]:
        """The errors of predictions in published runs of such a device, by the features of their layouts
        (`Layout.features`): with experts if the model has some, else without. None for measured speeds.
        """
        if not self.assumed or self.kind != "cuda":
            return {}
        return {one: errors for one, errors in accuracies(self.name).items() if one.startswith(EXPERTS) is self.mixture}

    @property
    def other_mixtures(self) -> Optional[Accuracy]:
        """The errors of all published runs of mixtures, if this is a device for one with assumed speeds."""
        return MIXTURES if self.mixture and self.assumed and self.kind == "cuda" else None

    @property
    def context_bytes(self) -> int:
        return int(self.context_gb * GIB)

    @property
    def communication_bytes(self) -> int:
        return int(self.communication_gb * GIB)

    def peak(self, precision: str) -> float:
        """FLOP/s of the data sheet, or the measured ones if there is none."""
        return peak_flops(self.name, precision) or self.flops.get(precision) or max(self.flops.values())

    def reached(self, precision: str, smallest: float) -> float:
        """FLOP/s of a product whose smallest dim is `smallest`."""
        best = self.flops.get(precision) or min(self.flops.values())
        return best * smallest / (smallest + self.rows)

    def reached_in_fp8(self, recipe: str, precision: str, smallest: float) -> float:
        """The same of a product in fp8. A device without this recipe's products computes them in fp32, and those of experts
        in the format of --precision.
        """
        peak = fp8_peak(self.name, recipe)
        if not peak:
            return self.reached(precision if recipe == IN_ROWS else "fp32", smallest)
        return self.reached(precision, smallest) * FP8[recipe] * peak / self.peak(precision)


# Name: memory in GiB, memory GB/s, NVLink or PCIe GB/s, adapter GB/s. Peaks are in `peak_flops.PEAK_TFLOPS`.
TABLE = {
    "V100-16GB": (16, 900, 130, 10),
    "V100-32GB": (32, 900, 130, 10),
    "A100-40GB": (40, 1555, 250, 20),
    "A100-80GB": (80, 2039, 250, 20),
    "A800-80GB": (80, 2039, 170, 20),
    "H100-80GB": (80, 3350, 370, 42),
    "H800-80GB": (80, 3350, 170, 42),
    "H200-141GB": (141, 4800, 370, 42),
    "GH200-96GB": (96, 4000, 370, 42),
    "B200-180GB": (180, 8000, 740, 42),
    "H20-96GB": (96, 4000, 370, 42),
    "A40-48GB": (48, 696, 25, 10),
    "A30-24GB": (24, 933, 25, 10),
    "A10-24GB": (24, 600, 20, 10),
    "L40S-48GB": (48, 864, 25, 10),
    "L4-24GB": (24, 300, 20, 5),
    "T4-16GB": (16, 300, 10, 3),
    "RTX 4090-24GB": (24, 1008, 20, 3),
    "RTX 3090-24GB": (24, 936, 20, 3),
    "RTX 5090-32GB": (32, 1792, 40, 3),
    "MI300X-192GB": (192, 5300, 300, 42),
}


DECORATION = re.compile(r"nvidia|tesla|geforce|amd|instinct|oam|sxm\d?|hbm\d?e?")  # words in names that drivers report


def find(name: str) -> Device:
    """Find a device of the table by its name, by a part of the name that only one model has, or by its driver's name.

    Of several memory sizes, returns the largest. Raises UsageError with the known names.

    >>> find("h100").name, find("A100").name, find("NVIDIA A100-SXM4-40GB").name
    ('H100-80GB', 'A100-80GB', 'A100-40GB')
    """
    words = name.lower().replace("_", " ").replace("-", " ").split()
    wanted = [word for word in words if not DECORATION.fullmatch(word)]
    known = {key: key.lower().replace("-", " ").split() for key in TABLE}
    fits = [key for key, words in known.items() if all(any(w in word for word in words) for w in wanted)]
    exact = [key for key in fits if known[key] == wanted or known[key][: len(wanted)] == wanted]
    fits = exact or fits if wanted else []
    if len({key.rpartition("-")[0] for key in fits}) > 1:
        raise UsageError(f"--device-name {name} could be {', '.join(fits)}", do="give more of its name")
    if not fits:
        raise UsageError(
            f"--device-name {name} is not in the table{did_you_mean(name, TABLE)}",
            f"known: {', '.join(TABLE)}",
            "give --device-memory-gb, or measure: python -m megatron.tools.plan --calibrate FILE",
        )
    return _of_table(fits[-1])


def _of_table(name: str) -> Device:
    memory, bandwidth, inner, outer = TABLE[name]
    own = generation(name)
    peaks = {kind: peak * 1e12 for kind, peak in PEAK_TFLOPS[name.rpartition("-")[0]].items() if kind != "fp8"}
    return Device(
        name,
        "cuda",
        memory * GIB / 1e9,
        {kind: LINEAR[own] * peak for kind, peak in peaks.items()},
        {kind: ATTENTION[own] * peak for kind, peak in peaks.items()},
        ATTENTION_TOKENS,
        ATTENTION_BACKWARD,
        ROWS,
        bandwidth=0.8e9 * bandwidth,
        unfused=UNFUSED,
        exposed=EXPOSED,
        inner=0.8e9 * inner,
        outer=0.9e9 * outer,
    )


def cpu(cores: int = 1, memory_gb: float = 8.0) -> Device:
    """A rank on some cores of a CPU, with assumed speeds."""
    return Device(
        "cpu",
        "cpu",
        memory_gb,
        dict(fp32=90e9 * cores, bf16=180e9 * cores, fp16=90e9 * cores),
        dict(fp32=40e9 * cores, bf16=60e9 * cores, fp16=40e9 * cores),
        rows=24.0,
        bandwidth=12e9,
        inner=0.7e9,
        outer=0.7e9,
        latency=4e-4,
        launch=8e-6,
        host=12e9,
        context_gb=0.35,
        communication_gb=0.0,
    )


def choose(
    name: Optional[str], memory_gb: Optional[float], calibration: Optional[str] = None, kind: str = "cuda"
) -> Device:
    """The device of the flags: by name, from a calibration file, else an A100 (or a CPU). `memory_gb` overrides its own."""
    if calibration:
        device = read(calibration)
    elif name:
        device = find(name)
    else:
        device = cpu() if kind == "cpu" else find("A100-80GB")
    return replace(device, memory_gb=memory_gb) if memory_gb else device


def read(path: str) -> Device:
    """Read a file of `plan --calibrate`. Raises DataError."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        known = {f.name for f in fields(Device)}
        device = Device(**{key: value for key, value in record["device"].items() if key in known})
        _check(device)
        return device
    except OSError as error:
        raise DataError(f"cannot read the calibration {path}", error.strerror) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{path} is not a calibration file", why, "python -m megatron.tools.plan --calibrate FILE writes one"
        ) from error


def _check(device: Device) -> None:
    """Raise ValueError for values that no measurement can give, before anything is divided by them."""
    speeds = {
        f"{name} of {kind}": speed
        for name in ("flops", "attention")
        for kind, speed in (getattr(device, name) or {"any precision": None}).items()
    }
    sizes = {name: getattr(device, name) for name in ("memory_gb", "bandwidth", "unfused", "inner", "outer", "host")}
    sizes |= dict(attention_backward=device.attention_backward)
    times = {
        name: getattr(device, name)
        for name in (
            *("attention_tokens", "exposed", "rows", "latency", "launch"),
            *("context_gb", "communication_gb", "update_bandwidth"),
        )
    }
    for name, value in (speeds | sizes | times).items():
        least = "at least 0" if name in times else "above 0"
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf or (value == 0 and name not in times):
            raise ValueError(f"{name} is {value!r}, which must be a number {least}")
    if device.kind not in ("cuda", "cpu"):
        raise ValueError(f"kind is {device.kind!r}, which must be cuda or cpu")
