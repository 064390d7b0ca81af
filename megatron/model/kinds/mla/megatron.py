# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention in Megatron-LM's checkpoints.

Their rotated channels are pairs of neighbours, and come after a head's others; ours are halves, and come first. Down
products are whole on each rank with Transformer Engine, and divided by rows without it. Rotation is that of --rope-type,
whatever --position-embedding-type says.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.model.kinds.mla.settings import LatentSettings
from megatron.model.megatron_form import NORM, KindNames, MegatronForm, Names, RowOrder, same_settings
from megatron.settings.schema import Model

SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
YARN = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
OF_YARN = dict(  # their names -> ours
    original_max_position_embeddings="yarn_original_max_position_embeddings",
    beta_fast="yarn_beta_fast",
    beta_slow="yarn_beta_slow",
)


def halves_of(pairs: int) -> torch.Tensor:
    """The place of each of their channels, pairs of neighbours, among ours: the first of all pairs, then the second.

    >>> halves_of(3).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    return torch.arange(2 * pairs).view(2, pairs).t().flatten()


def _names(model: Model, version: float) -> KindNames:
    no, ro, kv = model.qk_head_dim, model.qk_pos_emb_head_dim, model.kv_lora_rank
    of_head = torch.cat((ro + torch.arange(no), halves_of(ro // 2)))
    of_heads = RowOrder(lambda lead: (torch.arange(lead[0]).unsqueeze(1) * (no + ro) + of_head).flatten())
    of_latent = RowOrder(lambda lead: torch.cat((torch.arange(kv), kv + halves_of(ro // 2))))
    at = "self_attention."
    queries = {"q": Names(f"{at}linear_q_proj.")}
    if model.q_lora_rank is not None:
        queries = {
            "q_down": Names(f"{at}linear_q_down_proj."),
            "q_norm": Names(f"{at}q_layernorm.", fused=f"{at}linear_q_up_proj.layer_norm_"),
            "q_up": Names(f"{at}linear_q_up_proj."),
        }
    modules = {
        NORM: Names("input_layernorm."),
        "output": Names(f"{at}linear_proj."),
        **queries,
        "kv_down": Names(f"{at}linear_kv_down_proj."),
        "kv_norm": Names(f"{at}kv_layernorm.", fused=f"{at}linear_kv_up_proj.layer_norm_"),
        "kv_up": Names(f"{at}linear_kv_up_proj."),
    }
    rows = {"q.weight": of_heads, "q_up.weight": of_heads, "kv_down.weight": of_latent}
    return KindNames(modules, rows, divided=("q_down.weight", "kv_down.weight"))


def _ours(args: Mapping[str, Any], layers: int) -> dict[str, Any]:
    if args.get("position_embedding_type") not in ("rope", "none"):
        what = f"--position-embedding-type {args.get('position_embedding_type')}"
        raise CheckpointError(f"its attention is multi-latent, which rotates, and it has {what}, too")
    if args.get("mla_down_proj_fusion"):
        raise CheckpointError("its down products of queries and keys are one tensor (--mla-down-proj-fusion)")
    kind = args.get("rope_type") or "yarn"
    yarn = same_settings(YARN, args) | {ours: args[name] for name, ours in OF_YARN.items() if args.get(name)}
    usual = {name: getattr(LatentSettings, name) for name in SIZES}
    sizes = usual | same_settings(SIZES, args)
    return dict(
        sizes,
        multi_latent_attention=True,
        position_embedding_type="rope",
        rope_type=kind,
        group_query_attention=False,
        num_query_groups=None,
        **(yarn if kind == "yarn" else {}),
    )


def _theirs(model: Model) -> dict[str, Any]:
    if not model.multi_latent_attention:
        return {}
    named = {name: getattr(model, ours) for name, ours in OF_YARN.items()}
    own = {name: getattr(model, name) for name in (*SIZES, *YARN)}
    return dict(own, **named, multi_latent_attention=True, rope_type=model.rope_type)


FORM = MegatronForm(
    _names,
    other=("multi_latent_attention", *SIZES, *YARN, "rope_type", *OF_YARN.values()),
    asked=lambda args: bool(args.get("multi_latent_attention")),
    ours=_ours,
    theirs=_theirs,
    flags=True,
)
