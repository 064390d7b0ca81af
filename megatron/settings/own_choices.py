# SPDX-License-Identifier: Apache-2.0
"""A recipe's own learning-rate schedules, optimizers, kinds of mixers and linear layers, and parts of experts. Needs no
torch.

A recipe that defines some replaces `schema.Optimizer` (for layers, `schema.Model`) by a subclass. Its choices
include their names, its extra fields are their settings, and it holds the function of each name. So flags, help, files,
checks and checkpoints treat them as built-in ones.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields, make_dataclass
from types import MappingProxyType
from typing import Any, Literal, Optional, get_args, get_type_hints

from megatron.errors import SettingsError
from megatron.settings.schema import Model, Optimizer

BALANCING = "moe_router_load_balancing_type"  # the setting of which a recipe's own ways to balance are choices
NONE: Mapping[str, Any] = MappingProxyType({})
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


def model_group(linears: Mapping[str, Any], experts: Any = None, mixers: Mapping[str, Any] = NONE) -> type[Model]:
    """`schema.Model`, or its subclass with a recipe's own kinds of linear layers and of mixers, and its parts of experts.

    linears: name -> subclass of `mpu.linear_product.LinearProduct`
    experts: `model.kinds.experts.parts.ExpertParts`, or None
    mixers: name -> `model.kinds.mixer.Mixer`

    Raises SettingsError for invalid names and classes.
    """
    if not linears and experts is None and not mixers:
        return Model
    for name, kind in mixers.items():
        if getattr(kind, "name", None) != name or not callable(getattr(kind, "weights", None)):
            raise SettingsError(
                f"Recipe.kinds[{name!r}] is {kind!r}",
                do=f"give a megatron.model.kinds.mixer.Mixer with the name {name!r}: docs/extending.md",
            )
    balancing = {} if experts is None else experts.balancing
    for name, way in balancing.items():
        _check_name("experts.balancing", name, _choices(BALANCING, Model))
        if not callable(getattr(way, "loss", None)):
            raise SettingsError(
                f"Recipe.experts.balancing[{name!r}] is {way!r}",
                do="give a megatron.model.kinds.experts.parts.Balancing: docs/extending.md",
            )
    for name, kind in linears.items():
        _check_name("linears", name, ["plain"])
        if not callable(kind) or not callable(getattr(kind, "own_weights", None)):
            raise SettingsError(
                f"Recipe.linears[{name!r}] is {kind!r}",
                do="give a subclass of megatron.mpu.linear_product.LinearProduct: docs/extending.md",
            )
    kinds = (*linears.values(), *([] if experts is None else [experts]))
    groups = dict.fromkeys(kind.group for kind in kinds if kind.group is not None)
    more = (kind.settings for kind in mixers.values())
    groups |= dict.fromkeys(group for group in more if group is not None and not issubclass(Model, group))
    for group in groups:
        _check_fields(group)
    parts = dict(own_linears=dict(linears), own_experts=experts, own_kinds=dict(mixers))
    own = dict(**parts, __eq__=_same_settings, __hash__=Model.__hash__)
    widened = _widened(Model, {BALANCING: tuple(balancing)})
    return make_dataclass("Model", widened, bases=(*groups, Model), namespace=own, frozen=True, eq=False)


def _check_fields(group: type) -> None:
    taken = {one.name for one in fields(Model)} & {one.name for one in fields(group)}
    if taken:
        raise SettingsError(
            f"{group.__name__}: the suite has settings of these names: {', '.join(sorted(taken))}",
            do="give yours other names",
        )


def _same_settings(one: Any, other: object) -> bool:
    """Compare values only: each call of a recipe function creates another class for its group."""
    return isinstance(other, (Model, Optimizer)) and vars(one) == vars(other)


def _group(schedules: Mapping[str, Callable], optimizers: Mapping[str, Any]) -> type[Optimizer]:
    more = dict.fromkeys(SCHEDULES, tuple(schedules))
    more["optimizer"] = tuple(optimizers)
    widened = _widened(Optimizer, more)
    groups = dict.fromkeys(kind.group for kind in optimizers.values() if kind.group is not None)
    own = dict(own_schedules=dict(schedules), own_optimizers=dict(optimizers), __eq__=_same_settings)
    return make_dataclass("Optimizer", widened, bases=(*groups, Optimizer), namespace=own, frozen=True, eq=False)


def _widened(group: type, more: Mapping[str, tuple[str, ...]]) -> list[tuple[str, Any, Any]]:
    """The settings of a group with more choices, as `make_dataclass` takes them. more: setting -> names"""
    known, found = {one.name: one for one in fields(group)}, []
    for name, names in more.items():
        if names:
            kind = Literal[(*_choices(name, group), *names)]
            kind = Optional[list[kind]] if name == BALANCING else kind
            found.append((name, kind, field(default=known[name].default, metadata=known[name].metadata)))
    return found


def _choices(name: str, group: type = Optimizer) -> tuple[str, ...]:
    kind = get_type_hints(group)[name]
    return get_args(get_args(get_args(kind)[0])[0] if name == BALANCING else kind)


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
