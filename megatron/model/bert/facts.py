# SPDX-License-Identifier: Apache-2.0
"""The facts of BERT: layers of bidirectional attention and MLP, then a head that predicts masked tokens, and one that
predicts whether the second sentence follows.

    >>> facts = BertFacts(Model(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=512), 30522)
    >>> f"{facts.parameters / 1e6:.1f} M"
    '110.1 M'

Legend: n tokens of a micro-batch (s x b), h hidden, v vocabulary.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.model.bert.settings import BertSettings, own_settings
from megatron.model.branches import Branch
from megatron.model.facts import Bytes
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.attention.full import BIDIRECTIONAL
from megatron.model.kinds.table import KINDS
from megatron.model.layer_ops import RankSetup, Residual
from megatron.model.weights import Table, Unit, add_prefix, norm
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.settings.schema import Config, Model

HEAD = "head"  # the unit that predicts masked tokens
TASKS = "tasks."  # prefix of the names of the weights of tasks
TAKEN = ("lm", "sop", "z")  # not allowed as names of tasks: "lm loss" and others are sums of the model itself


@dataclass(frozen=True)
class BertFacts(GPTFacts):
    """See `Facts`. own: BERT's own settings."""

    own: BertSettings = BertSettings()

    name = "BERT"
    kinds = KINDS | {"attention": BIDIRECTIONAL}
    word_head = True  # False in a subclass with another head instead

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "BertFacts":
        return cls(config.model, vocab_size, own_settings(config))

    def embedding_weights(self, sequence_parallel: bool) -> Table:
        m, own, table = self.settings, self.own, super().embedding_weights(sequence_parallel)
        if own.num_tokentypes:
            shape, partial = (own.num_tokentypes, m.hidden_size), ("tp",) if sequence_parallel else ()
            table["tokentype.weight"] = Placement(shape, Normal(m.init_method_std), partial=partial)
        return table | (add_prefix("norm", norm(m, m.hidden_size, sequence_parallel)) if own.post_norm else {})

    def back_units(self, sequence_parallel: bool) -> list[Unit]:
        units = super().back_units(sequence_parallel)
        heads = [Unit(HEAD, self.head_weights(sequence_parallel), ends=("last",))]
        if self.own.bert_binary_head:
            heads.append(Unit("binary", self.binary_weights(), ends=("last",)))
        return units[: not self.own.post_norm] + heads + units[1:]

    def head_weights(self, sequence_parallel: bool) -> dict[str, Placement]:
        """The weights of the head for masked tokens, before the output layer, and the output layer's bias [v]."""
        m = self.settings
        bias = Placement(
            (self.vocab_size,), Constant(0.0), cut={"tp": 0}, multiple=m.make_vocab_size_divisible_by, decay=False
        )
        return {
            **add_prefix("dense", dense(m, m.hidden_size, sequence_parallel)),
            **add_prefix("norm", norm(m, m.hidden_size, sequence_parallel)),
            "output.bias": bias,
        }

    def binary_weights(self) -> dict[str, Placement]:
        """The weights of the head for the next sentence: the pooler, and two scores."""
        m = self.settings
        return {**add_prefix("pooler", dense(m, m.hidden_size)), **add_prefix("scores", dense(m, 2))}

    def branches(self, layer: int) -> tuple[Branch, ...]:
        branches = super().branches(layer)
        if not self.own.post_norm:
            return branches
        return tuple(replace(branch, before="", closing=branch.before) for branch in branches)

    @property
    def output_flops(self) -> float:
        """With the product of the head's dense layer."""
        return super().output_flops + 2.0 * self.settings.hidden_size**2

    def ends_saved_bytes(self, share: RankSetup, first: bool, last: bool) -> Bytes:
        kept = super().ends_saved_bytes(share, first, last)
        x = Residual(self.settings, share, self.loss_tokens(share))
        if last and self.word_head:  # inputs of the product and of GeLU, and the norm after it
            kept["output layer and loss"] += 2 * x.nbytes
            kept["norms"] += x.norm().kept
        if first and self.own.post_norm:
            kept["norms"] += x.norm().kept
        return kept


def dense(model: Model, outputs: int, sequence_parallel: bool = False) -> dict[str, Placement]:
    """The weights of a replicated linear layer [outputs, h]. With sequence parallelism, gradients are partial over tp."""
    partial = ("tp",) if sequence_parallel else ()
    return {
        "weight": Placement((outputs, model.hidden_size), Normal(model.init_method_std), partial=partial),
        "bias": Placement((outputs,), Constant(0.0), partial=partial, decay=False),
    }


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
    """The facts of a BERT with a head for masked tokens and one for each task of labelled texts (`--task-mixture`)."""

    heads: tuple[TaskHead, ...] = ()

    def back_units(self, sequence_parallel: bool) -> list[Unit]:
        m, units = self.settings, super().back_units(sequence_parallel)
        for head in self.heads:
            pooler = add_prefix("pooler", dense(m, m.hidden_size))
            units.append(Unit(head.unit, {**pooler, **add_prefix("scores", dense(m, head.classes))}, ends=("last",)))
        return units
