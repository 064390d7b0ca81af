# SPDX-License-Identifier: Apache-2.0
"""The largest attention logit of each head in a step, for --qk-clip and --log-max-attention-logit.

A logit is the scaled product of a query and a key that it sees, before a soft cap and a position bias. Passes keep the
largest ones in a buffer, whose values ranks with other tokens combine (`optimizer.buffers`); each step begins with 0.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import nn

from megatron.model.kinds.mixer import Parts
from megatron.model.layer import Layer
from megatron.mpu.layers import register_buffer


class MaxLogits(nn.Module):
    """The largest logits of heads, [groups, queries per group], of those of this tensor parallel rank.

    last: those of the last step, over all ranks with these heads; None before the first one
    """

    last: Optional[torch.Tensor] = None

    def __init__(self, groups: int, queries: int, tp: int):
        super().__init__()
        zeros, shape = torch.zeros(groups, queries), (groups * tp, queries)
        register_buffer(self, "largest", zeros, "max", shape=shape, cut={"tp": 0}, saved=False)

    def see(self, logits: torch.Tensor, part: int = 0) -> None:
        """Take the largest logits of a pass, [g, queries]; with fewer than all groups the `part`-th ones."""
        own = self.largest.narrow(0, part * len(logits), len(logits))
        own.copy_(torch.maximum(own, logits))

    def update_buffers(self) -> None:
        """Once a step, when the values are those of all ranks."""
        self.last = self.largest.clone()
        self.largest.zero_()


class WatchedHeads(NamedTuple):
    """The heads of a mixer. name: of its module; clipped: alpha -> `Mixer.clipped`, with names in the module"""

    name: str
    logits: MaxLogits
    clipped: Callable[[float], Mapping[str, Parts]]


def watch_heads(stages: Sequence[nn.Module], compiled: bool = False) -> list[WatchedHeads]:
    """Let mixers with heads keep their largest logits. compiled: their layers are (torch.compile)."""
    return [heads for stage in stages for heads in _of_stage(stage, compiled)]


def _of_stage(stage: nn.Module, compiled: bool) -> Iterator[WatchedHeads]:
    layers = [(name, layer) for name, layer in stage.named_modules() if isinstance(layer, Layer)]
    for name, layer in layers:
        for mixer in (mixer for branch in layer.branches for mixer in branch.mixers if mixer.clipped):
            logits = getattr(layer, mixer.slot).watch_logits(layer.tp.size, compiled)
            yield WatchedHeads(f"{name}.{mixer.slot}", logits, partial(mixer.clipped, layer.settings))
