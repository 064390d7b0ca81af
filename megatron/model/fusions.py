# SPDX-License-Identifier: Apache-2.0
"""Which ops of a model are computed by fused kernels, as `--no-bias-dropout-fusion` and its like say."""

from torch import nn

from megatron.settings.schema import Kernels


def choose_fusions(model: nn.Module, kernels: Kernels) -> None:
    """Tell the modules that name a setting as their `fusion` whether to compute `unfused`."""
    for module in model.modules():
        if fusion := getattr(module, "fusion", None):
            module.unfused = not getattr(kernels, fusion)
