# SPDX-License-Identifier: Apache-2.0
"""T5's relative position bias (arXiv:1910.10683, section 2.1): a score gets a term that depends on the distance between key
and query, one learned number per head for each bucket of distances.

Half of the buckets are single distances, the others grow logarithmically up to the largest one. With bidirectional
attention, keys after the query have separate buckets.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.t5.settings import T5Settings
from megatron.model.weights import Table, take_prefix
from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Axis


class RelativeTable(nn.Module):
    """The bias table of the encoder or the decoder, [buckets, heads/tp]."""

    def __init__(self, weights: Table, tp: Axis, *, dtype=None, device=None):
        super().__init__()
        create_parameters(self, weights, tp, dtype=dtype, device=device)

    def forward(self) -> torch.Tensor:
        return self.weight


class RelativeTables(nn.ModuleDict):
    """A table for each of `T5Facts.halves`. A module to call, so that ZeRO can gather its parameters around each use."""

    def __init__(self, weights: Table, halves: Sequence[str], tp: Axis, **factory_kwargs):
        super().__init__({half: RelativeTable(take_prefix(weights, half), tp, **factory_kwargs) for half in halves})

    def forward(self) -> torch.Tensor:
        """[halves, buckets, heads/tp]: the encoder's, then the decoder's."""
        return torch.stack([table() for table in self.values()])


def relative_buckets(distance: torch.Tensor, own: T5Settings, both_ways: bool) -> torch.Tensor:
    """The bucket of each distance, position of the key minus that of the query; int64 of its shape."""
    number, after = own.relative_attention_num_buckets, 0
    if both_ways:
        number //= 2
        after, distance = (distance > 0) * number, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = number // 2
    grown = torch.log(distance.clamp(min=1).float() / exact) / math.log(own.relative_attention_max_distance / exact)
    far = (exact + (grown * (number - exact)).long()).clamp(max=number - 1)
    return after + torch.where(distance < exact, distance, far)


def relative_bias(
    table: torch.Tensor, own: T5Settings, queries: int, keys: int, both_ways: bool, first: int = 0
) -> torch.Tensor:
    """The bias [heads/tp, queries, keys] from a table [buckets, heads/tp]. first: position of the first query.

    It depends only on the distance: one row per distance is looked up, and queries see slices of these rows.
    """
    distances = torch.arange(-(first + queries - 1), keys - first, device=table.device)  # ascending
    rows = F.embedding(relative_buckets(distances, own, both_ways), table)  # [queries + keys - 1, heads/tp]
    return _Windows.apply(rows, keys)


class _Windows(torch.autograd.Function):
    """rows [queries + keys - 1, heads] -> [heads, queries, keys]: the last query's slice begins at the first row, and each
    earlier query's one row later. torch's own gradient of such windows takes ten times as long on a CPU.
    """

    @staticmethod
    def forward(ctx, rows, keys):
        return rows.t().contiguous().unfold(1, keys, 1).flip(1)

    @staticmethod
    def backward(ctx, gradient):
        heads, queries, keys = gradient.shape
        width = queries + keys - 1
        # Put each query's gradients at the rows of its window, then sum over queries.
        placed = gradient.new_zeros(heads, queries, width)
        placed.as_strided((heads, queries, keys), (queries * width, width - 1, 1), queries - 1).copy_(gradient)
        return placed.sum(1).t(), None
