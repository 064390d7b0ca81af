# SPDX-License-Identifier: Apache-2.0
import hashlib
import math
import re
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import PeerLost, SettingsError
from megatron.mpu import initialize
from megatron.mpu.axis_sizes import expert_sizes
from megatron.mpu.initialize import join_job
from megatron.mpu.mesh import EXPERT_DP, Axis, Mesh, mesh_of, ranks_along
from megatron.pipeline.schedule import looped
from megatron.pipeline.wire import open_channels
from megatron.settings.schema import Kernels, Parallel

DOCUMENTED = dict(pp=4, dp=2, cp=1, tp=2)  # Megatron-LM's example of 16 GPUs


@pytest.mark.parametrize(
    "axis, groups",
    [
        ("tp", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]),
        ("dp", [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]),
        ("pp", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
    ],
)
def test_groups_of_the_documented_example(axis, groups):
    assert ranks_along(DOCUMENTED, [axis]) == groups


@given(st.lists(st.integers(1, 4), min_size=5, max_size=5), st.sets(st.sampled_from(["pp", "a", "b", "cp", "tp"])))
def test_groups_of_any_axes_divide_the_ranks(sizes, axes):
    sizes = dict(zip(("pp", "a", "b", "cp", "tp"), sizes, strict=True))
    groups = ranks_along(sizes, axes)
    assert sorted(rank for group in groups for rank in group) == list(range(math.prod(sizes.values())))
    assert {len(group) for group in groups} == {math.prod(sizes[axis] for axis in axes)}


def test_a_large_job_is_laid_out_in_one_process():
    mesh = Mesh(16383, tp=8, pp=16, replicate=16, shard=8, create_groups=False)
    assert mesh.world_size == 16384
    dense = dict(pp=15, replicate=15, shard=7, cp=0, tp=7, dp=127, dp_cp=127, world=16383, tied=1)
    experts = dict(ep=0, etp=7, ep_etp=7, expert_dp=127, expert_replicate=15, expert_shard=7, cp_inner=0, cp_outer=0)
    experts |= dict(ep_counts=0, ep_inner=0, ep_outer=0)
    assert mesh.coordinates == dense | experts
    assert mesh.pp.ranks[0] == 16383 - 15 * 1024


def test_axes_of_size_one_have_no_group():
    mesh = Mesh()
    axes = [axis for axis in vars(mesh).values() if isinstance(axis, Axis)]
    assert len(axes) > 10 and all(axis.size == 1 and axis.group is None for axis in axes)


def test_topology_names_every_group():
    text = Mesh(0, tp=2, pp=2, create_groups=False).topology()
    assert "world size 4 = pp 2 x replicate 1 x shard 1 x cp 1 x tp 2" in text
    assert " pp: [0,2] [1,3]" in text
    assert Mesh(0, tp=2, pp=4, create_groups=False).topology().endswith("tied embedding): [0,6] [1,7]")
    text = Mesh(0, tp=2, replicate=2, shard=2, create_groups=False).topology()
    assert "\nshard: [0,2] [1,3] [4,6] [5,7]\nreplicate: [0,4] [1,5] [2,6] [3,7]\n" in text


@pytest.mark.parametrize(
    "tp, pp, dp, digest",
    [(8, 16, 1, "8d764f742a5a01c8"), (8, 16, 16, "696ba81228f3579d"), (4, 8, 64, "7c67c46a0095c7d4")],
)
def test_tables_of_large_jobs(tp, pp, dp, digest):
    """`--print-topology` of 128 and 2,048 ranks: written down once, and equal to the place of each rank in its groups."""
    text = Mesh(0, tp=tp, pp=pp, replicate=dp, create_groups=False).topology()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
    for name, span, size in (("tp", 1, tp), ("dp", tp, dp), ("pp", tp * dp, pp)):
        line = next(line for line in text.splitlines() if line.startswith(f" {name}: "))
        groups = [[int(rank) for rank in group.split(",")] for group in re.findall(r"\[(.*?)\]", line)]
        assert len(groups) * size == tp * pp * dp and sorted(sum(groups, [])) == list(range(tp * pp * dp))
        assert all(group == list(range(group[0], group[0] + span * size, span)) for group in groups)
        assert all(group[0] // span % size == 0 for group in groups)


def test_first_and_last_stage_share_an_embedding():
    tied = [Mesh(rank, tp=2, pp=4, create_groups=False).tied for rank in range(8)]
    assert [axis.ranks for axis in tied] == [(0, 6), (1, 7), (2,), (3,), (4,), (5,), (0, 6), (1, 7)]
    assert [axis.rank for axis in tied] == [0, 0, 0, 0, 0, 0, 1, 1]


def by_megatron_core(order: str, sizes: dict[str, int], varied: str) -> list[list[int]]:
    """Groups as Megatron-Core defines them: axes of `order`, the fastest first ("tp-cp-ep-dp-pp"); a group is all ranks
    whose places differ on `varied` ("tp-ep") alone. Experts: sizes of their own, with cp 1, over the same ranks.
    """
    strides, stride = {}, 1
    for axis in order.split("-"):
        strides[axis], stride = stride, stride * sizes[axis]
    groups: dict[tuple, list[int]] = {}
    for rank in range(stride):
        place = {axis: rank // strides[axis] % sizes[axis] for axis in strides}
        groups.setdefault(tuple(at for axis, at in place.items() if axis not in varied.split("-")), []).append(rank)
    return sorted(groups.values())


def experts_by_megatron_core(world: int, pp: int, ep: int, etp: int, instances: int) -> dict[str, list[list[int]]]:
    """The experts' groups by the names of `Mesh`. instances: --num-distributed-optimizer-instances, each of which has
    consecutive ranks of expert data parallelism."""
    sizes = dict(tp=etp, cp=1, ep=ep, dp=world // pp // ep // etp, pp=pp)
    groups = lambda varied: by_megatron_core("tp-cp-ep-dp-pp", sizes, varied)
    found = dict(etp=groups("tp"), ep=groups("ep"), ep_etp=groups("tp-ep"), pp=groups("pp"), expert_dp=groups("dp"))
    part = sizes["dp"] // instances
    parts = [[ranks[at : at + part] for at in range(0, len(ranks), part)] for ranks in found["expert_dp"]]
    found["expert_shard"] = [ranks for each in parts for ranks in each]
    found["expert_replicate"] = [list(ranks) for each in parts for ranks in zip(*each, strict=True)]
    return {name: sorted(lists) for name, lists in found.items()}


def expert_groups(sizes: dict[str, int]) -> dict[str, list[list[int]]]:
    joined = dict(expert_dp=EXPERT_DP, ep_etp=("ep", "etp"))
    names = (*sizes, *joined)
    return {name: sorted(ranks_along(sizes, joined.get(name, (name,)))) for name in names}


def divisions(number: int, parts: int):
    """All ordered ways to write a number as a product of so many."""
    if parts == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        yield from ((first, *rest) for rest in divisions(number // first, parts - 1))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 16])
def test_groups_of_experts_are_megatron_cores(world):
    """Every layout of few ranks: equal where Megatron-Core has one, else the state of experts is divided no further."""
    seen = {"equal": 0, "no further": 0, "refused": 0}
    for pp, replicate, shard, cp, tp in divisions(world, 5):
        dense = dict(pp=pp, replicate=replicate, shard=shard, cp=cp, tp=tp)
        for ep, etp, _ in divisions(world // pp, 3):
            block, own = shard * cp * tp, ep * etp
            if block % own and own % block:
                seen["refused"] += 1
                with pytest.raises(SettingsError, match="one of the two has to divide the other") as refused:
                    expert_sizes(dense, ep, etp, shard_over_cp=True)
                assert f"--sharding-degree {shard} x" in refused.value.why
                continue
            instances = replicate if block % own == 0 else world // pp // own
            seen["equal" if instances == replicate else "no further"] += 1
            found = expert_groups(expert_sizes(dense, ep, etp, shard_over_cp=True))
            assert found == experts_by_megatron_core(world, pp, ep, etp, instances), (dense, ep, etp)
            copies = expert_sizes(dense | dict(replicate=replicate * shard, shard=1), ep, etp)
            assert copies["expert_shard"] == 1 and copies["expert_replicate"] == world // pp // own
    assert seen["equal"] and (world < 4 or seen["no further"]) and (world % 6 or seen["refused"])


LARGE = [
    (dict(tp=8, cp=2, pp=16, replicate=4, shard=16), 32, 1),
    (dict(tp=4, cp=1, pp=8, replicate=1, shard=512), 64, 2),
    (dict(tp=1, cp=4, pp=16, replicate=16, shard=16), 64, 1),
    (dict(tp=2, cp=8, pp=1, replicate=32, shard=32), 8, 4),
    (dict(tp=2, cp=2, pp=16, replicate=1, shard=256), 64, 1),  # ranks of tp, cp and dp
    (dict(tp=2, cp=1, pp=64, replicate=16, shard=8), 128, 1),  # more ranks than divide dense weights
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sizes, ep, etp", LARGE)
def test_groups_of_experts_on_16384_ranks(sizes, ep, etp):
    mesh = Mesh(11111, ep=ep, etp=etp, shard_over_cp=True, create_groups=False, **sizes)
    experts, block = mesh.expert_sizes, sizes["shard"] * sizes["cp"] * sizes["tp"]
    assert math.prod(experts.values()) == mesh.world_size == 16384
    found = expert_groups(experts)
    instances = experts["expert_replicate"] if ep * etp > block else sizes["replicate"]
    assert found == experts_by_megatron_core(16384, sizes["pp"], ep, etp, instances)
    assert found["pp"] == ranks_along(mesh.sizes, ["pp"])
    # All experts lie on consecutive ranks; ranks that divide their state divide that of dense weights together, too.
    assert all(ranks == list(range(ranks[0], ranks[0] + ep * etp)) for ranks in found["ep_etp"])
    assert all(len({rank // block for rank in ranks}) == 1 for ranks in found["expert_shard"])
    for name in ("ep", "etp", *EXPERT_DP, "expert_dp"):
        axis = getattr(mesh, name)
        assert list(axis.ranks) in found[name] and axis.ranks[axis.rank] == 11111


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sizes", [dict(tp=2, cp=2, pp=2, replicate=3), dict(tp=4, cp=2), dict(cp=3, replicate=2), {}])
def test_experts_that_nothing_divides_lie_as_dense_weights_do(sizes, sharded):
    """ep 1 and no etp: the same axes, whatever takes part in them."""
    for rank in range(math.prod(sizes.values())):
        mesh = Mesh(rank, shard_over_cp=sharded, create_groups=False, **sizes)
        for dense, experts in (
            ("tp", "etp"),
            ("dp_cp", "expert_dp"),
            *zip(("replicate", "shard"), EXPERT_DP, strict=True),
        ):
            assert getattr(mesh, dense).ranks == getattr(mesh, experts).ranks
        assert mesh.ep.ranks == (rank,) and not mesh.folded


def test_settings_and_experts_give_one_mesh():
    """`mesh_of`: ZeRO divides experts, its degree those within the ranks that it names; stage 0 divides none."""
    words = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)

    def sizes(ep, etp=None, **more):
        experts = dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
        return mesh_of(Parallel(**words, **experts, **more), 5, 32, create_groups=False).expert_sizes

    of = lambda replicate, shard, ep, etp: dict(pp=2, expert_replicate=replicate, expert_shard=shard, ep=ep, etp=etp)
    assert sizes(4) == of(2, 1, 4, 2)
    assert sizes(4, 1, sharding_stage=1) == of(1, 4, 4, 1)
    assert sizes(4, 1, sharding_stage=3, sharding_degree=4) == of(2, 2, 4, 1)
    assert sizes(8, 1, sharding_stage=3, sharding_degree=2) == of(2, 1, 8, 1)


@pytest.mark.parametrize("ep, etp", [(3, 1), (8, 2), (1, 3), (0, 1), (32, 1)])
def test_experts_that_do_not_divide_a_stage_are_refused(ep, etp):
    with pytest.raises(SettingsError) as refused:
        Mesh(0, tp=2, pp=2, replicate=4, ep=ep, etp=etp, create_groups=False)
    assert f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp}" in refused.value.what
    assert "8 ranks of a pipeline stage" in refused.value.what
    assert refused.value.why == "16 ranks, --pipeline-model-parallel-size 2"


def test_topology_of_experts():
    text = Mesh(0, tp=2, replicate=2, shard=2, ep=2, etp=1, create_groups=False).topology()
    assert text.split("\nexperts: ")[1].splitlines() == [
        "pp 1 x expert_replicate 2 x expert_shard 2 x ep 2 x etp 1",
        "etp: [0] [1] [2] [3] [4] [5] [6] [7]",
        " ep: [0,1] [2,3] [4,5] [6,7]",
        "expert_dp: [0,2,4,6] [1,3,5,7]",
        "expert_shard: [0,2] [1,3] [4,6] [5,7]",
        "expert_replicate: [0,4] [1,5] [2,6] [3,7]",
    ]


def test_every_group_gives_up_a_silent_rank_when_the_settings_say_so(run_ranks):
    """torch gives groups that are made later a timeout of their own, and not that of the first."""

    def body(rank):
        context = join_job(Parallel(tensor_model_parallel_size=2, distributed_timeout_minutes=7), Kernels(device="cpu"))
        channels = open_channels(context.mesh, looped(1))  # none: one stage
        groups = [context.mesh.tp.group, context.mesh.dp.group, *channels.values()]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]

    assert run_ranks(4, body) == [[420.0, 420.0]] * 4


def test_nccl_without_cuda_is_refused_before_the_ranks_meet(monkeypatch):
    """--device auto finds no CUDA: nobody waits for other ranks, which are not there at all."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match="nccl needs CUDA devices, and this run is on the CPU") as refused:
        join_job(Parallel(distributed_backend="nccl", distributed_timeout_minutes=0.001), Kernels())
    assert (refused.value.do, refused.value.code) == ("leave the flag out (gloo)", 3)


def test_a_rank_that_waits_for_others_says_so(monkeypatch, capfd):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    here = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(initialize, "PATIENCE", 0.2)
    with pytest.raises(PeerLost):
        join_job(Parallel(distributed_timeout_minutes=0.02), Kernels(device="cpu"))
    assert f"rank 0 is still waiting for some of ranks 1 to 3 at localhost:{port}" in capfd.readouterr().err
