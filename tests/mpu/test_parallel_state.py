# SPDX-License-Identifier: Apache-2.0
"""`mpu.get_*` against the groups of Megatron-LM's documentation, cut to eight ranks; and what their groups reduce."""

import pytest
import torch
import torch.distributed as dist

from megatron import mpu
from megatron.mpu import initialize, parallel_state
from megatron.settings.schema import Kernels, Parallel

# Of 8 GPUs with tensor parallel size 2 and pipeline parallel size 2, as the docstring of Megatron-LM's
# `initialize_model_parallel` counts its 16: tensor ranks are neighbours, then data, then pipeline ranks.
TENSOR = [[0, 1], [2, 3], [4, 5], [6, 7]]
PIPELINE = [[0, 4], [1, 5], [2, 6], [3, 7]]
DATA = [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.fixture(autouse=True)
def no_job():
    """Whatever tests before these have left in this process."""
    parallel_state.use_mesh(None)


def of(groups, rank):
    return next(group for group in groups if rank in group)


def facts(rank):
    context = initialize.join_job(
        Parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), Kernels(device="cpu")
    )
    found = {name: getattr(mpu, name)() for name in dir(parallel_state) if name.startswith(("get_", "is_"))}
    sums = {}
    for name, value in found.items():
        if name.endswith("_group") and name.startswith("get_"):
            total = torch.tensor([float(10**rank)])
            dist.all_reduce(total, group=value)
            sums[name] = f"{int(total.item()):08d}"[::-1]  # a 1 at the place of each rank
    found = {name: value for name, value in found.items() if name not in sums}
    initialize.leave_job(context)
    return found, sums, mpu.model_parallel_is_initialized()


def test_of_eight_ranks(run_ranks):
    for rank, (found, sums, still) in enumerate(run_ranks(8, facts)):
        tensor, pipeline, data = of(TENSOR, rank), of(PIPELINE, rank), of(DATA, rank)
        groups = dict(tensor_model=tensor, pipeline_model=pipeline, data=data, context=[rank])
        for name, ranks in groups.items():
            assert found[f"get_{name}_parallel_rank"] == ranks.index(rank), (rank, name)
            assert found[f"get_{name}_parallel_world_size"] == len(ranks), (rank, name)
            assert sums[f"get_{name}_parallel_group"] == "".join(str(int(r in ranks)) for r in range(8)), (rank, name)
        assert (
            found["get_tensor_model_parallel_src_rank"] == tensor[0] and found["get_data_parallel_src_rank"] == data[0]
        )
        assert found["get_context_parallel_global_ranks"] == [rank]
        ends = [found[f"get_pipeline_model_parallel_{which}_rank"] for which in ("first", "last", "next", "prev")]
        other = pipeline[1 - pipeline.index(rank)]
        assert ends == [*pipeline, other, other]
        assert found["is_pipeline_first_stage"] is (rank < 4) and found["is_pipeline_last_stage"] is (rank >= 4)
        assert found["is_rank_in_embedding_group"] is True
        assert sums["get_embedding_group"] == sums["get_pipeline_model_parallel_group"]
        assert still is False  # leave_job has let go of it
    assert not mpu.model_parallel_is_initialized()


def test_of_experts(run_ranks):
    """Eight ranks with tp 2, ep 2 and etp 1: experts are divided over tensor parallel neighbours, four copies of each."""

    def body(rank):
        parallel = Parallel(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
        context = initialize.join_job(parallel, Kernels(device="cpu"))
        found = {}
        for kind in ("model", "tensor", "data"):
            one = lambda what, kind=kind: getattr(mpu, f"get_expert_{kind}_parallel_{what}")()
            total = torch.tensor([float(10**rank)])
            dist.all_reduce(total, group=one("group"))
            found[kind] = one("rank"), one("world_size"), f"{int(total.item()):08d}"[::-1]
        found["src"] = mpu.get_expert_model_parallel_src_rank()
        initialize.leave_job(context)
        return found

    marks = lambda ranks: "".join(str(int(r in ranks)) for r in range(8))
    for rank, found in enumerate(run_ranks(8, body)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["model"] == (rank % 2, 2, marks(pair)) and found["src"] == pair[0]
        assert found["tensor"] == (0, 1, marks([rank]))
        assert found["data"] == (rank // 2, 4, marks(range(rank % 2, 8, 2)))


def test_outside_of_a_job():
    with pytest.raises(RuntimeError, match="has not joined a job yet"):
        mpu.get_tensor_model_parallel_rank()
    with pytest.raises(AttributeError, match="has no attribute 'get_virtual_pipeline_model_parallel_rank'"):
        mpu.get_virtual_pipeline_model_parallel_rank()


def test_with_context_parallelism(run_ranks):
    """Ranks of cp and dp hold the same weights: `with_context_parallel` is about both."""

    def body(rank):
        initialize.join_job(Parallel(context_parallel_size=2), Kernels(device="cpu"))
        total = torch.tensor([float(10**rank)])
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        both = mpu.get_data_parallel_rank(True), mpu.get_data_parallel_world_size(with_context_parallel=True)
        return mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank(), both, total.item()

    assert run_ranks(4, body) == [(rank // 2, rank % 2, (rank, 4), 1111.0) for rank in range(4)]
