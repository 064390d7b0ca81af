# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import blend
from megatron.data.blend import interleave, normalized, parse_blend, share_sizes, walk


def test_parse_blend():
    assert parse_blend(["a"], "--data-path") == (["a"], None)
    assert parse_blend(["a", "b", "c"], "--data-path") == (["a", "b", "c"], None)
    assert parse_blend(["a", "b"], "--data-path") == (["a", "b"], None)
    assert parse_blend(["1.0", "a"], "--data-path") == (["a"], [1.0])
    assert parse_blend(["1", "a ", "3", "b"], "--data-path") == (["a", "b"], [0.25, 0.75])


def test_sizes_leave_a_margin():
    assert share_sizes([0.3, 0.7], 600) == ([180, 420], [181, 423])
    assert sum(share_sizes([1 / 3] * 3, 100)[0]) == 102


@pytest.mark.sampled(2)
@given(
    weights=st.lists(st.floats(1e-6, 1) | st.sampled_from([0.1, 0.2, 0.25, 0.5, 1]), min_size=1, max_size=6),
    size=st.integers(1, 3000),
    chunks=st.integers(1, 40),
    warm_up=st.integers(0, 8),
)
@settings(max_examples=150, deadline=None)
def test_side_by_side_equals_one_by_one(weights, size, chunks, warm_up):
    weights, limits = normalized(weights), [size] * len(weights)
    expected = walk(weights, 0, size, [0] * len(weights), limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "CHUNKS", chunks)
        patch.setattr(blend, "WARM_UP", warm_up)
        datasets, samples = interleave(weights, size, limits)
    assert datasets.dtype == np.int16 and samples.dtype == np.int64
    assert (datasets == expected[0]).all() and (samples == expected[1]).all()


@given(limits=st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(any), chunks=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_limits_are_kept(limits, chunks):
    weights = normalized([count + 1 for count in reversed(limits)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "CHUNKS", chunks)
        patch.setattr(blend, "WARM_UP", 1)
        datasets, samples = interleave(weights, sum(limits), limits)
    for number, limit in enumerate(limits):  # every sample of every dataset, once, in order
        assert samples[datasets == number].tolist() == list(range(limit))


def test_shares_are_kept_at_every_moment():
    weights = normalized([5, 3, 1.5, 0.001])
    datasets, _ = interleave(weights, 50_000, [50_000] * 4)
    for number, weight in enumerate(weights):
        taken = np.cumsum(datasets == number)
        assert np.abs(taken - weight * np.arange(1, 50_001)).max() < 3
