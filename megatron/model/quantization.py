# SPDX-License-Identifier: Apache-2.0
"""Quantization aware training: linear layers compute with values that fit in a few bits (arXiv:1712.05877). Needs no torch.

    y = q(x) W_q^T + b        W_q: each output channel rounded to multiples of its abs-max / 127
                              q(x): rounded to multiples of the scale of x / 127, and clipped to it

`--quantization` selects it; the layers are those of `--quantization-layers` without those of `--quantization-skip`. It is a
kind of linear layer: `--linear PATTERN=fake_quantize` selects the same. The names and formulas are PaddleSlim's. A layer
has two buffers. The products: `model/fake_quantize.py`.

input_absmax:  the abs-max of the inputs of this step, over all of its tokens on all ranks
input_average: [2], a and n of the moving average: after each step a = 0.9 a + input_absmax and n = 0.9 n + 1; the scale of
               the next step's inputs is a / n. Inputs of the first step are not rounded: there is no scale yet

With `--activation-quantize-type token_wise_min_max` there are no such buffers: each token has a step and a zero, from the
least and the largest of its channels. With PACT (arXiv:1805.06085) inputs are first clipped to a trained bound,
`pact_alpha`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import DataError, SettingsError, UsageError
from megatron.mpu.placement import Buffer, Constant, Placement
from megatron.settings.declare import Needs
from megatron.settings.groups.model import FAKE_QUANTIZE
from megatron.settings.schema import Config, Model, setting

KIND = FAKE_QUANTIZE
ALPHA = 20.0  # initial bound of PACT
OF_TOKENS = "token_wise_min_max"
INT4 = Needs("--quantize int4", lambda s: s.quantize == "int4")
GPTQ = Needs("--quantize-method gptq", lambda s: s.quantize and s.quantize_method == "gptq")


@dataclass(frozen=True)
class QuantizeOptions:
    """How a tool quantizes the model that it loads (`inference/quantize.py`)."""

    quantize: Optional[Literal["int8", "int8-dynamic", "int4"]] = setting(
        "format of the linear layers: int8 weights, int8-dynamic: inputs as well, int4 weights in groups", None
    )
    quantize_group_size: int = setting("--quantize int4: inputs that share a scale", 128, needs=INT4)
    quantize_skip: Optional[str] = setting(
        "--quantize: patterns of layers that keep their format, or the file of tools.sensitivity --output",
        None,
        needs="quantize",
    )
    quantize_symmetric: bool = setting("--quantize int4: groups have no zero, and values around 0", False, needs=INT4)
    quantize_method: Literal["round", "gptq"] = setting(
        "--quantize: round each weight to the nearest value; gptq: correct later weights for the errors of earlier ones, "
        "on the inputs of --calibration-data",
        "round",
        needs="quantize",
    )
    calibration_data: Optional[list[str]] = setting(
        "prefixes of token files, or folders: the text of gptq", None, needs=GPTQ
    )
    calibration_samples: int = setting(
        "windows of the calibration text, evenly spaced", 128, "--calib-size", needs=GPTQ
    )

    def __post_init__(self):
        if self.quantize and self.quantize_method == "gptq" and not self.calibration_data:
            raise UsageError(
                "--quantize-method gptq: the inputs of layers are not known without a text",
                do="--calibration-data PREFIX, as of the training data",
            )
        if self.calibration_samples < 1:
            raise SettingsError(f"--calibration-samples {self.calibration_samples}: has to be at least 1")


PLAIN = QuantizeOptions()


def own_weights(settings: Model, weight: Placement) -> Mapping[str, Placement]:
    """The buffers of the input's scale, and PACT's bound, of a layer with this weight. Each tensor parallel rank may have
    another part of the input: the abs-max is that of all parts, and the bound's gradient is summed over them.
    """
    if settings.activation_quantize_type == "none":
        return {}
    parts, own = tuple(weight.model_axes), {}
    if settings.activation_quantize_type != OF_TOKENS:
        own = dict(
            input_absmax=Placement((), Constant(0.0), partial=parts, decay=False, buffer=Buffer("max")),
            input_average=Placement((2,), Constant(0.0), decay=False, buffer=Buffer("same")),
        )
    if settings.activation_preprocess_type == "PACT":
        own["pact_alpha"] = Placement((1,), Constant(ALPHA), partial=parts, decay=False)
    return own


def with_quantization(config: Config) -> Config:
    """The settings with the kinds of layers that --quantization implies. Patterns of --linear come after it, and those of
    --sparsity, which are added.
    """
    model = config.model
    skip = skipped_layers(model.quantization_skip)
    linear = implied_linear(model.linear, KIND, model.quantization_layers, skip)
    return config.derive("--quantization", linear=linear, quantization_skip=",".join(skip) or None)


def implied_linear(
    given: Optional[str], kind: str, layers: Optional[str], skip: Sequence[str], added: bool = False
) -> str:
    """The value of --linear with layers of a kind, before the patterns of `given`, which may have them already.

    added: to the kinds of patterns before them

    >>> implied_linear("*.up=lora", "sparse", "*.mlp.*", ["blocks.0.*"])
    '*.mlp.*=sparse,blocks.0.*=plain,*.up=lora'
    >>> implied_linear("*.mlp.*=sparse,blocks.0.*=plain", "sparse", "*.mlp.*", ["blocks.0.*"], added=True)
    '*.mlp.*=+sparse,blocks.0.*=-sparse'
    """
    forms = [
        ",".join([*(f"{one}={word}" for one in _words(layers or "*")), *(f"{one}={without}" for one in skip)])
        for word, without in ((kind, "plain"), (f"+{kind}", f"-{kind}"))
    ]
    if f",{forms[added]}," in f",{given},":  # in the settings of a checkpoint
        return given
    other = f",{forms[not added]},"  # in those of a checkpoint that is trained further, with another kind
    rest = f",{given or ''},".replace(other, ",").strip(",")
    return ",".join(filter(None, [forms[added], rest]))


def skipped_layers(text: Optional[str], flag: str = "--quantization-skip") -> list[str]:
    """The patterns of a flag: names, or those that `tools.sensitivity` recommends in a .json file."""
    if text is None or not text.endswith(".json"):
        return _words(text or "")
    try:
        record = json.loads(Path(text).read_text(encoding="utf-8"))
        skip, harm = list(record["skip"]), str(record.get("format", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{flag} {text}: cannot be read: {getattr(error, 'strerror', None) or error}",
            do="give patterns of layers, such as blocks.0.*, or the file of python -m megatron.tools.sensitivity --output",
        ) from error
    fits = harm.startswith("--prune-ratio") == (flag == "--prune-skip") and not harm.startswith("--drop-layers")
    if harm and not fits:
        raise DataError(
            f"{flag} {text}: tools.sensitivity has measured other parts of the model, with "
            + (harm if harm.startswith("--") else f"--quantize {harm}"),
            do=f"measure with {'--prune-ratio' if flag == '--prune-skip' else '--quantize or --sparsity'}",
        )
    return skip


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()
