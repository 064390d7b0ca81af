# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory is locked at its size, and unlocked before it is freed."""

from types import SimpleNamespace

import pytest
import torch

from megatron.mpu.transfer import page_locked


def test_memory_is_locked_as_large_as_asked_for_until_it_goes(monkeypatch):
    locked, code = {}, 0
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or code,
        cudaHostUnregister=lambda address: locked.pop(address) and 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    size = (1 << 20) + 64  # not a power of two
    memory = page_locked(size)
    assert memory.dtype == torch.uint8 and memory.shape == (size,) and locked == {memory.data_ptr(): size}
    part = memory[8:16]
    del memory
    assert locked  # a part of it is in use
    del part
    assert not locked
    assert page_locked(0).numel() == 0 and not locked
    code = 2  # cudaErrorMemoryAllocation
    with pytest.raises(RuntimeError, match="refused 2"):
        page_locked(size)


def refuse(code):
    if code:
        raise RuntimeError(f"refused {code}")
