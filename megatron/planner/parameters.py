# SPDX-License-Identifier: Apache-2.0
"""How many weights a rank holds, unit by unit: the arithmetic of `optimizer/units.py` without building a model.

Elements, not bytes. A *unit* is a layer, the embedding, the final norm or the output layer; its parameters are aligned
and the whole is padded to the number of ranks that shard it. Tests hold it equal to what a run allocates.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from megatron.config import Model

ALIGN = 64  # elements; `optimizer.units.ALIGN`, which needs torch to be imported


class Unit(NamedTuple):
    """name: `blocks`, `embedding`, `final_norm` or `output`; sizes: elements of each parameter on one tp rank."""

    name: str
    sizes: tuple[int, ...]

    def padded(self, pieces: int) -> int:
        """Elements of the unit's buffer when `pieces` ranks shard it."""
        at = sum(_up(size, ALIGN) for size in self.sizes)
        return _up(at, ALIGN * pieces)

    @property
    def exact(self) -> int:
        return sum(self.sizes)


def padded_vocabulary(model: Model, vocab_size: int, tp: int) -> int:
    """Rows of the embedding over all tp ranks."""
    return _up(vocab_size, model.make_vocab_size_divisible_by * tp)


@lru_cache(maxsize=1024)
def layer(model: Model, tp: int) -> Unit:
    """The parameters of one transformer layer on one tp rank."""
    h, d = model.hidden_size, model.head_dim
    bias = not model.disable_bias_linear
    norm = [h] * (1 if model.normalization == "RMSNorm" else 2)
    groups, queries = model.query_groups // tp, model.num_attention_heads // model.query_groups
    qkv = groups * (queries + 2) * d
    up = model.ffn_size // tp * (2 if model.swiglu else 1)
    sizes = [*norm, qkv * h, *[qkv] * bias, h * (model.num_attention_heads * d // tp), *[h] * bias]
    sizes += [d] * (2 * len(norm)) if model.qk_layernorm else []
    sizes += [*norm, up * h, *[up] * bias, h * (model.ffn_size // tp), *[h] * bias]
    return Unit("blocks", tuple(sizes))


@lru_cache(maxsize=4096)
def stage(model: Model, vocab_size: int, tp: int, layers: int, first: bool, last: bool) -> tuple[Unit, ...]:
    """The units of a pipeline stage with that many layers, on one tp rank."""
    h, rows = model.hidden_size, padded_vocabulary(model, vocab_size, tp) // tp
    tied, units = not model.untie_embeddings_and_output_weights, []
    if first or (last and tied):
        table = [model.position_table * h] if first and model.position_embedding_type == "learned_absolute" else []
        units.append(Unit("embedding", (rows * h, *table)))
    units += [layer(model, tp)] * layers
    if last:
        units.append(Unit("final_norm", (h,) * (1 if model.normalization == "RMSNorm" else 2)))
        if not tied:
            units.append(Unit("output", (rows * h,)))
    return tuple(units)


def padded(units: Iterable[Unit], pieces: int) -> int:
    """Elements of the buffer that holds these units."""
    return sum(unit.padded(pieces) for unit in units)


def partial(model: Model, layers: int, first: bool, last: bool) -> int:
    """Elements whose gradients are partial sums over tp under sequence parallelism: norms, biases of row layers, and
    learned positions."""
    h = model.hidden_size
    norm = h * (1 if model.normalization == "RMSNorm" else 2)
    each = 2 * norm + (0 if model.disable_bias_linear else 2 * h)
    table = model.position_table * h if first and model.position_embedding_type == "learned_absolute" else 0
    return layers * each + norm * last + table


def _up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple
