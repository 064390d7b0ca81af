# SPDX-License-Identifier: Apache-2.0
"""Mapping between the experts of Hugging Face's decoders and ours: entries of config.json, and tensors.

Our weights of a layer's experts are two tensors, [E, 2, f, h] and [E, h, f]. Their files have three matrices for each
expert, or in gpt-oss two tensors of all experts: [E, h, 2 f], with gate and values in turns, and [E, f, h].

Legend: E experts, f width of an expert, h hidden.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Optional

import torch

from megatron.errors import CheckpointError
from megatron.model.gpt.hf_rope import refuse
from megatron.model.hf_match import Match
from megatron.model.kinds.experts.weights import router
from megatron.settings.schema import Model

# The settings of experts that change what a model computes -> their values in a dense model.
DENSE: dict[str, Any] = dict(
    num_experts=None,
    moe_layer_freq="1",
    moe_shared_expert_intermediate_size=None,
    moe_shared_expert_gate=False,
    moe_latent_size=None,
    moe_router_load_balancing_type=None,
    moe_router_score_function="softmax",
    moe_router_pre_softmax=False,
    moe_router_num_groups=None,
    moe_router_group_topk=None,
    moe_router_group_score_topk=None,
    moe_router_topk_scaling_factor=None,
    moe_router_enable_expert_bias=False,
    moe_router_force_load_balancing=False,
    moe_expert_capacity_factor=None,
)


class ExpertWords(NamedTuple):
    """How a family names its experts.

    number, width: of experts, and inside one: entries of config.json
    part:          of a layer, before the names of experts and router
    matrices:      of an expert: gate, values, output; those without SwiGLU have no gate
    shared:        the expert that all tokens share, in a layer; None: it has none
    first_dense:   whether only the first layers may lack experts (first_k_dense_replace)
    """

    number: str
    width: str = "moe_intermediate_size"
    part: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: Optional[str] = None
    first_dense: bool = False


WORDS = {
    "mixtral": ExpertWords("num_local_experts", "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2")),
    "olmoe": ExpertWords("num_experts", "intermediate_size"),
    "qwen2_moe": ExpertWords("num_experts", shared="shared_expert"),
    "qwen3_moe": ExpertWords("num_experts"),
    "qwen3_next": ExpertWords("num_experts", shared="shared_expert"),
    "dots1": ExpertWords("n_routed_experts", shared="shared_experts", first_dense=True),
    "gpt_oss": ExpertWords("num_local_experts", "intermediate_size"),  # its tensors: `_fused_matches`
    "nemotron_h": ExpertWords("n_routed_experts", part="mixer", shared="shared_experts"),
    **dict.fromkeys(
        ("deepseek", "deepseek_v2", "deepseek_v3"),
        ExpertWords("n_routed_experts", shared="shared_experts", first_dense=True),
    ),
}


QWEN = ("qwen2_moe", "qwen3_moe", "qwen3_next")  # their words for the layers with experts
GATED = ("qwen2_moe", "qwen3_next")  # their shared expert has a gate
V3_ROUTERS = ("deepseek_v3", "nemotron_h")  # their routers are DeepSeek-V3's
ALWAYS_SHARED = ("dots1", *GATED, "deepseek_v2", *V3_ROUTERS)  # their layers with experts have a shared one


def effective_experts(m: Model) -> dict[str, Any]:
    """The values of the settings of `DENSE` in a model; those without an effect are those of a dense model."""
    if not m.mixture:
        return DENSE
    own = {name: getattr(m, name) for name in DENSE}
    kinds = [kind for kind, _ in m.balancing if kind == "sinkhorn"]  # others change only training
    one_group = m.moe_router_num_groups == m.moe_router_group_topk  # all groups are chosen
    sigmoid = m.moe_router_score_function == "sigmoid"
    return own | dict(
        moe_layer_freq="1" if len(m.expert_layers) == m.num_layers else m.moe_layer_freq,
        moe_router_load_balancing_type=" ".join(kinds) or None,
        moe_router_pre_softmax=m.moe_router_pre_softmax and not sigmoid,
        moe_router_num_groups=None if one_group else m.moe_router_num_groups,
        moe_router_group_topk=None if one_group else m.moe_router_group_topk,
        moe_router_group_score_topk=None if one_group or scored(m) == _usual_score(m) else scored(m),
        moe_router_topk_scaling_factor=None
        if m.moe_router_topk_scaling_factor == 1
        else m.moe_router_topk_scaling_factor,
    )


def _usual_score(m: Model) -> int:
    """The best experts of a group by whose scores it is chosen without --moe-router-group-score-topk."""
    return m.moe_router_topk // (m.moe_router_group_topk or 1)


def scored(m: Model) -> int:
    """The best experts of a group by whose scores it is chosen."""
    return m.moe_router_group_score_topk or _usual_score(m)


def against_experts(kind: str) -> Callable[[Model], dict[str, bool]]:
    """Reasons why a model is not of this family with experts -> whether they hold."""

    def reasons(m: Model) -> dict[str, bool]:
        if not m.mixture:
            return {"no --num-experts": kind not in V3_ROUTERS}  # whose layers may all be dense ones
        words, width, shared = WORDS[kind], m.expert_ffn_size, m.moe_shared_expert_intermediate_size
        sigmoid = kind in V3_ROUTERS
        groups, best = effective_experts(m)["moe_router_group_topk"], 1 if kind == "deepseek_v2" else 2
        dense_first = tuple(range(m.num_layers - len(m.expert_layers), m.num_layers))
        return {
            f"--moe-layer-freq {m.moe_layer_freq}": words.first_dense and m.expert_layers != dense_first,
            f"--moe-shared-expert-intermediate-size {shared}": words.first_dense and (shared or 0) % width != 0,
            f"--moe-router-group-topk {groups} of --moe-router-num-groups {m.moe_router_num_groups} by "
            f"--moe-router-group-score-topk {scored(m)}": bool(groups) and scored(m) != best,
            f"--kv-channels {m.head_dim}": kind == "olmoe" and m.head_dim * m.num_attention_heads != m.hidden_size,
            "no --activation-func-clamp-value": kind == "gpt_oss" and m.activation_func_clamp_value is None,
            "no --moe-shared-expert-intermediate-size": kind in ALWAYS_SHARED and not shared,
            "no --moe-router-pre-softmax": kind == "deepseek_v2" and not m.moe_router_pre_softmax,
            f"--moe-router-score-function {m.moe_router_score_function}": sigmoid
            and m.moe_router_score_function != "sigmoid",
            "no --moe-router-enable-expert-bias": sigmoid and not m.moe_router_enable_expert_bias,
            "--moe-router-topk 1": sigmoid and m.moe_router_topk == 1,  # which they divide by itself
        }

    return reasons


# ---- config.json -----------------------------------------------------------------------------------------------------


def their_experts(kind: str, m: Model) -> dict[str, Any]:
    """The entries of config.json for the experts of a model."""
    words = WORDS.get(kind)
    if words is None:
        return {}
    dense = m.num_layers - len(m.expert_layers)
    if not m.mixture:
        return dict(first_k_dense_replace=dense)
    theirs: dict[str, Any] = {
        words.number: m.num_experts,
        words.width: m.expert_ffn_size,
        "num_experts_per_tok": m.moe_router_topk,
    }
    if kind in ("olmoe", *QWEN, "deepseek"):
        theirs |= dict(norm_topk_prob=not m.moe_router_pre_softmax)
    if kind in QWEN:
        without = [n for n in range(m.num_layers) if not m.has_experts(n)]
        theirs |= dict(decoder_sparse_step=1, mlp_only_layers=without)
    if kind in GATED:
        theirs |= dict(shared_expert_intermediate_size=m.moe_shared_expert_intermediate_size)
    if words.first_dense:
        shared = (m.moe_shared_expert_intermediate_size or 0) // m.expert_ffn_size
        theirs |= dict(first_k_dense_replace=dense, n_shared_experts=shared or None)
        theirs |= dict(routed_scaling_factor=m.moe_router_topk_scaling_factor or 1.0)
    groups = dict(n_group=m.moe_router_num_groups or 1, topk_group=m.moe_router_group_topk or 1)
    if kind in ("dots1", "deepseek_v3"):
        theirs |= dict(norm_topk_prob=True, **groups)
    if kind == "deepseek_v2":
        method = "group_limited_greedy" if groups["n_group"] > 1 else "greedy"
        theirs |= dict(norm_topk_prob=False, topk_method=method, **groups)
    if kind == "deepseek":
        theirs |= dict(moe_layer_freq=1, scoring_func="softmax", auto_map=_DEEPSEEK)
    return theirs


_FILES = "deepseek-ai/deepseek-moe-16b-base--"  # their code; transformers has none for it
_DEEPSEEK = dict(
    AutoConfig=f"{_FILES}configuration_deepseek.DeepseekConfig",
    AutoModelForCausalLM=f"{_FILES}modeling_deepseek.DeepseekForCausalLM",
)


def our_experts(kind: str, c: dict[str, Any]) -> dict[str, Any]:
    """Our settings for the experts of a config.json. Raises CheckpointError for those that we do not have."""
    words = WORDS.get(kind)
    if words is None:
        return {}
    if words.first_dense and int(c.get("first_k_dense_replace") or 0) >= int(c["num_hidden_layers"]):
        return {}
    # transformers 5 writes the first
    number = int(c["num_local_experts"] if "num_local_experts" in c else c[words.number])
    width, k = int(c[words.width]), int(c["num_experts_per_tok"])
    if not 1 < number < 1 << 16 or not 0 < k <= number or width < 1:
        raise CheckpointError(f"config.json describes no experts: {number} of width {width}, {k} for each token")
    ours: dict[str, Any] = dict(num_experts=number, moe_ffn_hidden_size=width, moe_router_topk=k)
    ours |= dict(moe_layer_freq=pattern_of(_layers_with_experts(kind, c)))
    scaling = float(c.get("routed_scaling_factor") or 1.0)
    if scaling != 1:
        ours |= dict(moe_router_topk_scaling_factor=scaling)
    if kind == "olmoe":
        refuse(c, clip_qkv=(None,))
    if kind in ("olmoe", *QWEN, "deepseek"):
        ours |= dict(moe_router_pre_softmax=not c.get("norm_topk_prob"))
    if kind in GATED:
        refuse(c, use_sliding_window=(False, None), qkv_bias=(True, None))
        size = int(c["shared_expert_intermediate_size"])
        ours |= dict(moe_shared_expert_intermediate_size=size, moe_shared_expert_gate=True)
    if words.first_dense and c.get("n_shared_experts"):
        ours |= dict(moe_shared_expert_intermediate_size=width * int(c["n_shared_experts"]))
    if kind == "deepseek":
        refuse(c, scoring_func=("softmax", None))
    return ours | _choice(kind, c, number, k)


def mixer_experts(c: dict[str, Any]) -> dict[str, Any]:
    """Our settings for the experts of a Nemotron-H, whose layers its pattern lists."""
    number, k, width = int(c["n_routed_experts"]), int(c["num_experts_per_tok"]), int(c["moe_intermediate_size"])
    scaling, latent = float(c.get("routed_scaling_factor") or 1.0), c.get("moe_latent_size")
    return dict(
        num_experts=number,
        moe_ffn_hidden_size=width,
        moe_router_topk=k,
        moe_latent_size=latent and int(latent),
        moe_shared_expert_intermediate_size=int(c["moe_shared_expert_intermediate_size"]),
        moe_router_topk_scaling_factor=None if scaling == 1 else scaling,
        **_choice("nemotron_h", c, number, k),
    )


def their_mixer_experts(m: Model) -> dict[str, Any]:
    """The entries of config.json for the experts of a Nemotron-H."""
    if not m.mixture:
        return {}
    return dict(
        n_routed_experts=m.num_experts,
        moe_intermediate_size=m.expert_ffn_size,
        moe_latent_size=m.moe_latent_size,
        moe_shared_expert_intermediate_size=m.moe_shared_expert_intermediate_size,
        n_shared_experts=1,
        num_experts_per_tok=m.moe_router_topk,
        norm_topk_prob=True,
        routed_scaling_factor=m.moe_router_topk_scaling_factor or 1.0,
        n_group=m.moe_router_num_groups or 1,
        topk_group=m.moe_router_group_topk or 1,
    )


def _choice(kind: str, c: dict[str, Any], number: int, k: int) -> dict[str, Any]:
    """Our settings for how tokens choose experts in the families of DeepSeek-V2 and V3, and in Nemotron-H."""
    if kind == "deepseek_v2":
        ways = ("greedy", "group_limited_greedy")
        refuse(c, norm_topk_prob=(False, None), topk_method=ways, scoring_func=("softmax",))
        groups = _groups(c, number, k, best=1)
        groups = groups if c["topk_method"] == ways[1] else {}
        return dict(moe_router_pre_softmax=True, **groups)
    if kind not in ("dots1", *V3_ROUTERS):
        return {}
    refuse(c, norm_topk_prob=(True,))
    if kind != "nemotron_h":  # whose files do not say it
        refuse(c, topk_method=("noaux_tc",), scoring_func=("sigmoid",))
    if kind in V3_ROUTERS:
        refuse(dict(num_experts_per_tok=k), num_experts_per_tok=tuple(range(2, number + 1)))
    sigmoid = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    return sigmoid | _groups(c, number, k, best=2)


def _groups(c: dict[str, Any], number: int, k: int, best: int) -> dict[str, int]:
    """Our settings for groups of experts that are chosen by the sum of their best so many scores."""
    groups, chosen = int(c.get("n_group") or 1), int(c.get("topk_group") or 1)
    if groups == chosen:
        return {}
    if number % groups or number // groups < best or k > chosen * number // groups:
        raise CheckpointError(f"config.json has {groups} groups of {number} experts, {chosen} for {k} experts")
    score = {} if k % chosen == 0 and k // chosen == best else dict(moe_router_group_score_topk=best)
    return dict(moe_router_num_groups=groups, moe_router_group_topk=chosen, **score)


def _layers_with_experts(kind: str, c: dict[str, Any]) -> list[bool]:
    layers = range(int(c["num_hidden_layers"]))
    if kind in QWEN:
        step, without = int(c.get("decoder_sparse_step") or 1), c.get("mlp_only_layers") or []
        return [n not in without and (n + 1) % step == 0 for n in layers]
    if WORDS[kind].first_dense:
        step = int(c.get("moe_layer_freq") or 1)
        return [n >= int(c.get("first_k_dense_replace") or 0) and n % step == 0 for n in layers]
    return [True for _ in layers]


def pattern_of(layers: Sequence[bool]) -> str:
    """--moe-layer-freq for the layers that have experts.

    >>> pattern_of([False, True, True]), pattern_of([True, True])
    ('[0]*1+[1]*2', '1')
    """
    if all(layers):
        return "1"
    return "+".join(f"[{int(has)}]*{len(list(run))}" for has, run in groupby(layers))


# ---- tensors ---------------------------------------------------------------------------------------------------------


def matches(kind: str, m: Model, ours: str, theirs: str, norm: Callable[[str, str], Match]) -> list[Match]:
    """The matches of a layer's router and experts. ours: `blocks.7.mlp.`; theirs: `model.layers.7.`"""
    if kind == "gpt_oss":
        return _fused_matches(m, ours, f"{theirs}mlp.")
    words, e, shared = WORDS[kind], m.num_experts, bool(m.moe_shared_expert_intermediate_size)
    part = f"{theirs}{words.part}."
    names = lambda *which: tuple(f"{part}experts.{n}.{matrix}.weight" for n in range(e) for matrix in which)
    *inside, output = words.matrices if m.gated else words.matrices[1:]
    result = [
        Match(f"{ours}router.weight", (f"{part}gate.weight",)),
        *_counts(m, ours),
        Match(
            f"{ours}experts.up.weight",
            names(*inside),
            lambda t: torch.stack(t).unflatten(0, (e, 2)) if m.gated else torch.stack(t),
            lambda x: list(x.flatten(0, 1)) if m.gated else list(x),
        ),
        Match(f"{ours}experts.down.weight", names(output), torch.stack, list),
    ]
    if m.moe_router_enable_expert_bias:
        result.append(Match(f"{ours}router.expert_bias", (f"{part}gate.e_score_correction_bias",), exact=True))
    if shared:
        of = lambda *which: tuple(f"{part}{words.shared}.{matrix}.weight" for matrix in which)
        up = Match(f"{ours}shared.up.weight", of(*inside))
        result.append(up._replace(to_ours=torch.stack, to_theirs=list) if m.gated else up)
        result.append(Match(f"{ours}shared.down.weight", of(output)))
    if m.moe_latent_size:
        pairs = ("latent_down", "fc1_latent_proj"), ("latent_up", "fc2_latent_proj")
        result += [Match(f"{ours}{mine}.weight", (f"{part}{name}.weight",)) for mine, name in pairs]
    if m.moe_shared_expert_gate:
        result.append(Match(f"{ours}shared_gate.weight", (f"{part}shared_expert_gate.weight",)))
    return result


def _counts(m: Model, ours: str) -> list[Match]:
    """The loads of experts, which are counts of one step."""
    names = [name for name, placed in router(m).items() if placed.buffer and placed.buffer.combine == "sum"]
    zeros = lambda t: torch.zeros(m.num_experts, dtype=torch.int64)
    return [Match(f"{ours}router.{name}", (), zeros, lambda x: []) for name in names]


def _fused_matches(m: Model, ours: str, theirs: str) -> list[Match]:
    """The matches of gpt-oss, whose matrices are transposed: rows are inputs."""
    f = m.expert_ffn_size
    apart = lambda x: x.unflatten(1, (f, 2)).transpose(1, 2)  # [E, 2 f, ...] -> [E, 2, f, ...]
    in_turns = lambda x: x.transpose(1, 2).flatten(1, 2)
    experts = f"{theirs}experts."
    return [
        *(Match(f"{ours}router.{kind}", (f"{theirs}router.{kind}",)) for kind in ("weight", "bias")),
        *_counts(m, ours),
        Match(
            f"{ours}experts.up.weight",
            (f"{experts}gate_up_proj",),
            lambda t: apart(t[0].transpose(1, 2)),
            lambda x: [in_turns(x).transpose(1, 2)],
        ),
        Match(
            f"{ours}experts.up.bias", (f"{experts}gate_up_proj_bias",), lambda t: apart(t[0]), lambda x: [in_turns(x)]
        ),
        Match(
            f"{ours}experts.down.weight",
            (f"{experts}down_proj",),
            lambda t: t[0].transpose(1, 2),
            lambda x: [x.transpose(1, 2)],
        ),
        Match(f"{ours}experts.down.bias", (f"{experts}down_proj_bias",)),
    ]
