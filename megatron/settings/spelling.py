# SPDX-License-Identifier: Apache-2.0
"""Settings from dataclass fields: their flags, aliases, and the conversion of text to values.

>>> from megatron.settings.schema import Model
>>> [setting] = [s for s in settings_of({"model": Model}) if s.name == "bias_gelu_fusion"]
>>> setting.flag
'--no-bias-gelu-fusion'
"""

import math
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from types import MappingProxyType, UnionType

from megatron.errors import did_you_mean
from megatron.settings.declare import Range, dashed, negated
from megatron.settings.dialects.megatron_lm import INSTEAD
from megatron.settings.statements import SaidBy, Statement

# The words of torch and of Hugging Face for number formats, in every setting that has the format among its choices
FORMATS = dict(bfloat16="bf16", float16="fp16", half="fp16", float32="fp32", float="fp32")
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class BadValue(ValueError):
    """Raised for text that is no value of a setting. The message says what is valid, and does not name the setting."""


@dataclass(frozen=True)
class Setting:
    """A setting: one field of one group.

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
    joined: bool  # several words are a list with commas
    also_sets: dict  # a spelling -> values of other settings, as a preset has them
    range: Range | None

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def flag(self) -> str:
        """The main spelling: `--no-x` for a switch that is on by default, since only switching it off has an effect."""
        return negated(self.name) if self.default is True else dashed(self.name)

    def word(self, value):
        """The value as a user writes it: `auto` for the negative number that represents it."""
        words = [word for word, other in self.also.items() if other == value and isinstance(other, int) and other < 0]
        return words[0] if words else value

    def words(self, value) -> list[str]:
        """The words of a command line that set a value; empty for None."""
        value = self.word(value)
        if self.name == "sharding_stage" and value == 1:
            return ["--use-distributed-optimizer"]  # as Megatron-LM has it
        if value is None or isinstance(value, bool):
            return [] if value is None else [dashed(self.name) if value else negated(self.name)]
        values = value if isinstance(value, (list, tuple)) else [value]
        return [dashed(self.name), *(f"{one:g}" if isinstance(one, float) else str(one) for one in values)]

    def checked(self, value):
        """Convert a value from Python or JSON to the setting's type: `3.0 -> 3`. Raises BadValue."""
        if value is None and self.optional:
            return None
        return self.value([str(one) for one in (value if isinstance(value, (list, tuple)) else [value])])

    def value(self, words: list[str]):
        """Convert words of a command line or a file to a value: `["3"] -> 3`. Raises BadValue."""
        if self.many:
            if self.kind is not str:
                words = " ".join(words).split()  # quoted "16 16 1000" is three numbers too
            if not words:
                raise BadValue("needs at least one value")
            return [self._one(word) for word in words]
        if not words and self.kind is bool:
            return True
        if self.joined and len(words) > 1:
            words = [",".join(word.strip(" ,") for word in words)]
        if len(words) != 1:
            takes = " or ".join(map(str, self.kind)) if isinstance(self.kind, tuple) else _A[self.kind]
            got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
            if len(words) > 1 and self.kind is str:
                got += " (a value with * or spaces stands in quotes: a shell replaces * by the names of files)"
            if not words and self.kind is str:
                got += f" (of one that begins with a dash, both are one word: {self.flag}=VALUE)"
            raise BadValue(f"takes one value ({takes}), {got}")
        return self._one(words[0])

    def _one(self, word: str):
        """One value. A path may begin with ~: shells leave it in --flag=~/x, and so do config files."""
        value = one_value(self.kind, word, self.also)
        path = self.kind is str and self.name not in TEXTS and HOME.match(value)
        return os.path.expanduser(value) if path else value


HOME = re.compile(r"~[\w.-]*(/|$)")
TEXTS = ("prompt", "document_separator", "stop")  # settings whose values are no paths


@dataclass(frozen=True)
class Spelling:
    """A flag that sets a setting.

    implies   the value that the flag sets: --bf16
    off       the value for `false` after the flag, if known: --use-sharding false
    negates   --no-x
    yielding  other spellings override it: --use-distributed-optimizer next to --sharding-stage 2
    """

    flag: str
    setting: Setting
    implies: object = None
    off: object = ...
    negates: bool = False
    yielding: bool = False

    def statement(self, words: list[str], source: SaidBy, where: str = "", turn: int = 0) -> Statement:
        """The statement that the flag makes with these words. Raises BadValue.

        >>> from megatron.settings.schema import Parallel
        >>> spellings_of({"parallel": Parallel})["--use-sharding"].statement(["true"], SaidBy.COMMAND).value
        1
        """
        on, withdraws = True, False
        if self.implies is None:
            value = self.setting.value(words)
            if isinstance(value, bool):
                value = value != self.negates
                on = value and not self.negates
            elif self.negates:
                raise BadValue(f"takes no value, or true or false, got {value}")
        else:
            if len(words) > 1:
                raise BadValue(f"takes no value, or true or false, got {len(words)}: {' '.join(words)}")
            on = not words or one_value(bool, words[0])
            value = self.implies if on else self.off
            withdraws = value is ...
            value = self.implies if withdraws else value
        common = dict(turn=turn, yields=self.yielding and (on or withdraws), switch_off=not on, withdraws=withdraws)
        common["decides"] = self.yielding and not on and not withdraws
        text = self._shown(value, words) + (f" ({where})" if where else "")
        default = None if self.setting.required else self.setting.default
        return Statement(self.setting.name, value, source, self.flag, text, where, default=default, **common)

    def value(self, words: list[str]):
        """The value that the flag gives with these words; None if it only excludes a value."""
        statement = self.statement(words, SaidBy.COMMAND)
        return None if statement.withdraws else statement.value

    def _shown(self, value, words: list[str]) -> str:
        if self.implies is not None or isinstance(value, bool):
            return " ".join([self.flag, *words])
        shown = " ".join(map(str, value)) if isinstance(value, list) else self.setting.word(value)
        return f"{self.flag} {shown}"


def settings_of(groups: Mapping[str, type]) -> list[Setting]:
    """All fields of the groups, in order. Names are flags, so each occurs once."""
    return [setting for name, group in groups.items() for setting in _settings_of(name, group)]


@lru_cache(maxsize=256)
def _settings_of(name: str, group: type) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(group, include_extras=True)
    return tuple(_setting(name, field, hints[field.name]) for field in fields(group))


def spellings_of(groups: Mapping[str, type]) -> Mapping[str, Spelling]:
    """Map every flag of the groups to its spelling."""
    return _spellings_of(tuple(groups.items()))


@lru_cache(maxsize=64)
def _spellings_of(groups: tuple[tuple[str, type], ...]) -> Mapping[str, Spelling]:
    result: dict[str, Spelling] = {}  # two settings with the same flag are a bug, not a user's mistake
    for setting in settings_of(dict(groups)):
        for spelling in _spellings(setting):
            other = result.setdefault(spelling.flag, spelling)
            assert other is spelling, f"{spelling.flag} means {other.setting.name} and {setting.name}"
    return MappingProxyType(result)


def _gpu(word: str) -> str:
    """What says which GPU is meant, in the place of --device.

    >>> _gpu("H100")
    'plan and --dry-run take a kind of GPU: --device-name H100'
    """
    if number := re.fullmatch(r"(?:cuda|gpu):(\d+)", word):
        return f"CUDA_VISIBLE_DEVICES={number[1]} in front of the command chooses a GPU"
    return f"plan and --dry-run take a kind of GPU: --device-name {word}" if re.match("[A-Za-z]+[0-9]", word) else ""


def one_value(kind: type | tuple, word: str, also: dict | None = None):
    """Convert one word to a bool, int, float, str or choice. Raises BadValue that says what is valid."""
    also = also or {}
    if names := [name for name, value in also.items() if str(value) == word and word.startswith("-")]:
        raise BadValue(f"'{word}' is no value for it; say {names[0]} if that is meant")
    word = str(also.get(word, word))
    if not word.strip():
        raise BadValue("is empty (a shell variable that is not set?)")
    if isinstance(kind, tuple):
        named = FORMATS.get(word.lower().removeprefix("torch."))
        word = named if named in kind else word
        for choice in kind:
            if str(choice).lower() == word.lower():
                return choice
        known = [*map(str, kind), *also]
        instead = INSTEAD.get(word) or ("cuda" in known and _gpu(word))
        hint = f"; {instead}" if instead else did_you_mean(word, known)
        raise BadValue(f"'{word}' is none of {', '.join(known)}{hint}")
    if kind is bool:
        if word in also:
            return word
        if word.lower() in YES + NO:
            return word.lower() in YES
        raise BadValue(f"'{word}' is {'none of true, false, ' + ', '.join(also) if also else 'neither true nor false'}")
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
    optional, many, within = False, False, None
    if typing.get_origin(hint) in (typing.Union, UnionType):
        optional = True
        [hint] = [part for part in typing.get_args(hint) if part is not type(None)]
    if typing.get_origin(hint) in (list, tuple):
        many = True
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is typing.Annotated:
        hint, within = typing.get_args(hint)
    kind = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else hint
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    empty = dict(help="", alias=(), also={}, joined=False, also_sets={})
    metadata = {name: field.metadata.get(name, value) for name, value in empty.items()}
    return Setting(group, field.name, kind, many, optional, default, **metadata, range=within)


def _spellings(setting: Setting):
    yield Spelling(dashed(setting.name), setting)
    if setting.kind is bool and not setting.name.startswith("no_"):
        yield Spelling(negated(setting.name), setting, negates=True)
    for alias in setting.alias:
        flag, equals, meaning = alias.partition("=")
        value, slash, off = meaning.partition("/")
        implies = setting.value([value]) if equals else None
        if setting.kind is bool and equals:
            off = not implies
        elif slash:
            off = setting.value([off]) if off else setting.default
        else:
            off = ...
            assert implies is None or implies != setting.default, f"{alias}: what does false stand for?"
        yield Spelling(flag.rstrip("~"), setting, implies, off, yielding=flag.endswith("~"))


_A = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
