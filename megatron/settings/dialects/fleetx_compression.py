# SPDX-License-Identifier: Apache-2.0
"""Translate PaddleFleetX's keys of quantization, pruning and distillation to flags (`fleetx_keys`)."""

import re

from megatron.settings.dialects.fleetx import COMPRESSION, TEACHER
from megatron.settings.dialects.fleetx_translated import Translated
from megatron.settings.dialects.table import Compressed, sentence
from megatron.settings.spelling import YES

# Key of Quantization -> its flag and the values that are supported; None: any
QUANTIZATION = dict(
    weight_quantize_type=("--weight-quantize-type", ("abs_max", "channel_wise_abs_max")),
    activation_quantize_type=("--activation-quantize-type", ("moving_average_abs_max",)),
    activation_preprocess_type=("--activation-preprocess-type", ("pact",)),
    weight_bits=("--weight-bits", None),
    activation_bits=("--activation-bits", None),
)
COLUMN, ROW = "attention.qkv mlp.up".split(), "attention.output mlp.down".split()  # layers, in PaddleFleetX's classes
LAYER_TYPES = dict(linear=[*COLUMN, *ROW], columnparallellinear=COLUMN, rowparallellinear=ROW)


def _quantization(out: Translated) -> None:
    """The section Quantization, in Compress or on its own, if its switch is on."""
    sections = [section for section in ("Compress.Quantization", "Quantization") if out.is_on(f"{section}.enable")]
    for section in sections:
        if out.purpose != "train":
            out.compressed.append(Compressed("quantized", out.given[f"{section}.enable"].where, f"{section}.enable"))
            out.note("the checkpoint has the scales and bits of its training", *out.left(f"{section}."))
            continue
        out.say("--quantization", ["true"], f"{section}.enable")
        for name, (flag, values) in QUANTIZATION.items():
            if (key := f"{section}.{name}") in out.given:
                if values is None or out.word(key) in values:
                    out.say(flag, [out.given[key].value.upper()] if values == ("pact",) else None, key)
                else:
                    out.refuse(key, f"'{out.given[key].value}' is not supported; there is: {', '.join(values)}")
        if (key := f"{section}.weight_preprocess_type") in out.given:
            out.refuse(key, "is not supported: weights are rounded as they are; leave it out")
        _quantized_layers(out, section)
        out.note("files have one format, with the scales of layers as tensors", f"{section}.onnx_format")
        for key in (f"{section}.pretrained", "Compress.pretrained"):
            if key in out.given and key not in out.taken:
                out.say("--load", None, key)
                out.say("--finetune", ["true"], key)


def _quantized_layers(out: Translated, section: str) -> None:
    """Which layers are quantized, and with which scales; whether the embedding is trained."""
    if (key := f"{section}.quantizable_layer_type") in out.given:
        _layer_types(out, key)
    if (each := out.is_on(key := f"{section}.channel_wise_abs_max")) is not None:
        if f"{section}.weight_quantize_type" in out.given:
            out.note(f"{section}.weight_quantize_type says it", key)
        else:
            out.say("--weight-quantize-type", ["channel_wise_abs_max" if each else "abs_max"], key)
    _skipped(out, f"{section}.skip_tensor_map.")
    if out.is_on(key := f"{section}.freeze_embedding"):
        out.say("--freeze", ["embedding.*"], key)
    out.take(key)


PRUNED_FIRST = (
    "is a step before training: python -m megatron.tools.prune with this -c and --save DIR; then train with the flags "
    "that it prints, and -o Compress.Prune.enable=False"
)


def _layer_types(out: Translated, key: str) -> None:
    types = [word.lower() for word in out.given[key].words]
    if unknown := [word for word in types if word not in LAYER_TYPES]:
        return out.refuse(
            key, f"'{unknown[0]}' is not supported; there is: Linear, ColumnParallelLinear, RowParallelLinear"
        )
    layers = dict.fromkeys(layer for word in types for layer in LAYER_TYPES[word])
    out.say("--quantization-layers", [",".join(layers)], key)


SKIPPED = dict(linear1="mlp.up", linear2="mlp.down")  # their names of layers that keep their format


def _skipped(out: Translated, section: str) -> None:
    """`skip_tensor_map: {block_3: ['linear2']}`: layers of single blocks, counted from 0, that are not quantized."""
    layers, keys = [], []
    for key in out.left(section):
        block = re.fullmatch(r"block_(\d+)", key.removeprefix(section))
        unknown = [word for word in out.given[key].words if word.lower() not in SKIPPED]
        if not block or unknown:
            what = f"'{unknown[0]}' is not supported; there is: {', '.join(SKIPPED)}" if block else "blocks are block_N"
            out.refuse(key, what)
        else:
            layers += [f"blocks.{block[1]}.{SKIPPED[word.lower()]}" for word in out.given[key].words]
            keys.append(key)
    if layers:
        out.say("--quantization-skip", [",".join(layers)], *keys)
        out.take(*keys)


# Key of Distillation -> its flag
DISTILLATION = dict(distill_loss_ratio="--kd-alpha", T="--kd-temperature")


def _distillation(out: Translated) -> None:
    """The section Distillation, in Compress or on its own: its flags, if its switch is on."""
    for section in ("Compress.Distillation", "Distillation"):
        if out.purpose != "train" or not out.is_on(f"{section}.enable"):
            continue
        given = [(flag, f"{section}.{name}") for name, flag in DISTILLATION.items() if f"{section}.{name}" in out.given]
        words = [f"{flag} {out.given[key].value}" for flag, key in given]
        flags = " ".join(["--teacher-load DIR", *words])
        out.refuse(f"{section}.enable", f"names no checkpoint of the teacher: leave the section out, and say {flags}")
        out.take(*out.left(f"{section}."))


def _prune(out: Translated) -> None:
    """The section Prune, in Compress or on its own, if its switch is on: for the tool that prunes, before training."""
    sections = [section for section in ("Compress.Prune", "Prune") if out.is_on(f"{section}.enable")]
    for section in sections:
        if out.purpose in ("train", "task"):
            out.refuse(f"{section}.enable", PRUNED_FIRST)
            out.take("Compress.pretrained")
        elif out.purpose == "prune":
            out.take(f"{section}.enable")
            for name, flag in dict(criterion="--prune-criterion", ratio="--prune-ratio").items():
                if (key := f"{section}.{name}") in out.given:
                    out.say(flag, None, key)
            out.note("tools.sensitivity measures it", f"{section}.cal_sens")
            if (key := "Compress.pretrained") in out.given and key not in out.taken:
                out.say("--load", None, key)
        else:
            switch = f"{section}.enable"
            out.compressed.append(Compressed("pruned", out.given[switch].where, switch, _sizes(out)))
            others = "Compress.pretrained", "Model.num_attention_heads", "Model.ffn_hidden_size"
            out.note("the checkpoint has the sizes of the pruned model", *out.left(f"{section}."), *others)


def _sizes(out: Translated) -> dict[str, int]:
    """The sizes of the file's model that pruning changes."""
    names = dict(num_attention_heads="num_attention_heads", ffn_size="ffn_hidden_size", hidden_size="hidden_size")
    sizes = {name: int(word) for name, key in names.items() if (word := out.word(f"Model.{key}")).isdecimal()}
    hidden = sizes.pop("hidden_size", None)
    return (dict(ffn_size=4 * hidden) if hidden else {}) | sizes


def compression(out: Translated) -> None:
    """Translate quantization, pruning and distillation, and refuse other keys of compression."""
    _quantization(out)
    _prune(out)
    _distillation(out)
    for key in [key for key in out.given if key not in out.taken and sentence({"-": COMPRESSION + TEACHER}, key)]:
        if key == "Compress.pretrained":
            out.refuse(
                key, "is the model that is compressed, and no section of Compress is on; say --load DIR --finetune"
            )
        elif key.endswith(".enable"):
            if out.is_on(key):
                out.refuse(key, "is not supported here: see docs/compression.md and docs/distillation.md")
            out.take(key)
        else:
            switch = ".".join(key.split(".")[: 2 if key.startswith("Compress.") else 1]) + ".enable"
            refused = out.word(switch) in YES
            out.note(f"{switch} {'is refused' if refused else 'is not true'}", key, usual=not refused)
