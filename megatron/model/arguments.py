# SPDX-License-Identifier: Apache-2.0
"""The command line of a training of any model: which recipe it is for, and the settings read with that."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Optional

from megatron.model.recipe import Recipe, named_recipe
from megatron.settings.parse import parse_pretrain, said
from megatron.settings.schema import Config


def parse_any(
    argv: list[str],
    groups: Mapping[str, type] = MappingProxyType({}),
    description: str = "",
    recipe: Optional[Recipe] = None,
) -> Config:
    """The settings of a training. recipe: that of --model-type if not given; groups: more groups of settings, for
    `Config.extra`.
    """
    if recipe is None:
        statement = said(argv).get("model_type")
        recipe = named_recipe("GPT" if statement is None else str(statement.value))
    of_model = {"model_type": recipe.model_type}
    own = recipe.defaults

    def found(statements):
        return of_model | dict(own(statements))

    defaults = found if callable(own) else of_model | dict(own)
    return recipe.normalize_config(parse_pretrain(argv, {**recipe.setting_groups, **groups}, description, defaults))


def parse_with_options(argv: list[str], options: type, description: str) -> tuple[Config, Any]:
    """(the settings of a training of whatever --model-type says, a tool's own `options` next to them)."""
    config = parse_any(argv, {"options": options}, description)
    own = {name: group for name, group in config.extra.items() if name != "options"}
    return replace(config, extra=own), config.extra["options"]
