# SPDX-License-Identifier: Apache-2.0
"""A recipe's own learning-rate schedules, optimizers and kinds of linear layers. Needs no torch.

A recipe that defines some replaces `schema.Optimizer` (for linear layers, `schema.Model`) by a subclass. Its choices
include their names, its extra fields are their settings, and it holds the function of each name. So flags, help, files,
checks and checkpoints treat them as built-in ones.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, Literal, get_args, get_type_hints

from megatron.errors import SettingsError
from megatron.settings.schema import Model, Optimizer

SCHEDULES = ("lr_decay_style", "lr_wsd_decay_style")  # the settings that a recipe's own schedules are choices of


def optimizer_group(schedules: Mapping[str, Callable], optimizers: Mapping[str, Any]) -> type[Optimizer]:
    """`schema.Optimizer`, or its subclass with a recipe's own schedules and optimizers.

    schedules:  name -> function from the fraction of the decay that is done to the remaining learning rate (1: all)
    optimizers: name -> `optimizer.kinds.Kind`, with `update`

    Raises SettingsError for invalid names and functions.
    """
    if not schedules and not optimizers:
        return Optimizer
    for name, curve in schedules.items():
        _check_name("schedules", name, [choice for setting in SCHEDULES for choice in _choices(setting)])
        if not callable(curve):
            raise SettingsError(
                f"Recipe.schedules[{name!r}] is {curve!r}", do="give a function of the fraction done, 0 to 1"
            )
    for name, kind in optimizers.items():
        _check_name("optimizers", name, _choices("optimizer"))
        if not callable(getattr(kind, "update", None)) or not callable(getattr(kind, "state", None)):
            raise SettingsError(
                f"Recipe.optimizers[{name!r}] is {kind!r}",
                do="give megatron.optimizer.kinds.Kind(state=..., update=...): docs/extending.md",
            )
    return _group(schedules, optimizers)


def model_group(linears: Mapping[str, Any]) -> type[Model]:
    """`schema.Model`, or its subclass with a recipe's own kinds of linear layers.

    linears: name -> subclass of `mpu.linear_product.LinearProduct`

    Raises SettingsError for invalid names and classes.
    """
    if not linears:
        return Model
    for name, kind in linears.items():
        _check_name("linears", name, ["plain"])
        if not callable(kind) or not callable(getattr(kind, "own_weights", None)):
            raise SettingsError(
                f"Recipe.linears[{name!r}] is {kind!r}",
                do="give a subclass of megatron.mpu.linear_product.LinearProduct: docs/extending.md",
            )
    groups = dict.fromkeys(kind.group for kind in linears.values() if kind.group is not None)
    own = dict(own_linears=dict(linears), __eq__=_same_settings, __hash__=Model.__hash__)
    return make_dataclass("Model", (), bases=(*groups, Model), namespace=own, frozen=True, eq=False)


def _same_settings(one: Any, other: object) -> bool:
    """Compare values only: each call of a recipe function creates another class for its group."""
    return isinstance(other, (Model, Optimizer)) and vars(one) == vars(other)


def _group(schedules: Mapping[str, Callable], optimizers: Mapping[str, Any]) -> type[Optimizer]:
    more = dict.fromkeys(SCHEDULES, tuple(schedules))
    more["optimizer"] = tuple(optimizers)
    known = {one.name: one for one in fields(Optimizer)}
    widened = [
        (name, Literal[(*_choices(name), *names)], field(default=known[name].default, metadata=known[name].metadata))
        for name, names in more.items()
        if names
    ]
    groups = dict.fromkeys(kind.group for kind in optimizers.values() if kind.group is not None)
    own = dict(own_schedules=dict(schedules), own_optimizers=dict(optimizers), __eq__=_same_settings)
    return make_dataclass("Optimizer", widened, bases=(*groups, Optimizer), namespace=own, frozen=True, eq=False)


def _choices(name: str) -> tuple[str, ...]:
    return get_args(get_type_hints(Optimizer)[name])


def _check_name(where: str, name: str, taken: list[str] | tuple[str, ...]) -> None:
    also = {
        word
        for one in fields(Optimizer)
        if one.name in (*SCHEDULES, "optimizer")
        for word in one.metadata.get("also", ())
    }
    if name in taken or name in also:
        raise SettingsError(f"Recipe.{where}: {name!r} is a built-in name", do="give it another name")
    if not re.fullmatch(r"[A-Za-z]\w*(-\w+)*", name):
        raise SettingsError(f"Recipe.{where}: {name!r} is not a valid name", do="use letters, digits, - and _")
