# SPDX-License-Identifier: Apache-2.0
"""What a dialect is: a table from another suite's words to flags of this one, for `settings.translate`.

A line of `words` is a key, or a key with one of its values (in small letters), and behind two blanks what it means here:

    zero_optimization.stage              --sharding-stage             the same, with the value that is given
    bf16.enabled=true                    --bf16                       for this value alone
    optimizer.params.betas               --adam-beta1 --adam-beta2    a list: one value for each flag
    --use_amp=true                       --fp16; --amp-level O1       several flags at once
    -  scheduler.params.warmup_type=linear x.y=none                   what is done here anyway, several in a line
    =  optimizer.params.weight_decay seed                              what has the same name here
    optim=adamw|sgd                      --optimizer ...               several values, or keys, with one meaning

`false` of a key that has a row for `true` asks for nothing, unless that is done anyway. A row of `--use_amp=` is
for a switch that is false where no value follows.

Keys of the other tables may be patterns (`zero_optimization.stage3_*`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron.settings.spelling import NO, YES
from megatron.settings.statements import Statement

VARIABLE = re.compile(r"\$(\w|[@*(]|\{\w+[}:#%/?+=\[-])")  # of a shell: $X, ${X:-3}, $(nproc)


class TheirSetting(NamedTuple):
    """One setting as another suite has it: `key`, the words of its value, where it stands, and the text there."""

    key: str
    words: list[str]
    where: str
    text: str

    @property
    def value(self) -> str:
        return " ".join(self.words)


class FlagLine(NamedTuple):
    """A flag of this suite and its words, what it comes from (None: a default of the other suite), and what changed."""

    flag: str
    words: list[str]
    source: TheirSetting | None
    changed: str = ""
    says: Statement | None = None


class NoEffect(ValueError):
    """Raised by a `Computed` for what has no effect here. The message says why."""


def unread(value: str) -> str:
    """What is said of a value that is no number, which may be a variable of a shell."""
    if VARIABLE.search(value):
        return f"what {value} holds is not read: say its value"
    return f"'{value}' is not a number"


def epochs_unless(steps: str) -> "Computed":
    """The number of epochs, unless the key `steps` says how long training is."""

    def computed(words, given):
        if counts_steps(given, steps):
            raise NoEffect(f"{steps} {given[steps].value} says how long training is, there as well")
        return [("--train-epochs", words)]

    return computed


def counts_steps(given: Mapping[str, TheirSetting], key: str) -> bool:
    """Whether the key limits the steps of a training: a number above 0 does."""
    return key in given and not re.fullmatch(r"-.*|0+", given[key].value)


Computed = Callable[[list[str], Mapping[str, TheirSetting]], list[tuple[str, list[str]]]]


class Default(NamedTuple):
    """A flag for what the other suite does where nobody says anything, unless one of these keys is said, or key=value.

    where: only where there is this section
    """

    flag: str
    word: str
    unless: tuple[str, ...] = ()
    where: str = ""

    def is_said(self, flag: str) -> bool:
        """Whether a flag, with dashes, is among those that take its place."""
        return any(fnmatchcase(flag, one.replace("_", "-")) for one in self.unless)

    def applies(self, given: Mapping[str, TheirSetting]) -> bool:
        """Whether none of the keys is given that take its place, itself or something below it, or with its value."""
        found = {key.split(".")[0] for key in given} | set(given)
        found |= {f"{source.key}={source.value.lower()}" for source in given.values()}
        said = lambda *keys: any(fnmatchcase(one, key) for one in found for key in keys)
        return not said(*self.unless) and (not self.where or said(self.where))


@dataclass(frozen=True)
class Dialect:
    """The words of one suite.

    words:    see above
    changed:  key -> what is different about its meaning here
    idle:     sentence -> keys without an effect here, because of that
    lost:     sentence -> keys that have no equivalent
    computed: key -> function of (its words, all sources by key) -> [(flag, words)], where a value has to be calculated;
              raises ValueError, whose words are told, where there is none, and NoEffect
    defaults: see Default
    programs: scripts or modules whose command lines these are
    unsaid:   what its scripts do where nobody says anything, and no flag here -> sentence, which is always told
    presence: section -> what it means to be there, as a row has it
    kept:     keys whose words this suite's scripts take as they are
    base:     whether flags that are not named here are Megatron-LM's
    as_is:    whether it takes Megatron-LM's flags by their own names
    """

    name: str
    title: str
    words: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)
    idle: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, Computed] = field(default_factory=dict)
    defaults: tuple[Default, ...] = ()
    programs: tuple[str, ...] = ()
    unsaid: Mapping[str, str] = field(default_factory=dict)
    presence: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    base: bool = False
    as_is: bool = False
    table: dict[str, str] = field(init=False)

    def __post_init__(self):
        rows = [row for line in self.words.splitlines() if line.strip() for row in _rows(*line.strip().split("  ", 1))]
        assert len(dict(rows)) == len(rows), f"{self.name}: a key is there twice"
        object.__setattr__(self, "table", dict(rows))

    @property
    def unasked(self) -> str:
        """Where its defaults come from."""
        return f"what {self.title} does where nothing is said"

    def flags(self, source: TheirSetting, given: Mapping[str, TheirSetting]) -> list[tuple[str, list[str]]] | None:
        """The flags for a key and its value, with their words; None where neither a row nor a function makes them.

        given: all keys with what counts of each. Raises ValueError where the value is none.
        """
        value, row = source.value.lower() or "true", self.table.get(source.key)
        if not source.value and f"{source.key}=" in self.table:
            raise NoEffect(f"{self.title} reads it as false where no value follows")
        if f"{source.key}=true" in self.table or row is not None and is_switch(row):
            value = "true" if value in YES else "false" if value in NO else value
        if (one := self.table.get(f"{source.key}={value}")) is not None:
            return flags_of(one, [])
        if value == "false" and self.table.get(f"{source.key}=true", "-") != "-":
            return []
        if source.key in self.computed:
            if not source.words:
                raise ValueError("it has no value")
            return self.computed[source.key](source.words, given)
        if row is not None and source.words and is_switch(row):
            if value not in ("true", "false"):
                raise ValueError(f"it is a switch: '{source.value}' is neither true nor false")
            return flags_of(row, []) if value == "true" else []
        return row if row is None else flags_of(row, source.words)

    def name_of(self, key: str) -> str:
        """The key as the tables spell it: with dashes or underscores, as they have it."""
        spelled = (key, key.replace("_", "-"), "--" + key.removeprefix("--").replace("-", "_"))
        return next(filter(self.names, spelled), key)

    def names(self, key: str) -> bool:
        """Whether it is said somewhere what a key means."""
        return self.knows(key) or key in self.computed or bool(sentence(self.idle, key) or sentence(self.lost, key))

    def knows(self, key: str) -> bool:
        """Whether some value of a key has a row."""
        return key in self.table or any(row.startswith(f"{key}=") for row in self.table)

    def keys(self) -> list[str]:
        """The keys that have rows."""
        return [row.partition("=")[0] for row in self.table]

    def flags_of_key(self, key: str) -> list[str]:
        """The flags that a key may mean."""
        rows = [meaning for row, meaning in self.table.items() if row.partition("=")[0] == key]
        return [word for meaning in rows for word in meaning.replace(";", "").split() if word.startswith("--")]

    def values(self, key: str) -> list[str]:
        """The values of a key that have rows of their own."""
        found = [row.partition("=")[2] for row in self.table if row.startswith(f"{key}=")]
        return list(filter(None, found))


def _rows(key: str, meaning: str) -> list[tuple[str, str]]:
    """(key or key=value, what it means) of a line of words.

    >>> _rows("=", "--seed --eval_iters")
    [('--seed', '--seed'), ('--eval_iters', '--eval-iters')]
    """
    if key in "-=":
        same = lambda one: "--" + one.lstrip("-").rpartition(".")[2].replace("_", "-")
        return [row for one in meaning.split() for row in _rows(one, "-" if key == "-" else same(one))]
    names, equals, values = key.partition("=")
    return [(f"{name}{equals}{value}", meaning.strip()) for name in names.split("|") for value in values.split("|")]


def is_switch(meaning: str) -> bool:
    """Whether a row of a key without a value says all by itself: `--recompute-granularity full`."""
    first = meaning.split(";")[0].split()
    return meaning == "-" or len(first) > 1 and not first[1].startswith("--")


def flags_of(meaning: str, words: list[str]) -> list[tuple[str, list[str]]]:
    """The flags of a row, with the words that stand in it or those that are given.

    >>> flags_of("--adam-beta1 --adam-beta2", ["0.9", "0.95"])
    [('--adam-beta1', ['0.9']), ('--adam-beta2', ['0.95'])]
    >>> flags_of("--max-global-batch-size; --auto-parallel", ["32"])
    [('--max-global-batch-size', ['32']), ('--auto-parallel', [])]

    Raises ValueError where there are more or fewer words than flags.
    """
    if meaning == "-":
        return []
    parts = [part.split() for part in meaning.split(";")]
    if len(parts) == 1 and len(parts[0]) > 1 and all(word.startswith("--") for word in parts[0]):
        if len(words) != len(parts[0]):
            raise ValueError(f"{len(parts[0])} values are wanted ({' '.join(parts[0])}), and there are {len(words)}")
        return [(flag, [word]) for flag, word in zip(parts[0], words, strict=True)]
    (flag, *fixed), *others = parts
    return [(flag, fixed or words), *((other, fixed) for other, *fixed in others)]


def sentence(table: Mapping[str, str], key: str) -> str | None:
    """The sentence for a key, of a table of sentence -> keys and patterns."""
    for text, patterns in table.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return text
    return None
