# SPDX-License-Identifier: Apache-2.0
"""Messages of NCCL come before products: asked for before there are groups, and a user's own wish counts."""

import os

import pytest
import torch

from megatron.mpu import initialize
from megatron.settings.schema import Kernels, Parallel


@pytest.mark.parametrize("wish, got", [(None, "1"), ("0", "0")])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_streams_of_nccl_get_a_high_priority(backend, wish, got, monkeypatch):
    asked = {}

    class Joined(Exception):
        pass

    def init_process_group(backend, **_):
        asked[backend] = os.environ.get("TORCH_NCCL_HIGH_PRIORITY")
        raise Joined

    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY", raising=False)
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", wish or "")  # undone behind the test
    if wish is None:
        os.environ.pop("TORCH_NCCL_HIGH_PRIORITY")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(initialize, "pick_device", lambda wanted, local_rank: torch.device("cuda", 0))
    monkeypatch.setattr(initialize.dist, "init_process_group", init_process_group)
    with pytest.raises(Joined):
        initialize.join_job(Parallel(distributed_backend=backend), Kernels())
    assert asked == {backend: got if backend == "nccl" else wish}
