# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests: above all `run_ranks`, which runs a function on several ranks in a fraction of a second.

def test_sum(run_ranks):
    def body(rank):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item()

    assert run_ranks(2, body) == [1, 1]
"""

import os
import signal
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before the first import of torch, for this process and its children
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: tests send it on purpose
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(world_size, function, *args, timeout=60)`: see `megatron.mpu.forked`."""
    from megatron.mpu import forked

    return forked.run_ranks


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` are skipped where torch sees no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
