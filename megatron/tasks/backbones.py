# SPDX-License-Identifier: Apache-2.0
"""The models that can be fine-tuned, and the facts of such a model (a trunk) with a head. Needs no torch."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Optional

from megatron.data.masked_settings import GROUP as MASKED
from megatron.data.masked_settings import MASKED_RULES
from megatron.errors import SettingsError, did_you_mean
from megatron.model.facts import Facts, RankSetup
from megatron.model.recipe import Recipe, named_recipe
from megatron.model.t5.settings import DIVISIBLE_TARGET
from megatron.model.t5.settings import GROUP as T5_GROUP
from megatron.model.t5.settings import own_settings as t5_settings
from megatron.model.t5.stages import normalize_encoder_config
from megatron.model.weights import Unit
from megatron.mpu.placement import Normal, Placement
from megatron.settings.declare import Needs
from megatron.settings.rules import Rule
from megatron.settings.schema import Config
from megatron.telemetry.figures import several

HEAD = "head"
WORDS = 16  # default number of tokens of a target with the words of a label


@dataclass(frozen=True)
class Half:
    """A part of a model that can be a trunk by itself, such as the encoder of an encoder-decoder.

    name:    for messages
    normalize_config: config -> config of a model that is only this part (`Recipe.normalize_config`)
    of:      settings in a checkpoint of the whole model -> those in a checkpoint of this part
    unused:  settings of the other parts
    """

    name: str
    normalize_config: Callable[[Config], Config]
    of: Callable[[dict[str, Any]], dict[str, Any]]
    unused: tuple[str, ...]


@dataclass(frozen=True)
class Backbone:
    """The description of a kind of model as a trunk for fine-tuning.

    model_type: type of its recipe
    module:     "module:class" of its model, a `LanguageModel` with `of(config, mesh, facts, **stage)`
    reader:     "module:class" of the conversion of texts to arrays (`readers.TextReader`)
    pooled:     the token whose state is the head's input: "last" of the text (causal models), or "first"
    poolings:   other values that --pooling may have
    replaced:   units that the head replaces
    cloze:      "module:class" of the conversion of patterns to arrays (`cloze.Cloze`)
    shortened:  (config, whether there is a pattern) -> config with default lengths for fine-tuning
    lengths:    settings of such lengths, which are not taken from the checkpoint
    words_alone: config -> config of a model without other heads than the output layer
    divisible:  config -> config with lengths divisible by sequence parallel ranks; samples keep their lengths
    unneeded:   rules about pretraining samples, or about lengths that become divisible
    token_states: whether the model ends in a state of each token of the text
    half:       the part of the model below a head on the mean (`Half`); None: all of it
    """

    model_type: str
    module: str
    reader: str
    pooled: str
    poolings: tuple[str, ...]
    replaced: tuple[str, ...]
    cloze: str
    shortened: Callable[[Config, bool], Config] = lambda config, pattern: config
    lengths: tuple[str, ...] = ()
    words_alone: Callable[[Config], Config] = lambda config: config
    divisible: Callable[[Config], Config] = lambda config: config
    unneeded: tuple[Rule, ...] = MASKED_RULES
    token_states: bool = True
    half: Optional[Half] = None

    @property
    def recipe(self) -> Recipe:
        """The recipe of its pretraining."""
        return named_recipe(self.model_type)

    @property
    def groups(self) -> dict[str, type]:
        """The groups of settings that define its shape."""
        return {name: group for name, group in self.recipe.groups.items() if name != MASKED}

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The checks of its model's settings that also apply to fine-tuning."""
        return tuple(rule for rule in self.recipe.rules if rule not in self.unneeded)

    def module_class(self) -> type:
        """The class of its model; imports torch."""
        return _named(self.module)

    def reader_class(self) -> type:
        """The class of its text reader; imports numpy."""
        return _named(self.reader)

    def cloze_class(self) -> type:
        """The class of its pattern reader; imports numpy."""
        return _named(self.cloze)


def _named(path: str) -> type:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def few_targets(config: Config, pattern: bool) -> Config:
    """Set the default length of the decoder: one token, or with a pattern, room for the sentinel and the label's words."""
    own = t5_settings(config)
    if own.decoder_seq_length is not None:
        return config
    return config.derive("fine-tuning", decoder_seq_length=WORDS if pattern else 1)


def without_binary_head(config: Config) -> Config:
    """Turn off BERT's next-sentence head, which patterns do not use."""
    return config.derive("fine-tuning", bert_binary_head=False)


def divisible_target(config: Config) -> Config:
    """With sequence parallelism, pad the decoder's length to a multiple of the tensor parallel ranks."""
    own, parallel = t5_settings(config), config.parallel
    if not (parallel.sequence_parallel and own.decoder_seq_length):
        return config
    rows = multiple_above(own.decoder_seq_length, parallel.tensor_model_parallel_size)
    return config.derive("--sequence-parallel", decoder_seq_length=rows)


def encoder_of(saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of an encoder-decoder's checkpoint for its encoder alone, whose layers come first."""
    model, extra = saved["model"], saved.get("extra", {})
    own = extra.get(T5_GROUP, {})
    model = {**model, "num_layers": own.get("encoder_num_layers", model["num_layers"])}
    return {**saved, "model": model, "extra": {**extra, T5_GROUP: {**own, "decoder_num_layers": 0}}}


def multiple_above(number: int, size: int) -> int:
    return -(-number // size) * size


# A row for each kind of model. A bidirectional trunk pools its first token ([CLS]), an encoder-decoder the first output of
# its decoder, or the mean of its encoder's outputs, without a decoder (arXiv:2108.08877).
DEFAULT = "GPT"
_MODEL, _READER = "megatron.model.{}.module:{}", "megatron.tasks.readers:{}Reader"
_CLOZE = "megatron.tasks.cloze:{}Cloze"
BACKBONES = {
    "GPT": Backbone(
        "GPT",
        _MODEL.format("gpt", "GPT"),
        _READER.format("Causal"),
        "last",
        ("last", "mean"),
        ("output",),
        _CLOZE.format("Causal"),
    ),
    "BERT": Backbone(
        "BERT",
        _MODEL.format("bert", "Bert"),
        _READER.format("Bert"),
        "first",
        ("first", "last", "mean"),
        ("head", "binary", "output"),
        _CLOZE.format("Bert"),
        words_alone=without_binary_head,
    ),
    "T5": Backbone(
        "T5",
        _MODEL.format("t5", "T5"),
        _READER.format("T5"),
        "first",
        ("first", "mean"),
        ("output",),
        _CLOZE.format("T5"),
        shortened=few_targets,
        lengths=("decoder_seq_length",),
        divisible=divisible_target,
        token_states=False,
        unneeded=(*MASKED_RULES, DIVISIBLE_TARGET),
        half=Half("encoder", normalize_encoder_config, encoder_of, ("decoder_num_layers", "decoder_seq_length")),
    ),
}


def shape_groups() -> dict[str, type]:
    """The groups of settings that define the shapes of all kinds of trunks."""
    return {name: group for row in BACKBONES.values() for name, group in row.groups.items()}


def trunk_rules(chosen: Callable[[Any], str]) -> tuple[Rule, ...]:
    """The rules of all trunks, each limited to its trunks. chosen: argument of a rule -> name of the trunk in use."""
    users: dict[Rule, list[str]] = {}
    for name, row in BACKBONES.items():
        for rule in row.rules:
            users.setdefault(rule, []).append(name)

    def of_these(rule: Rule, names: list[str]) -> Rule:
        return Rule(lambda s: chosen(s) in names and rule.broken(s), rule.message)

    return tuple(of_these(rule, names) for rule, names in users.items())


def trunk_idle(chosen: Callable[[Any], str], pooling: Callable[[Any], Optional[str]]) -> dict[str, Needs]:
    """The conditions under which settings of a trunk's shape have an effect: the trunk is in use, and its recipe's own.

    chosen, pooling: argument of a rule -> name of the trunk in use, --pooling or None
    """
    conditions: dict[str, Needs] = {}
    for name, row in BACKBONES.items():
        own = {field.name for group in row.groups.values() for field in fields(group)}
        of_another = Needs(f"--backbone {name}", lambda s, name=name: chosen(s) == name)
        conditions |= {setting: needs for setting, needs in row.recipe.idle.items() if setting not in conditions}
        conditions |= {setting: both(of_another, row.recipe.idle.get(setting)) for setting in own}
        whole = Needs("a --pooling other than mean", lambda s, name=name: half_of(name, pooling(s)) is None)
        conditions |= {setting: both(conditions[setting], whole) for setting in (row.half.unused if row.half else ())}
    return conditions


def both(first: Needs, second: Needs | None) -> Needs:
    """The condition that both are met."""
    if second is None:
        return first
    return Needs(f"{first.words} and {second.words}", lambda s: first.met(s) and second.met(s))


def half_of(name: str, pooling: Optional[str]) -> Optional[Half]:
    """The part of a trunk's model that is used; None: all of it. pooling: --pooling or None."""
    return find_backbone(name).half if pooling == "mean" else None


def normalize_trunk_config(name: str, config: Config, pattern: bool, pooling: Optional[str]) -> Config:
    """`Recipe.normalize_config` of a trunk."""
    row, half = find_backbone(name), half_of(name, pooling)
    return (half or row.recipe).normalize_config(row.shortened(config, pattern))


def saved_shape(name: str) -> dict[str, str]:
    """Settings of a trunk that are taken from its checkpoint -> their group."""
    row = find_backbone(name)
    return {
        field.name: group
        for group, settings in row.groups.items()
        for field in fields(settings)
        if field.metadata.get("on_resume") in ("another model", "refused") and field.name not in row.lengths
    }


def find_backbone(name: str) -> Backbone:
    """The description of a trunk by name. Raises SettingsError for an unknown one."""
    if name not in BACKBONES:
        raise SettingsError(
            f"--backbone {name}: fine-tuning has no head for such models{did_you_mean(name, BACKBONES)}",
            f"it knows {', '.join(BACKBONES)}",
            "a kind of model is a row in megatron/tasks/backbones.py",
        )
    return BACKBONES[name]


def trunk_facts(name: str, config, vocab_size: int) -> Facts:
    """The facts of the pretrained model."""
    row = find_backbone(name)
    return row.recipe.facts(row.divisible(config), vocab_size)


def pattern_facts(name: str, config, vocab_size: int) -> Facts:
    """The facts of the model that predicts words in patterns."""
    return trunk_facts(name, find_backbone(name).words_alone(config), vocab_size)


def classifier_facts(name: str, config, vocab_size: int, outputs: int, options: int = 1) -> Facts:
    """The facts of the model with a head of `outputs` in place of the output layer. options: number per sample."""
    facts = trunk_facts(name, config, vocab_size)
    kind = _with_head(type(facts), find_backbone(name).replaced)
    return kind(**_own(facts), num_outputs=outputs, sequences=options)


def chooser_facts(name: str, config, vocab_size: int, outputs: int, tokens: int) -> Facts:
    """The facts of the model that chooses among `outputs` labels, each of at most `tokens` tokens."""
    facts = pattern_facts(name, config, vocab_size)
    return _choosing(type(facts))(**_own(facts), num_outputs=outputs, label_tokens=tokens)


def _own(facts: Facts) -> dict[str, Any]:
    return {field.name: getattr(facts, field.name) for field in fields(facts)}


@cache
def _scoring(trunk: type[Facts]) -> type[Facts]:
    @dataclass(frozen=True)
    class ScoringFacts(trunk):
        """Facts of a model that scores samples. num_outputs: number of scores per sample, or 1 for a regression."""

        num_outputs: int = 2

        output_flops = 0.0  # negligible: a few numbers per sample

        def state_bytes(self, share: RankSetup) -> int:
            """Bytes of one token's state for each sample of a micro-batch."""
            return share.micro_batch_size * self.settings.hidden_size * share.element

        # The loss is over a few scores per sample.

        def loss_chunks(self, share: RankSetup) -> int:
            return 1

        def loss_saved_bytes(self, share: RankSetup) -> int:
            return 4 * share.micro_batch_size * (self.settings.hidden_size + self.num_outputs)

        def loss_freed_bytes(self, share: RankSetup) -> int:
            return 0

        def loss_deferred(self, share: RankSetup) -> int:
            return 0

        def loss_workspace(self, share: RankSetup) -> int:
            return 8 * share.micro_batch_size * self.num_outputs

    return ScoringFacts


@cache
def _choosing(trunk: type[Facts]) -> type[Facts]:
    @dataclass(frozen=True)
    class ChooserFacts(_scoring(trunk)):
        """Facts of a model that chooses a label. label_tokens: number of positions it scores."""

        label_tokens: int = 1

        def score_sums(self, share: RankSetup) -> tuple[int, ...]:
            states = self.label_tokens * self.state_bytes(share)
            logits = 4 * self.label_tokens * share.micro_batch_size * self.num_outputs
            return (states, logits, *([states] if share.sp else []))

    return ChooserFacts


@cache
def _with_head(trunk: type[Facts], replaced: tuple[str, ...]) -> type[Facts]:
    @dataclass(frozen=True)
    class ClassifierFacts(_scoring(trunk)):
        """Facts of a model with a head. sequences: number of options per sample, each a sequence of its own."""

        sequences: int = 1
        word_head = False

        @property
        def name(self) -> str:
            head = f"{super().name} (a head of {several(self.num_outputs, 'output')})"
            return f"{head} for each of {self.sequences} options" if self.sequences > 1 else head

        @property
        def tied(self) -> bool:
            return False  # there is no output layer that could share the table

        def units(self, layers, first: bool, last: bool, sequence_parallel: bool = False) -> list[Unit]:
            kept = [unit for unit in super().units(layers, first, last, sequence_parallel) if unit.name not in replaced]
            m = self.settings
            weight = Placement((self.num_outputs, m.hidden_size), Normal(m.init_method_std))
            return kept + ([Unit(HEAD, {"weight": weight}, ends=("last",))] if last else [])

        def score_sums(self, share: RankSetup) -> tuple[int, ...]:
            return (self.state_bytes(share),) if share.sp else ()  # the rank with the token sends it to the others

    return ClassifierFacts
