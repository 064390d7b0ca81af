# SPDX-License-Identifier: Apache-2.0
"""Names of a GPT's tensors in Megatron-LM's checkpoints, in both directions.

Those of experts in classic checkpoints, `mlp.experts.linear_fc1.weight3`, are in `megatron_experts`.
"""

import re
from typing import Literal, NamedTuple, Optional

from megatron.convert import megatron_experts
from megatron.errors import CheckpointError

Implementation = Literal["transformer_engine", "local", "legacy"]  # of Megatron-LM: decides the names of tensors


class Names(NamedTuple):
    """Their names of a module's tensors, up to `weight` or `bias`; empty: as in Megatron-Core.

    core: of Megatron-Core. fused: with Transformer Engine, where norms are part of the linear layers after them
    legacy: with --use-legacy-models. also: further names that are read
    """

    core: str
    fused: str = ""
    legacy: str = ""
    also: tuple[str, ...] = ()

    def of(self, implementation: Implementation) -> str:
        own = dict(transformer_engine=self.fused, local="", legacy=self.legacy)[implementation]
        return own or self.core


SINKS = "attention.softmax_offset"
EXPERTS = "mlp.experts"
IN_LAYER = {  # our modules of a layer, in the order of Megatron-Core's with Transformer Engine
    "attention": Names("self_attention.core_attention."),  # softmax_offset
    "attention.output": Names(
        "self_attention.linear_proj.", legacy="self_attention.dense.", also=("attention.dense.",)
    ),
    "attention_norm": Names("input_layernorm.", fused="self_attention.linear_qkv.layer_norm_", also=("input_norm.",)),
    "attention.qkv": Names(
        "self_attention.linear_qkv.", legacy="self_attention.query_key_value.", also=("attention.query_key_value.",)
    ),
    "attention.q_norm": Names("self_attention.q_layernorm."),
    "attention.k_norm": Names("self_attention.k_layernorm."),
    "mlp_norm": Names(
        "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", "post_attention_layernorm.", ("post_attention_norm.",)
    ),
    "mlp.up": Names("mlp.linear_fc1.", legacy="mlp.dense_h_to_4h."),
    "mlp.down": Names("mlp.linear_fc2.", legacy="mlp.dense_4h_to_h."),
    "mlp.router": Names("mlp.router."),
    "mlp.experts.up": Names("mlp.experts.experts.linear_fc1."),  # of distributed checkpoints: [E, 2 f, h]
    "mlp.experts.down": Names("mlp.experts.experts.linear_fc2."),
    "mlp.shared_gate": Names("mlp.shared_experts.gate_"),
    "mlp.shared.up": Names("mlp.shared_experts.linear_fc1."),
    "mlp.shared.down": Names("mlp.shared_experts.linear_fc2."),
}
OUTSIDE = {
    "embedding.word": Names("embedding.word_embeddings."),
    "embedding.position": Names("embedding.position_embeddings."),
    "final_norm": Names(
        "decoder.final_layernorm.",
        legacy="encoder.final_layernorm.",
        also=("transformer.final_layernorm.", "decoder.final_norm.", "encoder.final_norm.", "transformer.final_norm."),
    ),
    "output": Names("output_layer."),
}
_KINDS = ("softmax_offset", "expert_bias", "weight", "bias")
_LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.+)")
_NO_WEIGHTS = re.compile(r".*(_extra_state|inv_freq|local_tokens_per_expert)|word_embeddings(_for_head)?\.weight")


def _ours_of(table: dict[str, Names]) -> dict[str, str]:
    """Each of their names in a table -> our module."""
    return {name: module for module, (*names, also) in table.items() for name in (*names, *also) if name}


_OURS_IN_LAYER, _OURS_OUTSIDE = _ours_of(IN_LAYER), _ours_of(OUTSIDE)


def our_name(theirs: str) -> Optional[tuple[Optional[int], str]]:
    """(layer within its chunk, our name after `blocks.N.`), or (None, our name); None for tensors that are not weights.
    The name of an expert's tensor ends with its number on the rank: `mlp.experts.up.weight@3`.

    >>> our_name("decoder.layers.2.self_attention.linear_qkv.layer_norm_weight")
    (2, 'attention_norm.weight')
    """
    name = theirs
    for prefix in ("module.", "language_model."):
        name = name.removeprefix(prefix)
    if _NO_WEIGHTS.fullmatch(name):
        return None
    match = _LAYER.fullmatch(name)
    layer, rest = (int(match[1]), match[2]) if match else (None, name)
    if match and (expert := megatron_experts.our_expert(rest)):
        return layer, "@".join(map(str, expert))
    kind = next((kind for kind in _KINDS if rest.endswith(kind)), "")
    module = (_OURS_IN_LAYER if match else _OURS_OUTSIDE).get(rest.removesuffix(kind))
    if not kind or module is None:
        raise CheckpointError(f"tensor {theirs} is not known")
    return layer, f"{module}.{kind}"


def their_name(ours: str, layer: Optional[int], implementation: Implementation, mixture: bool = False) -> str:
    """Their name of a tensor. ours: as `our_name` returns it. layer: within its chunk, or None

    mixture: the layer has experts, whose router reads the norm, too: it is a module of its own

    >>> their_name("mlp.up.weight", 2, "legacy")
    'encoder.layers.2.mlp.dense_h_to_4h.weight'
    """
    module, _, kind = ours.rpartition(".")
    if layer is None:
        return OUTSIDE[module].of(implementation) + kind
    stack = "encoder" if implementation == "legacy" else "decoder"
    apart = module == "mlp_norm" and mixture
    return f"{stack}.layers.{layer}.{IN_LAYER[module].of('local' if apart else implementation)}{kind}"
