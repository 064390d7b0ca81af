# SPDX-License-Identifier: Apache-2.0
"""Which trained model a command uses: a checkpoint (--load) or an export (--load-exported). Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from megatron.errors import SettingsError, UsageError
from megatron.model.quantization import PLAIN, QuantizeOptions
from megatron.settings.statements import Statement, words_of

BATCH_INVARIANT = "--batch-invariant-mode"
SAME_BITS = (
    "log-probabilities with the bits that training in --batch-invariant-mode computes, in every batch and layout"
)
EXPORTED = "folder that tools.export wrote, or a model's folder of Hugging Face, in the place of --load"


def check_one_model(settings: Any, given: Mapping[str, Statement]) -> None:
    """Raise UsageError unless one model is given. given: setting -> its source"""
    if settings.load is None and settings.load_exported is None:
        folder = "--load FOLDER of checkpoints, or --load-exported FOLDER of tools.export"
        raise UsageError("missing: --load", do=folder)
    if settings.load is not None and settings.load_exported is not None:
        both = (words_of(given, name, getattr(settings, name)) for name in ("load", "load_exported"))
        raise UsageError(f"{' and '.join(both)}: one of them is the model", do="leave one out")
    if settings.load_exported is not None and settings.ckpt_step is not None:
        step = words_of(given, "ckpt_step", settings.ckpt_step)
        raise UsageError(f"{step}: an export has one step", do="leave it out")


def load_one_model(
    load: Optional[str],
    exported: Optional[str],
    *,
    step: Optional[int] = None,
    quantize: QuantizeOptions = PLAIN,
    batch_invariant: bool = False,
    **how,
):
    """The model that is given, as `inference.load.Loaded`. An export that is given as --load is one, too."""
    from megatron.convert.export.load_exported import is_export, load_exported
    from megatron.inference.load import load_model, quantized

    if exported is None and load is not None and not is_export(Path(load)):
        return load_model(load, step=step, quantize=quantize, batch_invariant=batch_invariant, **how)
    if batch_invariant:
        raise SettingsError(
            f"{BATCH_INVARIANT}: {exported or load} is an export, and says nothing of the training whose bits these are",
            do="give a checkpoint with --load, or leave it out",
        )
    return quantized(load_exported(exported or load, **how), quantize)
