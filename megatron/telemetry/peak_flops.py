# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP/s of devices, for the model FLOPs utilization (MFU)."""

from typing import Optional

# Dense peak TFLOP/s from the vendors' data sheets, without sparsity: name in the device's string -> by number format.
# fp32: with TF32 off. The first name that matches counts, so longer names come first.
PEAK_TFLOPS = {
    "GB200": dict(fp8=5000, bf16=2500, fp16=2500, fp32=80),
    "B200": dict(fp8=4500, bf16=2250, fp16=2250, fp32=75),
    "GH200": dict(fp8=1978.9, bf16=989.4, fp16=989.4, fp32=66.9),
    "H200": dict(fp8=1978.9, bf16=989.4, fp16=989.4, fp32=66.9),
    "H100 PCIe": dict(fp8=1513, bf16=756.5, fp16=756.5, fp32=51.2),
    "H100 NVL": dict(fp8=1671, bf16=835.5, fp16=835.5, fp32=60),
    "H100": dict(fp8=1978.9, bf16=989.4, fp16=989.4, fp32=66.9),
    "H800": dict(fp8=1978.9, bf16=989.4, fp16=989.4, fp32=66.9),
    "H20": dict(fp8=296, bf16=148, fp16=148, fp32=44),
    "A100": dict(bf16=312, fp16=312, fp32=19.5),
    "A800": dict(bf16=312, fp16=312, fp32=19.5),
    "A40": dict(bf16=149.7, fp16=149.7, fp32=37.4),
    "A30": dict(bf16=165, fp16=165, fp32=10.3),
    "A10": dict(bf16=125, fp16=125, fp32=31.2),
    "RTX A6000": dict(bf16=154.8, fp16=154.8, fp32=38.7),
    "L40S": dict(fp8=733, bf16=362, fp16=362, fp32=91.6),
    "L40": dict(bf16=181, fp16=181, fp32=90.5),
    "L4": dict(fp8=242, bf16=121, fp16=121, fp32=30.3),
    "V100": dict(fp16=125, fp32=15.7),
    "T4": dict(fp16=65, fp32=8.1),
    "RTX 5090": dict(bf16=209.5, fp16=209.5, fp32=104.8),
    "RTX 4090": dict(fp8=330.3, bf16=165.2, fp16=165.2, fp32=82.6),
    "RTX 3090": dict(bf16=71, fp16=71, fp32=35.6),
    "MI300X": dict(fp8=2614.9, bf16=1307.4, fp16=1307.4, fp32=163.4),
}


def _words(device_name: str) -> list[str]:
    return device_name.upper().replace("-", " ").split()


def peak_flops(device_name: str, precision: str) -> Optional[float]:
    """Dense peak FLOP/s of a device by its driver's name; None for one that is not in the table.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("NVIDIA H100 PCIe", "fp16"), peak_flops("Abacus", "fp32")
    (312000000000000.0, 756500000000000.0, None)
    """
    words = _words(device_name)
    for name, peaks in PEAK_TFLOPS.items():
        wanted = name.upper().split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))) and precision in peaks:
            return peaks[precision] * 1e12
    return None


# --fp8-recipe -> devices whose tensor cores have its products (`fused_kernels/scaled_mm.py`). All that have fp8 have those
# of tensorwise.
HOPPER, BLACKWELL = ("H100", "H200", "H800", "H20", "GH200"), ("B200", "GB200")
FP8_DEVICES = dict(blockwise=HOPPER, mxfp8=BLACKWELL, rows=HOPPER + BLACKWELL)  # rows: of experts


def fp8_peak(device_name: str, recipe: str) -> Optional[float]:
    """Dense peak FLOP/s of the products of an fp8 recipe; None for a device without them.

    >>> fp8_peak("NVIDIA H100 80GB HBM3", "blockwise"), fp8_peak("NVIDIA H100 80GB HBM3", "mxfp8")
    (1978900000000000.0, None)
    """
    words = _words(device_name)
    has = recipe not in FP8_DEVICES or any(name in words for name in FP8_DEVICES[recipe])
    return peak_flops(device_name, "fp8") if has else None


def joint_peak(plain: Optional[float], fp8: Optional[float], share: float) -> Optional[float]:
    """The FLOP/s of a device at its peaks, with this share of the FLOPs in fp8.

    >>> joint_peak(1.0, 2.0, 0.5)
    1.3333333333333333
    """
    if not (plain and fp8 and share):
        return plain
    return 1 / (share / fp8 + (1 - share) / plain)
