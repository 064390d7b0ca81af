# SPDX-License-Identifier: Apache-2.0
"""What rank 0 finds out for all ranks of a job."""

import torch

from megatron.errors import DataError
from megatron.mpu.initialize import RankContext
from megatron.mpu.mesh import Mesh


def _body(rank):
    context, calls = RankContext(Mesh(rank, tp=2), torch.device("cpu")), []

    def read():
        calls.append(rank)
        return dict(rank=rank)

    def fail():
        raise DataError("no file", do="give one")

    found = context.from_rank_zero(read)
    try:
        context.from_rank_zero(fail)
    except DataError as error:
        return found, calls, str(error)


def test_all_ranks_get_the_result_or_the_failure_of_rank_zero(run_ranks):
    message = "no file\n  -> give one"
    assert run_ranks(2, _body) == [(dict(rank=0), [0], message), (dict(rank=0), [], message)]
