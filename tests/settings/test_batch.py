# SPDX-License-Identifier: Apache-2.0
"""Golden values were made with megatron-core 0.16.1's calculators of micro-batches."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.settings.batch import (
    batch_size,
    problems,
    samples_left_out,
    schedule_phases,
    total_iterations,
    total_samples,
)
from megatron.settings.schema import Batch

RAMP = Batch(micro_batch_size=4, global_batch_size=64, rampup_batch_size=[16, 16, 1000], train_samples=2000)


def test_constant_batch():
    batch = Batch(micro_batch_size=4, global_batch_size=64, train_iters=10)
    assert {batch_size(batch, 2, consumed) for consumed in (0, 64, 10**9)} == {(64, 8)}
    assert (total_iterations(batch, 2), total_samples(batch, 2)) == (10, 640)


def test_without_a_global_batch_size_each_rank_has_one_micro_batch():
    assert batch_size(Batch(micro_batch_size=3), 4, 0) == (12, 1)


@pytest.mark.parametrize(
    "consumed, expected",
    [
        (0, (16, 2)),
        (333, (16, 2)),
        (334, (32, 4)),
        (666, (32, 4)),
        (667, (48, 6)),
        (999, (48, 6)),
        (1000, (64, 8)),
        (1001, (64, 8)),
        (5000, (64, 8)),
    ],
)
def test_rampup_equals_megatrons(consumed, expected):
    assert batch_size(RAMP, 2, consumed) == expected


@given(
    start=st.integers(1, 9), by=st.integers(1, 4), times=st.integers(1, 12), samples=st.integers(1, 500), data=st.data()
)
def test_phases_of_a_rampup_are_megatrons_formula(start, by, times, samples, data):
    full = start + times * by
    batch = Batch(global_batch_size=full, rampup_batch_size=[start, by, samples], train_samples=1)
    for consumed in data.draw(st.lists(st.integers(0, samples + 2), min_size=20, max_size=20)) + [samples, samples + 1]:
        expected = full if consumed > samples else start + by * int(consumed / (samples / times))
        assert batch_size(batch, 1, consumed)[0] == expected


SCHEDULE = "0:768 250B:1536 500B:3072 750B:6144"


@pytest.mark.parametrize(
    "text, length, phases",
    [
        (SCHEDULE, 2048, [(0, 768), (122_070_312, 1536), (244_140_625, 3072), (366_210_937, 6144)]),
        ("0:4, 1.5k:2K,2.5K:8", 100, [(0, 4), (15, 2000), (25, 8)]),
        ("3M:8 0:4", 1000, [(0, 4), (3000, 8)]),  # sorted
        ("0:4 199:8", 100, [(0, 4), (1, 8)]),
        ("0samples:4 15samples:8", None, [(0, 4), (15, 8)]),
    ],
)
def test_a_schedule_is_read_as_megatrons(text, length, phases):
    assert list(schedule_phases(text, length)) == phases


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes, words",
    [
        ("4samples:8 8samples:16", "the first threshold has to be 0"),
        ("0:8 30:16", "30:16: tokens, and no --seq-length"),
        ("0:8 16", "16 is not THRESHOLD:SIZE"),
        ("", "the first threshold has to be 0"),
        ("0:8 9Q:16", "9Q:16: '9Q' is not a number"),
        ("0:8 -1:16", "-1:16: '-1' is not a number"),
        ("0:8 nan:16", "is not a number"),
        ("0:8 1e999:16", "is not a number"),
        ("0:0", "sizes have to be at least 1"),
        ("0:8 9samples:16 9samples:24", "two sizes, 16 and 24, from sample 9 on"),
        ("0:8 9samples:12 10samples:64", "from sample 9 on, size 12 is not a multiple of --micro-batch-size 4 x data"),
        ("0:8 9samples:32", "ends with 32, not --global-batch-size 64; leave that out"),
        (dict(rampup_batch_size=[16, 16, 100]), "--rampup-batch-size: give one of them"),
        (dict(train_samples=None, train_iters=9), "needs --train-samples"),
    ],
)
def test_problems_of_a_schedule(changes, words):
    changes = dict(step_batch_size_schedule=changes) if isinstance(changes, str) else changes
    good = replace(RAMP, rampup_batch_size=None, step_batch_size_schedule="0:8 100samples:64")
    assert problems(good, 2) == []
    found = problems(replace(good, **changes), 2)
    assert len(found) == 1 and words in found[0], found


def test_steps_of_a_schedule():
    """Walked step by step; a step that does not fit into the samples is left out."""
    for samples in range(1, 200):
        batch = Batch(step_batch_size_schedule="0:3 10samples:12 100samples:5", train_samples=samples)
        steps = consumed = 0
        while consumed + (size := 3 if consumed < 10 else 12 if consumed < 100 else 5) <= samples:
            assert batch_size(batch, 1, consumed) == (size, size)
            steps, consumed = steps + 1, consumed + size
        assert (total_iterations(batch, 1), samples_left_out(batch, 1, 0)) == (steps, samples - consumed)


def test_two_thresholds_in_one_sample_are_refused():
    with pytest.raises(ValueError, match="two sizes, 8 and 16, from sample 2 on"):
        schedule_phases("0:4 200:8 299:16", 100)


@pytest.mark.parametrize("samples, steps", [(100, 7), (1000, 39), (1024, 39), (2000, 54), (10_000, 179)])
def test_iterations_of_a_rampup_equal_megatrons(samples, steps):
    assert total_iterations(replace(RAMP, train_samples=samples), 2) == steps


def test_a_partial_last_batch_is_thrown_away():
    batch = Batch(micro_batch_size=2, global_batch_size=8, train_samples=39)
    assert (total_iterations(batch, 2), total_samples(batch, 2)) == (4, 39)


def test_a_run_without_length_is_our_mistake():
    with pytest.raises(ValueError, match="--train-iters"):
        total_iterations(Batch(), 1)


def test_rampup_that_starts_at_the_full_size_is_constant():
    batch = replace(RAMP, rampup_batch_size=[64, 16, 1000])
    assert problems(batch, 2) == []
    assert {batch_size(batch, 2, n) for n in (0, 500, 1000, 2000)} == {(64, 8)}


@given(
    micro=st.integers(1, 4),
    dp=st.integers(1, 4),
    first=st.integers(1, 5),
    by=st.integers(1, 4),
    times=st.integers(1, 6),
    ramp=st.integers(1, 2000),
    more=st.integers(0, 2000),
)
def test_walking_a_run_step_by_step_agrees_with_its_totals(micro, dp, first, by, times, ramp, more):
    step = micro * dp
    start, increment = first * step, by * step
    batch = Batch(
        micro_batch_size=micro,
        global_batch_size=start + times * increment,
        rampup_batch_size=[start, increment, ramp],
        train_samples=ramp + more,
    )
    assert problems(batch, dp) == []
    consumed, sizes = 0, []
    for _ in range(total_iterations(batch, dp)):
        size, num_microbatches = batch_size(batch, dp, consumed)
        assert size == num_microbatches * step
        sizes.append(size)
        consumed += size
    assert sizes == sorted(sizes) and sizes[0] == start and sizes[-1] <= batch.full_size(dp)
    assert consumed <= total_samples(batch, dp) < max(consumed, ramp + more) + batch.full_size(dp)


@pytest.mark.parametrize(
    "changes, dp, words",
    [
        (dict(global_batch_size=62), 2, "multiple of --micro-batch-size 4 x data parallel size 2 = 8; nearest: 56, 64"),
        (dict(global_batch_size=3), 1, "nearest: 4"),
        (dict(micro_batch_size=0), 1, "--micro-batch-size 0 must be at least 1"),
        (dict(train_iters=-1, train_samples=None), 1, "--train-iters -1 must be at least 0"),
        (dict(train_iters=10), 1, "give one of them"),
        (dict(train_samples=None, train_iters=10), 2, "needs --train-samples"),
        (dict(rampup_batch_size=[16, 16]), 2, "expected START INCREMENT SAMPLES"),
        (dict(rampup_batch_size=[16, 0, 100]), 2, "expected START INCREMENT SAMPLES"),
        (dict(rampup_batch_size=[128, 16, 100]), 2, "start 128 is above --global-batch-size 64"),
        (dict(rampup_batch_size=[16, 32, 100]), 2, "do not lead from 16 to --global-batch-size 64; an increment of 24"),
        (dict(rampup_batch_size=[12, 4, 100]), 2, "start 12 is not a multiple"),
        (dict(rampup_batch_size=[16, 12, 100]), 2, "increment 12 is not a multiple"),
        (dict(rampup_batch_size=[16, 16, 0]), 2, "over 0 samples"),
    ],
)
def test_problems_are_named_in_flags(changes, dp, words):
    found = problems(replace(RAMP, **changes), dp)
    assert any(words in line for line in found), found


@pytest.mark.parametrize(
    "said, size, words",
    [
        (dict(local_batch_size=8), 32, None),
        (dict(gradient_accumulation_steps=3), 24, None),
        (dict(local_batch_size=8, gradient_accumulation_steps=4, global_batch_size=32), 32, None),
        (dict(local_batch_size=8, global_batch_size=64), 64, "--local-batch-size 8 is not 64 samples / (4 data"),
        (dict(gradient_accumulation_steps=3, global_batch_size=16), 16, "--gradient-accumulation-steps 3 is not 16"),
        (dict(local_batch_size=3), 12, "--local-batch-size 3 is not a multiple of --micro-batch-size 2;"),
    ],
)
def test_what_other_suites_call_the_batch(said, size, words):
    settings = Batch(micro_batch_size=2, train_iters=1, **said)
    assert settings.full_size(4) == size
    assert (words or "") in " ".join(problems(settings, 4)) and bool(words) == bool(problems(settings, 4))


@pytest.mark.parametrize(
    "batch, dp", [(RAMP, 2), (Batch(micro_batch_size=4, global_batch_size=64, train_samples=1000), 2)]
)
def test_a_run_that_goes_on_ends_where_it_would_have(batch, dp):
    """Counted from each of its steps, batch by batch."""
    whole = total_iterations(batch, dp)
    consumed = iteration = 0
    while iteration < whole:
        assert total_iterations(batch, dp, iteration, consumed) == whole
        consumed, iteration = consumed + batch_size(batch, dp, consumed)[0], iteration + 1
    assert total_iterations(batch, dp, iteration, consumed) == whole and consumed <= batch.train_samples
    other = replace(batch, global_batch_size=128, rampup_batch_size=None)
    assert total_iterations(other, dp, 10, 424) == 10 + (batch.train_samples - 424) // 128
