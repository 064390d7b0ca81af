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
from megatron.mpu.initialize import join_job
from megatron.mpu.mesh import Mesh, ranks_along
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
    assert mesh.coordinates == dict(
        pp=15, replicate=15, shard=7, cp=0, tp=7, dp=127, dp_cp=127, world=16383, tied=1, ep=0, expert_dp=127
    )
    assert mesh.pp.ranks[0] == 16383 - 15 * 1024


def test_axes_of_size_one_have_no_group():
    mesh = Mesh()
    assert all(getattr(mesh, name).size == 1 and getattr(mesh, name).group is None for name in mesh.coordinates)


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
    assert f"rank 0 is still waiting for the others of 4 ranks at localhost:{port}" in capfd.readouterr().err
