# SPDX-License-Identifier: Apache-2.0
"""`Recipe`: all that the suite knows of a model; loop, planner and tools ask nothing else. Needs no torch.

`pretrain_gpt.py` is such a recipe. A checkpoint keeps its model type, by which tools find the recipe again: a name of
MODEL_TYPES, or a module with a function `recipe()`.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from megatron.errors import SettingsError, did_you_mean
from megatron.model.facts import Facts
from megatron.model.sample_arrays import SampleArray
from megatron.settings.effects import Needs
from megatron.settings.own_choices import model_group, optimizer_group
from megatron.settings.parse import Defaults
from megatron.settings.rules import Rule
from megatron.settings.schema import Config, from_record

# model type -> module with `recipe()`
MODEL_TYPES = {"GPT": "pretrain_gpt", "T5": "pretrain_t5", "BERT": "pretrain_bert"}
Z_LOSS = "z loss"  # what the sum of z-losses is called


@dataclass(frozen=True)
class Recipe:
    """How a model differs from others; how it is trained is the same for all.

    model_type:     what checkpoints keep: a name of MODEL_TYPES, or the name of the module with `recipe()`
    facts:          (config, vocab_size) -> what the model says of itself without being built
    build_model:    (config, mesh, vocab_size, layers=, first=, last=, dtype=, device=) -> module of some of the layers,
                    whose forward takes (what the stage before sent, MicroBatch) and returns what goes to the next stage,
                    or (that, {name: sum}) where it has sums: the last one its losses and "tokens", those that count
    build_datasets: (config, tokenizer, vocab_size, sizes, log) -> (train, valid, test), each a dataset or None
    own_data:       build_datasets makes samples without --data-path and --mock-data; with --mock-data it is not asked
    groups:         settings of its own: name -> frozen dataclass of `setting`s; a run has them in `config.extra`
    defaults:       of settings that all models have: name -> value, or a function of what is said (name -> `Statement`)
                    that returns it or None; or one function for all, which looks into the checkpoint, too
    rules:          what cannot work among its settings (`settings.rules.Rule`)
    idle:           name of a setting -> what it needs for an effect in this model (`settings.effects.Needs`)
    shares_sequences: its modules know the ranks of `mesh.cp`, each of which has some rows of every sequence
    schedules:      name of a learning-rate schedule of its own, for --lr-decay-style -> function of the share of the decay
                    that is done (0 to 1) to what is left of the rate (1: all, 0: --min-lr)
    optimizers:     name of an optimizer of its own, for --optimizer -> `optimizer.kinds.Kind` with `update`
    linears:        name of a kind of linear layer of its own, for --linear PATTERN=KIND -> a subclass of
                    `mpu.linear_product.LinearProduct`
    sums:           name of a sum over tokens that stages return -> its weight in what is minimised; 0: logged alone;
                    or (config) -> such weights, where settings decide. Those that all models have: `sums_of`
    epoch_samples:  (config) -> samples of an epoch, for --train-epochs; None: they are counted in --data-path
    measures:       (config) -> `training.measures.Measures`: what evaluations find out beside mean losses, and whether
                    the best of them is kept
    reinitialize:   (name of a weight, whether the checkpoint has it) -> whether a run that loads weights alone
                    (--finetune) keeps its initial values, for checkpoints of any model that shares the other weights
    starts_from:    model types whose checkpoints may be the beginning of such a run, beside its own
    part:           (config, settings that such a checkpoint holds) -> those that it would hold of the part of its model
                    that the run takes
    hooks:          classes of `training.hooks.Hook`, or functions that make one from the settings of a run: called at
                    named places of the loop, those of --hooks behind them
    collate:        what the dataset gives for the places of a micro-batch -> a sample for each, ids [seq_length + 1] with
                    or without a loss mask, of that one alone: ranks and micro-batches of other sizes ask for others
    arrays:         (config, vocab_size) -> name -> `SampleArray`: its datasets give dicts of these, "labels" and
                    "loss_mask" among them, and so does collate; micro-batches have them by name
    normalize_config: (config) -> config with the standard settings, for models whose own flags define layers or stages.
                    Must be idempotent
    counts:         (config) -> name of a sum -> name of another one: what is logged of the former is their quotient, and
                    nothing where the latter is 0; other sums are divided by the tokens that count
    predicts:       (config) -> what its facts say of the memory of a training, without building the model: "all" of it;
                    "state", where what a step adds depends on how long texts are; or "nothing"
    perplexities:   the sums whose means are negative log-likelihoods of a token: evaluations tell exp of them, too
    """

    model_type: str
    facts: Callable[[Config, int], Facts]
    build_model: Callable
    build_datasets: Callable
    own_data: bool = False
    groups: Mapping[str, type] = field(default_factory=dict)
    defaults: Defaults = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    idle: Mapping[str, Needs] = field(default_factory=dict)
    shares_sequences: bool = False
    schedules: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    optimizers: Mapping[str, Any] = field(default_factory=dict)
    linears: Mapping[str, Any] = field(default_factory=dict)
    sums: Mapping[str, float] | Callable[[Config], Mapping[str, float]] = field(
        default_factory=lambda: {"lm loss": 1.0}
    )
    counts: Callable[[Config], Mapping[str, str]] = lambda config: {}
    perplexities: tuple[str, ...] = ("lm loss",)
    epoch_samples: Optional[Callable[[Config], int]] = None
    measures: Optional[Callable[[Config], Any]] = None
    reinitialize: Callable[[str, bool], bool] = lambda name, stored: False
    starts_from: tuple[str, ...] = ()
    part: Callable[[Config, dict[str, Any]], dict[str, Any]] = lambda config, saved: saved
    hooks: tuple[Callable[[Config], Any], ...] = ()
    collate: Optional[Callable[[list], Sequence]] = None
    arrays: Optional[Callable[[Config, int], Mapping[str, SampleArray]]] = None
    normalize_config: Callable[[Config], Config] = lambda config: config
    predicts: Callable[[Config], str] = lambda config: "all"

    @property
    def setting_groups(self) -> dict[str, type]:
        """Groups of settings that this recipe has beside the suite's, or in the place of one of them."""
        model = {"model": model_group(self.linears)} if self.linears else {}
        return {**self.groups, **model, "optimizer": optimizer_group(self.schedules, self.optimizers)}


def recipe_of(config: Config) -> Recipe:
    """The recipe of a run's model. Raises SettingsError where there is none."""
    return named_recipe(config.model.model_type)


def named_recipe(model_type: str) -> Recipe:
    """The recipe of a model type. Raises SettingsError where there is none."""
    module = module_of(model_type)
    try:
        return importlib.import_module(module).recipe()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(
            f"--model-type {model_type}: there is no such model{did_you_mean(str(model_type), MODEL_TYPES)}",
            f"{module}: {error}",
            f"there are {', '.join(MODEL_TYPES)}, and modules that have a function recipe()",
        ) from error


def module_of(model_type: str) -> str:
    """The name of the module with the recipe of a model type."""
    return MODEL_TYPES.get(str(model_type), str(model_type))  # a damaged checkpoint may say anything


def config_of(record: Mapping) -> Config:
    """The settings that a checkpoint or the log of a run holds, those of its recipe's own groups with them."""
    model_type = record.get("model", {}).get("model_type", "GPT")
    return from_record(record, named_recipe(model_type).setting_groups)


def command_of(model_type: str) -> str:
    """What stands behind `python` or `torchrun ...` to train a model type: `pretrain_gpt.py`, or `-m a.module`."""
    return f"{MODEL_TYPES[model_type]}.py" if model_type in MODEL_TYPES else f"-m {model_type}"


def sums_of(recipe: Recipe, config: Config) -> dict[str, float]:
    """Name of a sum that the stages of a run return -> its weight in what is minimised. Raises SettingsError for a weight
    that is no number.
    """
    own = recipe.sums(config) if callable(recipe.sums) else recipe.sums
    for name, weight in own.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise SettingsError(
                f"Recipe.sums of {recipe.model_type}: the weight of {name!r} is {weight!r}",
                do="give a finite number; 0 for a sum that is only logged",
            )
    z_loss = {Z_LOSS: config.model.z_loss_coeff} if config.model.z_loss_coeff else {}
    return {**own, **z_loss}


def shown(means: Mapping[str, float], counts: Mapping[str, str]) -> dict[str, float]:
    """What is logged of sums, each divided by the same number; counts: see `Recipe.counts`.

    >>> shown({"lm loss": 3.0, "right": 6.0, "seen": 8.0}, {"right": "seen"})
    {'lm loss': 3.0, 'right': 0.75}
    """
    found = {}
    for name, value in means.items():
        count = means[counts[name]] if name in counts else 1.0
        if count and name not in counts.values():
            found[name] = value / count
    return found


def facts_of(config: Config, vocab_size: int) -> Facts:
    """What the model of a run says of itself; vocab_size: rows of the embedding before padding."""
    return recipe_of(config).facts(config, vocab_size)
