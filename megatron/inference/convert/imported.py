# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose weights come from another library: what it says of itself, and how it is written."""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

from megatron.checkpoint.folder import Saver
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError, SettingsError
from megatron.settings import schema


class ModelImport(NamedTuple):
    """A model in files of another program.

    notices: what the user should hear. shards: what becomes each of our files, read when its turn comes
    """

    model: schema.Model
    vocab_size: int  # without padding
    origin: str
    notices: list[str]
    shards: Callable[[], Iterator[list[Piece]]]


def check_free(out: Path) -> None:
    """Raise SettingsError where something is in `out` already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingsError(f"{out} is there already", do="give a new folder")


def check_complete(source: Path, wanted: Collection[str], seen: set[str]) -> None:
    """Raise CheckpointError when a tensor of the model was not there at all."""
    missing = sorted(set(wanted) - seen)
    if missing:
        raise CheckpointError(f"{source} lacks {len(missing)} tensors", ", ".join(missing[:8]))


def write_import(open_model: Callable[[], ModelImport], out: Path, state: dict[str, Any]) -> list[str]:
    """Write a model as a folder of checkpoints with one of iteration 0; returns what the user should hear.

    state: what a run saves of its position. Raises SettingsError before it opens the model where something is in `out`
    already. Nothing is left behind at a failure.
    """
    check_free(out)
    found = open_model()
    model, new = found.model, not out.exists()
    content = imported_state(model, found.vocab_size, state, found.origin)
    try:
        with Saver(out) as saver:
            saver.write(0, found.shards(), content)
    except BaseException:
        if new:
            shutil.rmtree(out, ignore_errors=True)
        raise
    size = f"{model.num_layers} layers, hidden {model.hidden_size}, vocabulary {found.vocab_size}"
    return [f"{out}: {size}", *found.notices]


def imported_state(
    model: schema.Model,
    vocab_size: int,
    position: dict[str, Any],
    origin: str,
    tokenizer: Optional[schema.TokenizerSettings] = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of state.json. position: of a run that has not begun (`run.State.record`). extra: groups of settings of
    the model's own.

    Sizes that follow from others are spelled out, as a training run does before it saves: they are compared with the
    settings of the run that goes on.
    """
    model = replace(
        model,
        ffn_hidden_size=model.ffn_size,
        kv_channels=model.head_dim,
        num_query_groups=model.query_groups,
        max_position_embeddings=model.position_table,
    )
    record = dict(model=asdict(model), tokenizer=asdict(tokenizer or schema.TokenizerSettings()))
    return dict(
        state=position,
        optimizer_steps=None,
        config=asdict(replace(schema.from_record(record), extra=dict(extra))),
        vocab_size=vocab_size,
        mesh={},
        origin=origin,
    )
