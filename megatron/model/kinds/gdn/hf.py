# SPDX-License-Identifier: Apache-2.0
"""Mapping between gated delta nets of Hugging Face's decoders and ours: entries of config.json, and tensors.

Our rows are in the order of key heads. Their files have those of queries, keys, values and gates in that order, too, and
those of write strengths and decays in another tensor; the channels of their convolution are all queries, all keys, all
values.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.model.hf_match import Match
from megatron.model.kinds.gdn.kind import DeltaSizes, settings_of
from megatron.settings.schema import Model

KIND = "qwen3_next"
LINEAR, FULL = "linear_attention", "full_attention"
SIZES = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def their_layers(kind: str, m: Model) -> dict[str, Any]:
    """The entries of config.json for the layers of a model; none in families without gated delta nets."""
    if kind != KIND:
        return {}
    types = [LINEAR if m.is_linear(n) else FULL for n in range(m.num_layers)]
    return dict(layer_types=types, **{name: getattr(m, name) for name in SIZES})


def our_layers(c: dict[str, Any]) -> dict[str, Any]:
    """Our settings for the layers of a config.json. Raises CheckpointError for those that we do not have."""
    layers, every = int(c["num_hidden_layers"]), int(c.get("full_attention_interval") or 4)
    types = c.get("layer_types") or [LINEAR if (n + 1) % every else FULL for n in range(layers)]
    if len(types) != layers or not {LINEAR, FULL}.issuperset(types):
        what = f"layer_types in config.json are {', '.join(map(str, types[:12]))}, of {layers} layers"
        raise CheckpointError(what, do=f"there are {LINEAR} and {FULL}, one for each layer")
    return settings_of([one == LINEAR for one in types]) | {name: int(c[name]) for name in SIZES}


def matches(kind: str, model: Model, ours: str, theirs: str, norm: Callable[[str, str], Match]) -> list[Match]:
    """The matches of a gated delta net. ours: `blocks.7.gdn.`; theirs: `model.layers.7.`"""
    sizes, theirs = DeltaSizes.of(model), f"{theirs}linear_attn."
    g, first = sizes.groups, sum(sizes.parts[:4])
    channels = [g * width for width in sizes.parts[:3]]  # of their convolution
    return [
        Match(
            f"{ours}in_proj.weight",
            (f"{theirs}in_proj_qkvz.weight", f"{theirs}in_proj_ba.weight"),
            lambda t: torch.cat([part.unflatten(0, (g, -1)) for part in t], 1),
            lambda x: [part.flatten(0, 1) for part in x.tensor_split([first], 1)],
        ),
        Match(
            f"{ours}conv_weight",
            (f"{theirs}conv1d.weight",),
            lambda t: torch.cat([part.squeeze(1).unflatten(0, (g, -1)) for part in t[0].split(channels)], 1),
            lambda x: [torch.cat([part.flatten(0, 1) for part in x.split(sizes.parts[:3], 1)]).unsqueeze(1)],
        ),
        *(
            Match(
                f"{ours}{name}", (f"{theirs}{name}",), lambda t: t[0].view(g, -1), lambda x: [x.flatten()], exact=True
            )
            for name in ("dt_bias", "A_log")
        ),
        Match(f"{ours}norm_weight", (f"{theirs}norm.weight",)),
        Match(f"{ours}out_proj.weight", (f"{theirs}out_proj.weight",)),
    ]
