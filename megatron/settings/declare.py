# SPDX-License-Identifier: Apache-2.0
"""How a setting is declared: a field of a frozen dataclass, whose type says which values are in its range.

    @dataclass(frozen=True)
    class Precision:  # groups/precision.py
        hysteresis: Count = shown_by("test_loss_scales_of_fp16")(
            "number of overflows before the scale halves", 2, needs=DYNAMIC_SCALE
        )

Nothing else declares it: flag, help, YAML key, checks, record in checkpoints and line in docs/flags.md follow. Its name is
its attribute, its key and (with dashes) its flag; a bool that is true by default becomes `--no-...`. Afterwards run
`python -m megatron.tools.flag_docs --output docs/flags.md`. A given setting whose condition (`Needs`) is not met is logged.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, Optional

# What happens if a run resumes from a checkpoint with another value: another model, whose weights do not fit (refused with
# --finetune, too); refused unless --override names it, because results would silently change; the same in training, and
# logged in evaluation (--skip-train); logged; or irrelevant to the result.
ON_RESUME = ("another model", "refused", "refused in training", "logged", "irrelevant")


class Range(NamedTuple):
    """Values that a setting may have, regardless of others: in words, after "must be", and as a function."""

    words: str
    holds: Callable[[float], bool]


AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
Count = Annotated[int, AT_LEAST_1]
Natural = Annotated[int, AT_LEAST_0]
FromOne = Annotated[float, AT_LEAST_1]
FromZero = Annotated[float, AT_LEAST_0]
Positive = Annotated[float, Range("above 0", lambda value: value > 0)]
Fraction = Annotated[float, Range("at least 0 and below 1", lambda value: 0 <= value < 1)]
Share = Annotated[float, Range("at least 0 and at most 1", lambda value: 0 <= value <= 1)]
PositiveShare = Annotated[float, Range("above 0 and at most 1", lambda value: 0 < value <= 1)]
Between = Annotated[float, Range("above 0 and below 1", lambda value: 0 < value < 1)]
Bits = Annotated[int, Range("at least 2 and at most 8", lambda value: 2 <= value <= 8)]


class Needs(NamedTuple):
    """The condition for an effect: in words, with flags, and as a function of the settings (`rules.record`).

    of_network: the network decides whether it holds: a condition of those recipes that have it (`Recipe.idle`)
    """

    words: str
    met: Callable[[SimpleNamespace], object]
    of_network: bool = False


def setting(help: str, default=MISSING, *alias: str, needs: Optional[Needs | str] = None, **metadata):
    """A dataclass field that is also a flag.

    alias: other spellings of the flag. `--other=value` implies a value; `--other~=value` does, too, but any other spelling
    overrides it. `--other false` means "not this value", or `off` for `--other=value/off` (the default for `value/`).
    `--other~=value/off` is a switch: if it is off, anywhere on the command line, the other spellings have no effect.

    also: other words for a value, as `{"gpu": "cuda"}`. joined: several words are a list with commas.
    also_sets: a spelling -> values of other settings, as a preset has them. replaces: the settings whose place it takes.
    gives: the settings that follow from it.
    by_layer: layers may have values of their own (--layer-settings), which this type reads from text.
    requires: (another setting, why that must be given, too). needs: the condition for an effect, or a setting without
    which it has none. on_resume: one of ON_RESUME (default: see `guard/changes.py`). shown: see `shown_by`.
    """
    if isinstance(needs, str):
        needs = Needs(dashed(needs), attrgetter(needs))
    return field(default=default, metadata=dict(help=help, alias=alias, needs=needs, **metadata))


def shown_by(test: str, **metadata) -> Callable:
    """`setting`, with the test that shows its effect, and with what several settings have in common.

    test: the name of its function, with `file::` in front if others have this name
    """
    return partial(setting, shown=test, **metadata)


def declared(what: str, *groups: object) -> dict:
    """Setting -> this part of its declaration, of the settings of these groups that have it.

    >>> from megatron.settings.groups.planner import Planner
    >>> declared("needs", Planner)["tune_steps"].words
    '--auto-parallel or --micro-batch-size auto'
    """
    return {one.name: value for group in groups for one in fields(group) if (value := one.metadata.get(what))}


def dashed(name: str) -> str:
    """The flag of a setting: `--tensor-model-parallel-size`."""
    return "--" + name.replace("_", "-")


def negated(name: str) -> str:
    """The flag that switches a setting off."""
    return "--no-" + name.replace("_", "-")


# Given settings without effect: harmless, and a sign that another one was forgotten. Each is logged once.


def without_effect(s: SimpleNamespace, table: Mapping[str, Needs]) -> dict[str, str]:
    """Name -> message, for each given setting that has no effect. s: `rules.record`"""
    return {
        name: f"{said.words} has no effect without {needs.words}"
        for name in s.settings.statements
        if (needs := table.get(name)) and (said := s.settings.given(name)) and said.is_request and not needs.met(s)
    }


def idle_flags(
    group: object, said: Mapping[str, Any], table: Optional[Mapping[str, Needs]] = None, **more
) -> list[str]:
    """`without_effect` for a tool's group of settings.

    said: setting -> `Statement`; table: conditions in the place of those of the group; more: other inputs of conditions
    """
    record = SimpleNamespace(statements=said, given=said.get)
    table = declared("needs", group) if table is None else table
    own = {name: needs for name, needs in table.items() if hasattr(group, name)}
    return list(without_effect(SimpleNamespace(settings=record, **vars(group), **more), own).values())
