# SPDX-License-Identifier: Apache-2.0
"""Parse the command line of a training run of any model: find its recipe, then read the settings with it."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Optional

from megatron.model.fp8 import with_recipe
from megatron.model.lora import with_adapters
from megatron.model.quantization import with_quantization
from megatron.model.recipe import Recipe, named_recipe
from megatron.model.sparsity import with_sparsity
from megatron.settings.batch import SCHEDULE_IN_SAMPLES
from megatron.settings.parse import parse_pretrain, said
from megatron.settings.schema import Config, Derivation, derived


def parse_any(
    argv: list[str],
    groups: Mapping[str, type] = MappingProxyType({}),
    description: str = "",
    recipe: Optional[Recipe] = None,
) -> Config:
    """The settings of a training run. recipe: default: that of --model-type. groups: additional groups of settings, for
    `Config.extra`.
    """
    if recipe is None:
        statement = said(argv).get("model_type")
        recipe = named_recipe("GPT" if statement is None else str(statement.value))
    of_model = {"model_type": recipe.model_type}
    own = recipe.defaults

    def with_type(statements):
        return of_model | dict(own(statements))

    defaults = with_type if callable(own) else of_model | dict(own)
    config = parse_pretrain(argv, {**recipe.setting_groups, **groups}, description, defaults, recipe.starts_from)
    return derived(config, derivations(recipe))


def derivations(recipe: Recipe) -> tuple[Derivation, ...]:
    """The values that follow from a command line, in order."""
    from megatron.model.frozen_settings import (
        with_projections,  # it reads checkpoints, with a package that may be missing
    )

    return (
        Derivation("pretrained_checkpoint load ckpt_step", "load", _from_pretrained, cause="pretrained_checkpoint"),
        Derivation(
            "sparsity sparsity_layers sparsity_skip quantization linear",
            "linear sparsity_skip",
            with_sparsity,
            cause="sparsity",
        ),
        Derivation(
            "quantization quantization_layers quantization_skip linear",
            "linear quantization_skip",
            with_quantization,
            cause="quantization",
        ),
        Derivation("fp8_recipe", "fp8_recipe", with_recipe, cause="fp8_format"),
        Derivation(
            "lora_rank lora_target use_dora linear train_only", "linear train_only", with_adapters, cause="lora_rank"
        ),
        Derivation("*", "*", recipe.normalize_config),  # any settings, by the model
        Derivation(
            "teacher_load kd_hidden_layers kd_hidden_projections hidden_size num_layers train_only",
            "kd_hidden_projections train_only",
            with_projections,
        ),
        SCHEDULE_IN_SAMPLES,
    )


def _from_pretrained(config: Config) -> Config:
    from megatron.settings.from_checkpoint import from_pretrained  # it needs a package that may be missing

    return from_pretrained(config)


def parse_with_options(argv: list[str], options: type, description: str) -> tuple[Config, Any]:
    """(settings of a training run of the model in --model-type, a tool's own `options`)."""
    config = parse_any(argv, {"options": options}, description)
    own = {name: group for name, group in config.extra.items() if name != "options"}
    return replace(config, extra=own), config.extra["options"]
