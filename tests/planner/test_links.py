# SPDX-License-Identifier: Apache-2.0
"""Prices of collectives against the bytes that must cross each link, counted here from the ranks of each group."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of
from megatron.mpu.mesh import Mesh, ranks_along
from megatron.planner.cluster import Cluster, placements
from megatron.planner.device import find
from megatron.planner.layout import Job, Layout
from megatron.planner.speed import step
from megatron.planner.step_communication import _seconds
from megatron.planner.text import far
from megatron.planner.traffic import Transfer
from megatron.training.rules import resolve

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send")
H100 = find("H100")
EXACT = replace(H100, inner=100.0, outer=10.0, latency=0.0)  # bytes a second


def groups(ranks: int, stride: int, local: int, world: int) -> list[Counter]:
    """The ranks on each node of every group of the job."""
    blocks = range(0, world, ranks * stride)
    return [
        Counter((block + own + n * stride) // local for n in range(ranks)) for block in blocks for own in range(stride)
    ]


def least(op: str, size: float, group: Counter, device) -> float:
    """Seconds in which the bytes of one group can cross the links: what each node has to receive goes through the adapters
    of its own ranks, and what a rank has to receive comes over its links.
    """
    ranks, nodes = group.total(), len(group)
    if op in ("shift", "send"):
        return size / (device.outer if nodes > 1 else device.inner)
    if op == "all_to_all":  # of `size` bytes on a rank, each other rank gets an equal part
        inside = max(size * (own - 1) / ranks for own in group.values()) / device.inner
        outside = max(size * (ranks - own) / ranks for own in group.values()) / device.outer
        return max(inside, outside)
    # Partial sums of every node but one are sent once, and the sum is sent to every node but one
    if op == "all_reduce":
        if nodes == 1:
            return 2 * size * (ranks - 1) / ranks / device.inner
        return 2 * size * (nodes - 1) / (ranks * device.outer)
    if nodes == 1:
        return size * (ranks - 1) / ranks / device.inner
    return max(size * (ranks - own) / ranks / own for own in group.values()) / device.outer


def shapes(number: int) -> list[tuple[int, int, int, int]]:
    """(ranks, stride, ranks of a node, ranks of the job), made up; also ones that do not divide each other."""
    draw, found = random.Random(7), []
    while len(found) < number:
        ranks, stride, local = (
            draw.choice((2, 3, 4, 6, 8, 16, 32, 64)),
            draw.choice((1, 2, 3, 4, 8, 12)),
            draw.randint(1, 9),
        )
        found.append((ranks, stride, local, ranks * stride * draw.randint(1, 3)))
    return found


SIZES = [
    (tp, pp, dp, cp, zero, shard, ep, etp)
    for tp, pp, dp, cp in ((2, 2, 8, 1), (1, 3, 12, 1), (2, 1, 4, 2), (4, 2, 6, 1))
    for zero, shard in ((0, 1), (1, 1), (1, 2), (3, dp))
    for ep, etp in ((1, None), (2, 1), (4, 1), (2, 2), (4, 2))
    if dp % shard == 0
]


def test_groups_of_once_a_step_are_those_of_the_mesh():
    """Ranks and distance of each axis, as the mesh numbers them: experts are divided in another way than dense weights."""
    asked = SimpleNamespace(seconds=lambda op, size, calls, ranks, stride: (ranks, stride))
    differ = 0
    for tp, pp, dp, cp, zero, shard, ep, etp in SIZES:
        layout = Layout(tp, pp, dp, zero=zero, shard=shard * cp if zero else 1, cp=cp, ep=ep, etp=etp)
        if not layout.possible:
            continue
        parts = dict(pp=pp, replicate=dp // shard, shard=shard, cp=cp, tp=tp)
        mesh = Mesh(0, **parts, ep=ep, etp=etp, shard_over_cp=zero > 0, create_groups=False)
        copies, shards = (("replicate",), ("shard", "cp")) if zero else (("replicate", "cp"), ("shard",))
        groups = dict(replicate=ranks_along(parts, copies)[0], shard=ranks_along(parts, shards)[0])
        groups |= {axis: getattr(mesh, axis).ranks for axis in ("tp", "tied", "expert_replicate", "expert_shard")}
        groups |= dict(ep=mesh.ep.ranks, etp=mesh.etp.ranks)
        differ += groups["replicate"] != list(groups["expert_replicate"])
        for axis, ranks in groups.items():
            if len(ranks) > 1:
                found = _seconds(Transfer("", "all_reduce", axis, 8, 1), layout, asked)
                assert found == (len(ranks), ranks[1] - ranks[0]), (axis, layout)
    assert differ > 10


@pytest.mark.parametrize("op", OPS)
def test_no_collective_is_faster_than_its_links(op):
    for ranks, stride, local, world in shapes(120):
        for device, size in ((EXACT, 4096), (H100, 134_000_000)):
            took = Cluster(device, world, local).seconds(op, size, 1, ranks, stride)
            slowest = max(least(op, size, group, device) for group in groups(ranks, stride, local, world))
            assert took >= slowest * (1 - 1e-9), (ranks, stride, local, world)


def test_groups_lie_on_nodes_as_their_ranks_do():
    for ranks, stride, local, world in shapes(200):
        listed = {tuple(sorted(Counter(group.values()).items())) for group in groups(ranks, stride, local, world)}
        assert placements(ranks, stride, local, world) == listed, (ranks, stride, local, world)


@pytest.mark.parametrize("op", OPS)
def test_more_nodes_are_never_cheaper(op):
    for ranks in (2, 4, 8, 16, 64):
        for stride in (1, 2, 8):
            times = [
                Cluster(H100, 1024, local).seconds(op, 1 << 24, 3, ranks, stride) for local in (64, 16, 8, 4, 2, 1)
            ]
            assert times == sorted(times), (ranks, stride)


@pytest.mark.parametrize("op", OPS)
def test_prices_of_repeated_collectives_add_up(op):
    for ranks, stride, local, world in shapes(40):
        cluster = Cluster(H100, world, local)
        once = cluster.seconds(op, 1 << 22, 1, ranks, stride)
        assert cluster.seconds(op, 5 << 22, 5, ranks, stride) == pytest.approx(5 * once)


def test_an_exchange_over_two_nodes_and_one():
    """Of 16 equal parts a rank sends 7 inside its node and 8 to the other one, at 10 B/s; of 8 parts it sends 7 inside."""
    assert Cluster(EXACT, 16).seconds("all_to_all", 1600, 1, 16, 1) == 800 / 10
    assert Cluster(EXACT, 8).seconds("all_to_all", 1600, 1, 8, 1) == 1400 / 100
    # Two ranks a node: 1 of 4 parts stays inside, 2 leave.
    assert Cluster(EXACT, 16).seconds("all_to_all", 400, 1, 4, 4) == 200 / 10
    fast = replace(EXACT, outer=1000.0)  # then the links inside a node are the slower ones
    assert Cluster(fast, 16).seconds("all_to_all", 1600, 1, 16, 1) == 700 / 100


def test_a_large_exchange_takes_as_long_as_the_network():
    """134 MB of each of 64 ranks on 8 nodes: 56 of 64 parts leave the node, 117 MB at 38 GB/s: 3.1 ms."""
    took = Cluster(H100, 64).seconds("all_to_all", 134_217_728, 1, 64, 1)
    assert 117.4e6 / 38e9 < took < 1.15 * 117.4e6 / 37.8e9
    inside = Cluster(H100, 64).seconds("all_to_all", 134_217_728, 1, 8, 1)
    assert inside == pytest.approx(134_217_728 * 7 / 8 / 296e9 + 3 * 12e-6)


def test_tokens_that_are_sent_once_to_a_node():
    """DeepEP's exchange, against draws: each token has 8 of 32 experts on 16 ranks, 2 on each; a node has 8 ranks."""
    draw, inside, outside, tokens = random.Random(1), 0, 0, 4000
    for _ in range(tokens):
        ranks = {draw.randrange(16) for _ in range(8)}  # with repetition, as if there were many experts
        inside += len([rank for rank in ranks if 0 < rank < 8])
        outside += any(rank >= 8 for rank in ranks)
    own, other = Cluster(EXACT, 16, once=8)._exchanged(8 * 100, 8, 16, ((8, 2),))
    assert own == pytest.approx(100 * inside / tokens, rel=0.02)
    assert other == pytest.approx(100 * outside / tokens, rel=0.02)
    plain, deduplicated = (Cluster(EXACT, 64, once=k).seconds("all_to_all", 6400, 1, 64, 1) for k in (None, 8))
    assert deduplicated < plain and Cluster(EXACT, 8, once=8).seconds("all_to_all", 1600, 1, 8, 1) < 14


# ---- a step ----------------------------------------------------------------------------------------------------------

LINE = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --mock-data --vocab-size 50304 --swiglu "
    "--disable-bias-linear --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 1024 --bf16 --micro-batch-size 1 "
    "--global-batch-size 64 --train-iters 2 --lr 1e-4 --use-distributed-optimizer --attention-dropout 0"
)
EXCHANGED = 4096 * 8 * 2048 * 2  # bytes of a rank's tokens, once for each of their experts


def a_step(more: str, cluster: Cluster):
    config = resolve(parse_any(f"{LINE} {more}".split(), recipe=pretrain_gpt.recipe()), cluster.world_size)
    layout = Layout.of(config, cluster.world_size)
    return step(Job.of(config, facts_of(config, 50304), dp=layout.dp, device="cuda"), layout, cluster), layout


FULL = "--recompute-granularity full --recompute-method uniform"


@pytest.mark.parametrize("more, exchanges", [("", 4), (FULL, 6), (f"{FULL} --hidden-dropout 0", 5)])
@pytest.mark.parametrize("ep, local", [(8, 8), (8, 4), (32, 8)])
def test_a_step_has_all_exchanges_of_its_layers(ep, local, more, exchanges):
    """Tokens to experts and back, their gradients; and again the way there if a layer is recomputed, and the way back if a
    mask of dropout is computed after it. Weights go with the rows to experts. Numbers of rows are exchanged first, once.
    """
    cluster = Cluster(replace(H100, latency=0.0), 32, local)
    took, _ = a_step(f"--ep {ep} {more}", cluster)
    each = cluster.seconds("all_to_all", EXCHANGED, 1, ep, 1)
    counts = cluster.seconds("all_to_all", 8 * 64, 1, ep, 1)
    weights = cluster.seconds("all_to_all", 4 * 4096 * 8, 1, ep, 1) * (3 if more else 2)
    microbatches = 64 // 32
    assert took.parts["expert parallel"] == pytest.approx(microbatches * 4 * (exchanges * each + weights + counts))


def test_experts_inside_a_node_are_faster_than_over_several():
    took = [a_step(f"--ep {ep}", Cluster(H100, 64))[0] for ep in (8, 16, 32, 64)]
    exchanges = [one.parts["expert parallel"] for one in took]
    assert exchanges == sorted(exchanges) and [one.seconds for one in took] == sorted(one.seconds for one in took)
    # Of 64 parts 56 leave the node, in 4 x 4 exchanges.
    assert exchanges[-1] > 16 * EXCHANGED * 56 / 64 / 38e9 > 3 * exchanges[0]


@pytest.mark.parametrize(
    "more, said",
    [
        ("--ep 8", []),
        ("--ep 16", ["--expert-model-parallel-size 16 spans machines of 8 ranks"]),
        ("--tp 2 --ep 8 --expert-tensor-parallel-size 1", []),
        ("--tp 2 --ep 8 --expert-tensor-parallel-size 2", ["--expert-tensor-parallel-size 2 spans machines of 8"]),
    ],
)
def test_experts_beyond_a_node_are_warned_of(more, said):
    cluster = Cluster(H100, 64)
    told = far(a_step(more, cluster)[1], cluster)
    assert len(told) == len(said) and all(words in line for words, line in zip(said, told, strict=True))
