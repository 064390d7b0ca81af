# SPDX-License-Identifier: Apache-2.0
"""Variables that CUDA, torch and Triton read once: set before the device is asked for, and a user's own count."""

import os
import tempfile

import pytest
import torch

from megatron.mpu import initialize
from megatron.mpu.device_variables import ALLOCATOR, defaults, described, set_variables, streams_of
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Kernels, Parallel

NAMES = (*ALLOCATOR, "CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_CACHE_DIR", "TORCH_NCCL_HIGH_PRIORITY")


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({}, dict(PYTORCH_ALLOC_CONF="expandable_segments:True", CUDA_DEVICE_MAX_CONNECTIONS="8")),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, dict(PYTORCH_ALLOC_CONF=None)),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TRITON_CACHE_DIR": "/scratch"}, {}),
        ({"TORCH_NCCL_HIGH_PRIORITY": "0"}, {}),
    ],
)
def test_what_a_user_has_set_stays(given, wanted):
    env = dict(given)
    set_variables(Parallel(), 0, 1, env)
    assert {name: env.get(name) for name in wanted | given} == wanted | given
    if "TRITON_CACHE_DIR" not in given:
        assert env["TRITON_CACHE_DIR"].startswith(tempfile.gettempdir())
    assert env["TORCH_NCCL_HIGH_PRIORITY"] == given.get("TORCH_NCCL_HIGH_PRIORITY", "1")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", *wanted.keys() & env.keys()):
        assert f"{name}={env[name]}" in described(env)


def test_there_are_as_many_queues_as_streams():
    """Counted by hand: products, all ranks, tp, data parallel, and the stages before and after."""
    mesh = dict(tp=2, pp=4, shard=2)
    assert streams_of(Mesh(0, create_groups=False)) == 1
    assert streams_of(Mesh(0, **mesh, create_groups=False)) == 1 + 1 + 2 + 2 + 1  # and the ends of the pipeline
    assert streams_of(Mesh(4, **mesh, create_groups=False)) == 1 + 1 + 2 + 2
    wide = Mesh(0, tp=2, pp=4, shard=4, cp=2, ep=8, etp=1, shard_over_cp=True, create_groups=False)
    assert defaults(wide)["CUDA_DEVICE_MAX_CONNECTIONS"] == str(streams_of(wide)) and 8 < streams_of(wide) <= 32


@pytest.mark.parametrize("cuda, device", [("13.0", "auto"), ("13.0", "cpu"), (None, "auto")])
def test_they_are_set_before_the_device_is_picked(cuda, device, monkeypatch):
    seen = []

    class Picked(Exception):
        pass

    def pick_device(wanted, local_rank):
        seen.extend(name for name in NAMES if os.environ.get(name))
        raise Picked

    for name in NAMES:
        monkeypatch.setenv(name, "")  # undone behind the test
        os.environ.pop(name)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(initialize, "pick_device", pick_device)
    with pytest.raises(Picked):
        initialize.join_job(Parallel(), Kernels(device=device))
    assert bool(seen) == (cuda is not None and device != "cpu")
