# SPDX-License-Identifier: Apache-2.0
"""PaddlePaddle's degrees: replicas stand outside sharding, and a job has mp x sharding x pp x dp ranks."""

import itertools

import pytest

from megatron.settings.parse import parse_pretrain
from megatron.training.rules import check

SHAPE = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --mock-data --vocab-size 99 --lr 1 --train-iters 1"


def problems(line: str, world: int) -> list[str]:
    return check(parse_pretrain(f"{SHAPE} {line}".split()), world)


@pytest.mark.parametrize("stage", ["", "--use_sharding true"])
def test_world_is_the_product_of_paddles_degrees(stage):
    """Every small combination, against the documented product; Megatron's --data-parallel-size stays the total."""
    for mp, sharding, pp, dp, world in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4, 8, 16, 32)):
        line = f"{stage} --mp_degree {mp} --sharding_degree {sharding} --pp_degree {pp}"
        right = world == mp * sharding * pp * dp
        assert (problems(f"{line} --dp_degree {dp}", world) == []) == right, (mp, sharding, pp, dp, world)
        assert (problems(f"{line} --data-parallel-size {dp * sharding}", world) == []) == right


def test_without_a_sharding_degree_all_of_data_parallel_is_sharded():
    assert problems("--use-distributed-optimizer --dp-degree 1", 4) == []
    assert problems("--dp-degree 4", 4) == []
    [said] = problems("--use-distributed-optimizer --dp-degree 4", 4)
    assert "--dp-degree 4 is not what there is" in said and "sharding 4) = 1" in said


def test_the_message_says_which_number_of_ranks_would_do():
    [said] = problems("--mp_degree 2 --sharding_degree 4 --use_sharding true --dp_degree 3", 16)
    assert "16 ranks / (mp 2 x pp 1 x sharding 4) = 2" in said and "run on 24 ranks" in said
