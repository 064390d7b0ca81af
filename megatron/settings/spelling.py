# SPDX-License-Identifier: Apache-2.0
"""Dataclass fields read as settings: their flags, their other spellings, and text turned into their values.

>>> from megatron.settings.schema import Model
>>> [setting] = [s for s in settings_of({"model": Model}) if s.name == "bias_gelu_fusion"]
>>> setting.flag
'--no-bias-gelu-fusion'
"""

import math
import types
import typing
from dataclasses import MISSING, dataclass, fields

from megatron.errors import did_you_mean
from megatron.settings.dialects.megatron_lm import INSTEAD

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class BadValue(ValueError):
    """The text cannot be a value of the setting. The message says what would be, without naming the setting."""


@dataclass(frozen=True)
class Setting:
    """One field of one group.

    `kind` is bool, int, float, str or a tuple of choices; `many` says that the value is a list of them.
    """

    group: str
    name: str
    kind: type | tuple
    many: bool
    optional: bool
    default: object
    help: str
    alias: tuple[str, ...]
    also: dict  # other words for a value: {"gpu": "cuda"}

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def flag(self) -> str:
        """The main spelling: `--no-x` for a switch that is on by default: only switching it off says anything."""
        return negated(self.name) if self.default is True else dashed(self.name)

    def word(self, value):
        """The value as one would give it: `auto` where that stands for a number that nobody means as one."""
        words = [word for word, other in self.also.items() if other == value and isinstance(other, int) and other < 0]
        return words[0] if words else value

    def value(self, words: list[str]):
        """Words of a command line or a file as a value: `["3"] -> 3`. Raises BadValue."""
        if self.many:
            if self.kind is not str:
                words = " ".join(words).split()  # "16 16 1000" in quotes is three numbers too
            if not words:
                raise BadValue("needs at least one value")
            return [one_value(self.kind, word, self.also) for word in words]
        if not words and self.kind is bool:
            return True
        if len(words) != 1:
            takes = " or ".join(map(str, self.kind)) if isinstance(self.kind, tuple) else _A[self.kind]
            got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
            raise BadValue(f"takes one value ({takes}), {got}")
        return one_value(self.kind, words[0], self.also)


@dataclass(frozen=True)
class Spelling:
    """A flag that sets a setting. `implies`: its value, when it stands alone. A `yielding` one gives way to others."""

    flag: str
    setting: Setting
    implies: object = None
    negates: bool = False
    yielding: bool = False

    def value(self, words: list[str]):
        """The setting's value, or None when the spelling was switched off (`--bf16 false`). Raises BadValue."""
        if self.negates:
            return not self.setting.value(words)
        if self.implies is None:
            return self.setting.value(words)
        if len(words) > 1:
            raise BadValue(f"takes no value, or true or false, got {len(words)}: {' '.join(words)}")
        return self.implies if not words or one_value(bool, words[0]) else None


def settings_of(groups: dict[str, type]) -> list[Setting]:
    """All fields of the groups, in order. A name may occur once: it is a flag."""
    return [
        _setting(name, field, hints[field.name])
        for name, group in groups.items()
        for hints in [typing.get_type_hints(group)]
        for field in fields(group)
    ]


def spellings_of(settings: list[Setting]) -> dict[str, Spelling]:
    """Every flag -> what it means. Two settings that claim the same flag are our mistake, not the user's."""
    found: dict[str, Spelling] = {}
    for setting in settings:
        for spelling in _spellings(setting):
            other = found.setdefault(spelling.flag, spelling)
            assert other is spelling, f"{spelling.flag} means {other.setting.name} and {setting.name}"
    return found


def dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def negated(name: str) -> str:
    return "--no-" + name.replace("_", "-")


def one_value(kind: type | tuple, word: str, also: dict | None = None):
    """One word as a bool, int, float, str or choice. Raises BadValue with what would be understood."""
    also = also or {}
    if unsaid := [name for name, value in also.items() if str(value) == word and word.startswith("-")]:
        raise BadValue(f"'{word}' is no value for it; say {unsaid[0]} if that is meant")
    word = str(also.get(word, word))
    if not word.strip():
        raise BadValue("is empty (a shell variable that is not set?)")
    if isinstance(kind, tuple):
        for choice in kind:
            if str(choice).lower() == word.lower():
                return choice
        known = [*map(str, kind), *also]
        hint = f"; {INSTEAD[word]}" if word in INSTEAD else did_you_mean(word, known)
        raise BadValue(f"'{word}' is none of {', '.join(known)}{hint}")
    if kind is bool:
        if word.lower() in YES + NO:
            return word.lower() in YES
        raise BadValue(f"'{word}' is neither true nor false")
    if kind is str:
        return word
    return _number(kind, word)


def _number(kind: type, word: str):
    try:
        number = int(word) if kind is int else float(word)
    except ValueError:
        try:
            number = float(word)  # 1e6 samples is a count too
        except ValueError:
            raise BadValue(f"'{word}' is not {_A[kind]}") from None
    if not math.isfinite(number):
        raise BadValue(f"'{word}' is not a finite number")
    if kind(number) != number:
        raise BadValue(f"'{word}' is not {_A[kind]}")
    return kind(number)


def _setting(group: str, field, hint) -> Setting:
    optional, many = False, False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        optional = True
        [hint] = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) in (list, tuple):
        many = True
        hint = typing.get_args(hint)[0]
    kind = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else hint
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    meta = field.metadata
    return Setting(
        group,
        field.name,
        kind,
        many,
        optional,
        default,
        meta.get("help", ""),
        meta.get("alias", ()),
        meta.get("also", {}),
    )


def _spellings(setting: Setting):
    yield Spelling(dashed(setting.name), setting)
    if setting.kind is bool and not setting.name.startswith("no_"):
        yield Spelling(negated(setting.name), setting, negates=True)
    for alias in setting.alias:
        flag, equals, value = alias.partition("=")
        implies = setting.value([value]) if equals else None
        yield Spelling(flag.rstrip("~"), setting, implies, yielding=flag.endswith("~"))


_A = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
