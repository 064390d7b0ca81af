# SPDX-License-Identifier: Apache-2.0
"""Parse the command line of a training run of any model: find its recipe, then read the settings with it."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Optional

from megatron.model.lora import with_adapters
from megatron.model.quantization import with_quantization
from megatron.model.recipe import Recipe, named_recipe
from megatron.model.sparsity import with_sparsity
from megatron.settings.parse import parse_pretrain, said
from megatron.settings.schema import Config


def parse_any(
    argv: list[str],
    groups: Mapping[str, type] = MappingProxyType({}),
    description: str = "",
    recipe: Optional[Recipe] = None,
) -> Config:
    """The settings of a training run. recipe: default: that of --model-type. groups: additional groups of settings, for
    `Config.extra`.
    """
    # It reads checkpoints, with a package that may be missing.
    from megatron.model.frozen_settings import with_projections

    if recipe is None:
        statement = said(argv).get("model_type")
        recipe = named_recipe("GPT" if statement is None else str(statement.value))
    of_model = {"model_type": recipe.model_type}
    own = recipe.defaults

    def with_type(statements):
        return of_model | dict(own(statements))

    defaults = with_type if callable(own) else of_model | dict(own)
    config = parse_pretrain(argv, {**recipe.setting_groups, **groups}, description, defaults, recipe.starts_from)
    config = recipe.normalize_config(with_adapters(with_quantization(with_sparsity(config))))
    return with_projections(config)


def parse_with_options(argv: list[str], options: type, description: str) -> tuple[Config, Any]:
    """(settings of a training run of the model in --model-type, a tool's own `options`)."""
    config = parse_any(argv, {"options": options}, description)
    own = {name: group for name, group in config.extra.items() if name != "options"}
    return replace(config, extra=own), config.extra["options"]
