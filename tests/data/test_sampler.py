# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.sampler import cyclic_position, global_batch, micro_batch_samples


@given(
    consumed=st.integers(0, 10**12),
    micro_batch_size=st.integers(1, 5),
    dp=st.integers(1, 6),
    num_microbatches=st.integers(1, 5),
)
def test_ranks_and_micro_steps_cover_a_global_batch_once(consumed, micro_batch_size, dp, num_microbatches):
    seen = [
        position
        for micro in range(num_microbatches)
        for rank in range(dp)
        for position in micro_batch_samples(consumed, micro_batch_size, rank, dp, micro)
    ]
    assert seen == list(global_batch(consumed, micro_batch_size * dp * num_microbatches))


def test_cyclic_epochs():
    assert [cyclic_position(position, 3) for position in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 1)]
