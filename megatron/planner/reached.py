# SPDX-License-Identifier: Apache-2.0
"""The share of a GPU's data sheet that training reaches: constants with their sources, and the errors of predictions.

Times are predicted with the speeds of another kind of suite: FSDP with PyTorch's eager ops (`KIND`). Suites with fused
kernels, such as this one on small models, are faster, as docs/planning.md#published-runs shows.

The constants were fitted together to a third of llm-foundry's published runs, which a hash selects (`published.is_fitted`;
`python benchmarks/published.py --fit` repeats it). All other published runs test them.
"""

from typing import NamedTuple, Optional

KIND = "eager FSDP"

AMPERE, HOPPER = "Ampere", "Hopper"
# Devices that use the shares of H100; all others use those of A100. Published bf16 runs exist only for A100 and H100.
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200", "B200", "MI300X")

# Constants, fitted unless noted otherwise.
LINEAR = {AMPERE: 0.885, HOPPER: 0.737}  # share of the peak, for large matrix products
ROWS = 64.0  # rows, columns or terms of a sum with which half of that is reached: assumed; 20 to 100 fit equally well
ATTENTION = {AMPERE: 0.522, HOPPER: 0.287}  # share of the peak, for a long sequence in a flash kernel's forward pass
ATTENTION_TOKENS = 770.0  # length of a sequence with which half of that is reached
ATTENTION_BACKWARD = 4.94  # time of its backward pass, which has 2.5 times as many FLOPs, over that of its forward pass
UNFUSED = 1.52  # elementwise traffic, as a multiple of the traffic of fused kernels
EXPOSED = 0.71  # share of FSDP's messages that passes do not hide


def generation(name: str) -> str:
    """The generation whose shares a device uses."""
    return HOPPER if name.startswith(HOPPER_NAMES) else AMPERE


class Accuracy(NamedTuple):
    """Errors of predicted tokens/s, relative to published runs to which no constant was fitted."""

    median: float
    worst: float
    runs: int

    def __str__(self) -> str:
        if self.runs < FEW:
            return f"error {self.worst:.0%} in {self.runs} runs"
        return f"error {self.median:.0%}, worst {self.worst:.0%}"


FEW = 10  # number of runs below which a median means little
DATA, MODEL = "data parallel", "tensor or pipeline parallel"  # kinds of layouts
# (GPU, kind of layout) -> errors, from `python -m megatron.tools.plan --published`. A test compares them.
ACCURACY = {
    ("A100", DATA): Accuracy(0.03, 0.28, 66),
    ("A100", MODEL): Accuracy(0.04, 0.14, 23),
    ("H100", DATA): Accuracy(0.02, 0.11, 40),
    ("H100", MODEL): Accuracy(0.01, 0.01, 2),
}
OTHERS = ("PCIe", "NVL", "GH200")  # variants of a GPU with other speeds


def accuracy(name: str, model_parallel: bool) -> Optional[Accuracy]:
    """The errors for a device and a kind of layout; None for a device without published runs.

    >>> str(accuracy("NVIDIA A100-SXM4-80GB", False)), accuracy("H200-141GB", False)
    ('error 3%, worst 28%', None)
    """
    gpu = next((gpu for gpu, _ in ACCURACY if gpu in name), None)
    if gpu is None or any(other in name for other in OTHERS):
        return None
    return ACCURACY[gpu, MODEL if model_parallel else DATA]
