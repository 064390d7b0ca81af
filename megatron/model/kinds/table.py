# SPDX-License-Identifier: Apache-2.0
"""`KINDS`, the kinds of the suite: `KIND` in each folder's `kind.py`. Needs no torch."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Union

from megatron.model.kinds import parts
from megatron.model.kinds.mixer import Mixer
from megatron.settings.rules import Rule
from megatron.settings.schema import Model

KINDS: Mapping[str, Mixer] = {module.KIND.name: module.KIND for module in parts("kind")}


def resolved(reference: Union[str, Any]) -> Any:
    """The class or function of a reference "module:name"; others are returned as they are."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def chosen(kinds: Mapping[str, Mixer], place: str, model: Model, layer: int) -> Mixer:
    """The kind that is a branch of a transformer layer: the first that takes it, else the one without `takes`."""
    able = [kind for kind in kinds.values() if kind.place == place]
    taking = (kind for kind in able if kind.takes is not None and kind.takes(model, layer))
    return next(taking, None) or next(kind for kind in able if kind.takes is None)


def letters_of(kinds: Mapping[str, Mixer]) -> dict[str, tuple[Mixer, ...]]:
    """Character of --hybrid-layer-pattern -> the kinds of such a layer: one, or several after one norm."""
    found = {kind.symbol: (kind,) for kind in kinds.values() if kind.symbol}
    return found | {
        letter: (kinds[other], kind) for kind in kinds.values() for letter, other in kind.beside if other in kinds
    }


def words_of(kinds: Mapping[str, Mixer]) -> dict[str, str]:
    """Character of --hybrid-layer-pattern -> the kinds of such a layer, in words."""
    return {letter: " beside ".join(kind.name for kind in own) for letter, own in letters_of(kinds).items()}


def listed(kinds: Mapping[str, Mixer], letters: str) -> list[Mixer]:
    """The kinds of the layers that a pattern lists."""
    known = letters_of(kinds)
    names = {kind.name for letter in letters for kind in known.get(letter, ())}
    return [kind for kind in kinds.values() if kind.name in names]


def rules_of(*own: str) -> tuple[Rule, ...]:
    """The rules of models whose layers have these kinds: those of each, and that settings ask for no other kind."""
    return tuple(rule for name, kind in KINDS.items() for rule in (kind.rules if name in own else (_refused(kind),)))


def _refused(kind: Mixer) -> Rule:
    return Rule(
        lambda s: kind.asked(s.settings.model),
        lambda s: f"{kind.asked(s.settings.model)}: this kind of model has no {kind.name}; leave it out",
    )


def sums_of_kinds(model: Model) -> dict[str, float]:
    """Name of a sum that layers return -> its weight in the loss."""
    return {name: weight for kind in {**KINDS, **model.own_kinds}.values() for name, weight in kind.sums(model).items()}
