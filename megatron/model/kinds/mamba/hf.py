# SPDX-License-Identifier: Apache-2.0
"""Mapping between the weights of Mamba-2 in Hugging Face's models and ours (`gpt.hf_names`).

Theirs have whole parts after each other, ours group after group:

| ours                               | theirs                                                    |
|------------------------------------|-----------------------------------------------------------|
| in_proj [G, 2 r P + 2 N + r, h]    | in_proj [all gates, all x, all B, all C, all step sizes]  |
| conv_weight [G, r P + 2 N, W]      | conv1d [all x, all B, all C; 1; W]                        |
| A_log, dt_bias, D [G, r]           | [H], in fp32                                              |
"""

from collections.abc import Callable
from functools import partial

import torch

from megatron.model.hf_match import Match, Tensors, module_of
from megatron.model.kinds.mamba.kind import ScanSizes
from megatron.settings.schema import Model


def matches(kind: str, model: Model, ours: str, theirs: str, norm: Callable[[str, str], Match]) -> list[Match]:
    """The matches of a Mamba-2 layer. ours: `blocks.7.mamba.`; theirs: `backbone.layers.7.`"""
    theirs, sizes = module_of(kind, theirs, "mamba"), ScanSizes.of(model)
    mixed = sizes.parts[1:4]
    by_group, whole = partial(_by_group, sizes.groups), partial(_whole, sizes.parts)
    of_heads = lambda t: t[0].view(sizes.groups, -1)
    of_norm = Match(f"{ours}norm_weight", (f"{theirs}norm.weight",), of_heads, lambda x: [x.flatten()])
    return [
        Match(f"{ours}in_proj.weight", (f"{theirs}in_proj.weight",), partial(by_group, sizes.parts), whole),
        Match(
            f"{ours}conv_weight",
            (f"{theirs}conv1d.weight",),
            lambda t: by_group(mixed, [t[0].squeeze(1)]),
            lambda x: [_whole(mixed, x)[0].unsqueeze(1)],
        ),
        Match(f"{ours}conv_bias", (f"{theirs}conv1d.bias",), partial(by_group, mixed), partial(_whole, mixed)),
        *(
            Match(f"{ours}{name}", (f"{theirs}{name}",), of_heads, lambda x: [x.flatten()], exact=True)
            for name in ("dt_bias", "A_log", "D")
        ),
        *[of_norm] * model.mamba_rms_norm,
        Match(f"{ours}out_proj.weight", (f"{theirs}out_proj.weight",)),
    ]


def _by_group(groups: int, parts: tuple[int, ...], theirs: Tensors) -> torch.Tensor:
    """[sum of parts of all groups, ...] -> [groups, sum of parts, ...]."""
    whole = theirs[0].split([groups * part for part in parts])
    return torch.cat([part.unflatten(0, (groups, -1)) for part in whole], 1)


def _whole(parts: tuple[int, ...], ours: torch.Tensor) -> Tensors:
    return [torch.cat([part.flatten(0, 1) for part in ours.split(parts, 1)])]
