# SPDX-License-Identifier: Apache-2.0
"""Block sizes of kernels, also used by the planner to predict their memory."""

from typing import NamedTuple, Optional

CHUNK_BYTES = dict(cpu=4 << 20, cuda=800 << 20)  # of a chunk's fp32 logits: fits a CPU's cache; fills a GPU
TILE = 128  # rows of a tile of a GPU's matrix product, of which chunks are multiples
JOINED = 256  # short neighbouring documents share a masked attention call of this many keys: one call each costs more
BLOCK_BYTES = 128 << 20  # of the logits of one product, which their gradients overwrite

SAME_ROWS = 16  # rows from which on a product's row does not depend on their number
VECTORS = 32  # numbers of which vector registers take many; of the rest kernels may compute functions in another way
SAME_SIZE = 1 << 13  # rows x columns x terms: torch multiplies up to 2^12 in bf16 by other kernels
NONCAUSAL_ROWS = 512  # of queries in a block of non-causal attention
RING_ROWS = 256  # the same of explicit attention in a ring
SCORE_BYTES = dict(cpu=4 << 20, cuda=256 << 20)  # of fp32 scores, of which only the largest are kept


class LossChunks(NamedTuple):
    """Tokens per chunk, the unit of fp32 logits, and per block, the unit of the output layer's product."""

    chunk: int
    block: int

    @classmethod
    def of(cls, rows: int, element: int, device: str, chunk: Optional[int] = None) -> "LossChunks":
        """rows: of the vocabulary on this rank; element: bytes of a weight; device: cpu or cuda; chunk:
        --cross-entropy-chunk.

        >>> LossChunks.of(50304, 2, "cuda")
        LossChunks(chunk=4096, block=4096)
        """
        if not chunk:
            chunk = max(16, CHUNK_BYTES[device] // (4 * rows))
            chunk -= chunk % TILE if device == "cuda" and chunk > TILE else 0
        return cls(chunk, max(chunk, BLOCK_BYTES // (element * rows) // chunk * chunk))

    @classmethod
    def ordered(cls, n: int, rows: int, tp: int, *args) -> "LossChunks":
        """Those of --batch-invariant-mode: all n tokens are one block, and none is in a vector register that is not full.
        args: as of `of`
        """
        return cls(max(VECTORS, cls.of(rows * tp, *args).chunk // VECTORS * VECTORS), n)


def causal_blocks(s: int, q: int) -> list[tuple[int, int]]:
    """[start, stop) of the blocks of positions in block-causal attention; q: query heads per key head.

    Blocks have about 128 to 256 rows, measured best at 256 and at 1024 positions.
    """
    return even_blocks(s, (128 if s <= 512 else 256) // q)


def even_blocks(s: int, size: int) -> list[tuple[int, int]]:
    """[start, stop) of blocks of `size` positions, at least 1.

    >>> even_blocks(5, 2)
    [(0, 2), (2, 4), (4, 5)]
    """
    size = max(1, size)
    return [(start, min(start + size, s)) for start in range(0, s, size)]


def first_key(start: int, window: Optional[int]) -> int:
    """The first key for a block of queries from `start` on, if each attends to `window` keys before its own."""
    return 0 if window is None else max(0, start - window)


def causal_pairs(s: int, q: int, window: Optional[int] = None, past: int = 0) -> int:
    """Number of attention weights per head in block-causal attention; past: number of keys before the first query.

    >>> causal_pairs(256, 1) / 256**2
    0.75
    """
    return sum((stop - start) * (past + stop - first_key(past + start, window)) for start, stop in causal_blocks(s, q))
