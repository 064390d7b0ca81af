# SPDX-License-Identifier: Apache-2.0
"""How many passes of the generation engine may be under way between stages."""

import pytest
import torch
import torch.distributed as dist

from megatron.inference.links import Link
from megatron.inference.scoring import ALONE
from megatron.mpu.mesh import Axis


@pytest.mark.parametrize("backend, stages, passes", [("gloo", 1, 1), ("nccl", 1, 1), ("gloo", 3, 3), ("nccl", 3, 1)])
def test_over_nccl_an_answer_would_wait_for_the_next_pass(backend, stages, passes, monkeypatch):
    """Its messages between two ranks are one queue, so one pass alone is under way; else one for each stage."""
    monkeypatch.setattr(dist, "get_backend", lambda group: {"of the pipeline": backend}[group])
    pp = Axis("pp", tuple(range(stages)), group="of the pipeline")
    assert Link(ALONE, pp, torch.device("cpu")).under_way == passes
