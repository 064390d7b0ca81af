# SPDX-License-Identifier: Apache-2.0
"""A BERT that learns several tasks together: one encoder, a head for masked words, and one for each task of labelled
texts (`--task-mixture`, docs/masked_data.md#mixtures-of-tasks).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.model.bert.facts import BertFacts, dense
from megatron.model.weights import Unit, add_prefix

TASKS = "tasks."  # what names of their weights begin with
TAKEN = ("lm", "sop", "z")  # no names of tasks: "lm loss" and its like are sums of the model itself


class TaskHead(NamedTuple):
    """A head. number: of its task in the mixture; classes: that it tells apart; scale: of the loss of a sample, for as many
    tokens as are masked in a sample of masked words, about: losses are divided by the number of masked tokens.
    """

    name: str
    number: int
    classes: int
    scale: float

    @property
    def unit(self) -> str:
        return f"{TASKS}{self.name}"


@dataclass(frozen=True)
class TaskFacts(BertFacts):
    """See `BertFacts`."""

    heads: tuple[TaskHead, ...] = ()

    def units(self, layers: Sequence[int], first: bool, last: bool, sequence_parallel: bool = False) -> list[Unit]:
        m, found = self.settings, super().units(layers, first, last, sequence_parallel)
        for head in self.heads if last else ():
            pooler = add_prefix("pooler", dense(m, m.hidden_size))
            found.append(Unit(head.unit, {**pooler, **add_prefix("scores", dense(m, head.classes))}, ends=("last",)))
        return found
