# SPDX-License-Identifier: Apache-2.0
"""How many passes of the generation engine may be under way between stages, and which ranks share experts."""

from types import SimpleNamespace

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


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_one_rank_tells_and_one_answers(tp, pp, monkeypatch):
    """The first of all, and the first of the last stage."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    axis = lambda rank, size: SimpleNamespace(rank=rank, size=size, group=None)
    places = [(one, other) for other in range(pp) for one in range(tp)]
    links = {place: Link(axis(place[0], tp), axis(place[1], pp), torch.device("cpu")) for place in places}
    assert [place for place, link in links.items() if link.is_first] == [(0, 0)]
    assert [place for place, link in links.items() if link.answers] == [(0, pp - 1)]
    assert all(link.alone == (tp == pp == 1) for link in links.values())
