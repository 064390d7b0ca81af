# SPDX-License-Identifier: Apache-2.0
"""The router of a layer with experts: which experts each token goes to, with which weights, and the losses that balance them.

Legend: s' tokens of this rank in each sequence (its part along cp and tp), b micro-batch, n = s' b, h hidden, E experts, k experts
of a token.
"""

from contextlib import nullcontext
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.experts import balancing
from megatron.model.experts.routing import Choice, capacity, choose, best, count_experts, normalized_scores, places_of
from megatron.model.weights import Table
from megatron.mpu import collectives, mappings
from megatron.mpu.context_parallel import own_rows
from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import random_words, seed_of
from megatron.settings.schema import Model

DROPPED, ENTROPY = "dropped tokens", "routing entropy"  # sums that are only logged
DTYPES = dict(fp32=torch.float32, fp64=torch.float64)


class Memo(NamedTuple):
    """What a second run of a router takes from the first: nothing is chosen or counted again.

    experts: [n, k] before drops; kept: [n, k] bool, None: all; loads: of each balancing loss
    """

    experts: torch.Tensor
    kept: Optional[torch.Tensor]
    loads: dict[str, torch.Tensor]


class Routing(NamedTuple):
    """The experts of a rank's tokens.

    weights: [n, k] factors of what the experts return, fp32 or fp64; 0 for dropped ones
    experts: [n, k] int64; E marks a pair of token and expert that is dropped
    sums:    fp32 scalars: sums over the tokens that count, divided by the number of layers with experts
    memo:    for recomputation
    """

    weights: torch.Tensor
    experts: torch.Tensor
    sums: dict[str, torch.Tensor]
    memo: Memo


class Router(nn.Module):
    """See `forward`.

    weights: the table of `weight` [E, h], and of the buffers `load` [E] (tokens of each expert in this step) and, if the model has
    them, `expert_bias` [E] and `scored_load` [E].
    replay: a `replay.Recording` that records choices, or determines them; None in normal runs
    last_load: [E], the loads of the last step over all ranks, after its update
    """

    replay = last_load = None

    def __init__(self, model: Model, layer: int, weights: Table, mesh: Mesh, *, seed: int, dtype, device):
        super().__init__()
        create_parameters(self, weights, None, dtype=dtype, device=device)
        self.model, self.layer, self.seed = model, layer, seed
        self.cp, self.tp = mesh.cp, mesh.tp
        self.choice = choice_of(model)
        self.dtype = DTYPES[model.moe_router_dtype]
        self.coefficients = dict(model.balancing)
        self.sinkhorn = "sinkhorn" in self.coefficients
        self.stage = mesh.stage() if "global_aux_loss" in self.coefficients else None
        self.layers = sum(model.has_experts(n) for n in range(model.num_layers))

    def forward(
        self,
        x: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        samples: Optional[torch.Tensor] = None,
        memo: Optional[Memo] = None,
    ) -> Routing:
        """The routing of x [s', b, h].

        mask: [s', b] weights of tokens in the loss; those with 0 are routed, but change no load, loss or statistic. None: all
        count. samples: [b], as for `Dropout`. memo: of the first run, in recomputation
        """
        counted = None if mask is None else mask > 0
        logits = self.logits(x, samples)  # [s', b, E]
        flat, scores = logits.flatten(0, 1), normalized_scores(logits, self.choice.score_function)
        if memo is None:
            memo = self._choose(flat, scores, counted, samples)
        _, weights = choose(flat, self.choice, given=memo.experts) if not self.sinkhorn else (None, self._sinkhorn_weights(flat, memo))
        experts = memo.experts
        if memo.kept is not None:
            weights, experts = weights * memo.kept, experts.masked_fill(~memo.kept, self.choice.num_experts)
        return Routing(weights, experts, self._sums(logits, scores, mask, counted, memo), memo)

    def logits(self, x: torch.Tensor, samples: Optional[torch.Tensor]) -> torch.Tensor:
        """[s', b, E] in fp32 or fp64, whatever the format of the run."""
        x = self._jittered(x.to(self.dtype), samples)
        uncast = torch._C.DisableTorchFunction() if torch._C._len_torch_function_stack() else nullcontext()
        with uncast:  # from `Autocast`, which computes products in half precision
            bias = None if self.bias is None else self.bias.to(self.dtype)
            logits = F.linear(x, self.weight.to(self.dtype), bias)
        if not self.model.moe_router_force_load_balancing:
            return logits
        return self._random(logits, samples) + (logits - logits.detach())  # the gradient is that of the logits
