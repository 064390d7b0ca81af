# SPDX-License-Identifier: Apache-2.0
"""Golden orders were made with megatron-core 0.16.1's schedule table and warm-up counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.schedule import SCHEDULES, Op, dependencies, looped, make_schedule, parse_op, problems, stage_map

ONE_CHUNK = {  # pp, num_microbatches -> order of each rank
    (1, 3): ["F0 B0 F1 B1 F2 B2"],
    (2, 1): ["F0 B0", "F0 B0"],
    (3, 5): ["F0 F1 F2 B0 F3 B1 F4 B2 B3 B4", "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"],
    (3, 2): ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"],
}
TWO_CHUNKS = {
    (2, 2): ["F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"],
    (2, 4): [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ],
}


def text(ops) -> str:
    return " ".join(map(str, ops))


@pytest.mark.parametrize("shape", ONE_CHUNK)
def test_1f1b_equals_megatrons(shape):
    pp, num_microbatches = shape
    assert [text(make_schedule("1f1b", rank, pp, num_microbatches)) for rank in range(pp)] == ONE_CHUNK[shape]


@pytest.mark.parametrize("shape", TWO_CHUNKS)
def test_interleaved_1f1b_equals_megatrons(shape):
    pp, num_microbatches = shape
    assert [text(make_schedule("1f1b", rank, pp, num_microbatches, 2)) for rank in range(pp)] == TWO_CHUNKS[shape]


def test_gpipe_and_forward_only():
    assert text(make_schedule("gpipe", 0, 2, 3)) == "F0 F1 F2 B0 B1 B2"
    assert text(make_schedule("gpipe", 1, 2, 2, 2)) == "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"
    assert text(make_schedule("forward-only", 1, 2, 3, 2)) == "F0 F1 F2 F0.1 F1.1 F2.1"
    assert text(make_schedule("forward-only", 1, 2, 4, 2)) == "F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1"


def test_zb_h1_splits_every_backward_and_delays_weights_by_rank():
    assert text(make_schedule("zb-h1", 0, 2, 2)) == "F0 F1 I0 W0 I1 W1"
    assert text(make_schedule("zb-h1", 1, 2, 3)) == "F0 I0 F1 I1 W0 F2 I2 W1 W2"


def test_forward_and_backward_passes_in_turns():
    """A rank has a forward pass of a later micro-batch for each backward pass, and F of its micro-batch came before."""
    assert text(make_schedule("1f1b &", 0, 1, 3)) == "F0 F1 & B0 F2 & B1 B2"
    assert text(make_schedule("1f1b &", 0, 2, 5)) == "F0 F1 F2 F3 & B0 F4 & B1 B2 B3 B4"
    assert text(make_schedule("1f1b &", 1, 2, 5)) == "F0 F1 & B0 F2 & B1 F3 & B2 F4 & B3 B4"
    assert text(make_schedule("zb-h1 &", 1, 2, 4)) == "F0 F1 & I0 F2 & I1 W0 F3 & I2 W1 I3 W2 W3"
    assert text(make_schedule("1f1b &", 1, 2, 2, 2)) == "F0 F1 F0.1 F1.1 & B0.1 B1.1 B0 B1"
    with pytest.raises(ValueError, match="no pipeline schedule 'gpipe &'"):  # nothing could take turns
        make_schedule("gpipe &", 0, 2, 4)


@settings(deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 8), st.integers(1, 24), st.integers(1, 4))
def test_every_op_comes_once_and_work_without_pipeline_needs_nobody(name, pp, num_microbatches, chunks):
    if problems(name, pp, num_microbatches, chunks):
        with pytest.raises(ValueError):
            make_schedule(name, 0, pp, num_microbatches, chunks)
        return
    kinds = "FIW" if SCHEDULES[name].split else "F" if name == "forward-only" else "FB"
    for rank in range(pp):
        ops = make_schedule(name, rank, pp, num_microbatches, chunks)
        ops = [op for op in ops if op.kind != "&"]
        assert sorted(ops) == sorted(Op(k, m, c) for k in kinds for m in range(num_microbatches) for c in range(chunks))
    if pp == 1:
        stages = stage_map(name, 1, chunks)
        assert all(source == 0 for op in ops for source, _ in dependencies(op, 0, stages))


def test_needs_names_the_neighbours():
    stages = looped(2, 2)  # stage 0: rank 0, 1: rank 1, 2: rank 0 chunk 1, 3: rank 1 chunk 1
    assert dependencies(Op("F", 7), 0, stages) == []
    assert dependencies(Op("F", 7, 1), 0, stages) == [(1, Op("F", 7, 0))]
    assert dependencies(Op("B", 7, 1), 1, stages) == [(1, Op("F", 7, 1))]
    assert dependencies(Op("I", 7, 0), 1, stages) == [(1, Op("F", 7, 0)), (0, Op("I", 7, 1))]
    assert dependencies(Op("W", 7, 0), 1, stages) == [(1, Op("I", 7, 0))]


def test_words_and_ops_are_the_same():
    for op in make_schedule("zb-v &", 1, 2, 12):
        assert parse_op(str(op)) == op
    for word in ("f0", "F", "F-1", "F1.", "F1.1.1", "X1", "", "F0,"):
        with pytest.raises(ValueError, match="is no op"):
            parse_op(word)


def test_stages_may_lie_anywhere():
    v_shape = ((0, 0), (1, 0), (1, 1), (0, 1))
    assert dependencies(Op("F", 3, 1), 1, v_shape) == [(1, Op("F", 3, 0))]
    assert dependencies(Op("B", 3, 0), 0, v_shape) == [(0, Op("F", 3, 0)), (1, Op("B", 3, 0))]


@pytest.mark.parametrize(
    "shape, words",
    [
        (("2f2b", 2, 4, 1), "choose from gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half"),
        (("1f1b", 2, 0, 1), "at least 1"),
        (("1f1b", 0, 4, 1), "at least 1 of both"),
        (("1f1b", 2, 4, -1), "at least 1 of both"),
        (("1f1b", 1, 4, 2), "--pipeline-model-parallel-size of at least 2"),
        (("interleaved", 4, 3, 1), "at least 2 model chunks"),
        (("zb-h1", 4, 8, 2), "one model chunk"),
        (("zb-v", 4, 8, 3), "2 model chunks a rank, not 3"),
    ],
)
def test_impossible_schedules_say_why(shape, words):
    assert any(words in line for line in problems(*shape)), problems(*shape)
    with pytest.raises(ValueError):
        make_schedule(shape[0], 0, *shape[1:])
