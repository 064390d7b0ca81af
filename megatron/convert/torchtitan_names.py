# SPDX-License-Identifier: Apache-2.0
"""The names that torchtitan gives to the tensors of a Llama, and its order of the rows of queries and keys.

| Hugging Face                | torchtitan                                                                   |
|-----------------------------|------------------------------------------------------------------------------|
| model.embed_tokens          | tok_embeddings                                                               |
| q_proj, k_proj, v_proj      | attention.wq, .wk, .wv; since April 2026 attention.qkv_linear.wq, .wk, .wv   |
| o_proj                      | attention.wo                                                                 |
| gate_proj, up_proj, down_proj | feed_forward.w1, .w3, .w2                                                  |
| input_layernorm, post_attention_layernorm | attention_norm, ffn_norm                                       |
| lm_head                     | lm_head; until April 2026 output                                             |

torchtitan rotates channels 2i and 2i + 1 of a head, transformers and this suite i and i + d/2: the rows of wq and wk are in
another order. Its newer optimizers have one state for queries, keys and values, `wqkv` [g (q + 2) d, h], which its models
save as three tensors.

Legend: h hidden, g key-value groups, q queries per group, d channels per head.
"""

import re
from dataclasses import replace
from typing import NamedTuple, Optional

import torch

from megatron.convert.families import Family
from megatron.errors import SettingsError
from megatron.model.hf_match import Match, Tensors
from megatron.settings.schema import Model

TABLE = "tok_embeddings.weight"
FUSED = "attention.qkv_linear.wqkv.weight"
_OUTSIDE = {"model.embed_tokens.weight": TABLE, "model.norm.weight": "norm.weight"}
_OF_LAYER = dict(
    input_layernorm="attention_norm",
    post_attention_layernorm="ffn_norm",
    **{
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
)
_QKV = {"self_attn.q_proj": "wq", "self_attn.k_proj": "wk", "self_attn.v_proj": "wv"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


class TitanForm(NamedTuple):
    """The names of a version. attention: before wq. head: of the output layer. fused: the optimizer has `wqkv`"""

    attention: str
    head: str
    fused: bool


FORMS = {
    "torchtitan": TitanForm("attention.qkv_linear.", "lm_head", True),
    "torchtitan-0.2": TitanForm("attention.", "output", False),
}


def form_of(weights, state) -> Optional[TitanForm]:
    """The form of a checkpoint with tensors of these names; None if it is none of torchtitan's."""
    if TABLE not in weights:
        return None
    linear = any(f".{FORMS['torchtitan'].attention}" in name for name in weights)
    attention = FORMS["torchtitan" if linear else "torchtitan-0.2"].attention
    return TitanForm(attention, "lm_head" if linear or "lm_head.weight" in weights else "output", _is_fused(state))


def _is_fused(state) -> bool:
    return any(name.endswith(FUSED) for name in state)


def in_torchtitan(family: Family, form: TitanForm) -> Family:
    """A family with torchtitan's names. Raises SettingsError for a model that is no Llama."""
    if family.kind != "llama":
        raise SettingsError(
            f"a {family.kind} in torchtitan's names is not converted",
            do="there is Llama; or convert with Hugging Face's",
        )
    model = family.facts.settings
    name = lambda theirs: _name(theirs, form)
    return replace(
        family,
        matches=[_renamed(match, model, form) for match in family.matches],
        table=name(family.table),
        head=name(family.head),
        copies={name(copy): name(original) for copy, original in family.copies.items()},
        constants=re.compile(r"(freqs_cis|rope\.cache)"),
    )


def of_optimizer(matches: list[Match], model: Model, form: TitanForm) -> list[Match]:
    """The matches of an optimizer's state: with `wqkv`, if it is one parameter."""
    return [_fused(match, model, form) if form.fused and len(match.theirs) == 3 else match for match in matches]


def _name(theirs: str, form: TitanForm) -> str:
    """torchtitan's name of a tensor of Hugging Face.

    >>> _name("model.layers.3.self_attn.k_proj.weight", FORMS["torchtitan"])
    'layers.3.attention.qkv_linear.wk.weight'
    """
    if theirs == "lm_head.weight":
        return f"{form.head}.weight"
    if theirs in _OUTSIDE:
        return _OUTSIDE[theirs]
    found = _LAYER.fullmatch(theirs)
    module = found and (_OF_LAYER.get(found[2]) or (found[2] in _QKV and form.attention + _QKV[found[2]]))
    if not module:
        raise SettingsError(f"torchtitan's Llama has no {theirs}", do="a model without biases is converted")
    return f"layers.{found[1]}.{module}.weight"


def _renamed(match: Match, model: Model, form: TitanForm) -> Match:
    heads = [_rotated_heads(theirs, model) for theirs in match.theirs]
    return match._replace(
        theirs=tuple(_name(theirs, form) for theirs in match.theirs),
        to_ours=lambda own: match.to_ours([_halves(x, n) if n else x for x, n in zip(own, heads)]),
        to_theirs=lambda ours: [_pairs(x, n) if n else x for x, n in zip(match.to_theirs(ours), heads)],
    )


def _rotated_heads(theirs: str, model: Model) -> int:
    """The number of heads whose channels are rotated in the rows of a tensor; 0: none."""
    return model.num_attention_heads if ".q_proj." in theirs else model.query_groups if ".k_proj." in theirs else 0


def _halves(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from torchtitan's order, (0, 1) rotated together, to ours, (0, d/2).

    >>> _halves(torch.arange(8).view(8, 1), 2).flatten().tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _pairs(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `_halves`."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _fused(match: Match, model: Model, form: TitanForm) -> Match:
    """A match of wq, wk and wv as one of wqkv, in which each group has its queries, its key and its value."""
    g, h = model.query_groups, model.hidden_size
    q = model.num_attention_heads // g

    def split(own: Tensors) -> Tensors:
        x = own[0].view(g, q + 2, -1, h)
        return [part.reshape(-1, h) for part in x.split([q, 1, 1], dim=1)]

    def joined(parts: Tensors) -> Tensors:
        return [torch.cat([part.view(g, -1, model.head_dim, h) for part in parts], dim=1).reshape(-1, h)]

    return match._replace(
        theirs=(match.theirs[0].replace(f"{form.attention}wq.weight", FUSED),),
        to_ours=lambda own: match.to_ours(split(own)),
        to_theirs=lambda ours: joined(match.to_theirs(ours)),
    )
