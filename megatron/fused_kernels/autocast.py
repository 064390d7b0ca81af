# SPDX-License-Identifier: Apache-2.0
"""Mixed precision per op (`--amp-level O1`): weights stay in fp32, and each op converts its inputs to a suitable format.

    with Autocast(torch.bfloat16):
        y = linear(norm(x))  # the norm in fp32, the product in bf16

A table of names maps ops to formats: products in half precision, sums over many elements in fp32, other ops in the format
of their inputs (torch computes a mixture in fp32). `--amp-custom-black-list` and `--amp-custom-white-list` change it.
The mode intercepts every call of a torch function; our own ops take part through `@op`.

`torch.autocast` does the same, but only inside torch's ops, and its table cannot be changed.
"""

import difflib
import functools
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from megatron.errors import SettingsError
from megatron.settings import schema

HALF = """linear matmul mm bmm addmm baddbmm einsum scaled_dot_product_attention linear_cross_entropy
    token_losses""".split()
FULL = """layer_norm rms_norm softmax log_softmax cross_entropy sum mean prod norm exp expm1 log log2 log10 log1p pow rsqrt
    reciprocal cumsum logsumexp""".split()
OURS = ("linear_cross_entropy", "token_losses")  # ops without a torch function of the same name
# Paddle's names, which its recipes list. The softmax of the loss is always computed in fp32.
PADDLE = {
    "lookup_table": ["embedding"],
    "c_embedding": ["embedding"],
    "matmul": ["matmul", "linear"],
    "linear": ["linear", *OURS],
    "softmax_with_cross_entropy": ["cross_entropy"],
    "c_softmax_with_cross_entropy": ["cross_entropy"],
    "flash_attn": ["scaled_dot_product_attention"],
    "p_norm": ["norm"],
}


def op(function: Callable) -> Callable:
    """Let modes such as `Autocast` intercept calls of `function` by its name, like calls of torch's functions."""

    @functools.wraps(function)
    def overridable(*args, **kwargs):
        tensors = tuple(arg for arg in args if isinstance(arg, torch.Tensor))
        if has_torch_function(tensors):
            return handle_torch_function(overridable, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return overridable


class Autocast(TorchFunctionMode):
    """A region in which ops get their floating-point tensors in the format of the table.

    half: bf16 or fp16. black: names of ops that compute in fp32, in addition to `FULL`; white: in `half`, in addition to
    `HALF`. Raises SettingsError for an unknown op, and for one in both lists.
    """

    def __init__(self, half: torch.dtype, black: Iterable[str] = (), white: Iterable[str] = ()):
        super().__init__()
        black, white = _names("black", black), _names("white", white)
        if black & white:
            raise SettingsError(
                f"{', '.join(sorted(black & white))}: in --amp-custom-black-list and in "
                "--amp-custom-white-list; drop one of them"
            )
        formats = dict.fromkeys(HALF, half) | dict.fromkeys(FULL, torch.float32)
        formats |= dict.fromkeys(black, torch.float32) | dict.fromkeys(white, half)
        self.formats = formats | {f"__r{name}__": wanted for name, wanted in formats.items()}  # 2 / x is `__rdiv__`

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wanted, kwargs = self.formats.get(func.__name__), kwargs or {}
        if wanted is None:
            return func(*args, **kwargs)
        return func(*(_cast(arg, wanted) for arg in args), **{name: _cast(arg, wanted) for name, arg in kwargs.items()})


def autocast_of(precision: schema.Precision) -> Autocast | None:
    """The region that the settings select; None if weights themselves have the format of `--precision` (O2)."""
    if precision.amp_level == "O2" or precision.precision == "fp32":
        return None
    half = dict(bf16=torch.bfloat16, fp16=torch.float16)[precision.precision]
    return Autocast(half, precision.amp_custom_black_list or (), precision.amp_custom_white_list or ())


def _cast(value, wanted: torch.dtype):
    if isinstance(value, torch.Tensor):
        return value.to(wanted) if value.dtype in (torch.float32, torch.bfloat16, torch.float16) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(part, wanted) for part in value) if type(value) in (list, tuple) else value
    return value


def _names(which: str, words: Iterable[str]) -> set[str]:
    """torch's names for a list of ops, with or without commas, in Paddle's spelling or torch's."""
    result = set()
    for word in ",".join(words).replace(",", " ").split():
        name = word.removesuffix("_v2").removesuffix("_v3")
        name = name.removeprefix("elementwise_").removeprefix("reduce_")
        names = PADDLE.get(name, [name])
        for name in names:
            if name not in OURS and not any(callable(getattr(place, name, None)) for place in (torch, F, torch.Tensor)):
                close = difflib.get_close_matches(name, [*HALF, *FULL, *dir(torch.Tensor), *dir(F)], 1)
                raise SettingsError(
                    f"--amp-custom-{which}-list: torch has no op '{name}'"
                    + (f"; did you mean {close[0]}?" if close else "")
                )
        result.update(names)
    return result
