# SPDX-License-Identifier: Apache-2.0
"""The tokens of a sequence that each context parallel rank has. Needs no torch and no numpy.

A sequence is split into 2 x cp chunks, and rank r has chunks r and 2 cp - 1 - r, as in Megatron-LM: under a causal mask all
ranks then have the same number of pairs of query and key. Eight tokens on two ranks:

    >>> own_chunks(8, 0, 2), own_chunks(8, 1, 2)
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
"""


def own_chunks(s: int, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """[start, stop) of a rank's two chunks of a sequence of s tokens; `size`: number of ranks."""
    assert s % (2 * size) == 0, f"{s} tokens are not {2 * size} equal chunks"
    c = s // (2 * size)
    late = 2 * size - 1 - rank
    return (rank * c, rank * c + c), (late * c, late * c + c)


def row_numbers(s: int, rank: int, size: int) -> list[int]:
    """The positions in the sequence of a rank's s/cp tokens, in its order."""
    return [row for start, stop in own_chunks(s, rank, size) for row in range(start, stop)]
