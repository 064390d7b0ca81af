# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself when its weights come from another library."""

from dataclasses import asdict, replace
from typing import Any, Optional

from megatron.settings import schema


def imported_state(
    model: schema.Model,
    vocab_size: int,
    position: dict[str, Any],
    origin: str,
    tokenizer: Optional[schema.TokenizerSettings] = None,
) -> dict[str, Any]:
    """The content of state.json. position: of a run that has not begun (`run.State.record`).

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
        config=asdict(schema.from_record(record)),
        vocab_size=vocab_size,
        mesh={},
        origin=origin,
    )
