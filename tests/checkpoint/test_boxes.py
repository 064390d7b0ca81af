# SPDX-License-Identifier: Apache-2.0
"""Box arithmetic: exhaustive over small shapes, random over layouts."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import Box, cut_evenly, find_flaw, flat_to_boxes

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (4, 1, 3), (1, 1, 6), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_flat_range_is_cut_into_consecutive_boxes(shape):
    tensor = np.arange(prod(shape)).reshape(shape)
    for start, stop in itertools.combinations(range(prod(shape) + 1), 2):
        found = flat_to_boxes(shape, start, stop)
        assert len(found) <= max(1, 2 * len(shape) - 1)
        elements = np.concatenate([tensor[box.slices()].reshape(-1) for box in found])
        assert elements.tolist() == list(range(start, stop))


def test_empty_ranges_and_empty_tensors_have_no_boxes():
    assert flat_to_boxes((3, 4), 5, 5) == []
    assert flat_to_boxes((3, 0), 0, 0) == []
    assert find_flaw((3, 0), []) is None


def all_boxes(shape):
    spans = [[(a, n) for a in range(full) for n in range(1, full - a + 1)] for full in shape]
    return [Box(*map(tuple, zip(*choice, strict=True))) for choice in itertools.product(*spans)]


def test_intersection_is_the_common_elements_for_all_pairs():
    shape = (3, 4)
    tensor = np.arange(12).reshape(shape)
    for a, b in itertools.product(all_boxes(shape), repeat=2):
        common = set(tensor[a.slices()].flat) & set(tensor[b.slices()].flat)
        overlap = a.intersection(b)
        assert overlap == b.intersection(a)
        assert common == (set(tensor[overlap.slices()].flat) if overlap else set())
        if overlap:
            assert (tensor[a.slices()][overlap.relative_to(a).slices()] == tensor[overlap.slices()]).all()
            assert overlap.relative_to(a).shifted(a.offset) == overlap


def test_scalars_meet_and_empty_boxes_never_do():
    assert Box((), ()).intersection(Box((), ())) == Box((), ())
    assert Box((2,), (0,)).intersection(Box((0,), (4,))) is None


def layout(shape, dim, tp, zero):
    """Boxes of each rank: `tp` ranks cut `dim`, `zero` ranks cut the flattened rest; like the optimizer's shards."""
    ranks, width = [], -(-shape[dim] // tp)
    for t in range(tp):
        offset, extent = [0] * len(shape), list(shape)
        offset[dim] = min(t * width, shape[dim])
        extent[dim] = min(width, shape[dim] - offset[dim])
        share = -(-prod(extent) // zero)
        for z in range(zero):
            start, stop = (min(prod(extent), share * k) for k in (z, z + 1))
            ranks.append([box.shifted(offset) for box in flat_to_boxes(extent, start, stop)])
    return ranks


layouts = st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(1, 5))


@pytest.mark.sampled(2)
@given(st.tuples(*[st.integers(1, 7)] * 3), layouts, layouts)
def test_any_layout_is_rebuilt_from_any_other(shape, saved, wanted):
    full, got = np.arange(prod(shape)).reshape(shape), np.full(shape, -1)
    stored = [box for rank in layout(shape, *saved) for box in rank]
    assert find_flaw(shape, stored) is None
    for want in (box for rank in layout(shape, *wanted) for box in rank):
        for overlap in filter(None, map(want.intersection, stored)):
            assert (got[overlap.slices()] == -1).all(), "an element arrived twice"
            got[overlap.slices()] = full[overlap.slices()]
    assert (got == full).all()


@given(st.tuples(*[st.integers(1, 6)] * 3), layouts, st.data())
def test_a_removed_repeated_or_moved_box_is_a_flaw(shape, chosen, data):
    stored = [box for rank in layout(shape, *chosen) for box in rank]
    victim = data.draw(st.integers(0, len(stored) - 1))
    assert "in no box" in find_flaw(shape, stored[:victim] + stored[victim + 1 :])
    assert "overlap" in find_flaw(shape, stored + [stored[victim]])
    moved = stored[victim].shifted([data.draw(st.sampled_from([-9, -1, 1, 9]))] + [0] * (len(shape) - 1))
    assert find_flaw(shape, stored[:victim] + [moved] + stored[victim + 1 :]) is not None


def test_flaws_against_brute_force_on_all_small_sets():
    shape = (2, 3)
    for chosen in itertools.combinations(all_boxes(shape), 2):
        hits = np.zeros(shape, int)
        for box in chosen:
            hits[box.slices()] += 1
        assert (find_flaw(shape, chosen) is None) == bool((hits == 1).all())


def test_wrong_number_of_dims_is_a_flaw():
    assert "outside" in find_flaw((4,), [Box((0, 0), (4, 1))])
    assert "outside" in find_flaw((), [Box((0,), (1,))])


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 6))
def test_even_cut_gives_each_element_to_one_part(sizes, parts):
    seen = [[0] * size for size in sizes]
    loads = []
    for part in range(parts):
        ranges = cut_evenly(sizes, part, parts)
        loads.append(sum(stop - start for start, stop in ranges))
        for counts, (start, stop) in zip(seen, ranges, strict=True):
            for i in range(start, stop):
                counts[i] += 1
    assert all(count == 1 for counts in seen for count in counts)
    assert max(loads) - min(loads) <= 1
