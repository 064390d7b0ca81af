# SPDX-License-Identifier: Apache-2.0
"""Kernels that torch keeps for passes of many lengths on a CPU have a limit; a limit that the user has set counts."""

import os
import subprocess
import sys

import pytest

from megatron.mpu.cpu_memory import KERNELS, bound_kernel_caches

NAMES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def test_what_the_user_has_set_counts(monkeypatch):
    monkeypatch.setattr(os, "environ", {NAMES[0]: "7"})
    bound_kernel_caches()
    assert os.environ == {NAMES[0]: "7", NAMES[1]: str(KERNELS)}


@pytest.mark.parametrize("tool", ["generate", "benchmark_inference", "serve", "lm_eval"])
def test_torch_is_loaded_after_it(tool):
    """The tools import no torch before they set the limits."""
    code = f"import sys, megatron.tools.{tool} as tool; assert 'torch' not in sys.modules and tool.bound_kernel_caches"
    subprocess.run([sys.executable, "-c", code], check=True)


GROWTH = """
import torch
from megatron.fused_kernels import cpu_ops

def memory():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

with torch.inference_mode():
    weight = cpu_ops.packed(torch.randn(768, 768))
    run = lambda tokens: cpu_ops.onednn(torch.zeros(tokens, 768), weight)
    for tokens in (1, 2, 1000):
        run(tokens)
    before = memory()
    for tokens in range(100, 800):
        run(tokens)
    print(memory() - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_memory_is_bounded():
    grown = []
    for capacity in ("1024", str(KERNELS)):
        environment = {**os.environ, **dict.fromkeys(NAMES, capacity), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", GROWTH], env=environment, capture_output=True, text=True, check=True
        )
        grown.append(int(done.stdout))
    assert grown[1] < grown[0] / 2, grown
