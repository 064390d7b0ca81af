# SPDX-License-Identifier: Apache-2.0
"""A GPT whose layers with experts have parts of their own: a noisy router that compares directions, a dispatcher that
gathers tokens instead of sending them, and a loss on the scores of crowded experts.

    python -m tests.models.own_mixture --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --vocab-size 100 --num-experts 4 \\
        --moe-router-load-balancing-type crowded --moe-aux-loss-coeff 0.1

Legend: n tokens of a rank, h hidden, E experts, k experts of a token, m rows of this rank's experts.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.kinds.experts.dispatch import Dispatcher
from megatron.model.kinds.experts.grouped import Rows
from megatron.model.kinds.experts.parts import Balancing, ExpertParts
from megatron.model.kinds.experts.router import Router
from megatron.mpu import collectives, mappings
from megatron.mpu.placement import Constant, Placement
from megatron.settings.declare import Share, setting


@dataclass(frozen=True)
class Noise:
    router_noise: Share = setting("largest noise of the scores that choose experts, in training", 0.0)


class Directions(Router):
    @staticmethod
    def weights(model):
        return {**Router.weights(model), "sharpness": Placement((1,), Constant(8.0), partial=("tp",), decay=False)}

    def logits(self, x, samples):  # [s, b, h] -> [s, b, E]
        x, experts = (F.normalize(one.to(self.dtype), dim=-1) for one in (x, self.weight))
        return self.sharpness.to(self.dtype) * (x @ experts.T)

    def choose(self, logits, counted, samples):
        if self.training and self.model.router_noise and not logits.is_meta:
            logits = logits + self.model.router_noise * self.uniform("router noise", logits, samples)
        return super().choose(logits, counted, samples)


class Gathering(Dispatcher):
    def __init__(self, experts, number, ep, drops, counts=None):  # [n, k] of this rank's tokens
        self.ep, self.k = ep, experts.shape[1]
        flat = collectives.all_gather(experts, ep).flatten()
        first, own = ep.rank * number // ep.size, number // ep.size
        order = flat.argsort(stable=True)
        self.order = order[(flat[order] >= first) & (flat[order] < first + own)]
        loads = torch.bincount(flat, minlength=number)[first : first + own]
        self.rows = Rows(loads, len(self.order))

    def dispatch(self, x, weights):  # [n, h] and [n, k] -> [m, h] and [m, 1]
        tokens, factors = (mappings.gather_from_sequence_parallel_region(one, self.ep) for one in (x, weights))
        self.tokens = len(tokens)
        return tokens[self.order // self.k], factors.view(-1, 1)[self.order]

    def combine(self, y):  # [m, h] -> [n, h]
        sums = y.new_zeros(self.tokens, y.shape[1]).index_add(0, self.order // self.k, y)
        return mappings.reduce_scatter_to_sequence_parallel_region(sums, self.ep)


class Crowded(Balancing):
    label = "crowded experts"

    def loads(self, router, own):  # [b, E] of a rank's part of each sequence
        return router.total(own.clone()).sum(0)

    def loss(self, scores, loads):  # [s, b, E] -> [s, b]
        return (scores * (loads * len(loads) > loads.sum())).sum(-1)


PARTS = ExpertParts(router=Directions, dispatcher=Gathering, balancing={"crowded": Crowded()}, group=Noise)


def recipe():
    """What is trained."""
    return replace(pretrain_gpt.recipe(), model_type="tests.models.own_mixture", experts=PARTS)


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
