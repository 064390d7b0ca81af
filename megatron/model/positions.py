# SPDX-License-Identifier: Apache-2.0
"""Position embeddings: a learned table added to token embeddings, or rotation of queries and keys (RoPE)."""

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.fused_kernels import Case, choose_kernel
from megatron.model.weights import Table
from megatron.mpu.layers import create_parameters
from megatron.settings.schema import Model


class LearnedPositions(nn.Module):
    """A learned table of position embeddings [positions, h]. weights: `model.weights.positions(...)`."""

    def __init__(self, weights: Table, *, dtype=None, device=None):
        super().__init__()
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(position_ids, self.weight)


class Rotary:
    """Rotary position embedding: rotates pairs of channels by position x frequency (RoFormer, arXiv:2104.09864).

    Channel i is paired with channel i + n/2 of the n rotated ones, as in Megatron-LM and in Hugging Face's Llama; the rest
    are unchanged. Frequencies may be scaled for sequences longer than the original length (`scaled_frequencies`), and YaRN
    also scales the rotated channels.

    base: another base of the frequencies, which are not scaled then (--rope-local-base-freq). width: n (default:
    `rotary_percent` x head_dim)
    """

    def __init__(self, model: Model, base: Optional[float] = None, width: Optional[int] = None):
        self.width = int(model.head_dim * model.rotary_percent) // 2 * 2 if width is None else width
        self.model, self.scaled = model, base is None
        self.base = model.rotary_base if base is None else base
        self.stretch = model.yarn_stretch if model.rope_type == "yarn" and self.scaled else 1.0

    def angles(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [s, b or 1, 1, 1, width], for position ids [s, b or 1]."""
        exponents = torch.arange(0, self.width, 2, device=position_ids.device, dtype=torch.float32) / self.width
        frequencies = self.base**-exponents
        if self.scaled:
            frequencies = scaled_frequencies(frequencies, self.model)
        angles = position_ids.float().unsqueeze(-1) * frequencies  # [s, b, width/2]
        angles = torch.cat((angles, angles), -1)[:, :, None, None]
        cos, sin = angles.cos(), angles.sin()
        if self.stretch != 1.0:
            cos, sin = cos * self.stretch, sin * self.stretch
        return cos.to(dtype), sin.to(dtype)


def scaled_frequencies(frequencies: torch.Tensor, model: Model) -> torch.Tensor:
    """Rotary frequencies [n/2] in radians per token, scaled as the settings specify."""
    if model.rotary_seq_len_interpolation_factor is not None:
        return frequencies / model.rotary_seq_len_interpolation_factor
    if model.use_rope_scaling:
        low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
        turns = model.rope_scaling_original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: enough turns in the original length
        return frequencies * (kept + (1 - kept) / model.rope_scaling_factor)
    if model.rope_type == "yarn":
        kept = 1 - _yarn_ramp(frequencies, model)
        return frequencies * (kept + (1 - kept) / model.rotary_scaling_factor)
    return frequencies


def _yarn_ramp(like: torch.Tensor, model: Model) -> torch.Tensor:
    """YaRN's ramp [half]: 0 for channels with more than beta_fast turns in the original length, 1 for those with fewer than
    beta_slow turns, and linear between. like: the frequencies.
    """
    half = len(like)

    def channel(turns: float) -> float:  # index of the frequency with this many turns
        waves = model.yarn_original_max_position_embeddings / (2 * math.pi * turns)
        return half * math.log(waves) / math.log(model.rotary_base)

    low, high = channel(model.yarn_beta_fast), channel(model.yarn_beta_slow)
    if model.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    places = torch.arange(half, dtype=torch.float32, device=like.device)
    return ((places - low) / max(high - low, 0.001)).clamp(0, 1).to(like.dtype)


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], unfused: bool = False) -> torch.Tensor:
    """x [s, b, g, any, d] with the first `width` channels of d rotated, by the best kernel for `reference.rotate`."""
    return choose_kernel("rotate", Case(x.device.type, x.dtype, unfused=unfused)).run(x, *angles)
