# SPDX-License-Identifier: Apache-2.0
"""Attention in Megatron-LM's checkpoints.

Queries, keys and values are stored [g, q + 2, d, h] since format version 2, which is our order, too; [3, heads, d, h] in
version 0, and [heads, d, 3, h] in version 1. With --attention-output-gate a group has its queries, their gates, key, value.
"""

import torch

from megatron.model.megatron_form import NORM, KindNames, MegatronForm, Names, RowOrder
from megatron.settings.schema import Model


def _names(model: Model, version: float) -> KindNames:
    modules = {
        "": Names("self_attention.core_attention."),  # softmax_offset
        "output": Names("self_attention.linear_proj.", legacy="self_attention.dense.", also=("attention.dense.",)),
        NORM: Names("input_layernorm.", fused="self_attention.linear_qkv.layer_norm_", also=("input_norm.",)),
        "qkv": Names(
            "self_attention.linear_qkv.", legacy="self_attention.query_key_value.", also=("attention.query_key_value.",)
        ),
        "q_norm": Names("self_attention.q_layernorm."),
        "k_norm": Names("self_attention.k_layernorm."),
    }
    if version >= 2:
        return KindNames(modules)
    old = RowOrder(_version_0 if version < 1 else _version_1)
    return KindNames(modules, {"qkv.weight": old, "qkv.bias": old})


def _version_0(lead: tuple[int, ...]) -> torch.Tensor:
    return _numbers(lead).transpose(0, 1).flatten()


def _version_1(lead: tuple[int, ...]) -> torch.Tensor:
    return _numbers(lead).transpose(1, 2).flatten()


def _numbers(lead: tuple[int, ...]) -> torch.Tensor:
    """[heads, 3, d]"""
    return torch.arange(torch.Size(lead).numel()).view(lead)


FORM = MegatronForm(_names, same=("attention_output_gate",), asked=lambda args: True)
