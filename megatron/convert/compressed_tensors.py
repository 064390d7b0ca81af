# SPDX-License-Identifier: Apache-2.0
"""Quantized models as Hugging Face's folders, in the format of the package compressed-tensors, for transformers and vLLM.

    pack-quantized   int8 and int4: whole numbers of b bits, 32 / b of them in an int32, the first in the lowest bits
    int-quantized    int8-dynamic, and models of quantization aware training: int8

config.json has the format as its `quantization_config`. Matrices that are not quantized are listed there, in `ignore`.

Legend: i inputs, o outputs, g groups of i.
"""

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from megatron.checkpoint.boxes import Box
from megatron.convert.families import Family
from megatron.convert.hf_files import TensorGroup
from megatron.errors import SettingsError
from megatron.inference.quantize import MIDDLE, Codes, Int4, Int8Dynamic, Int8OfTokens, Int8Static, Rounded
from megatron.model.hf_match import Match
from megatron.model.quantization import QuantizeOptions

METHOD = "compressed-tensors"
PACKED, WHOLE = "pack-quantized", "int-quantized"
WEIGHT = ".weight"


def refuse_other(kind: str, products: Mapping[str, Rounded]) -> None:
    """Raise SettingsError for a model whose layers transformers would not quantize, or would compute otherwise."""
    if kind == "gpt2":
        raise SettingsError(
            "--format hf: GPT-2's layers in transformers are Conv1D, which its formats of quantized weights do not have",
            do="python -m megatron.tools.checkpoint quantize writes a checkpoint for this suite; --format gguf, onnx and "
            "torch-export have quantized GPT-2s",
        )
    for product in products.values():
        if not isinstance(product, Int8Static):
            continue
        settings = product.settings
        clipped, bits = settings.activation_preprocess_type == "PACT", settings.activation_bits
        if product.trained.rounds_inputs and (clipped or bits != 8):
            named = "--activation-preprocess-type PACT" if clipped else f"--activation-bits {bits}"
            raise SettingsError(
                f"--format hf: compressed-tensors has no inputs of {named}",
                "it rounds them to 8 bits, without a trained bound",
                "--format onnx or torch-export",
            )


def tensors_of(match: Match, product: Rounded) -> TensorGroup:
    """The tensors in the place of a layer's weights of theirs."""
    made: dict[str, torch.Tensor] = {}
    packed = format_of(product) == PACKED
    middle = MIDDLE if product.least == 0 else 0  # whole numbers are signed there
    for name, values, scale, zero in zip(match.theirs, *(_theirs(match, product, x) for x in product.codes())):
        groups = values.shape[1] // (product.group_size or values.shape[1])
        scale, zero = (x.unflatten(1, (groups, -1))[:, :, 0].contiguous() for x in (scale, zero))
        values = (values.int() - middle).to(torch.int8)
        if packed:
            made |= {f"{name}_packed": pack(values, bits_of(product)), f"{name}_shape": torch.tensor(values.shape)}
        else:
            made[name] = values
        made[f"{name}_scale"] = scale
        if has_zeros(product):
            made[f"{name}_zero_point"] = pack((zero.int() - middle).t(), bits_of(product)).t().contiguous()
        if isinstance(product, Int8Static) and product.input_scale is not None:
            made[f"{name.removesuffix(WEIGHT)}.input_scale"] = product.input_scale.to(scale.dtype).reshape(1)
    tensors = tuple(made.values())
    shapes, dtypes = tuple(tuple(x.shape) for x in tensors), tuple(x.dtype for x in tensors)
    return TensorGroup(tuple(made), shapes, lambda: tensors, dtypes)


def _theirs(match: Match, product: Rounded, x: torch.Tensor) -> list[torch.Tensor]:
    """A tensor [o, g] of a layer as their parts, [o', i]: each group's value at each of its inputs."""
    shape = product.layer.placements["weight"].shape
    wide = x.repeat_interleave(shape[-1] // x.shape[1], 1).view(shape)
    return [part.contiguous() for part in match.to_theirs(wide)]


def quantization_config(family: Family, products: Mapping[str, Rounded]) -> dict[str, Any]:
    """The entry of config.json."""
    product = next(iter(products.values()))
    grouped = product.group_size is not None
    weights: dict[str, Any] = dict(
        num_bits=bits_of(product), type="int", symmetric=not has_zeros(product), dynamic=False
    )
    weights |= dict(strategy="group", group_size=product.group_size) if grouped else dict(strategy="channel")
    inputs = dict(num_bits=8, type="int", symmetric=True)
    if isinstance(product, (Int8Dynamic, Int8OfTokens)):
        inputs |= dict(strategy="token", dynamic=True, symmetric=isinstance(product, Int8Dynamic))
    elif isinstance(product, Int8Static) and product.trained.observes:
        inputs |= dict(strategy="tensor", dynamic=False)
    else:
        inputs = None
    plain = {
        theirs.removesuffix(WEIGHT)
        for match in family.matches
        if match.ours.removesuffix(WEIGHT) not in products
        for theirs in match.theirs
        if theirs.endswith(WEIGHT) and len(family.facts.weights[match.ours].shape) > 1
    }
    return dict(
        quant_method=METHOD,
        format=format_of(product),
        quantization_status="compressed",
        config_groups=dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=inputs)),
        ignore=sorted({*plain, "lm_head"}),
    )


def has_zeros(product: Rounded) -> bool:
    """Whether groups have zeros. transformers loads such files with CompressedTensorsConfig(dequantize=True) alone."""
    return isinstance(product, Int4) and not product.symmetric


def bits_of(product: Rounded) -> int:
    """Bits of a whole number in the file: 4 or 8."""
    return 4 if product.group_size else 8


def rounds_inputs(product: Rounded) -> bool:
    """Whether inputs are whole numbers, too."""
    return isinstance(product, Int8Dynamic) or isinstance(product, Int8Static) and product.trained.rounds_inputs


def format_of(product: Rounded) -> str:
    """The format of a product's weights."""
    return WHOLE if rounds_inputs(product) else PACKED


# ---- reading ---------------------------------------------------------------------------------------------------------


def options_of(config: Mapping[str, Any], place) -> QuantizeOptions:
    """How a folder with this `quantization_config` is quantized. Raises SettingsError for what this suite does not have."""
    groups = list((config.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    inputs = groups[0].get("input_activations") if len(groups) == 1 else None
    bits, strategy, symmetric = weights.get("num_bits"), weights.get("strategy"), bool(weights.get("symmetric", True))
    known = (
        config.get("quant_method") == METHOD
        and config.get("format") == (WHOLE if inputs else PACKED)
        and weights.get("type") == "int"
    )
    if known and bits == 8 and strategy == "channel" and symmetric:
        if not inputs:
            return QuantizeOptions("int8")
        of_tokens = inputs.get("dynamic") and inputs.get("strategy") == "token" and inputs.get("symmetric", True)
        if of_tokens and inputs.get("num_bits") == 8:
            return QuantizeOptions("int8-dynamic")
    if known and bits == 4 and strategy == "group" and not inputs:
        return QuantizeOptions("int4", weights["group_size"], quantize_symmetric=symmetric)
    raise SettingsError(
        f"{place} has weights of another format: {config.get('quant_method')}, {config.get('format')}, "
        f"{bits} bits, {strategy}{', rounded inputs' if inputs else ''}",
        "read here are int8 with a scale for each channel, and int4 in groups, of compressed-tensors; inputs are as they "
        "are, or have a symmetric scale for each token, so an export after quantization aware training is not read",
        "load the checkpoint that was exported",
    )


def is_quantized(name: str, names: Container[str]) -> bool:
    """Whether a folder with tensors of these names has the weight `name` as whole numbers."""
    return f"{name}_scale" in names


def names_of(name: str) -> tuple[str, ...]:
    """The tensors that a folder can have in the place of the weight `name`."""
    parts = (f"{name}{part}" for part in ("", "_packed", "_shape", "_scale", "_zero_point"))
    return *parts, f"{name.removesuffix(WEIGHT)}.input_scale"


def hold(product: Rounded, match: Match, get: Callable[[str], torch.Tensor], place: Mapping[str, int]) -> None:
    """Give a product its part of a folder's weight. get: name -> tensor. place: this rank's coordinates."""
    placement, layer = product.layer.placements["weight"], product.layer
    box = Box(*placement.box(placement.local_shape({layer.tp.name: layer.tp.size}), place))
    wide = zip(*(_wide(product, name, get) for name in match.theirs))
    values, scale, zero = (match.to_ours(list(parts))[box.slices()].flatten(0, -2) for parts in wide)
    step = product.group_size or values.shape[1]
    product.hold(product.operand(Codes(values, scale[:, ::step].contiguous(), zero[:, ::step].contiguous())))


def _wide(product: Rounded, name: str, get: Callable[[str], torch.Tensor]) -> Codes:
    """A weight of theirs, [o, i], with each group's scale and zero at each of its inputs."""
    scale, middle = get(f"{name}_scale"), MIDDLE if product.least == 0 else 0
    if format_of(product) == PACKED:
        values = unpack(get(f"{name}_packed"), bits_of(product), int(get(f"{name}_shape")[1]))
    else:
        values = get(name).int()
    zero = torch.zeros_like(scale)
    if has_zeros(product):
        zero = unpack(get(f"{name}_zero_point").t(), bits_of(product), len(scale)).t()
    each = values.shape[1] // scale.shape[1]
    return Codes(values + middle, *(x.repeat_interleave(each, 1) for x in (scale, zero.float() + middle)))


# ---- whole numbers in int32 ------------------------------------------------------------------------------------------


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed numbers of 4 or 8 bits, [o, n] int -> [o, n bits / 32] int32, the first in the lowest bits; the rest is 0.

    >>> pack(torch.tensor([[-8, -7, 7]]), 4).tolist()
    [[3856]]
    """
    each = 32 // bits
    unsigned = values.long() + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, -values.shape[1] % each)).unflatten(1, (-1, each))
    words = (unsigned << (torch.arange(each, device=values.device) * bits)).sum(2)  # below 2^32
    return words.to(torch.int32)  # which takes the lower 32 bits


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` numbers of each row of `pack`.

    >>> unpack(torch.tensor([[3856]], dtype=torch.int32), 4, 3).tolist()
    [[-8, -7, 7]]
    """
    shifts = torch.arange(32 // bits, device=words.device) * bits
    values = (words.long().unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    return values.flatten(1)[:, :count].int() - (1 << (bits - 1))
