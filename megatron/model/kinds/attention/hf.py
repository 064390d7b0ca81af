# SPDX-License-Identifier: Apache-2.0
"""Mapping between the weights of attention in Hugging Face's decoders and ours (`gpt.hf_names`)."""

from collections.abc import Callable
from functools import partial

import torch

from megatron.model.hf_match import FUSED, Match, Tensors, linear_matches, module_of
from megatron.settings.schema import Model


def matches(kind: str, model: Model, ours: str, theirs: str, norm: Callable[[str, str], Match]) -> list[Match]:
    """The matches of a layer's attention. ours: `blocks.7.attention.`; theirs: `model.layers.7.`"""
    theirs = module_of(kind, theirs, "self_attn")
    g, q, d = model.query_groups, model.num_attention_heads // model.query_groups, model.head_dim
    sizes = [g * heads * d for heads in (q, 1, 1)]

    def joined(rest: tuple[int, ...], parts: Tensors) -> torch.Tensor:
        parts = parts[0].split(sizes) if kind in FUSED else parts
        if model.attention_output_gate:  # of each head its query, then its gate
            both = parts[0].reshape(g, q, 2, d, *rest)
            parts = [both[:, :, 0], both[:, :, 1], *parts[1:]]
        return torch.cat([part.reshape(g, -1, d, *rest) for part in parts], 1)

    def separate(rest: tuple[int, ...], x: torch.Tensor) -> Tensors:
        parts = list(x.split(model.qkv_parts, 1))
        if model.attention_output_gate:
            parts = [torch.stack(parts[:2], 2), *parts[2:]]
        parts = [part.reshape(-1, *rest) for part in parts]
        return [torch.cat(parts)] if kind in FUSED else parts

    names = ("qkv",) if kind in FUSED else tuple("qkv")
    kinds = {"weight": (model.hidden_size,), **({"bias": ()} if model.qkv_bias else {})}
    result = [
        Match(
            f"{ours}qkv.{what}",
            tuple(f"{theirs}{name}_proj.{what}" for name in names),
            partial(joined, rest),
            partial(separate, rest),
        )
        for what, rest in kinds.items()
    ]
    result += linear_matches(model, f"{ours}output", f"{theirs}o_proj")
    if model.softmax_type == "learnable":
        of_heads = lambda t: t[0].view(g, q)
        result.append(Match(f"{ours}softmax_offset", (f"{theirs}sinks",), of_heads, lambda x: [x.flatten()]))
    if model.qk_layernorm and model.qk_layernorm_across_heads:
        for name, heads in (("q_norm", q), ("k_norm", 1)):
            split = lambda t, heads=heads: t[0].view(g, heads, d)
            result.append(Match(f"{ours}{name}.weight", (f"{theirs}{name}.weight",), split, lambda x: [x.flatten()]))
    elif model.qk_layernorm:
        result += [norm(f"{ours}{name}", f"{theirs}{name}") for name in ("q_norm", "k_norm")]
    return result
