# SPDX-License-Identifier: Apache-2.0
"""The share of a GPU's data sheet that training reaches: constants with their sources, and the errors of predictions.

Times are predicted with the speeds of another kind of suite: FSDP with PyTorch's eager ops (`KIND`). Suites with fused
kernels, such as this one on small models, are faster, as docs/proof/planner.md shows.

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
# Share of fp8's peak, relative to that of bf16's: assumed, until `benchmarks/gpu_fp8.py` has run on a GPU. Others measured
# 680 TFLOP/s in bf16 on an H100, and 1050 to 1200 in fp8.
FP8 = dict(tensorwise=0.88, blockwise=0.77, mxfp8=0.8, rows=0.8)
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
            return f"error {self.worst:.0%} in {self.runs} run{'s' * (self.runs > 1)}"
        return f"error {self.median:.0%}, worst {self.worst:.0%}"


EXPERTS = "experts"  # the first feature of a mixture
FEW = 10  # number of runs below which a median means little
# (GPU, features of the layout as in `Layout.features`) -> errors, from `python -m megatron.tools.plan --published`. A test
# compares them.
ACCURACY = {
    ("A100", "dp over nodes"): Accuracy(0.03, 0.28, 23),
    ("A100", "one node"): Accuracy(0.03, 0.28, 43),
    ("A100", "tp"): Accuracy(0.07, 0.1, 2),
    ("A100", "tp, dp over nodes"): Accuracy(0.14, 0.14, 3),
    ("A100", "tp, pp"): Accuracy(0.05, 0.11, 6),
    ("A100", "tp, pp, dp over nodes"): Accuracy(0.02, 0.08, 12),
    ("B200", "experts, ep, dp over nodes"): Accuracy(0.18, 0.37, 4),
    ("H100", "dp over nodes"): Accuracy(0.01, 0.11, 20),
    ("H100", "experts, ep"): Accuracy(0.39, 0.42, 4),
    ("H100", "experts, ep, dp over nodes"): Accuracy(0.22, 0.44, 7),
    ("H100", "experts, pp, ep, dp over nodes"): Accuracy(0.26, 0.29, 3),
    ("H100", "experts, tp, ep, dp over nodes"): Accuracy(0.55, 0.55, 1),
    ("H100", "experts, tp, pp, ep"): Accuracy(0.14, 0.14, 1),
    ("H100", "experts, tp, pp, ep, dp over nodes"): Accuracy(0.21, 0.39, 3),
    ("H100", "one node"): Accuracy(0.02, 0.08, 20),
    ("H100", "tp, dp over nodes"): Accuracy(0.01, 0.01, 2),
    ("H800", "experts, pp, ep"): Accuracy(0.21, 0.25, 2),
    ("H800", "experts, tp, pp, ep"): Accuracy(0.15, 0.25, 2),
}
MIXTURES = Accuracy(0.22, 0.55, 27)  # all runs with experts, of every GPU
OTHERS = ("PCIe", "NVL", "GH200")  # variants of a GPU with other speeds


def accuracies(name: str) -> dict[str, Accuracy]:
    """The errors for a device by the features of layouts; none for a device without published runs."""
    gpu = next((gpu for gpu, _ in ACCURACY if gpu in name), None)
    if gpu is None or any(other in name for other in OTHERS):
        return {}
    return {features: errors for (of, features), errors in ACCURACY.items() if of == gpu}


def accuracy(name: str, features: str) -> Optional[Accuracy]:
    """The errors for a device and layouts with these features; None without such published runs.

    >>> str(accuracy("NVIDIA A100-SXM4-80GB", "dp over nodes")), accuracy("A100-80GB", "cp"), accuracy("H200-141GB", "tp")
    ('error 3%, worst 28%', None, None)
    """
    return accuracies(name).get(features)
