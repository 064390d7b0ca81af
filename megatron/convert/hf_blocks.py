# SPDX-License-Identifier: Apache-2.0
"""Files of Hugging Face in which blocks of a weight have a scale: they are read as ordinary weights.

fp8: as DeepSeek-V3 and Kimi K2 are published. The matrix `X.weight` [o, i] is stored in e4m3, with `X.weight_scale_inv`
[o / 128, i / 128], rounded up, in fp32: the numbers of each block of 128 x 128 are multiplied by its scale.

MXFP4: as gpt-oss is published, 32 numbers of 4 bits share a power of two (OCP Microscaling Formats 1.0). The tensor `X`
[E, inputs, rows] is stored by rows: `X_blocks` [E, rows, inputs / 32, 16] uint8, two numbers in a byte, the first in its
low bits, and `X_scales` [E, rows, inputs / 32] uint8, exponents with a bias of 127.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron.convert.hf_files import WHOLE, TensorFiles
from megatron.errors import CheckpointError

SCALE = "_scale_inv"


def is_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are in fp8."""
    return (config.get("quantization_config") or {}).get("quant_method") == "fp8"


class FP8Files:
    """`TensorFiles` in which a matrix and its scales are one tensor in fp32."""

    def __init__(self, files: TensorFiles, config: Mapping[str, Any]):
        """Raises CheckpointError for other blocks than those of config.json."""
        self._files, self.shapes = files, dict(files.shapes)
        self.block = tuple(config["quantization_config"].get("weight_block_size") or ())
        if len(self.block) != 2 or min(self.block) < 1:
            raise CheckpointError(
                "quantization_config of config.json has no weight_block_size, as [128, 128]", do=WHOLE
            )
        for name, shape in files.shapes.items():
            whole = name.removesuffix(SCALE)
            if whole == name:
                continue
            matrix = files.shapes.get(whole, ())
            blocks = tuple(-(-size // block) for size, block in zip(matrix, self.block))
            if len(matrix) != 2 or shape != blocks:
                raise CheckpointError(f"{name} is {shape}, and its matrix {matrix}: no scales of its blocks", do=WHOLE)
            del self.shapes[name]

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        values = self._files.get(name)
        if f"{name}{SCALE}" not in self._files.shapes:
            return values
        scales = self._files.get(f"{name}{SCALE}").float()
        for dim, size in enumerate(self.block):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
        return values.float() * scales


BLOCKS, SCALES = "_blocks", "_scales"
BIAS = 127  # of exponents
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # two bits of exponent, one of mantissa
_NUMBERS = torch.tensor([*_POSITIVE, *(-x for x in _POSITIVE)])


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are in MXFP4."""
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


class MXFP4Files:
    """`TensorFiles` in which pairs of blocks and scales are one tensor in fp32. All numbers are exact, in bf16, too."""

    def __init__(self, files: TensorFiles):
        self._files, self.shapes = files, dict(files.shapes)
        for name, shape in files.shapes.items():
            whole = name.removesuffix(BLOCKS)
            if whole == name or f"{whole}{SCALES}" not in files.shapes:
                continue
            if len(shape) != 4 or shape[3] != 16 or files.shapes[f"{whole}{SCALES}"] != shape[:3]:
                scales = files.shapes[f"{whole}{SCALES}"]
                raise CheckpointError(f"{name} is {shape}, and its scales {scales}: no MXFP4", do=WHOLE)
            experts, rows, blocks, _ = shape
            self.shapes[whole] = experts, 32 * blocks, rows
            del self.shapes[name], self.shapes[f"{whole}{SCALES}"]

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        if name in self._files.shapes:
            return self._files.get(name)
        pairs = zip(self._files.get(f"{name}{BLOCKS}"), self._files.get(f"{name}{SCALES}"), strict=True)
        return torch.stack([dequantized(*pair) for pair in pairs]).transpose(1, 2)


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks [rows, n, 16] and scales [rows, n] -> fp32 [rows, 32 n]."""
    byte = torch.arange(256)
    both = _NUMBERS[torch.stack((byte & 15, byte >> 4), 1)]  # the two numbers of each byte
    values = F.embedding(blocks.int(), both).flatten(-2)  # [rows, n, 32]
    return torch.ldexp(values, (scales.int() - BIAS).unsqueeze(-1)).flatten(-2)
