# SPDX-License-Identifier: Apache-2.0
"""The key-value cache, so that generation computes each token only once.

Legend: n tokens of a pass, t tokens of one text, g key-value groups, q queries per group, d channels per head, tp ranks
that divide the groups.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional, Protocol

import torch

from megatron.fused_kernels.decode_attention import Places, last_places


class Cache(Protocol):
    """What layers need of a cache: it adds the keys and values of new tokens, and attends to those of all tokens."""

    def attend(
        self, layer, query: torch.Tensor, key: torch.Tensor, value: Optional[torch.Tensor], context
    ) -> torch.Tensor:  # [s, b, g/tp, q, d] and [s, b, g/tp, d] -> [s, b, g/tp q d]
        ...


class TextInPass(NamedTuple):
    """The tokens of one text in a pass.

    rows:   of the pass
    places: of the keys and values of all tokens of the text so far, as slices of the cache; the last ones are the rows'
    """

    rows: slice
    places: tuple[slice, ...]


class PagedCache:
    """Keys and values of texts, in blocks of `block_size` tokens, which `inference.blocks` gives to texts.

    A pass packs new tokens of several texts into one row of tokens [n, 1], since only attention needs to know which tokens
    belong together. `begin` says so before the pass, with the place of each new token in the cache:

        cache = PagedCache(blocks=64, block_size=16)
        cache.begin([(3, [(0, 1)]), (2, [(5, 1)])], [0, 0])  # texts of 3 and 2 tokens, in blocks 0 and 5
        model.logits(tokens, cache=cache)  # [5, 1], at the positions 0, 1, 2, 0, 1
        cache.begin([(4, [(0, 1)]), (3, [(5, 1)])], [3, 2])  # one more token each
        model.logits(tokens, cache=cache)  # [2, 1], at the positions 3, 2

    Layers attend to each text by itself, or to all texts with one new token in one call that does not mix them
    (`fused_kernels.decode_attention`): a result does not depend on the other texts of the pass. The tensors of a layer are
    allocated at its first pass.
    """

    def __init__(self, blocks: int, block_size: int):
        self.blocks, self.block_size = blocks, block_size
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}  # keys and values, [blocks block_size, g/tp, d]; or one
        self.parts: list[TextInPass] = []
        self._slots: list[int] = []  # the place of each new token
        self._positions: list[int] = []
        self._single: list[int] = []  # rows of texts with one new token
        self._on_device: dict[str, torch.Tensor] = {}
        self._single_places: Optional[Places] = None

    def begin(self, texts: Sequence[tuple[int, Sequence[tuple[int, int]]]], starts: Sequence[int]) -> None:
        """Describe the next pass. texts: (tokens so far, blocks as (first, number) of consecutive ones); starts: the
        first token that the pass computes.
        """
        self.parts, self._slots, self._positions, self._on_device, row = [], [], [], {}, 0
        for (tokens, runs), start in zip(texts, starts, strict=True):
            places = tuple(_cut(runs, self.block_size, 0, tokens))
            self.parts.append(TextInPass(slice(row, row + tokens - start), places))
            for run in _cut(runs, self.block_size, start, tokens):
                self._slots.extend(range(run.start, run.stop))
            self._positions.extend(range(start, tokens))
            row += tokens - start
        self._single = [rows.start for rows, _ in self.parts if rows.stop - rows.start == 1]
        self._single_places = None

    def position_ids(self, device) -> torch.Tensor:
        """[n, 1] int64, of the new tokens in their texts."""
        return self._tensor("positions", self._positions, device).unsqueeze(1)

    def attend(
        self, layer, query: torch.Tensor, key: torch.Tensor, value: Optional[torch.Tensor], context
    ) -> torch.Tensor:
        """Add keys and values [n, 1, g/tp, d] of new tokens to the cache, and attend to all of their texts.

        layer: the `Attention`; query [n, 1, g/tp, q, d]. value: None if keys are all that the layer caches, of any shape
        [n, 1, ...], and its values follow from them. Returns [n, 1, g/tp q v], with the channels of its values.
        """
        keys, values = self._write(layer.layer, key, value)
        dtype, query = query.dtype, query.to(keys.dtype)
        decode = layer.decode_kernel(query) if self._single else None
        if decode and len(self._single) == len(query):
            attended = decode(query.squeeze(1), keys, values, self._places(query.device))
            return attended.unsqueeze(1).to(dtype)
        attended = query.new_empty((len(query), 1, query.shape[2] * query.shape[3] * layer.value_dim))
        if decode:
            rows = self._tensor("single", self._single, query.device)
            attended[rows, 0] = decode(query[rows, 0], keys, values, self._places(query.device))
        for rows, places in self.parts:
            count = rows.stop - rows.start
            if not decode or count > 1:
                places = places if layer.window is None else last_places(places, count + layer.window)
                own, theirs = (_taken(stored, places).to(dtype) for stored in (keys, values))
                attended[rows] = layer.core(query[rows].to(dtype), own, theirs, layer, context.without_cache)
        return attended.to(dtype)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, as (from, to): a text is about to write into a block that another one has, too."""
        if not pairs:
            return
        for stored in (tensor for layer in self._layers.values() for tensor in layer):
            blocks = stored.view(self.blocks, self.block_size, *stored.shape[1:])
            blocks[[to for _, to in pairs]] = blocks[[source for source, _ in pairs]]

    def _write(self, layer: int, key: torch.Tensor, value: Optional[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """All stored keys and values; keys in place of values that there are none of."""
        slots, new = self._tensor("slots", self._slots, key.device), (key,) if value is None else (key, value)
        if layer not in self._layers:
            places, dtype = self.blocks * self.block_size, stored_dtype(key)
            self._layers[layer] = tuple(one.new_empty((places, *one.shape[2:]), dtype=dtype) for one in new)
        stored = self._layers[layer]
        for tensor, one in zip(stored, new, strict=True):
            tensor.index_copy_(0, slots, one.squeeze(1).to(tensor.dtype))
        return stored[0], stored[-1]

    def _places(self, device) -> Places:
        """Of the texts with one new token."""
        if self._single_places is None:
            of_texts = [places for rows, places in self.parts if rows.stop - rows.start == 1]
            self._single_places = Places(of_texts, self.block_size, device)
        return self._single_places

    def _tensor(self, name: str, numbers: list[int], device) -> torch.Tensor:
        if name not in self._on_device:
            self._on_device[name] = torch.tensor(numbers, dtype=torch.int64, device=device)
        return self._on_device[name]


def stored_dtype(like: torch.Tensor) -> torch.dtype:
    """The format of keys and values of a model with weights `like` this: fp32 on a CPU, whose attention of one token takes
    2 to 7 times as long in bf16.
    """
    return torch.float32 if like.device.type == "cpu" else like.dtype


def _cut(runs: Sequence[tuple[int, int]], size: int, start: int, stop: int):
    """The places of a text's tokens from start to stop, as slices."""
    first = 0  # token of the run's first place
    for block, number in runs:
        low, high = max(start, first), min(stop, first + number * size)
        if low < high:
            yield slice(block * size + low - first, block * size + high - first)
        first += number * size


def _taken(stored: torch.Tensor, places: tuple[slice, ...]) -> torch.Tensor:
    """[t, 1, g/tp, d]: a view if the places are consecutive."""
    if len(places) == 1:
        return stored[places[0]].unsqueeze(1)
    return torch.cat([stored[place] for place in places]).unsqueeze(1)
