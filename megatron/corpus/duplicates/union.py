# SPDX-License-Identifier: Apache-2.0
"""Union-find of documents from pairs in one process: 4 bytes per document (8 beyond 4 billion), for any number of pairs.

>>> groups = DocumentGroups(5)
>>> groups.join(np.array([[1, 3], [3, 4]]))
>>> groups.smallest(0, 5).tolist()
[0, 1, 2, 1, 1]
"""

import numpy as np

_PIECE = 1 << 22  # documents or pairs that are processed together


class DocumentGroups:
    """Groups of documents. Each document points to a smaller one of its group; the smallest one points to itself.

    The result does not depend on the order of the pairs.
    """

    def __init__(self, documents: int):
        self._parent = np.arange(documents, dtype=np.uint32 if documents < 1 << 32 else np.int64)

    def join(self, pairs: np.ndarray) -> None:
        """Join the groups of each pair. [pairs, 2]"""
        for start in range(0, len(pairs), _PIECE):
            self._join(np.asarray(pairs[start : start + _PIECE]))

    def _join(self, pairs: np.ndarray) -> None:
        one, other = pairs[:, 0], pairs[:, 1]
        while True:
            one, other = self._roots(one), self._roots(other)
            apart = one != other
            if not apart.any():
                return
            one, other = one[apart], other[apart]
            # Of several pairs that give one root a new parent, the smallest wins; the loop repeats the others.
            np.minimum.at(self._parent, np.maximum(one, other), np.minimum(one, other))

    def _roots(self, documents: np.ndarray) -> np.ndarray:
        roots = self._parent[documents]
        while True:
            further = self._parent[roots]
            if (further == roots).all():
                self._parent[documents] = roots  # shortens the path
                return roots
            roots = further

    def smallest(self, first: int, end: int) -> np.ndarray:
        """The smallest document of the group of each of [first, end)."""
        return self._roots(np.arange(first, end))
