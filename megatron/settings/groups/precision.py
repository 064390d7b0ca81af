# SPDX-License-Identifier: Apache-2.0
"""The settings of number formats."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Needs, Positive, shown_by

FP16 = Needs("--fp16", lambda s: s.precision == "fp16")
DYNAMIC_SCALE = Needs("--fp16, and no --loss-scale", lambda s: s.precision == "fp16" and s.loss_scale is None)
HALF = Needs("--bf16 or --fp16", lambda s: s.precision != "fp32")
O1 = Needs("--amp-level O1, and --bf16 or --fp16", lambda s: s.amp_level == "O1" and s.precision != "fp32")

# Tests that show effects
SCALE = "test_loss_scales_of_fp16"
FORMATS = "test_formats"

dynamic = shown_by(SCALE, needs=DYNAMIC_SCALE)


@dataclass(frozen=True)
class Precision:
    """Number formats, and fp16's loss scale."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = shown_by(FORMATS)(
        "format of weights and activations; auto: bf16 if it is faster than fp32",
        "fp32",
        "--bf16=bf16",
        "--fp16=fp16",
        "--use-amp~=fp16/fp32",
        "--use-pure-fp16=fp16",
        also_sets={"--use-amp": dict(amp_level="O1", initial_loss_scale=2.0**15)},
    )
    amp_level: Literal["O1", "O2"] = shown_by(FORMATS)(
        "O2: weights in bf16 or fp16, with fp32 main weights; O1: weights in fp32, and autocast", "O2", needs=HALF
    )
    amp_custom_black_list: Optional[list[str]] = shown_by(FORMATS)(
        "O1: ops to compute in fp32, with torch's or Paddle's names", None, needs=O1
    )
    amp_custom_white_list: Optional[list[str]] = shown_by(FORMATS)(
        "O1: ops to compute in half precision", None, needs=O1
    )
    loss_scale: Optional[Positive] = shown_by(SCALE)("static loss scale for fp16 (default: dynamic)", None, needs=FP16)
    initial_loss_scale: Positive = dynamic("initial dynamic loss scale", 2.0**32, "--scale-loss")
    min_loss_scale: Positive = dynamic("minimum dynamic loss scale", 1.0)
    loss_scale_window: Count = dynamic("steps without overflow before the scale doubles", 1000)
    hysteresis: Count = dynamic("number of overflows before the scale halves", 2)
