# SPDX-License-Identifier: Apache-2.0
"""Golden values were made with megatron-core 0.16.1's calculators of micro-batches."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.settings.batch import batch_size, problems, total_iterations, total_samples
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


@pytest.mark.parametrize("samples, steps", [(100, 7), (1000, 39), (1024, 39), (2000, 54), (10_000, 179)])
def test_iterations_of_a_rampup_equal_megatrons(samples, steps):
    assert total_iterations(dataclasses.replace(RAMP, train_samples=samples), 2) == steps


def test_a_partial_last_batch_is_thrown_away():
    batch = Batch(micro_batch_size=2, global_batch_size=8, train_samples=39)
    assert (total_iterations(batch, 2), total_samples(batch, 2)) == (4, 39)


def test_a_run_without_length_is_our_mistake():
    with pytest.raises(ValueError, match="--train-iters"):
        total_iterations(Batch(), 1)


def test_rampup_that_starts_at_the_full_size_is_constant():
    batch = dataclasses.replace(RAMP, rampup_batch_size=[64, 16, 1000])
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
    found = problems(dataclasses.replace(RAMP, **changes), dp)
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
    other = dataclasses.replace(batch, global_batch_size=128, rampup_batch_size=None)
    assert total_iterations(other, dp, 10, 424) == 10 + (batch.train_samples - 424) // 128
