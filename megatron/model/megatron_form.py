# SPDX-License-Identifier: Apache-2.0
"""`MegatronForm`: a kind's weights and settings in checkpoints of Megatron-LM. Each kind has its own, in `megatron.py`."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Optional

import torch

from megatron.settings.schema import Model

Implementation = Literal["transformer_engine", "local", "legacy"]  # of Megatron-LM: decides the names of tensors
Lead = tuple[int, ...]  # sizes of the dims of a tensor of ours that the rows of theirs flatten
NORM = "norm"  # the norm before a kind, in `KindNames.modules`


class Names(NamedTuple):
    """Their names of a tensor, or of a module up to `weight` or `bias`; empty: as in Megatron-Core.

    core: of Megatron-Core. fused: with Transformer Engine, where norms are part of the linear layers after them
    legacy: with --use-legacy-models. also: further names that are read
    """

    core: str
    fused: str = ""
    legacy: str = ""
    also: tuple[str, ...] = ()

    def of(self, implementation: Implementation) -> str:
        own = dict(transformer_engine=self.fused, local="", legacy=self.legacy)[implementation]
        return own or self.core


class RowOrder(NamedTuple):
    """The rows of a tensor of theirs, if they have another order than ours or are several tensors.

    order: sizes of dims -> for each of their rows the number of ours; None: ours, or that of `parts`
    parts: end of a name -> index of these dims. Files of torch_dist have a tensor for each part, in the place of one
    taps:  whether theirs is the weight of a convolution, [rows, 1, taps]
    """

    order: Optional[Callable[[Lead], torch.Tensor]] = None
    parts: Mapping[str, tuple] = MappingProxyType({})
    taps: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether their rows have our order."""
        return self.order is None and not self.parts

    def numbers(self, lead: Lead, part: str = "") -> torch.Tensor:
        """For each of their rows, or of those of a part, the number of ours."""
        if not part and self.order is not None:
            return self.order(lead)
        ours = torch.arange(prod(lead)).view(lead)
        indices = [self.parts[part]] if part else list(self.parts.values())
        return torch.cat([ours[index].flatten() for index in indices]) if indices else ours.flatten()


AS_OURS = RowOrder()


def in_parts(names: Sequence[str], sizes: Sequence[int], taps: bool = False) -> RowOrder:
    """Rows of a tensor [groups, sum of sizes, ...] of ours that theirs has part after part, each of all groups.

    names: of the parts in torch_dist

    >>> in_parts("xB", (2, 1)).numbers((2, 3)).tolist()
    [0, 1, 3, 4, 2, 5]
    """
    ends = list(accumulate(sizes))
    slices = [slice(end - size, end) for size, end in zip(sizes, ends)]
    return RowOrder(parts={f".{name}": (slice(None), part) for name, part in zip(names, slices)}, taps=taps)


class KindNames(NamedTuple):
    """The tensors of a kind.

    modules: our module or tensor, without the slot -> their names, from the layer on; `NORM` is the norm before the kind.
             In the order of their module with Transformer Engine
    rows:    our tensor -> its rows
    divided: our tensors that each of our tensor parallel ranks has whole, and theirs by rows, without Transformer Engine
    older:   the order of `modules` in Megatron-LM up to 0.16; empty: the same
    """

    modules: Mapping[str, Names]
    rows: Mapping[str, RowOrder] = MappingProxyType({})
    divided: tuple[str, ...] = ()
    older: tuple[str, ...] = ()

    def in_order(self, apart: bool, older: bool = False) -> list[str]:
        """The names of `modules` in the order of their parameters. apart: norms are modules of their own"""
        order = list(older and self.older or self.modules)
        if not apart:
            return order
        inside = [name for name in order if self.modules[name].fused and name != NORM]  # are built last then
        return [NORM, *(name for name in order if name != NORM and name not in inside), *inside]


def same_settings(names: Sequence[str], args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of these names that the arguments of a run have."""
    return {name: args[name] for name in names if args.get(name) is not None}


class MegatronForm(NamedTuple):
    """See above.

    names:  (settings, version of the format) -> its tensors
    same:   settings with the same name and meaning in the arguments of a run
    other:  settings that `theirs` writes otherwise
    asked:  whether a run without --hybrid-layer-pattern has such layers, by its arguments
    ours:   (arguments, layers) -> settings besides `same`; may raise CheckpointError
    theirs: settings -> arguments besides `same`
    flags:  whether a run must be given its settings: Megatron-LM's --use-checkpoint-args does not read them
    one_of_experts: their name, from the layer on -> (our tensor, number of the expert on its rank); None: it is no expert's
    their_expert:   (our tensor, number, whether experts are one module) -> their name
    """

    names: Callable[[Model, float], KindNames]
    same: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    asked: Callable[[Mapping[str, Any]], bool] = lambda args: False
    ours: Callable[[Mapping[str, Any], int], dict[str, Any]] = lambda args, layers: {}
    theirs: Callable[[Model], dict[str, Any]] = lambda model: {}
    flags: bool = False
    one_of_experts: Callable[[str], Optional[tuple[str, int]]] = lambda theirs: None
    their_expert: Optional[Callable[[str, int, bool], str]] = None
