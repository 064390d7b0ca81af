# SPDX-License-Identifier: Apache-2.0
"""PaddlePaddle's degrees: replicas stand outside sharding, and a job has mp x sharding x pp x dp ranks."""

import itertools
from dataclasses import replace

import pytest

from megatron.settings.parse import parse_pretrain
from megatron.training.rules import check

SHAPE = "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --mock-data --vocab-size 99 --lr 1 --train-iters 1"


def problems(line: str, world: int) -> list[str]:
    return check(parse_pretrain(f"{SHAPE} {line}".split()), world)


@pytest.mark.parametrize("stage", [0, 1])
def test_world_is_the_product_of_paddles_degrees(stage):
    """Every small combination, against the documented product; Megatron's --data-parallel-size stays the total."""
    plain = parse_pretrain(SHAPE.split())

    def works(world: int, **degrees) -> bool:
        return check(replace(plain, parallel=replace(plain.parallel, sharding_stage=stage, **degrees)), world) == []

    for mp, sharding, pp, dp, world in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4, 8, 16, 32)):
        sizes = dict(tensor_model_parallel_size=mp, pipeline_model_parallel_size=pp, sharding_degree=sharding)
        right = world == mp * sharding * pp * dp
        assert works(world, **sizes, dp_degree=dp) == right, (mp, sharding, pp, dp, world)
        assert works(world, **sizes, data_parallel_size=dp * sharding) == right


def test_without_a_sharding_degree_all_of_data_parallel_is_sharded():
    assert problems("--use-distributed-optimizer --dp-degree 1", 4) == []
    assert problems("--dp-degree 4", 4) == []
    [said] = problems("--use-distributed-optimizer --dp-degree 4", 4)
    assert "--dp-degree 4 is not what there is" in said and "sharding 4) = 1" in said


def test_the_message_says_which_number_of_ranks_would_do():
    [said] = problems("--mp_degree 2 --sharding_degree 4 --use_sharding true --dp_degree 3", 16)
    assert "16 ranks / (mp 2 x pp 1 x sharding 4) = 2" in said and "run on 24 ranks" in said
