# SPDX-License-Identifier: Apache-2.0
"""Which release of FlashAttention computes torch's flash attention on CUDA, of whole samples and of documents."""

import torch
import torch.nn.attention

from megatron.errors import SettingsError


def use_flash_attention(version: int) -> None:
    """Let release 3 or 4 take the place of torch's own (2), for this process; on a CPU nothing changes.

    Raises SettingsError where torch or the package that has it cannot.
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
    except Exception as error:  # no such function, no package, a package of another release: whatever it is
        package = {3: "flash_attn_interface (FlashAttention's folder hopper)", 4: "flash-attn-4"}[version]
        raise SettingsError(
            f"--flash-attention-version {version}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            f"it needs a torch that has {name} (this is {torch.__version__}) and the package {package}",
            "leave the flag out: torch has FlashAttention 2 by itself",
        ) from error
