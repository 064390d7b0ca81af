# SPDX-License-Identifier: Apache-2.0
"""BERT with a head for each task of a mixture: see `facts.TaskFacts`."""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.model.bert.facts import TaskFacts, TaskHead
from megatron.model.bert.module import Bert, BinaryHead
from megatron.model.language_model import Sums
from megatron.mpu.mesh import Mesh


class Heads(nn.ModuleDict):
    """Heads by task name, even if the name is also that of an attribute, such as `type` or `training`."""

    def add_module(self, name: str, module: nn.Module) -> None:
        self._modules[name] = module

    def __setattr__(self, name: str, value) -> None:
        object.__setattr__(self, name, value)


class TaskBert(Bert):
    """See `Bert`. A sample has `task`, the index of its task, and `class_label`."""

    facts: TaskFacts

    def __init__(self, facts: TaskFacts, mesh: Mesh, **keywords):
        super().__init__(facts, mesh, **keywords)
        tables = {unit.name: unit.weights for unit in self.units}
        heads = facts.heads if self.last else ()
        self.tasks = Heads({h.name: BinaryHead(tables[h.unit], **self.factory_kwargs) for h in heads})

    @property
    def pools(self) -> bool:
        return True

    def head_sums(self, pooled: torch.Tensor, batch) -> Sums:
        """For each task: the losses of its samples, its number of samples, and of correct ones."""
        sums = super().head_sums(pooled, batch)
        for head in self.facts.heads:
            sums |= self._task_sums(head, pooled, batch)
        return sums

    def _task_sums(self, head: TaskHead, pooled: torch.Tensor, batch) -> Sums:
        mine = batch.arrays["task"] == head.number
        labels = torch.where(mine, batch.arrays["class_label"], 0)
        scores = self.tasks[head.name](pooled).float()  # [b, classes]
        losses = F.cross_entropy(scores, labels, reduction="none")
        known = (scores.detach().argmax(-1) == labels).float()
        weights = mine.float() * head.scale
        sums = dict(loss=losses * weights, accuracy=known * weights, samples=weights)
        return {f"{head.name} {name}": values.sum() for name, values in sums.items()}
