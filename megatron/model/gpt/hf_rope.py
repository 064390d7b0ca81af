# SPDX-License-Identifier: Apache-2.0
"""Mapping between `rope_parameters` in config.json of Hugging Face and our settings of rotary positions."""

import math
from typing import Any

from megatron.errors import CheckpointError
from megatron.settings.schema import Model


def refuse(theirs: dict[str, Any], **allowed) -> None:
    """Raise CheckpointError if an entry of config.json has a value that changes the arithmetic."""
    for name, values in allowed.items():
        if name in theirs and theirs[name] not in values:
            raise CheckpointError(
                f"{name} {theirs[name]!r} in config.json cannot be expressed here",
                f"known: {', '.join(map(repr, values))}",
            )


def their_rope(m: Model) -> dict[str, Any]:
    """The scaling of rotary frequencies, as entries of `rope_parameters`."""
    if m.rotary_seq_len_interpolation_factor is not None:
        return dict(rope_type="linear", factor=m.rotary_seq_len_interpolation_factor)
    if m.use_rope_scaling:
        return dict(
            rope_type="llama3",
            factor=m.rope_scaling_factor,
            low_freq_factor=m.rope_scaling_low_freq_factor,
            high_freq_factor=m.rope_scaling_high_freq_factor,
            original_max_position_embeddings=m.rope_scaling_original_max_position_embeddings,
        )
    if m.rope_type == "yarn":
        return dict(
            rope_type="yarn",
            factor=m.rotary_scaling_factor,
            beta_fast=m.yarn_beta_fast,
            beta_slow=m.yarn_beta_slow,
            truncate=m.yarn_correction_range_round_to_int,
            attention_factor=m.yarn_stretch,
            original_max_position_embeddings=m.yarn_original_max_position_embeddings,
        )
    return dict(rope_type="default")


def our_rope(c: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Our settings from `rope_parameters`, or from `rope_scaling` of older files."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    known = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            *("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
            "original_max_position_embeddings",
        ),
    }
    refuse(dict(rope_type=kind), rope_type=tuple(known))
    common = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    other = sorted(set(rope) - set(known[kind]) - set(common)) if kind != "default" else []
    if other:
        raise CheckpointError(
            f"{', '.join(other)} in the rope_parameters of config.json cannot be expressed here",
            f"known of {kind}: {', '.join(known[kind])}",
        )
    if kind == "default":
        return {}
    name = "original_max_position_embeddings"
    # In this order, as transformers reads them.
    original = c.get(name) or rope.get(name) or c["max_position_embeddings"]
    if kind == "linear":
        return dict(rotary_seq_len_interpolation_factor=float(rope["factor"]))
    if kind == "llama3":
        return dict(
            use_rope_scaling=True,
            rope_scaling_factor=float(rope["factor"]),
            rope_scaling_low_freq_factor=float(rope["low_freq_factor"]),
            rope_scaling_high_freq_factor=float(rope["high_freq_factor"]),
            rope_scaling_original_max_position_embeddings=int(original),
        )
    factor = float(rope.get("factor") or c["max_position_embeddings"] / original)
    return dict(
        rope_type="yarn",
        rotary_scaling_factor=factor,
        yarn_original_max_position_embeddings=int(original),
        yarn_beta_fast=float(rope.get("beta_fast") or 32),
        yarn_beta_slow=float(rope.get("beta_slow") or 1),
        yarn_correction_range_round_to_int=bool(rope.get("truncate", True)),
        **_our_stretch(rope, factor),
    )


def _our_stretch(rope: dict[str, Any], factor: float) -> dict[str, float]:
    """--mscale and --mscale-all-dim from their YaRN, which may give the resulting factor instead."""
    given, pair = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if given is None:
        return dict(mscale=float(pair[0]), mscale_all_dim=float(pair[1])) if all(pair) else {}
    if factor > 1:
        return dict(mscale=(float(given) - 1) / (0.1 * math.log(factor)))
    refuse(rope, attention_factor=(1, 1.0))
    return {}
