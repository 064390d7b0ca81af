# SPDX-License-Identifier: Apache-2.0
"""`Recipe`: the complete interface between a model and the suite. Needs no torch.

The training loop, the planner and the tools know a model only through its recipe; `pretrain_gpt.py` defines one. A
checkpoint stores its model type, from which tools look up the recipe: a name of MODEL_TYPES, or a module with a function
`recipe()`.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from megatron.errors import SettingsError, did_you_mean
from megatron.model.facts import Facts
from megatron.model.sample_arrays import SampleArray
from megatron.settings.declare import Needs
from megatron.settings.own_choices import model_group, optimizer_group
from megatron.settings.parse import Defaults
from megatron.settings.rules import Rule
from megatron.settings.schema import Config, Distillation, from_record

# model type -> module with `recipe()`
MODEL_TYPES = {"GPT": "pretrain_gpt", "T5": "pretrain_t5", "BERT": "pretrain_bert"}
# GPTs of other recipes -> the script that trains them, as its name is another one.
SCRIPTS = {"megatron.tasks.chat": "finetune.py"}
LM_LOSS = "lm loss"  # name of the sum of a language model's losses
Z_LOSS = "z loss"  # of z-losses
KD_LOSS = "kd loss"  # of losses on a teacher's logits
KD_HIDDEN_LOSS = "kd hidden loss"  # of losses on its hidden states


@dataclass(frozen=True)
class Recipe:
    """The definition of a model type: its facts, module, datasets and settings.

    model_type:     stored in checkpoints: a name of MODEL_TYPES, or the name of the module with `recipe()`
    facts:          (config, vocab_size) -> the `Facts` of the model, without building it
    build_model:    (config, mesh, vocab_size, layers=, first=, last=, dtype=, device=) -> module of some of the layers.
                    Its forward takes (message of the previous stage, MicroBatch) and returns the message to the next
                    stage, or (that, {name: sum}); the last stage returns its losses and "tokens", the number that count
    build_datasets: (config, tokenizer, vocab_size, sizes, log) -> (train, valid, test), each a dataset or None
    own_data:       build_datasets makes samples without --data-path and --mock-data; it is not called with --mock-data
    groups:         its own settings: name -> frozen dataclass of `setting`s; available in `config.extra`
    defaults:       of common settings: name -> value, or a function of the given settings (name -> `Statement`)
                    that returns it or None; or one function for all, which can also read the checkpoint
    rules:          invalid combinations of its settings (`settings.rules.Rule`)
    idle:           name of a setting -> its condition for having an effect in this model (`settings.declare.Needs`)
    shares_sequences: its modules support `mesh.cp`: each of these ranks has some rows of every sequence
    batch_invariant: --batch-invariant-mode covers all sums of its modules
    schedules:      its own learning-rate schedules: name for --lr-decay-style -> function from the fraction of the decay
                    that is done (0 to 1) to the remaining learning rate (1: all, 0: --min-lr)
    optimizers:     its own optimizers: name for --optimizer -> `optimizer.kinds.Kind` with `update`
    linears:        its own kinds of linear layers: name for --linear PATTERN=KIND -> a subclass of
                    `mpu.linear_product.LinearProduct`
    kinds:          its own kinds of mixers, and those that replace the suite's: name -> `model.kinds.mixer.Mixer`
    experts:        its own router, dispatcher and ways to balance, for layers with experts: `experts.parts.ExpertParts`
    sums:           name of a sum over tokens that stages return -> its weight in the loss; 0: only logged;
                    or (config) -> such weights. `sums_of` adds those that all models have
    epoch_samples:  (config) -> samples per epoch, for --train-epochs; None: counted in --data-path
    measures:       (config) -> `training.measures.Measures`: what evaluations compute in addition to mean losses, and
                    whether the best weights are kept
    reinitialize:   (name of a weight, whether the checkpoint has it) -> whether a run that loads only weights (--finetune)
                    keeps its initial values, for checkpoints of any model that shares the other weights
    starts_from:    other model types whose checkpoints can start such a run
    part:           (config, settings of such a checkpoint) -> the settings of the part of its model that the run loads
    hooks:          classes of `training.hooks.Hook`, or functions that make one from the settings of a run: called at
                    named points of the loop, before those of --hooks
    collate:        the dataset's items of a micro-batch -> a sample for each, ids [seq_length + 1] with or without a loss
                    mask. A sample must depend on its own item only: ranks and micro-batch sizes group items differently
    arrays:         (config, vocab_size) -> name -> `SampleArray`: its datasets and collate return dicts of these, with
                    "labels" and "loss_mask"; micro-batches have them by name
    normalize_config: (config) -> config with the standard settings, for models whose own flags define layers or stages.
                    Must be idempotent
    counts:         (config) -> name of a sum -> name of its divisor, another sum: their quotient is logged, unless the
                    divisor is 0; other sums are divided by the tokens that count
    frozen:         (config) -> (setting that names it, folder) of a second, frozen model, whose losses of tokens the last
                    stage reads (`frozen_losses` of that stage), or None
    predicts:       (config) -> how much of training memory its facts predict: "all"; "state", if the memory of a step
                    depends on the length of texts; or "nothing"
    about:          a sentence for --help
    perplexities:   the sums whose means are negative log-likelihoods of a token: evaluations also log exp of them
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
    batch_invariant: bool = False
    schedules: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    optimizers: Mapping[str, Any] = field(default_factory=dict)
    linears: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, Any] = field(default_factory=dict)
    experts: Any = None
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
    frozen: Callable[[Config], Optional[tuple[str, str]]] = lambda config: None
    predicts: Callable[[Config], str] = lambda config: "all"
    about: str = ""

    @property
    def setting_groups(self) -> dict[str, type]:
        """The recipe's own groups of settings, and its extended versions of common groups."""
        own = self.linears or self.kinds or self.experts is not None
        model = {"model": model_group(self.linears, self.experts, self.kinds)} if own else {}
        return {**self.groups, **model, "optimizer": optimizer_group(self.schedules, self.optimizers)}


def mtp_loss(depth: int) -> str:
    """The name of the sum of the losses of a depth of multi-token prediction, as Megatron-LM logs it. depth: from 0"""
    return f"mtp_{depth + 1} loss"


def recipe_of(config: Config) -> Recipe:
    """The recipe of a run's model. Raises SettingsError if there is none."""
    return named_recipe(config.model.model_type)


def named_recipe(model_type: str) -> Recipe:
    """The recipe of a model type. Raises SettingsError if there is none."""
    module = module_of(model_type)
    try:
        return importlib.import_module(module).recipe()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(
            f"--model-type {model_type}: there is no such model{did_you_mean(str(model_type), MODEL_TYPES)}",
            f"{module}: {error}",
            f"there are {', '.join(MODEL_TYPES)}, and modules that have a function recipe()"
            + "; Python looks for them in the present folder and in PYTHONPATH"
            * isinstance(error, ModuleNotFoundError),
        ) from error


def module_of(model_type: str) -> str:
    """The name of the module with the recipe of a model type."""
    return MODEL_TYPES.get(str(model_type), str(model_type))  # a damaged checkpoint may have any value


def config_of(record: Mapping) -> Config:
    """The settings in the record of a checkpoint or a run's log, with its recipe's own groups.

    The model has no projections to a teacher's hidden size: these are for training alone.
    """
    model_type = record.get("model", {}).get("model_type", "GPT")
    config = from_record(record, named_recipe(model_type).setting_groups)
    if config.model.kd_hidden_projections is None:
        return config
    return replace(config, model=replace(config.model, kd_hidden_projections=None))


def computes_its_own(recipe: Recipe) -> bool:
    """Whether a recipe outside of the suite has facts, a module or experts that no recipe of the suite has."""
    of_suite = (*MODEL_TYPES, "finetune")  # the script's name is that of its recipe
    if recipe.model_type in of_suite or recipe.model_type.startswith("megatron."):
        return False
    return (recipe.facts, recipe.build_model, recipe.experts, recipe.kinds) not in [
        (one.facts, one.build_model, one.experts, one.kinds) for one in map(named_recipe, MODEL_TYPES)
    ]


def kind_of(facts: Facts) -> str:
    """The kind of a model in messages: GPT, T5 or BERT; for other recipes the name of the network, as GPT after
    instruction tuning.
    """
    model_type = facts.settings.model_type
    return model_type if model_type in MODEL_TYPES else facts.name


def command_of(model_type: str) -> str:
    """The arguments after `python` or `torchrun ...` that train a model type: `pretrain_gpt.py`, or `-m a.module`."""
    own = f"{MODEL_TYPES[model_type]}.py" if model_type in MODEL_TYPES else f"-m {model_type}"
    return SCRIPTS.get(model_type, own)


def sums_of(recipe: Recipe, config: Config) -> dict[str, float]:
    """Name of a sum that the stages of a run return -> its weight in the loss. Raises SettingsError for a bad weight."""
    own = recipe.sums(config) if callable(recipe.sums) else recipe.sums
    for name, weight in own.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise SettingsError(
                f"Recipe.sums of {recipe.model_type}: the weight of {name!r} is {weight!r}",
                do="give a finite number; 0 for a sum that is only logged",
            )
    m = config.model
    more = {Z_LOSS: m.z_loss_coeff} if m.z_loss_coeff else {}
    if m.depths and own.get(LM_LOSS):
        more |= {mtp_loss(depth): m.mtp_loss_scaling_factor / m.depths for depth in range(m.depths)}
    return {**own, **more, **_distilled(recipe, own, config.distillation)}


def _distilled(recipe: Recipe, own: Mapping[str, float], settings: Distillation) -> dict[str, float]:
    """The weights of the two losses of a student; none without a teacher."""
    if not settings.distils:
        return {}
    if not own.get(LM_LOSS):
        raise SettingsError(
            f"{settings.source}: --model-type {recipe.model_type} does not minimize a language model's loss",
            do="leave it out; a teacher's logits are for models that predict tokens",
        )
    hidden = {KD_HIDDEN_LOSS: settings.kd_hidden_coeff} if settings.kd_hidden_layers and settings.teacher_load else {}
    return {LM_LOSS: own[LM_LOSS] * (1 - settings.kd_alpha), KD_LOSS: own[LM_LOSS] * settings.kd_alpha, **hidden}


def logged_means(means: Mapping[str, float], counts: Mapping[str, str]) -> dict[str, float]:
    """The values to log, from sums that were divided by the same number; counts: see `Recipe.counts`.

    >>> logged_means({"lm loss": 3.0, "right": 6.0, "seen": 8.0}, {"right": "seen"})
    {'lm loss': 3.0, 'right': 0.75}
    """
    result = {}
    for name, value in means.items():
        count = means[counts[name]] if name in counts else 1.0
        if count and name not in counts.values():
            result[name] = value / count
    return result


def facts_of(config: Config, vocab_size: int) -> Facts:
    """The facts of a run's model; vocab_size: rows of the embedding before padding."""
    return recipe_of(config).facts(config, vocab_size)
