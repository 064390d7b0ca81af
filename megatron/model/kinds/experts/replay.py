# SPDX-License-Identifier: Apache-2.0
"""Record the experts that tokens chose, and choose the same ones in another run or layout.

A token may prefer two experts almost equally. Another order of sums then changes its choice, and its output by much more
than rounding does. Runs that replay the choices of another one differ by rounding only.
"""

from collections.abc import Iterable, Mapping
from typing import Optional

import torch
from torch import nn

from megatron.model.kinds.experts.router import Router
from megatron.mpu import collectives
from megatron.mpu.context_parallel import in_order, own_rows

Choices = dict[tuple[int, int], torch.Tensor]  # (layer, sample in training order) -> experts [s, k], int16


class RoutingRecord:
    """The choices of a run, of whole sequences, in every layout.

    replayed: choices of another run, which this one takes; None: it only records
    choices:  what this run's routers chose by themselves (ranks of data parallelism: of their samples)
    changed, seen: with `replayed`: the tokens whose own choice is another one, and all of them
    """

    def __init__(self, replayed: Optional[Mapping[tuple[int, int], torch.Tensor]] = None):
        self.replayed, self.choices = replayed, Choices()
        self.changed = self.seen = 0

    def take(self, router: Router, samples: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Record the choice [n, k] that a router made, and return the one to use."""
        own = own.unflatten(0, (-1, len(samples)))  # [s', b, k]
        whole = collectives.all_gather(collectives.all_gather(own, router.tp), router.cp)
        whole = in_order(whole, router.cp.size) if router.cp.size > 1 else whole
        for place, sample in enumerate(samples.tolist()):
            self.choices[router.layer, sample] = whole[:, place].to(torch.int16).cpu()
        if self.replayed is None:
            return own.flatten(0, 1)
        given = torch.stack([self.replayed[router.layer, sample] for sample in samples.tolist()], 1)
        given = own_rows(given, router.cp).chunk(router.tp.size)[router.tp.rank].to(own)
        self.changed += (own.sort(-1).values != given.sort(-1).values).any(-1).sum().item()
        self.seen += own[..., 0].numel()
        return given.flatten(0, 1)


def attach(chunks: Iterable[nn.Module], recording: Optional[RoutingRecord]) -> None:
    """Let all routers of a model use a recording; None: no longer."""
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)):
        router.replay = recording
