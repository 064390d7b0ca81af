# SPDX-License-Identifier: Apache-2.0
"""GPTs with experts whose forward and backward passes take turns, in many layouts, against the same runs without turns, and
against the plain loop of `test_expert_layouts.py`.
"""

import pytest
import torch

from megatron.mpu.forked import run_ranks
from tests.models.test_expert_layouts import (
    CP2,
    EP2,
    ETP1,
    ETP2,
    FAMILIES,
    FULL,
    INTERLEAVED,
    MODULES,
    PAD,
    PP2,
    SP,
    ZB,
    V,
    check,
    pretrain,
)

pytestmark = pytest.mark.sampled(10)

TURNS = "--overlap-moe-expert-parallel-comm"
ONE = f"{EP2} --micro-batch-size 1"
LAYOUTS = {  # stages with and without experts, and of different numbers of them
    # No auxiliary loss, whose gradient would gather a layer again.
    "ep2, zero3": (2, "plain", f"{ONE} --sharding-stage 3 --overlap-param-gather --overlap-grad-reduce"),
    "ep2, zero3, groups of recomputed layers": (
        4,
        "plain",
        f"{ONE} --sharding-stage 3 {FULL} --recompute-num-layers 2",
    ),
    # Both passes run the same layer, whose shared expert comes after the last exchange.
    "ep2, zero3, all layers recomputed together": (
        2,
        "gated",
        f"{ONE} --sharding-stage 3 {FULL} --recompute-num-layers 4",
    ),
    "ep2, capacity, padded": (2, "capacity", f"{EP2} {PAD}"),
    "ep2, fused accumulation, recomputed MLP": (2, "gated", f"{ONE} --gradient-accumulation-fusion {MODULES} mlp"),
    "tp2, ep over its ranks": (2, "plain", f"{SP} {ETP1} {ONE}"),
    "tp2 dp2, ep2 etp2, recomputed activations": (
        4,
        "gated",
        f"{SP} {ETP2} {ONE} {MODULES} mlp_act layernorm core_attn",
    ),
    "cp2, ep over its ranks": (2, "gated", f"{CP2} {ONE}"),
    "pp2 ep2": (4, "gated", f"{PP2} {ONE}"),
    "pp2 ep2, zb-h1, zero2": (4, "plain", f"{PP2} {EP2} {ZB} --sharding-stage 2"),
    "pp2 ep2, interleaved, zero3, recomputed": (4, "plain", f"{PP2} {ONE} {INTERLEAVED} --sharding-stage 3 {FULL}"),
    "pp2 ep2 in a V, zero3": (4, "gated", f"{PP2} {EP2} {V} --sharding-stage 3 --overlap-param-gather"),
    "pp2 ep2 in half a V": (4, "plain", f"{PP2} {ONE} --pipeline-schedule v-half"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_turns_change_no_bit(layout, tmp_path):
    """Only the order of the passes of a V is another one, in which a rank adds up the gradients of the tied table."""
    world, family, words = LAYOUTS[layout]
    found = []
    for turns in ("", TURNS):
        folder = tmp_path / turns
        run_ranks(world, pretrain, f"{FAMILIES[family].flags} {words} {turns} --save {folder}")
        found.append(check(folder, family))
    apart, together = found
    for name, values in apart.items():
        if " V" in layout:
            torch.testing.assert_close(together[name], values, rtol=0, atol=1e-6)
        else:
            assert torch.equal(together[name], values), name
