# SPDX-License-Identifier: Apache-2.0
"""Tokens that go to their experts in hops, between nodes and inside them, against a loop over tokens and against rows that
are sent to each expert (--moe-token-dispatcher-type flex); all ranks are threads of this process, exchanges are counted.
"""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron.model.kinds.experts.dispatch import Dispatcher
from megatron.model.kinds.experts.hops import HopDispatcher
from megatron.model.kinds.experts.parts import expected_parts
from megatron.model.kinds.experts.routing import ExpertChoice, best
from megatron.model.kinds.experts.settings import ExpertSettings
from megatron.mpu import collectives
from megatron.mpu.axis_sizes import ranks_together
from megatron.mpu.mesh import Mesh
from tests.models.test_expert_layouts import EP4, FAMILIES, HOPS, LAYOUTS, check, pretrain


class Threads:
    """Ranks as threads: exchanges put rows on a table, and take them when all ranks of the axis have done so.

    sent: (whether they leave the node, whether they are rows of the width of a token) -> bytes
    """

    def __init__(self, world: int, local: int, width: int):
        self.table, self.sent, self.world, self.local, self.width = {}, Counter(), world, local, width
        self.calls, self.changed = Counter(), threading.Condition()

    def start_all_to_all(self, arrived, x, axis, sent=None, received=None):
        me, parts = axis.ranks[axis.rank], x.detach().split(sent or [len(x) // axis.size] * axis.size)
        with self.changed:
            number = self.calls[me, axis.name, axis.ranks]
            self.calls[me, axis.name, axis.ranks] += 1
            for other, part in zip(axis.ranks, parts, strict=True):
                self.table[axis.name, number, me, other] = part
                self.sent[me // self.local != other // self.local, x[:1].numel() == self.width] += part.nbytes
            self.changed.notify_all()
            mine = [(axis.name, number, other, me) for other in axis.ranks]
            assert self.changed.wait_for(lambda: all(key in self.table for key in mine), 60), f"{axis.name}, rank {me}"
            arrived.copy_(torch.cat([self.table.pop(key) for key in mine]))
        return collectives.Done()

    def run(self, function) -> list:
        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(function, range(self.world)))


def factor(experts: torch.Tensor) -> torch.Tensor:
    """What an expert of these tests multiplies the sine of a token with."""
    return 1.0 + 0.25 * experts


def exchanged(choose, *, world, local, number, n, h, hops, monkeypatch, ep=0, etp=1):
    """(what each rank found, Threads). choose: a generator -> the experts of a rank's tokens, [n, k]"""
    threads, ep = Threads(world, local, h), ep or world // etp
    monkeypatch.setattr(collectives, "start_all_to_all", threads.start_all_to_all)

    def rank(at):
        inner = ranks_together(ep, etp, local)
        levels = dict(ep_levels=(inner, ep // inner)) if hops else {}
        mesh = Mesh(at, replicate=world, ep=ep, etp=etp, create_groups=False, **levels)
        draw = torch.Generator().manual_seed(at)
        experts = choose(draw)
        x, weights = (torch.rand(n, width, generator=draw, dtype=torch.float64) for width in (h, experts.shape[1]))
        x, weights, upstream = x.requires_grad_(), weights.requires_grad_(), torch.rand(n, h, generator=draw).double()
        kind = HopDispatcher if hops else Dispatcher
        more = dict(levels=(mesh.ep_outer, mesh.ep_inner)) if hops else {}
        dispatcher = kind(experts, number, mesh.ep, True, over=mesh.ep_counts, **more)
        rows, own = dispatcher.dispatch(x, weights)
        first = mesh.ep.rank * number // ep
        each = dispatcher.rows.each(factor(torch.arange(first, first + number // ep)).unsqueeze(1))
        y = dispatcher.combine(rows.sin() * own * each)
        gradients = torch.autograd.grad(y, (x, weights), upstream)
        # The same, token by token.
        scale = torch.cat((factor(torch.arange(number)), torch.zeros(1)))[experts].double()
        want = x.sin() * (scale * weights).sum(1, keepdim=True)
        for found, wanted in zip(
            (y, *gradients), (want, *torch.autograd.grad(want, (x, weights), upstream)), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        return dispatcher.counts, dispatcher.rows.counts, (x, weights, upstream)

    return threads.run(rank), threads


def drawn(number: int, k: int, n: int, drops: int = 0):
    def choose(draw):
        experts = torch.rand(n, number, generator=draw).topk(k).indices
        experts.view(-1)[torch.randperm(n * k, generator=draw)[:drops]] = number
        return experts

    return choose


@pytest.mark.parametrize(
    "world, local, etp, number, k, drops",
    [
        (8, 4, 1, 16, 3, 0),  # two nodes
        (8, 2, 1, 8, 2, 5),  # four nodes of two, and dropped pairs
        (4, 1, 1, 4, 1, 0),  # each rank a node
        (4, 8, 1, 8, 8, 0),  # one node; all experts
        (8, 4, 2, 8, 3, 4),  # each expert on two ranks
        (6, 4, 1, 6, 2, 3),  # 4 ranks of a node do not divide 6: pairs of neighbours
        (4, 2, 1, 8, 2, 18),  # all pairs are dropped
    ],
)
def test_hops_and_rows_are_the_loop_over_tokens(world, local, etp, number, k, drops, monkeypatch):
    """Outputs and gradients, and the rows of each expert exactly; a second pass with the counts of the first is in
    `test_expert_layouts`.
    """
    case = dict(world=world, local=local, etp=etp, number=number, n=9, h=5, monkeypatch=monkeypatch)
    (hops, _), (rows, _) = (exchanged(drawn(number, k, 9, drops), hops=hops, **case) for hops in (True, False))
    for one, other in zip(hops, rows, strict=True):
        assert torch.equal(one[1], other[1])


def test_a_token_crosses_between_nodes_once(monkeypatch):
    """DeepSeek-V3's router: 8 of 256 experts, from 4 of 8 groups at most, one group a node; 64 ranks on 8 nodes. Bytes of
    both passes between nodes, with numbers and weights: at most .55 of those of a row for each expert.
    """
    rule = ExpertChoice(256, 8, "sigmoid", num_groups=8, group_topk=4, group_score_topk=2)
    chosen = []

    def choose(draw):
        chosen.append(best(torch.rand(16, 256, generator=draw), rule))
        return chosen[-1]

    case = dict(world=64, local=8, number=256, n=16, h=256, monkeypatch=monkeypatch)
    (_, hops), (_, rows) = (exchanged(choose, hops=hops, **case) for hops in (True, False))
    between = [sum(size for (away, _), size in one.sent.items() if away) for one in (hops, rows)]
    assert between[0] <= 0.55 * between[1]
    # Each token to each other node with some of its experts, once in either direction of both passes.
    reached, tokens = 0, 0
    draws = [torch.Generator().manual_seed(at) for at in range(64)]
    for at, draw in enumerate(draws):
        nodes = best(torch.rand(16, 256, generator=draw), rule) // 32
        reached += sum(len(set(row) - {at // 8}) for row in nodes.tolist())
        tokens += sum(len(set(row)) for row in nodes.tolist())
    assert hops.sent[True, True] == 4 * reached * 256 * 8
    v3 = ExpertSettings(num_experts=256, moe_router_topk=8, moe_router_num_groups=8, moe_router_group_topk=4)
    assert tokens / (64 * 16) == pytest.approx(expected_parts(v3, 8), rel=0.03)


@pytest.mark.parametrize("groups, chosen", [(None, None), (4, 2), (8, 4), (2, 1)])
@pytest.mark.parametrize("parts", [2, 4, 8, 16])
def test_expected_parts_are_those_of_draws(groups, chosen, parts):
    sizes = dict(num_experts=32, moe_router_topk=8, moe_router_num_groups=groups, moe_router_group_topk=chosen)
    rule, draw = ExpertChoice(32, 8, "sigmoid", num_groups=groups, group_topk=chosen), torch.Generator().manual_seed(1)
    nodes = best(torch.rand(2000, 32, generator=draw), rule) // (32 // parts)
    reached = [len(set(row)) for row in nodes.tolist()]
    assert sum(reached) / len(reached) == pytest.approx(expected_parts(ExpertSettings(**sizes), parts), rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize("turns", ["", "--overlap-moe-expert-parallel-comm --micro-batch-size 1"])
def test_two_hops_train_as_one(turns, tmp_path, run_ranks):
    """The run of one process, with two ranks a node (--moe-ranks-per-node 2), also with passes in turns."""
    words = f"{EP4} {HOPS} 2 {turns}"
    run_ranks(4, pretrain, f"{FAMILIES['plain'].flags} {words} --save {tmp_path}")
    check(tmp_path, "plain")
    assert LAYOUTS["ep4 in two hops"][2] == f"{EP4} {HOPS} 2"
