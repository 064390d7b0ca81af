# SPDX-License-Identifier: Apache-2.0
"""Which layers lie where; expectations of first/last counts and accounted weights are Megatron-LM's rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.schedule import TRAINING
from megatron.pipeline.stages import Pipeline, problems
from megatron.settings.schema import Parallel


def _parallel(pp=4, **more) -> Parallel:
    return Parallel(pipeline_model_parallel_size=pp, **more)


EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
CHUNKS = "num_virtual_stages_per_pipeline_rank"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


@pytest.mark.parametrize(
    "num_layers, settings, counts",
    [
        (8, {}, [2, 2, 2, 2]),
        (5, dict(pipeline_stage_layers="2,1,1,1"), [2, 1, 1, 1]),
        (5, dict(pipeline_stage_layers="0 2 3 0"), [0, 2, 3, 0]),
        (9, dict(pipeline_stage_layers="2,1,1,1,1,1,1,1", **{CHUNKS: 2}), [2, 1, 1, 1, 1, 1, 1, 1]),
        (14, {EMBEDDING: True, LOSS: True}, [3, 4, 4, 3]),
        (15, {EMBEDDING: True}, [3, 4, 4, 4]),
        (6, {EMBEDDING: True, LOSS: True, CHUNKS: 2}, [0, 1, 1, 1, 1, 1, 1, 0]),
        (11, {FIRST: 2}, [2, 3, 3, 3]),
        (11, {LAST: 2}, [3, 3, 3, 2]),
        (10, {FIRST: 2, LAST: 4}, [2, 2, 2, 4]),
        (20, {FIRST: 4, LAST: 4, CHUNKS: 2}, [2, 3, 3, 2, 2, 3, 3, 2]),
        (20, {FIRST: 4, LAST: 4, "pipeline_schedule": "zb-v"}, [2, 3, 3, 2, 2, 3, 3, 2]),
        (8, dict(num_layers_per_virtual_pipeline_stage=1), [1] * 8),
        (16, dict(pipeline_schedule="v-half"), [2] * 8),
    ],
)
def test_layers_of_stages(num_layers, settings, counts):
    parallel = _parallel(**settings)
    assert problems(parallel, num_layers) == []
    assert [len(layers) for layers in Pipeline.of(parallel, num_layers).layers] == counts


def test_layers_of_ranks():
    looped = Pipeline.of(_parallel(2, **{CHUNKS: 2}), 8)
    assert [looped.layers_of(rank) for rank in range(2)] == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]
    v = Pipeline.of(_parallel(2, pipeline_schedule="zb-v"), 8)
    assert [v.layers_of(rank) for rank in range(2)] == [[range(0, 2), range(6, 8)], [range(2, 4), range(4, 6)]]
    assert v.split and not looped.split
    assert {op.kind for op in v.ops(0, 3)} == {"F", "I", "W"} and {op.kind for op in v.ops(0, 3, training=False)} == {
        "F"
    }


@pytest.mark.parametrize(
    "num_layers, settings, words",
    [
        (
            10,
            {},
            "nearest: 8 or 12 layers, or --pipeline-model-parallel-size 2 or 5, or --pipeline-stage-layers 2,3,3,2",
        ),
        (3, {}, "nearest: 4 layers"),
        (12, {CHUNKS: 2}, "8 even stages .*4 x 2 model chunks a rank.*nearest: 8 or 16 layers"),
        (15, {EMBEDDING: True, LOSS: True}, "15 with the embedding and the loss .* nearest: 14 or 18 layers"),
        (5, dict(pipeline_stage_layers="2,1,1"), "for 3 stages, and there are 4"),
        (5, dict(pipeline_stage_layers="2,1,1,2"), "is 6 layers, and --num-layers is 5; 1,2,1,1 would work"),
        (5, dict(pipeline_stage_layers="2,a,1,1"), "must be numbers with commas"),
        (12, {FIRST: 2}, "leaves 10 of 12 layers for 3 ranks, which cannot be even; --pipeline-stage-layers 3,3,3,3"),
        (12, {FIRST: 3, CHUNKS: 2}, "cannot be divided by 2 model chunks a rank"),
        (8, {FIRST: 2, EMBEDDING: True}, "two ways to even out"),
        (8, {FIRST: 2, "pipeline_stage_layers": "2,2,2,2"}, "leave out --decoder-first-pipeline-num-layers"),
        (8, {FIRST: 2, "num_layers_per_virtual_pipeline_stage": 1}, "needs --num-virtual-stages-per-pipeline-rank"),
        (8, {CHUNKS: 2, "num_layers_per_virtual_pipeline_stage": 1}, "set the same thing"),
        (8, dict(num_layers_per_virtual_pipeline_stage=3), "does not cut 8 layers evenly .* 1 or 2 would work"),
        (8, dict(pipeline_schedule="zigzag"), "no pipeline schedule 'zigzag': choose from"),
        (8, dict(pipeline_schedule="forward-only"), "no pipeline schedule 'forward-only': choose from"),
        (8, {CHUNKS: 1, "pipeline_schedule": "interleaved"}, "at least 2 model chunks"),
        (8, {CHUNKS: 2, "pipeline_schedule": "zb-h1"}, "one model chunk a rank, not 2"),
        (8, {CHUNKS: 2, "pp": 1}, "--pipeline-model-parallel-size of at least 2"),
        (8, {FIRST: 2, "pp": 1}, "needs --pipeline-model-parallel-size above 1"),
    ],
)
def test_what_cannot_be_is_told_with_what_can(num_layers, settings, words):
    found = problems(_parallel(**settings), num_layers)
    assert found
    pytest.raises(ValueError, _fail, found).match(words)


def _fail(found):
    raise ValueError("; ".join(found))


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.sampled_from(TRAINING),
    st.sampled_from([None, 1, 2, 3]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([None, 1, 2, 4]),
)
def test_settings_are_refused_or_every_layer_is_held_once(pp, num_layers, name, chunks, embedding, loss, first, last):
    parallel = _parallel(
        pp, pipeline_schedule=name, **{CHUNKS: chunks, EMBEDDING: embedding, LOSS: loss, FIRST: first, LAST: last}
    )
    if problems(parallel, num_layers):
        return
    pipeline = Pipeline.of(parallel, num_layers)
    held = [n for rank in range(pp) for layers in pipeline.layers_of(rank) for n in layers]
    assert sorted(held) == list(range(num_layers)) and [n for layers in pipeline.layers for n in layers] == sorted(held)
    if first and not embedding:
        assert sum(map(len, pipeline.layers_of(0))) == first
    if last and pp > 1:
        assert sum(map(len, pipeline.layers_of(pp - 1))) == last
    assert all(len(layers) for layers in pipeline.layers[1:-1])
