# SPDX-License-Identifier: Apache-2.0
"""Pack the tokens of a padded micro-batch into one row without most of the padding, for non-causal layers on a CPU.

The loss does not depend on outputs at padding, so these are set to zero.

    >>> rows = PackedRows.of(torch.arange(256) < torch.tensor([[256], [70]]))
    >>> rows.pack(torch.ones(256, 2, 8)).shape, rows.padding.sum()
    (torch.Size([384, 1, 8]), tensor(326))
    >>> rows.unpack(torch.ones(384, 1, 8)).sum((0, 2))
    tensor([2048., 1024.])

Legend: s positions, b samples, n kept rows, h width.
"""

from dataclasses import dataclass, replace
from typing import Optional

import numpy as np
import torch

from megatron.fused_kernels.documents import Documents
from megatron.model.context import ForwardContext
from megatron.settings.schema import Kernels, Model

ROUND = 64  # each sample keeps a multiple of this many rows: a product of a new shape takes milliseconds to prepare
WORTH = 0.95  # of all rows: if more are kept, packing costs what it saves


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The kept rows of [s, b, ...], and the inputs of attention over them.

    index      [n] int64: indices of the kept rows among the s b rows, sample after sample
    places     [n] int64: the position of each row in its sample
    documents  the sample of each row, as if samples were the documents of one sequence
    padding    [1, n] bool: True for rows that are tokens; None: all
    shape      (s, b)
    """

    index: torch.Tensor
    places: torch.Tensor
    documents: Documents
    padding: Optional[torch.Tensor]
    shape: tuple[int, int]

    @classmethod
    def of(cls, padding: Optional[torch.Tensor]) -> Optional["PackedRows"]:
        """Build from [b, s] bool, True at tokens. None if nearly all rows would stay, if padding does not follow the
        tokens of each sample, or on other devices, where the row counts would need a synchronization.
        """
        if padding is None or padding.device.type != "cpu":
            return None
        (b, s), lengths, order = padding.shape, padding.sum(1), torch.arange(padding.shape[1])
        kept_lengths = ((lengths + ROUND - 1) // ROUND * ROUND).clamp(max=s)
        if kept_lengths.sum() > WORTH * b * s or not torch.equal(padding, order < lengths.unsqueeze(1)):
            return None
        kept = order < kept_lengths.unsqueeze(1)
        samples, places = kept.nonzero(as_tuple=True)
        first = np.repeat((kept_lengths.cumsum(0) - kept_lengths).numpy(), kept_lengths.numpy())
        documents = Documents.of(first.astype(np.int32).reshape(1, -1), "cpu")
        tokens = padding[kept].unsqueeze(0)
        return cls(places * b + samples, places, documents, None if tokens.all() else tokens, (s, b))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [n, 1, h]."""
        return _Pack.apply(x, self.index)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 1, h] -> [s, b, h], zero at dropped rows."""
        return _Unpack.apply(x, self.index, self.shape)

    def context(self, context: ForwardContext) -> ForwardContext:
        """The context of layers over packed rows."""
        angles = context.angles and tuple(part[self.places] for part in context.angles)
        return replace(context, angles=angles, padding=self.padding, documents=self.documents)


def may_pack(model: Model, kernels: Kernels, training: bool, sequence_parallel: bool) -> bool:
    """Whether layers with these settings give the same result for packed rows: dropout is drawn by sample and position, and
    sequence parallelism divides a fixed number of rows.
    """
    drops = training and (model.hidden_dropout > 0 or model.attention_dropout > 0 or model.lora_dropout > 0)
    explicit = kernels.attention_backend in ("auto", "explicit")
    return explicit and not drops and not sequence_parallel


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape[:2]
        return _taken(x, index)

    @staticmethod
    def backward(ctx, gradient):
        return _put(gradient, *ctx.saved_tensors, ctx.shape), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, shape):
        ctx.save_for_backward(index)
        return _put(x, index, shape)

    @staticmethod
    def backward(ctx, gradient):
        return _taken(gradient, *ctx.saved_tensors), None, None


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).index_select(0, index).unsqueeze(1)


def _put(x: torch.Tensor, index: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    whole = x.new_zeros(shape[0] * shape[1], x.shape[-1])
    return whole.index_copy_(0, index, x.squeeze(1)).view(*shape, -1)
