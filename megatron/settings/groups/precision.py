# SPDX-License-Identifier: Apache-2.0
"""The settings of number formats."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, Positive, shown_by

FP16 = Needs("--fp16", lambda s: s.precision == "fp16")
DYNAMIC_SCALE = Needs("--fp16, and no --loss-scale", lambda s: s.precision == "fp16" and s.loss_scale is None)
HALF = Needs("--bf16 or --fp16", lambda s: s.precision != "fp32")
O1 = Needs("--amp-level O1, and --bf16 or --fp16", lambda s: s.amp_level == "O1" and s.precision != "fp32")

IN_FP8 = Needs("--fp8-format", lambda s: s.fp8_format)
SAME_TURNED = Needs(
    "--fp8-format, and --fp8-recipe tensorwise or blockwise", lambda s: s.fp8_format and s.fp8_recipe != "mxfp8"
)
FIRST_LAST = Needs("--fp8-format, and --first-last-layers-bf16", lambda s: s.fp8_format and s.first_last_layers_bf16)

# Tests that show effects
FP8 = "test_which_layers_have_fp8_products"
SCALE = "test_loss_scales_of_fp16"
FORMATS = "test_formats"

fp8 = shown_by(FP8, on_resume="refused", needs=IN_FP8)
dynamic = shown_by(SCALE, needs=DYNAMIC_SCALE)


@dataclass(frozen=True)
class Precision:
    """Number formats, products in fp8, and fp16's loss scale."""

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
    fp8_format: Optional[Literal["e4m3", "hybrid"]] = shown_by("test_a_step_is_the_plain_loops", on_resume="refused")(
        "multiply in linear layers of blocks with fp8 numbers (docs/fp8.md): e4m3; hybrid: e5m2 for gradients of outputs",
        None,
        "--fp8-e4m3=e4m3",
        "--fp8-hybrid=hybrid",
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = shown_by(
        "test_a_step_is_the_plain_loops", on_resume="refused", needs=IN_FP8
    )(
        "numbers that share a scale: all of a tensor (delayed is the same); 1 x 128 of inputs and gradients, 128 x 128 of "
        "weights; 1 x 32",
        "tensorwise",
    )
    fp8_wgrad: bool = fp8(
        "gradients of weights in fp8; --no-fp8-wgrad: in the format of --precision", True, "--disable-fp8-wgrad=false"
    )
    fp8_layers: Optional[str] = fp8(
        "patterns of the layers with fp8 products, as mlp.*,attention.qkv (default: all linear layers of blocks)", None
    )
    fp8_skip: Optional[str] = fp8("patterns of the layers without, as blocks.0.*,mlp.down", None)
    fp8_param_gather: bool = shown_by("test_weights_are_kept_and_gathered_in_fp8", needs=SAME_TURNED)(
        "keep and gather the weights of these layers as fp8 numbers, a byte each, instead of in bf16 beside them; the "
        "numbers are the same",
        False,
    )
    first_last_layers_bf16: bool = fp8("leave the first and the last layers of the model without fp8 products", False)
    num_layers_at_start_in_bf16: Natural = fp8("--first-last-layers-bf16: first layers; 0: none", 1, needs=FIRST_LAST)
    num_layers_at_end_in_bf16: Natural = fp8("--first-last-layers-bf16: last layers; 0: none", 1, needs=FIRST_LAST)
