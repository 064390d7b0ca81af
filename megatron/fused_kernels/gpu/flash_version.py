# SPDX-License-Identifier: Apache-2.0
"""Select the FlashAttention release that torch's flash attention uses on CUDA, for whole samples and for documents."""

import torch
import torch.nn.attention

from megatron.errors import SettingsError


def use_flash_attention(version: int) -> None:
    """Replace torch's own release (2) with release 3 or 4 in this process; no effect on a CPU.

    Raises SettingsError if torch or the package does not support it.
    """
    if version == 2 or not torch.cuda.is_available():
        return
    name = f"FA{version}"
    try:
        current, activate = (
            getattr(torch.nn.attention, f"{word}_flash_attention_impl") for word in ("current", "activate")
        )
        if current() != name:
            activate(name)
    except Exception as error:  # no such function, no package, a package of another release, or anything else
        package = {3: "flash_attn_interface (FlashAttention's folder hopper)", 4: "flash-attn-4"}[version]
        raise SettingsError(
            f"--flash-attention-version {version}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            f"it needs a torch that has {name} (this is {torch.__version__}) and the package {package}",
            "leave the flag out: torch has FlashAttention 2 by itself",
        ) from error
