# SPDX-License-Identifier: Apache-2.0
"""How many passes of the generation engine may be under way between stages, and which ranks share experts."""

import pytest
import torch
import torch.distributed as dist

from megatron.errors import SettingsError
from megatron.inference.expert_ranks import expert_parallel
from megatron.inference.links import Link
from megatron.inference.scoring import ALONE
from megatron.mpu.mesh import Axis


@pytest.mark.parametrize("backend, stages, passes", [("gloo", 1, 1), ("nccl", 1, 1), ("gloo", 3, 3), ("nccl", 3, 1)])
def test_over_nccl_an_answer_would_wait_for_the_next_pass(backend, stages, passes, monkeypatch):
    """Its messages between two ranks are one queue, so one pass alone is under way; else one for each stage."""
    monkeypatch.setattr(dist, "get_backend", lambda group: {"of the pipeline": backend}[group])
    pp = Axis("pp", tuple(range(stages)), group="of the pipeline")
    assert Link(ALONE, pp, torch.device("cpu")).under_way == passes


@pytest.mark.parametrize("tp, ep", [(4, 0), (4, -1), (4, 3), (2, 4), (1, 2)])
def test_ranks_that_experts_do_not_divide_are_refused(tp, ep):
    with pytest.raises(SettingsError, match=f"--expert-model-parallel-size {ep} does not divide the {tp} ranks"):
        expert_parallel(tp, ep)


@pytest.mark.parametrize("tp, ep, etp", [(4, 1, 4), (4, 2, 2), (4, 4, 1), (1, 1, 1)])
def test_the_other_ranks_divide_each_expert(tp, ep, etp):
    assert expert_parallel(tp, ep) == dict(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
