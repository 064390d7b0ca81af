# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.sampler import cyclic_place, global_batch, micro_batch_samples


@given(
    consumed=st.integers(0, 10**12), micro_batch_size=st.integers(1, 5), dp=st.integers(1, 6), micros=st.integers(1, 5)
)
def test_ranks_and_micro_steps_cover_a_global_batch_once(consumed, micro_batch_size, dp, micros):
    seen = [
        position
        for micro in range(micros)
        for rank in range(dp)
        for position in micro_batch_samples(consumed, micro_batch_size, rank, dp, micro)
    ]
    assert seen == list(global_batch(consumed, micro_batch_size * dp * micros))


def test_cyclic_epochs():
    assert [cyclic_place(position, 3) for position in (0, 2, 3, 7)] == [(0, 0), (0, 2), (1, 0), (2, 1)]
