# SPDX-License-Identifier: Apache-2.0
"""The cache of generation, which computes each token only once: keys and values of tokens, states of texts.

Legend: n tokens of a pass, t tokens of one text, g key-value groups, q queries per group, d channels per head, tp ranks
that divide the groups.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Optional, Protocol

import torch

from megatron.fused_kernels.decode_attention import Places, last_places
from megatron.fused_kernels.explicit_attention import SAME_ROWS, of_sample


class Cache(Protocol):
    """What layers need of a cache: it adds the keys and values of new tokens, and attends to those of all tokens."""

    def attend(
        self, layer, query: torch.Tensor, key: torch.Tensor, value: Optional[torch.Tensor], context
    ) -> torch.Tensor:  # [s, b, g/tp, q, d] and [s, b, g/tp, d] -> [s, b, g/tp q d]
        ...

    def scan(self, layer: int, y: torch.Tensor, core: "Scan") -> torch.Tensor:  # [s, b, ...] -> [s, b, ...]
        """The output of a layer whose tokens read a state of earlier ones, which it keeps for later ones."""
        ...


State = tuple[torch.Tensor, ...]  # what a layer knows of a text, [b, ...] each
# (y, state before) -> (output, state after)
Scan = Callable[[torch.Tensor, Optional[State]], tuple[torch.Tensor, State]]


class TextInPass(NamedTuple):
    """The tokens of one text in a pass.

    rows:   of the pass
    name:   of the text, and whether tokens of it were computed before
    places: of the keys and values of all tokens of the text so far, as slices of the cache; the last ones are the rows'
    """

    rows: slice
    name: int
    continues: bool
    places: tuple[slice, ...]


class PagedCache:
    """What layers keep of texts. Keys and values are in blocks of `block_size` tokens, which `inference.blocks` gives to
    texts.

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

    A state is one for each text and layer, and replaced by each pass that computes tokens of the text. A text whose first
    token is computed begins without one.

    sample: tokens of a sample in training; given, layers compute the bits of a training pass (--batch-invariant-mode,
            `explicit_attention.of_sample`). A pass then has `padding` rows after those of texts, which belong to none
    """

    def __init__(self, blocks: int, block_size: int, sample: Optional[int] = None):
        self.blocks, self.block_size, self.sample, self.padding = blocks, block_size, sample, 0
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}  # keys and values, [blocks block_size, g/tp, d]; or one
        self._states: dict[int, dict[int, State]] = {}  # text -> layer -> [1, ...]
        self._snapshots: dict[int, dict[int, State]] = {}  # of states, by number
        self.parts: list[TextInPass] = []
        self._slots: list[int] = []  # the place of each new token
        self._positions: list[int] = []
        self._single: list[int] = []  # rows of texts with one new token
        self._on_device: dict[str, torch.Tensor] = {}
        self._single_places: Optional[Places] = None

    def begin(
        self,
        texts: Sequence[tuple[int, Sequence[tuple[int, int]]]],
        starts: Sequence[int],
        names: Optional[Sequence[int]] = None,
        sources: Sequence[int] = (),
    ) -> None:
        """Describe the next pass. texts: (tokens so far, blocks as (first, number) of consecutive ones); starts: the
        first token that the pass computes; names: by which their states are known (default: their numbers in order);
        sources: numbers of snapshots from which their states begin.
        """
        self.parts, self._slots, self._positions, self._on_device, row = [], [], [], {}, 0
        names = range(len(texts)) if names is None else names
        for (tokens, runs), start, name in zip(texts, starts, names, strict=True):
            places = tuple(_cut(runs, self.block_size, 0, tokens))
            self.parts.append(TextInPass(slice(row, row + tokens - start), name, start > 0, places))
            if start == 0:
                self._states[name] = {}
            for run in _cut(runs, self.block_size, start, tokens):
                self._slots.extend(range(run.start, run.stop))
            self._positions.extend(range(start, tokens))
            row += tokens - start
        for name, source in zip(names, sources):
            if source in self._snapshots:
                self._states[name] = dict(self._snapshots[source])
        self._single = [part.rows.start for part in self.parts if part.rows.stop - part.rows.start == 1]
        self._single_places = None
        self.padding = 0 if self.sample is None else -row % SAME_ROWS
        self._positions.extend([0] * self.padding)

    def position_ids(self, device) -> torch.Tensor:
        """[n, 1] int64, of the new tokens in their texts; 0 of padding."""
        return self._tensor("positions", self._positions, device).unsqueeze(1)

    def attend(
        self, layer, query: torch.Tensor, key: torch.Tensor, value: Optional[torch.Tensor], context
    ) -> torch.Tensor:
        """Add keys and values [n, 1, g/tp, d] of new tokens to the cache, and attend to all of their texts.

        layer: the `Attention`; query [n, 1, g/tp, q, d]. value: None if keys are all that the layer caches, of any shape
        [n, 1, ...], and its values follow from them. Returns [n, 1, g/tp q v], with the channels of its values.
        """
        keys, values = self._write(layer.layer, key, value)
        if self.sample is not None:
            return self._attend_as_in_training(layer, query, keys, values)
        dtype, query = query.dtype, query.to(keys.dtype)
        decode = layer.decode_kernel(query) if self._single else None
        if decode and len(self._single) == len(query):
            attended = decode(query.squeeze(1), keys, values, self._places(query.device))
            return attended.unsqueeze(1).to(dtype)
        attended = query.new_empty((len(query), 1, query.shape[2] * query.shape[3] * layer.value_dim))
        if decode:
            rows = self._tensor("single", self._single, query.device)
            attended[rows, 0] = decode(query[rows, 0], keys, values, self._places(query.device))
        for rows, _, _, places in self.parts:
            count = rows.stop - rows.start
            if not decode or count > 1:
                places = places if layer.window is None else last_places(places, count + layer.window)
                own, theirs = (_taken(stored, places).to(dtype) for stored in (keys, values))
                attended[rows] = layer.core(query[rows].to(dtype), own, theirs, layer, context.without_cache)
        return attended.to(dtype)

    def _attend_as_in_training(
        self, layer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        g, q = query.shape[2:4]
        attended = query.new_zeros((len(query), 1, g * q * layer.value_dim))
        more = dict(s=self.sample, scale=layer.scale, softcap=layer.softcap, window=layer.window)
        more |= dict(sinks=layer.sinks(g)) if layer.has_sinks else {}
        for rows, _, _, places in self.parts:
            own, theirs = (_taken(stored, places).to(query.dtype) for stored in (keys, values))
            first = len(own) - (rows.stop - rows.start)
            attended[rows] = of_sample(query[rows], own, theirs, first=first, **more)
        return attended

    def scan(self, layer: int, y: torch.Tensor, core: Scan) -> torch.Tensor:
        """y: [n, 1, ...] of all new tokens. Texts that go on by one token are computed together, the others one by one."""
        groups, single, out = [], [], None
        for part in self.parts:
            if part.continues and part.rows.stop - part.rows.start == 1:
                single.append(part)
            else:
                groups.append((part.rows, [part.name], part.continues))
        if single:
            groups.append(([part.rows.start for part in single], [part.name for part in single], True))
        for rows, names, continues in groups:
            before = [self._states[name][layer] for name in names] if continues else []
            own = y[rows] if len(names) == 1 else y[rows].transpose(0, 1)  # [s, b, ...]
            new, after = core(own, tuple(map(torch.cat, zip(*before))) if before else None)
            out = y.new_empty((len(y), 1, *new.shape[2:])) if out is None else out
            out[rows] = new if len(names) == 1 else new.transpose(0, 1)
            for number, name in enumerate(names):
                self._states[name][layer] = tuple(one[number : number + 1] for one in after)
        return out

    def reorder(self, order: Sequence[int]) -> None:
        """Text n goes on with the states of text order[n]."""
        self._states = {name: dict(self._states.get(text, {})) for name, text in enumerate(order)}

    def keep(self, snapshots: Mapping[int, int], dropped: Sequence[int]) -> None:
        """Copy states, after a pass, and drop earlier copies. snapshots: number of the copy -> text"""
        for number, name in snapshots.items():
            states = self._states[name].items()
            self._snapshots[number] = {layer: tuple(one.clone() for one in state) for layer, state in states}
        for number in dropped:
            self._snapshots.pop(number, None)

    def forget(self, names: Sequence[int]) -> None:
        """Drop the states of texts that have ended."""
        for name in names:
            self._states.pop(name, None)

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
            tensor.index_copy_(0, slots, one[: len(slots)].squeeze(1).to(tensor.dtype))
        return stored[0], stored[-1]

    def _places(self, device) -> Places:
        """Of the texts with one new token."""
        if self._single_places is None:
            of_texts = [part.places for part in self.parts if part.rows.stop - part.rows.start == 1]
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
