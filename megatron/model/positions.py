# SPDX-License-Identifier: Apache-2.0
"""How a token's position enters: a learned table added to the embedding, or rotations of queries and keys (RoPE)."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.weights import Table
from megatron.mpu.layers import create_parameters


class LearnedPositions(nn.Module):
    """Position ids -> vectors of a learned table [positions, h]. weights: `model.weights.positions(...)`."""

    def __init__(self, weights: Table, *, dtype=None, device=None):
        super().__init__()
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(position_ids, self.weight)


class Rotary:
    """Rotation of pairs of channels by position x frequency (RoFormer, arXiv:2104.09864).

    Channel i is paired with channel i + n/2 of the n = `percent` x head_dim that are rotated, as in Megatron-LM and
    in Hugging Face's Llama; the rest pass.
    """

    def __init__(self, head_dim: int, base: float, percent: float = 1.0):
        self.width = int(head_dim * percent) // 2 * 2
        self.base = base

    def angles(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [s, b or 1, 1, 1, width], for position ids [s, b or 1]."""
        exponents = torch.arange(0, self.width, 2, device=position_ids.device, dtype=torch.float32) / self.width
        angles = position_ids.float().unsqueeze(-1) * self.base**-exponents  # [s, b, width/2]
        angles = torch.cat((angles, angles), -1)[:, :, None, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [s, b, g, any, d] with the first `width` channels of d rotated."""
    cos, sin = angles
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turning.chunk(2, -1)
    turned = turning * cos + torch.cat((-second, first), -1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)
