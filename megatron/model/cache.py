# SPDX-License-Identifier: Apache-2.0
"""The key-value cache, so that generation computes each token only once."""

from typing import Optional

import torch


class Cache:
    """Keys and values of up to `capacity` tokens of `batch` sequences; layers fill it, and `logits` advances `length`.

    The cached tokens that a new one may see follow from `document_ids`, as in training: padding of a sequence has another
    id than its text. Two prompts, of 3 and 2 tokens, padded on the left, then one token:

        cache = Cache(capacity=64, batch=2)
        documents, positions = [[0, 1], [0, 0], [0, 0]], [[0, 0], [1, 0], [2, 1]]  # as tensors [s, b]
        model.logits(prompts, cache=cache, position_ids=positions, document_ids=documents)
        model.logits(tokens, cache=cache, position_ids=[[3, 2]])
    """

    def __init__(self, capacity: int, batch: int):
        self.capacity, self.batch, self.length = capacity, batch, 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._document_ids: Optional[torch.Tensor] = None

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [s, b, g, d] of a layer; returns those of all tokens, [length + s, b, g, d]."""
        end = self.length + key.shape[0]
        assert end <= self.capacity and key.shape[1] == self.batch, (
            f"cache of {self.capacity} x {self.batch} is too small"
        )
        for store, new in ((self._keys, key), (self._values, value)):
            if layer not in store:
                store[layer] = new.new_empty((self.capacity, *new.shape[1:]))
            store[layer][self.length : end] = new
        return self._keys[layer][:end], self._values[layer][:end]

    def reorder(self, order: torch.Tensor) -> None:
        """Sequence n continues from the cache of sequence order[n]; the number of sequences may increase."""
        for store in (self._keys, self._values):
            for layer, kept in store.items():
                if len(order) == self.batch:
                    kept[: self.length] = kept[: self.length, order]
                else:
                    store[layer] = kept[:, order]
        self.batch = len(order)

    def extend_documents(self, document_ids: Optional[torch.Tensor], s: int) -> Optional[torch.Tensor]:
        """Add the ids [s, b] of new tokens, None meaning 0; returns those of all tokens; None if none were given yet."""
        if self._document_ids is None:
            if document_ids is None:
                return None
            self._document_ids = document_ids.new_zeros((self.capacity, self.batch))
        end = self.length + s
        self._document_ids[self.length : end] = 0 if document_ids is None else document_ids
        return self._document_ids[:end]
