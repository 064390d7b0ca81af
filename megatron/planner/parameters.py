# SPDX-License-Identifier: Apache-2.0
"""How many weights a rank holds, unit by unit: the arithmetic of `optimizer/units.py` without building a model.

Elements, not bytes. A *unit* is a layer, the word table, learned positions, the final norm or the output layer; its
parameters are aligned and the whole is padded to the number of ranks that shard it. Tests hold it equal to what a run
allocates.
"""

import math
from collections import Counter
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron.planner.layout import Job, Layout
from megatron.settings.schema import Model

ALIGN = 64  # elements; `optimizer.units.ALIGN`, which needs torch to be imported


class Slot(NamedTuple):
    """A parameter: its elements on one tp rank, whether it is decayed, and the axis over which its gradient is partial."""

    size: int
    decay: bool = True
    partial: str = ""


class Unit(NamedTuple):
    """name: `blocks` (each layer), `embedding.word`, `embedding`, `final_norm` or `output`; slots: as they lie."""

    name: str
    slots: tuple[Slot, ...]

    def padded(self, pieces: int) -> int:
        """Elements of the unit's buffer when `pieces` ranks shard it."""
        return _padded(self.slots, pieces)

    @property
    def exact(self) -> int:
        """Elements without padding."""
        return sum(slot.size for slot in self.slots)

    def partial(self, axis: str, rank: int, pieces: int) -> int:
        """Elements in the shard of `rank` of `pieces` whose gradients are partial sums over an axis."""
        size = self.padded(pieces) // pieces
        low, high, at, found = size * rank, size * (rank + 1), 0, 0
        for slot in self.slots:
            if slot.partial == axis:
                found += max(0, min(high, at + slot.size) - max(low, at))
            at += _up(slot.size, ALIGN)
        return found


class Units(tuple):
    """The units of a rank, in order; figures of the whole are computed once."""

    @cached_property
    def others(self) -> "Units":
        """Those that are no layers."""
        return Units(unit for unit in self if unit.name != "blocks")

    @cached_property
    def block(self) -> "Units":
        """A layer, or nothing where there is none."""
        return Units([unit for unit in self if unit.name == "blocks"][:1])

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max(slot.size for unit in self for slot in unit.slots)

    @cached_property
    def counts(self) -> Counter:
        """Unit -> how many there are of it."""
        return Counter(self)

    @cached_property
    def _sizes(self) -> dict[int, int]:
        return {}

    def padded(self, pieces: int) -> int:
        """Elements of the buffer that holds all of them when `pieces` ranks shard it."""
        if pieces not in self._sizes:
            self._sizes[pieces] = sum(count * unit.padded(pieces) for unit, count in self.counts.items())
        return self._sizes[pieces]


def padded_vocabulary(model: Model, vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all tp ranks."""
    return _up(vocab_size, model.make_vocab_size_divisible_by * tp)


@lru_cache(maxsize=1024)
def layer(model: Model, tp: int, sp: bool) -> Unit:
    """The parameters of one transformer layer on one tp rank."""
    h, d, bias = model.hidden_size, model.head_dim, not model.disable_bias_linear
    over = "tp" if sp else ""
    vectors = 1 if model.normalization == "RMSNorm" else 2
    norm = [Slot(h, False, over)] * vectors
    heads = [Slot(d, False, "tp" if tp > 1 else "")] * (2 * vectors * model.qk_layernorm)
    groups, queries = model.query_groups // tp, model.num_attention_heads // model.query_groups
    qkv = groups * (queries + 2) * d
    up = model.ffn_size // tp * (2 if model.swiglu else 1)
    slots = [*norm, Slot(qkv * h), *[Slot(qkv, False)] * bias]
    slots += [Slot(h * (model.num_attention_heads * d // tp)), *[Slot(h, False, over)] * bias, *heads, *norm]
    slots += [Slot(up * h), *[Slot(up, False)] * bias, Slot(h * (model.ffn_size // tp)), *[Slot(h, False, over)] * bias]
    return _unit("blocks", slots)


def rank_units(job: Job, layout: Layout, rank: int) -> Units:
    """The units of a pipeline rank's chunks, on one tp rank."""
    pipeline = layout.pipeline(job.model.num_layers)
    last = len(pipeline.stages) - 1
    stages = pipeline.stages_of(rank)
    chunks = tuple((len(pipeline.layers[stage]), stage == 0, stage == last) for stage in stages)
    return _units(job.model, job.vocab_size, layout.tp, layout.sp, chunks)


@lru_cache(maxsize=4096)
def _units(model: Model, vocab_size: int, tp: int, sp: bool, chunks: tuple[tuple[int, bool, bool], ...]) -> Units:
    h, over = model.hidden_size, "tp" if sp else ""
    rows = padded_vocabulary(model, vocab_size, tp) // tp
    tied = not model.untie_embeddings_and_output_weights
    first, last = any(first for _, first, _ in chunks), any(last for _, _, last in chunks)
    units = []
    if first or (last and tied):
        units.append(Unit("embedding.word", (Slot(rows * h, True, "tied" if tied and not (first and last) else ""),)))
    if first and model.position_embedding_type == "learned_absolute":
        units.append(Unit("embedding", (Slot(model.position_table * h, True, over),)))
    units += [layer(model, tp, sp)] * sum(layers for layers, _, _ in chunks)
    if last:
        units.append(Unit("final_norm", (Slot(h, False, over),) * (1 if model.normalization == "RMSNorm" else 2)))
        if not tied:
            units.append(Unit("output", (Slot(rows * h),)))
    return Units(units)


def _unit(name: str, slots: list[Slot]) -> Unit:
    return Unit(name, tuple(sorted(slots, key=lambda slot: not slot.decay)))


@lru_cache(maxsize=65536)
def _padded(slots: tuple[Slot, ...], pieces: int) -> int:
    return _up(sum(_up(slot.size, ALIGN) for slot in slots), ALIGN * pieces)


def _up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple
