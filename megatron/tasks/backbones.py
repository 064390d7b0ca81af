# SPDX-License-Identifier: Apache-2.0
"""Which models fine-tuning knows as trunks, and the facts of a trunk with a head. Needs no torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache

from megatron.errors import SettingsError, did_you_mean
from megatron.model.facts import Facts, RankSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.recipe import named_recipe
from megatron.model.weights import Unit
from megatron.mpu.placement import Normal, Placement

HEAD = "head"


@dataclass(frozen=True)
class Backbone:
    """How a kind of model becomes a trunk.

    facts:  class of its facts
    module: "module:class" of its model, a `LanguageModel` with `of(config, mesh, facts, **stage)`
    pooled: the token whose state the head sees: "last" of the text (what looks back alone), or "first"
    recipe: its model type
    """

    facts: type[Facts]
    module: str
    pooled: str
    recipe: str

    def module_class(self) -> type:
        """Imports torch."""
        module, _, name = self.module.partition(":")
        return getattr(importlib.import_module(module), name)


# A row for each kind of model. A trunk that sees both sides pools its first token ([CLS]), and an encoder-decoder the first
# output of its decoder.
DEFAULT = "GPT"
BACKBONES = {"GPT": Backbone(GPTFacts, "megatron.model.gpt.module:GPT", "last", "GPT")}


def find_backbone(name: str) -> Backbone:
    """Raises SettingsError where fine-tuning does not know such models."""
    if name not in BACKBONES:
        raise SettingsError(
            f"--backbone {name}: fine-tuning has no head for such models{did_you_mean(name, BACKBONES)}",
            f"it knows {', '.join(BACKBONES)}",
            "a kind of model is a row in megatron/tasks/backbones.py",
        )
    return BACKBONES[name]


def trunk_facts(name: str, config, vocab_size: int) -> Facts:
    """The facts of the model as it was pretrained."""
    return named_recipe(find_backbone(name).recipe).facts(config, vocab_size)


def classifier_facts(name: str, config, vocab_size: int, outputs: int) -> Facts:
    """The facts of that model with a head of so many outputs in the place of the output layer."""
    facts = trunk_facts(name, config, vocab_size)
    own = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return _with_head(type(facts))(**own, num_outputs=outputs)


@cache
def _with_head(trunk: type[Facts]) -> Callable[..., Facts]:
    @dataclass(frozen=True)
    class ClassifierFacts(trunk):
        """num_outputs: of the head."""

        num_outputs: int = 2

        @property
        def name(self) -> str:
            return f"{trunk.name} with a head of {self.num_outputs}"

        @property
        def tied(self) -> bool:
            return False  # there is no output layer that could share the table

        def units(self, layers, first: bool, last: bool, sequence_parallel: bool = False) -> list[Unit]:
            found = [unit for unit in super().units(layers, first, last, sequence_parallel) if unit.name != "output"]
            m = self.settings
            weight = Placement((self.num_outputs, m.hidden_size), Normal(m.init_method_std))
            return found + ([Unit(HEAD, {"weight": weight}, ends=("last",))] if last else [])

        def flops(self, context=None) -> float:
            return super().flops(context) - 3.0 * 2.0 * self.settings.hidden_size * self.vocab_size

        # Of the loss: scores of samples, a few numbers.

        def loss_chunks(self, share: RankSetup) -> int:
            return 1

        def loss_saved_bytes(self, share: RankSetup) -> int:
            return 4 * share.micro_batch_size * (self.settings.hidden_size + self.num_outputs)

        def loss_deferred(self, share: RankSetup) -> int:
            return 0

        def loss_workspace(self, share: RankSetup) -> int:
            return 8 * share.micro_batch_size * self.num_outputs

    return ClassifierFacts
