# SPDX-License-Identifier: Apache-2.0
"""On two GPUs with NVLink: DeepEP and HybridEP, where they are installed, send tokens where NCCL sends their rows."""

import subprocess
import sys

import pytest
import torch

from megatron.model.kinds.experts.libraries import library_refusal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_a_library_sends_what_nccl_sends(backend, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if lacking := library_refusal((backend, None), torch.device(device)):
        pytest.skip(str(lacking))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.send_by_library", backend], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
