# SPDX-License-Identifier: Apache-2.0
"""The facts of a BERT that learns several tasks together: one encoder, a head for masked tokens, and one for each task of
labelled texts (`--task-mixture`, docs/masked_data.md#mixtures-of-tasks).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.model.bert.facts import BertFacts, dense
from megatron.model.weights import Unit, add_prefix

TASKS = "tasks."  # prefix of the names of their weights
TAKEN = ("lm", "sop", "z")  # not allowed as names of tasks: "lm loss" and others are sums of the model itself


class TaskHead(NamedTuple):
    """The head of a task. number: index of the task in the mixture; classes: how many; scale: weight of a sample's loss,
    about the number of masked tokens in a sample of masked text, because losses are divided by masked tokens.
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
        m, units = self.settings, super().units(layers, first, last, sequence_parallel)
        for head in self.heads if last else ():
            pooler = add_prefix("pooler", dense(m, m.hidden_size))
            units.append(Unit(head.unit, {**pooler, **add_prefix("scores", dense(m, head.classes))}, ends=("last",)))
        return units
