# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels compute what the reference says, forward and backward, in fp32 to 1e-6: run by Triton's interpreter on
the CPU, on odd sizes, wide rows and shards of a vocabulary; and whole networks with them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fused_kernels.gpu import probe
from tests.fused_kernels.interpret_kernels import CASES

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="the package triton is not installed: pip install '.[dev]'"
)


NETWORKS = ("GPT", "Llama", "mixture", "generation", "GPT in fp8, blockwise")  # they use every kernel


@pytest.fixture(scope="module")
def told(request) -> dict:
    """Of the networks, and of the cases that run."""
    items = [
        item for item in request.session.items if not item.get_closest_marker("skip") and hasattr(item, "callspec")
    ]
    named = [item.callspec.params["name"] for item in items if item.fspath == request.node.fspath]
    command = [
        sys.executable,
        str(Path(__file__).with_name("interpret_kernels.py")),
        *dict.fromkeys([*NETWORKS, *named]),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_the_reference(told, name):
    found = told["errors"][name]
    if not found:
        pytest.skip("no 4 GiB of addresses")
    assert max(found) <= 1e-6, found


def test_the_networks_use_every_kernel(told):
    assert set(told["used"]) == set(probe.MODULES)
