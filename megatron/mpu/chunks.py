# SPDX-License-Identifier: Apache-2.0
"""The tokens of a sequence that each context parallel rank has. Needs no torch and no numpy.

A sequence is split into 2 x cp chunks, and rank r has chunks r and 2 cp - 1 - r, as in Megatron-LM: under a causal mask all
ranks then have the same number of pairs of query and key. Eight tokens on two ranks:

    >>> own_chunks(8, 0, 2), own_chunks(8, 1, 2)
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
"""

from typing import NamedTuple, Optional


def own_chunks(s: int, rank: int, size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """[start, stop) of a rank's two chunks of a sequence of s tokens; `size`: number of ranks."""
    assert s % (2 * size) == 0, f"{s} tokens are not {2 * size} equal chunks"
    c = s // (2 * size)
    late = 2 * size - 1 - rank
    return (rank * c, rank * c + c), (late * c, late * c + c)


def row_numbers(s: int, rank: int, size: int) -> list[int]:
    """The positions in the sequence of a rank's s/cp tokens, in its order."""
    return [row for start, stop in own_chunks(s, rank, size) for row in range(start, stop)]


def exchanging(groups: int, cp: int, inner: int) -> int:
    """How many ranks of cp exchange rows for heads in a scan with so many groups of heads on each: all if they divide
    these, else the inner ones of a2a+p2p, else one. States are passed on between those with other rows.

    >>> exchanging(4, 4, 1), exchanging(4, 8, 2), exchanging(1, 2, 1)
    (4, 2, 1)
    """
    return next(ranks for ranks in (cp, inner, 1) if groups % ranks == 0)


class VisiblePart(NamedTuple):
    """Queries [start, stop) that see keys [start, stop), each counted on its rank; as `partial_attention.Rectangle`."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    window: Optional[int] = None


def parts_between(s: int, rank: int, source: int, size: int, window: Optional[int] = None) -> list[VisiblePart]:
    """The pairs of the queries of `rank` and the keys of `source` under a causal mask, of chunks that see each other.

    >>> parts_between(8, 1, 0, 2), parts_between(8, 1, 1, 2)[0].causal
    ([VisiblePart(rows=(0, 4), keys=(0, 2), causal=False, window=None)], True)
    """
    c = s // (2 * size)
    if window is None:
        if source == rank:
            return [VisiblePart((0, 2 * c), (0, 2 * c), True)]
        rows, keys = ((0, 2 * c), (0, c)) if source < rank else ((c, 2 * c), (0, 2 * c))
        return [VisiblePart(rows, keys, False)]
    parts = (part_of_chunks(c, *pair, window) for pair in chunk_pairs(rank, source, size))
    return [part for part in parts if part is not None]


def ring_distances(s: int, size: int, window: Optional[int] = None) -> list[int]:
    """How many places before a rank the ranks are whose keys it sees, for any rank: all of them, or those in a window.

    >>> ring_distances(64, 8), ring_distances(64, 8, 4)
    ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 7])
    """
    seen = lambda rank, distance: parts_between(s, rank, (rank - distance) % size, size, window)
    return [distance for distance in range(size) if any(seen(rank, distance) for rank in range(size))]


class ChunkPair(NamedTuple):
    """A chunk of queries and one of keys: the place of each on its rank (0 early, 1 late), its number in the sequence."""

    query_place: int
    key_place: int
    query: int
    key: int


def chunk_pairs(rank: int, source: int, size: int) -> list[ChunkPair]:
    """The chunks of `rank` with those of `source` that are not after them."""
    numbers = lambda one: enumerate((one, 2 * size - 1 - one))
    return [
        ChunkPair(query_place, key_place, query, key)
        for query_place, query in numbers(rank)
        for key_place, key in numbers(source)
        if key <= query
    ]


def part_of_chunks(
    c: int,
    query_place: int,
    key_place: int,
    query: int,
    key: int,
    window: Optional[int],
    queries: int = 0,
    first: int = 0,
) -> Optional[VisiblePart]:
    """The visible pairs of two chunks of c tokens; None if there are none.

    queries, first: of different chunks, only the first so many queries (default: all) see keys, from key `first` on
    """
    q, k = query_place * c, key_place * c
    if query == key:
        return VisiblePart((q, q + c), (k, k + c), True, window)
    queries = queries or c
    if window is not None:
        away = (query - key) * c  # from a key to the query at the same place
        queries, first = min(queries, window - away + c), max(first, away - window)
        if queries <= 0:
            return None
        window = window - away + c - queries  # counted as if the queries were the last of the keys
        window = None if window >= c - first - 1 else window
    return VisiblePart((q, q + queries), (k + first, k + c), False, window)
