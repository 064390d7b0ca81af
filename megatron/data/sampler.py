# SPDX-License-Identifier: Apache-2.0
"""The samples of each rank at each step: pure functions of the number of samples consumed so far.

There is no state between steps, so a resumed run, another number of ranks or a batch size ramp-up cannot change the order
of the data. A *position* is an index in the order of training: 0, 1, 2, ... The micro-steps of one step with 2 samples per
micro-batch and 2 data-parallel ranks, after 100 samples:

    >>> [[list(micro_batch_samples(100, 2, rank, 2, micro)) for rank in (0, 1)] for micro in (0, 1)]
    [[[100, 101], [102, 103]], [[104, 105], [106, 107]]]

The sample ledger is a hash of the samples of each step, the same for every parallel layout. A sample's hash covers its
position in the order of training and its tokens. A step's hash is the sum over its samples, so the order of ranks does not
matter: the sum is part of the all-reduce of each step. Two runs with equal ledgers have trained on the same tokens at the
same steps; a repeated, skipped or changed sample changes the hash.

    >>> a, b, c = ([place, place * 7] for place in (1, 2, 3))
    >>> to_hex(sum_hashes([a, b, c])) == to_hex(sum_hashes([sum_hashes([c, a]), b]))
    True
    >>> to_hex([255, 16])
    '000000ff00000010'
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


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


HALF = 2**32  # a hash is two numbers below this: sums of a million of them are exact in fp64


def sample_hash(place: int, tokens: np.ndarray) -> tuple[int, int]:
    """The hash of the sample at position `place` in the order of training; tokens: int64 [seq_length], contiguous."""
    first = zlib.crc32(tokens, place & 0xFFFFFFFF)
    second = zlib.crc32(place.to_bytes(8, "little"), zlib.adler32(tokens) ^ first)
    return first, second


def batch_hash(places: Iterable[int], rows: Iterable[np.ndarray]) -> tuple[int, int]:
    """The hash of a micro-batch; rows: int64 [seq_length] for each sample."""
    return sum_hashes(sample_hash(place, np.ascontiguousarray(row)) for place, row in zip(places, rows))


def sum_hashes(hashes: Iterable[Sequence[int]]) -> tuple[int, int]:
    """The sum of several hashes."""
    first = second = 0
    for part in hashes:
        first, second = (first + part[0]) % HALF, (second + part[1]) % HALF
    return first, second


def to_hex(halves: Iterable[float]) -> str:
    """A hash as 16 hexadecimal digits."""
    return "".join(f"{int(half) % HALF:08x}" for half in halves)
