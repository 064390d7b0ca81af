# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint with weights from another library."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

from megatron.checkpoint.folder import Saver
from megatron.checkpoint.store import Piece
from megatron.convert.megatron_optimizer import compared_settings, position_of
from megatron.errors import CheckpointError
from megatron.mpu.placement import Placement
from megatron.settings import schema
from megatron.storage.new_folder import removed_after_error


class ModelImport(NamedTuple):
    """A model in files of another library.

    notices: messages for the user. shards: yields the content of each of our files, read on demand
    facts: of the run, if its optimizer state is among the shards (`megatron_pickle`)
    """

    model: schema.Model
    vocab_size: int  # without padding
    origin: str
    notices: list[str]
    shards: Callable[[], Iterator[list[Piece]]]
    facts: Optional[Mapping[str, Any]] = None


def check_complete(source: Path, wanted: Collection[str], shards: Iterable[list[Piece]]) -> Iterator[list[Piece]]:
    """The shards unchanged. Then raise CheckpointError if tensors of the model, or parts of them, are missing."""
    sizes: dict[str, tuple[int, ...]] = {}
    elements, experts = Counter(), defaultdict(set)
    for pieces in shards:
        for piece in pieces:
            sizes[piece.name] = piece.shape
            elements[piece.name] += piece.tensor.numel()
            experts[piece.name].add(piece.box.offset[0] if piece.shape else 0)
        yield pieces
    lines = sorted(set(wanted) - sizes.keys())
    for name, shape in sorted(sizes.items()):
        if elements[name] < math.prod(shape):
            numbers = sorted(set(range(shape[0])) - experts[name]) if ".experts." in name else []
            which = f"expert {', '.join(map(str, numbers[:8]))}" if numbers else ""
            lines.append(
                f"{name}: {which or f'{math.prod(shape) - elements[name]:,} of {math.prod(shape):,} elements'}"
            )
    if lines:
        raise CheckpointError(f"{source} lacks {len(lines)} tensors, or parts of them", "\n  ".join(lines[:8]))


def refuse_differences(differ: Sequence[str]) -> None:
    """Raise CheckpointError if a file that was just written is read back with these differences."""
    if differ:
        raise CheckpointError(
            f"what was written is read back as another model: {len(differ)} differences",
            ", ".join(differ[:8]),
            "nothing was written",
        )


def write_import(open_model: Callable[[], ModelImport], out: Path, state: dict[str, Any]) -> list[str]:
    """Write a model as a checkpoint; returns notices for the user. Without optimizer state its iteration is 0.

    state: the position of a run that has not begun, as saved. Raises SettingsError if `out` is not free, before it opens
    the model. Removes its output after an error.
    """
    with removed_after_error(out):
        found = open_model()
        model = found.model
        content = imported_state(model, found.vocab_size, state, found.origin)
        notices = list(found.notices)
        if found.facts is not None:
            notices.append(_continue_run(content, found.facts, state))
        with Saver(out) as saver:
            saver.write(content["state"]["iteration"], found.shards(), content)
    size = f"{model.num_layers} layers, hidden {model.hidden_size}, vocabulary {found.vocab_size}"
    how_on = "train on with --finetune" if found.facts is None else "resume the run with"
    return [f"{out}: {size}", *notices, f"{how_on} --load {out}"]


def _continue_run(content: dict[str, Any], facts: Mapping[str, Any], fresh: dict[str, Any]) -> str:
    """Make `content` the record of a run that goes on with its optimizer state; returns a notice for the user."""
    position, updates = position_of(facts, fresh)
    content["state"], content["optimizer_steps"] = position, updates
    content["config"] = dict(model=content["config"]["model"], **compared_settings(facts["args"]))
    return (
        f"weights and optimizer state of iteration {position['iteration']}, after {updates} updates and "
        f"{position['consumed_samples']} samples"
    )


def untrained_of(placements: Mapping[str, Placement]) -> dict[str, Any]:
    """The record of what an import does not train: its buffers, such as the counters of a router (name -> rule)."""
    return dict(
        frozen=[], buffers={name: placed.buffer.combine for name, placed in placements.items() if placed.buffer}
    )


def imported_state(
    model: schema.Model,
    vocab_size: int,
    position: dict[str, Any],
    origin: str,
    tokenizer: Optional[schema.TokenizerSettings] = None,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of state.json.

    position: of a run that has not begun (`run.State.record`); extra: the model's own groups of settings
    Derived sizes are written explicitly, as a training run does, because a resumed run compares them with its settings.
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


def without_kinds(config: dict[str, Any], own: Sequence[str]) -> dict[str, Any]:
    """The record of a run's settings, with these settings of kinds of linear layers as in an ordinary model."""
    plain = schema.Model(num_layers=1, hidden_size=1, num_attention_heads=1)
    copy = {name: dict(group) if isinstance(group, dict) else group for name, group in config.items()}
    copy["model"] |= {name: getattr(plain, name) for name in own}
    return copy
