# SPDX-License-Identifier: Apache-2.0
"""The sizes of a mesh's axes (mesh.py), from settings and the number of ranks. Needs neither torch nor numpy."""

import math
from typing import Optional

from megatron.errors import SettingsError


def sizes_of(parallel, world_size: int) -> dict[str, int]:
    """Sizes of the axes of dense weights for these settings (`schema.Parallel`) on `world_size` ranks."""
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    dp = world_size // (tp * pp * cp)
    shard = 1 if parallel.sharding_stage == 0 else parallel.sharding_degree or dp
    return dict(tp=tp, pp=pp, cp=cp, replicate=dp // shard, shard=shard)


def expert_sizes(
    sizes: dict[str, int], ep: int = 1, etp: Optional[int] = None, *, shard_over_cp: bool = False
) -> dict[str, int]:
    """Sizes of the expert axes on the ranks of `sizes`, slowest to fastest.

    etp: tensor parallel size of experts (default: tp, as in Megatron-LM)
    The state of experts is sharded inside the blocks of consecutive ranks that shard the state of dense weights: each
    block of shard x cp x tp ranks is expert_shard x ep x etp. If ep x etp fill or exceed a block, expert_shard is 1.
    So expert_replicate is at most `replicate` (Megatron-LM's --num-distributed-optimizer-instances).
    Raises SettingsError for sizes that do not divide the ranks.

    >>> expert_sizes(dict(pp=2, replicate=2, shard=8, cp=1, tp=2), ep=4, etp=1)
    {'pp': 2, 'expert_replicate': 2, 'expert_shard': 4, 'ep': 4, 'etp': 1}
    """
    etp = sizes["tp"] if etp is None else etp
    stage, block = math.prod(sizes.values()) // sizes["pp"], sizes["shard"] * sizes["cp"] * sizes["tp"]
    one_copy, sharded = ep * etp, sizes["shard"] > 1 or shard_over_cp
    flags = f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp}"
    if min(ep, etp) < 1 or stage % one_copy:
        raise SettingsError(
            f"{flags} does not divide the {stage} ranks of a pipeline stage",
            f"{stage * sizes['pp']} ranks, --pipeline-model-parallel-size {sizes['pp']}",
            f"choose a product that divides {stage}",
        )
    if sharded and block % one_copy and one_copy % block:
        raise SettingsError(
            f"{flags} = {one_copy}, and {block} ranks shard optimizer state: one of the two has to divide the other",
            f"--sharding-degree {sizes['shard']} x --context-parallel-size {sizes['cp']} x "
            f"--tensor-model-parallel-size {sizes['tp']} = {block}",
            "choose another --sharding-degree, or leave it out",
        )
    shard = max(1, block // one_copy) if sharded else 1
    return dict(pp=sizes["pp"], expert_replicate=stage // one_copy // shard, expert_shard=shard, ep=ep, etp=etp)


def ranks_together(ep: int, etp: int, local: int) -> int:
    """Of the ranks along ep, each of which has `etp` ranks, so many neighbours always share a node of `local` ranks.

    >>> ranks_together(64, 1, 8), ranks_together(4, 1, 8), ranks_together(16, 2, 8), ranks_together(6, 1, 4)
    (8, 4, 4, 2)
    """
    together = math.gcd(ep * etp, local)
    return together // etp if together % etp == 0 else 1


def ep_levels(parallel, local_size: int) -> Optional[tuple[int, int]]:
    """Ranks of ep on a node, and nodes, for the settings --moe-token-dispatcher-type flex; None: a row goes to each expert.

    local_size: ranks of a node, unless --moe-ranks-per-node says it
    """
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if parallel.moe_token_dispatcher_type != "flex" or ep == 1:
        return None
    local = parallel.moe_ranks_per_node or local_size
    inner = ranks_together(ep, etp or parallel.tensor_model_parallel_size, local)
    return inner, ep // inner


def ep_library(parallel) -> Optional[tuple[str, Optional[int]]]:
    """The library of --moe-flex-dispatcher-backend and its multiprocessors (None: its default); None: no library."""
    return None if parallel.expert_model_parallel_size == 1 else library_of(parallel)


def library_of(parallel) -> Optional[tuple[str, Optional[int]]]:
    """The same where ep is still to be chosen."""
    backend = parallel.moe_flex_dispatcher_backend
    return None if backend is None else (backend, getattr(parallel, f"moe_{backend}_num_sms"))


def lacking_ranks(stage: int, ep: int, etp: int) -> int:
    """The least factor by which a pipeline stage of `stage` ranks has to grow so that ep x etp divides it."""
    return ep * etp // math.gcd(ep * etp, stage)
