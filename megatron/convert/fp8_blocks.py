# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8, as DeepSeek-V3 and Kimi K2 are published: each block of 128 x 128 numbers has a scale.

The matrix `X.weight` [o, i] is stored in e4m3, with `X.weight_scale_inv` [o / 128, i / 128], rounded up, in fp32: its
numbers are multiplied by the scale of their block.
"""

from collections.abc import Mapping
from typing import Any

import torch

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
