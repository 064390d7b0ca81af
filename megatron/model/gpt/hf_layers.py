# SPDX-License-Identifier: Apache-2.0
"""Which layers of Hugging Face's decoders have windows, and rotate: entries of config.json, and our settings."""

from typing import Any

from megatron.errors import CheckpointError
from megatron.model.gpt.hf_rope import refuse
from megatron.settings.groups.model import Model

FULL, SLIDING = "full_attention", "sliding_attention"


def their_window(m: Model) -> int | None:
    """Their window includes a token's own key."""
    return None if m.window is None else m.window + 1


def their_rotation(kind: str, m: Model) -> dict[str, Any]:
    """The layers of a SmolLM3 that rotate."""
    rotated = [int(m.rotates(n)) for n in range(m.num_layers)]
    return dict(no_rope_layers=rotated, use_sliding_window=False) if kind == "smollm3" else {}


def layer_types(m: Model) -> list[str]:
    return [FULL if m.window_of(n) is None else SLIDING for n in range(m.num_layers)]


def two_ropes(c: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json with the rope_parameters of layers without a window, our settings for those with one), of a Gemma 3."""
    both = c.get("rope_parameters") or {}
    whole = dict(both.get(FULL) or {}) | (c.get("rope_scaling") or {})
    local = dict(both.get(SLIDING) or {})
    c = c | dict(rope_scaling=None, rope_parameters=whole)
    whole.setdefault("rope_theta", c["rope_theta"])
    refuse(whole, rope_type=("default", "linear", None))
    local.setdefault("rope_theta", c["rope_local_base_freq"])
    if local == whole:
        return c, {}
    refuse(local, rope_type=("default", None))
    return c, dict(rope_local_base_freq=float(local["rope_theta"]))


def our_rotation(c: dict[str, Any]) -> str | None:
    """--no-rope-freq of a SmolLM3, whose lists have a 1 for each layer that rotates."""
    refuse(c, use_sliding_window=(False, None))
    layers, every = int(c["num_hidden_layers"]), int(c.get("no_rope_layer_interval") or 4)
    rotated = c.get("no_rope_layers")
    rotated = [int((n + 1) % every != 0) for n in range(layers)] if rotated is None else list(map(int, rotated))
    if len(rotated) != layers:
        what = f"no_rope_layers in config.json is for {len(rotated)} layers, and num_hidden_layers is {layers}"
        raise CheckpointError(what, do="get the whole file of the model")
    return None if all(rotated) else str([1 - one for one in rotated]).replace(" ", "")


def our_windows(kind: str, c: dict[str, Any]) -> dict[str, Any]:
    """--window-size and --window-attn-skip-freq: their window includes a token's own key."""
    window, layers = c.get("sliding_window"), int(c["num_hidden_layers"])
    if window is None or not c.get("use_sliding_window", True):
        return {}
    if int(window) < 1:
        what = f"sliding_window {window!r} in config.json cannot be expressed here"
        raise CheckpointError(what, do="give a number from 1, or null for no window")
    size = dict(window_size=f"{int(window) - 1},0")
    types = None if kind in ("mistral", "mixtral", "phi3", "qwen3_moe") else c.get("layer_types")
    if types is None:
        every = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": c.get("sliding_window_pattern") or 6}.get(kind)
        if every:
            if int(every) < 2:
                _refuse_windows(f"by sliding_window_pattern {every}")
            return size | (dict(window_attn_skip_freq=int(every)) if int(every) <= layers else {})
        first = 0 if kind == "qwen3_moe" else int(c.get("max_window_layers") or 0)  # Qwen has windows from a layer on
        if first >= layers:
            return {}
        if first > 0:
            _refuse_windows(f"from layer {first} on")
        return size
    if SLIDING not in types:
        return {}
    skip = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if len(types) != layers or types != [SLIDING if (n + 1) % skip else FULL for n in range(layers)]:
        _refuse_windows(f"in layers of {', '.join(map(str, types[:12]))}")
    return size | (dict(window_attn_skip_freq=skip) if FULL in types else {})


def _refuse_windows(where: str) -> None:
    raise CheckpointError(
        f"windows {where} (layer_types in config.json) cannot be expressed here",
        None,
        "there are windows in every layer, and in all but each N-th",
    )
