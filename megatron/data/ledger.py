# SPDX-License-Identifier: Apache-2.0
"""The sample ledger: a hash of the samples of each step, the same for every parallel layout.

A sample's hash covers its position in the order of training and its tokens. A step's hash is the sum over its samples, so
the order of ranks does not matter: the sum is part of the all-reduce of each step. Two runs with equal ledgers have
trained on the same tokens at the same steps; a repeated, skipped or changed sample changes the hash.

    >>> a, b, c = ([place, place * 7] for place in (1, 2, 3))
    >>> to_hex(sum_hashes([a, b, c])) == to_hex(sum_hashes([sum_hashes([c, a]), b]))
    True
    >>> to_hex([255, 16])
    '000000ff00000010'
"""

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

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
