# SPDX-License-Identifier: Apache-2.0
"""The samples of each rank at each step: pure functions of the number of samples consumed so far.

There is no state between steps, so a resumed run, another number of ranks or a batch size ramp-up cannot change the order
of the data. A *position* is an index in the order of training: 0, 1, 2, ... The micro-steps of one step with 2 samples per
micro-batch and 2 data-parallel ranks, after 100 samples:

    >>> [[list(micro_batch_samples(100, 2, rank, 2, micro)) for rank in (0, 1)] for micro in (0, 1)]
    [[[100, 101], [102, 103]], [[104, 105], [106, 107]]]
"""

from typing import NamedTuple


def global_batch(consumed: int, size: int) -> range:
    """Positions of the step that starts after `consumed` samples with a global batch of `size`."""
    return range(consumed, consumed + size)


def micro_batch_samples(consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int, micro: int) -> range:
    """Positions of data-parallel rank `dp_rank` at micro-step `micro` of the step that starts at `consumed`."""
    assert 0 <= dp_rank < dp_size, f"rank {dp_rank} of {dp_size}"
    start = consumed + (micro * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)


class EpochPosition(NamedTuple):
    """The epoch of a position, and the index within the epoch."""

    epoch: int
    index: int


def cyclic_position(position: int, length: int) -> EpochPosition:
    """The epoch of a position and its index within the epoch's shuffled order (`--dataloader-type cyclic`).

    Each epoch has its own permutation of all `length` samples, seeded by the epoch's number. The order equals Megatron-LM's
    without data sharding if its global micro-step divides `length`. If it does not, Megatron-LM drops the rest of the
    epoch; here nothing is dropped, because that would depend on the number of ranks.
    """
    return EpochPosition(*divmod(position, length))
