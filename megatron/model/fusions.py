# SPDX-License-Identifier: Apache-2.0
"""Enable or disable fused kernels in a model (`--no-bias-dropout-fusion` and other fusion flags)."""

from torch import nn

from megatron.settings.schema import Kernels


def choose_fusions(model: nn.Module, kernels: Kernels) -> None:
    """Set `unfused` of the modules that name a setting as their `fusion`."""
    for module in model.modules():
        if fusion := getattr(module, "fusion", None):
            module.unfused = not getattr(kernels, fusion)
