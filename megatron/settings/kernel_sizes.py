# SPDX-License-Identifier: Apache-2.0
"""Sizes of the blocks that kernels work in: for the kernels, and for the planner, which counts what they keep."""

from typing import NamedTuple, Optional

CHUNK_BYTES = dict(cpu=4 << 20, cuda=512 << 20)  # of a chunk's fp32 logits: in a CPU's cache; enough rows to fill a GPU
JOINED = 256  # keys of neighbouring documents that a kernel looks at together, under a mask: a call for each costs more
BLOCK_BYTES = 128 << 20  # of logits by one product, and of their gradients, which wait for the next one

NONCAUSAL_ROWS = 512  # of queries in a block of non-causal attention


class LossChunks(NamedTuple):
    """Tokens of a chunk, whose logits exist in fp32 at a time, and of a block, whose logits are made by one product."""

    chunk: int
    block: int

    @classmethod
    def of(cls, rows: int, element: int, device: str, chunk: Optional[int] = None) -> "LossChunks":
        """rows: of the vocabulary on this rank; element: bytes of a weight; device: cpu or cuda; chunk:
        --cross-entropy-chunk.

        >>> LossChunks.of(50304, 2, "cuda")
        LossChunks(chunk=2668, block=2668)
        """
        chunk = chunk or max(16, CHUNK_BYTES[device] // (4 * rows))
        return cls(chunk, max(chunk, BLOCK_BYTES // (element * rows) // chunk * chunk))


def causal_blocks(s: int, q: int) -> list[tuple[int, int]]:
    """[start, stop) of blocks of positions in block-causal attention, where q queries share a key. Of about 128 to 256
    rows: measured best at 256 and at 1024 positions.
    """
    size = max(1, (128 if s <= 512 else 256) // q)
    return [(start, min(start + size, s)) for start in range(0, s, size)]


def first_key(start: int, window: Optional[int]) -> int:
    """The first key that a block of queries from `start` on may see, where each sees `window` keys before its own."""
    return 0 if window is None else max(0, start - window)


def causal_pairs(s: int, q: int, window: Optional[int] = None, past: int = 0) -> int:
    """Pairs of query and key whose weights block-causal attention keeps, of one head; past: keys before the first query.

    >>> causal_pairs(256, 1) / 256**2
    0.75
    """
    return sum((stop - start) * (past + stop - first_key(past + start, window)) for start, stop in causal_blocks(s, q))
