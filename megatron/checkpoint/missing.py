# SPDX-License-Identifier: Apache-2.0
"""The error of a folder without checkpoints. Needs no torch, so that commands raise it before they look for a device."""

from megatron.checkpoint.backends import CheckpointPath, backend_of
from megatron.errors import CheckpointError, no_folder
from megatron.settings.from_checkpoint import megatron_format_problem, of_transformers
from megatron.storage import hub
from megatron.storage.urls import location

EXPORT = ("export.json", "config.json")  # a folder with one of these is an export, or a model of Hugging Face


def no_checkpoint(folder: CheckpointPath, do: str = "check the path") -> CheckpointError:
    """The error of a folder without checkpoints: what it holds instead, or what to do."""
    if problem := megatron_format_problem(folder):
        return CheckpointError(problem)
    if (folder / "config.json").exists():
        return of_transformers(folder)
    why = no_folder(folder)
    near = why and hub.hint(folder, "python -m megatron.tools.checkpoint from-hf hf://{} OUT")
    return CheckpointError(f"{folder} holds no checkpoint", why, near or do)


def refuse_no_model(folder: str) -> None:
    """Raise CheckpointError if a folder holds neither checkpoints, good or damaged, nor an export. Reads none of them."""
    place = location(folder)
    one = any((place / name).exists() for name in ("index.json", *EXPORT))
    if not one and not backend_of(place).checkpoints(place):
        raise no_checkpoint(place)
