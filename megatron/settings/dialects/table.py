# SPDX-License-Identifier: Apache-2.0
"""The `Dialect`: a table from another suite's settings to flags of this one, for `dialects.translate`.

A line of `words` is a key, or a key with one of its values (in lower case), and after two blanks its meaning here:

    zero_optimization.stage              --sharding-stage             the same, with its value
    bf16.enabled=true                    --bf16                       for this value only
    optimizer.params.betas               --adam-beta1 --adam-beta2    a list: one value for each flag
    --use_amp=true                       --fp16; --amp-level O1       several flags at once
    -  scheduler.params.warmup_type=linear x.y=none                   always done here, several in a line
    =  optimizer.params.weight_decay seed                              keys with the same name here
    optim=adamw|sgd                      --optimizer ...               several values, or keys, with one meaning

`false` of a key that has a row for `true` asks for nothing, unless that is done anyway. A row `--use_amp=` is for
a switch that is false without a value.

Keys of the other tables may be patterns (`zero_optimization.stage3_*`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from megatron.settings.declare import dashed
from megatron.settings.spelling import NO, YES
from megatron.settings.statements import SaidBy, Statement

VARIABLE = re.compile(r"\$(\w|[@*(]|\{\w+[}:#%/?+=\[-])")  # of a shell: $X, ${X:-3}, $(nproc)


class Word(NamedTuple):
    """A flag with its words and its source: `--tp 8`, or `tp: 8` in run.yaml:3."""

    flag: str
    words: list[str]
    source: SaidBy
    where: str = ""

    def __str__(self) -> str:
        """The flag or key as the user wrote it."""
        return f"{self.where}: {self.flag[2:].replace('-', '_')}" if self.where else self.flag


class TheirSetting(NamedTuple):
    """One setting of another suite: its key, the words of its value, its place in the file, and the text there."""

    key: str
    words: list[str]
    where: str
    text: str

    @property
    def value(self) -> str:
        return " ".join(self.words)


class FlagLine(NamedTuple):
    """A flag of this suite, its words and source (None: the other suite's default). changed: how its meaning differs."""

    flag: str
    words: list[str]
    source: TheirSetting | None
    changed: str = ""
    says: Statement | None = None


class NoEffect(ValueError):
    """Raised by a `Computed` for a setting without an effect here. The message says why."""


def unread(value: str) -> str:
    """The message for a value that is no number; it may be a variable of a shell."""
    if VARIABLE.search(value):
        return f"what {value} holds is not read: say its value"
    return f"'{value}' is not a number"


def epochs_unless(steps: str) -> "Computed":
    """Compute the number of epochs, unless the key `steps` sets the length of training."""

    def computed(words, given):
        if counts_steps(given, steps):
            raise NoEffect(f"{steps} {given[steps].value} says how long training is, there as well")
        return [("--train-epochs", words)]

    return computed


def counts_steps(given: Mapping[str, TheirSetting], key: str) -> bool:
    """Whether the key limits the steps of training: a number above 0 does."""
    return key in given and not re.fullmatch(r"-.*|0+", given[key].value)


Computed = Callable[[list[str], Mapping[str, TheirSetting]], list[tuple[str, list[str]]]]


class Default(NamedTuple):
    """A flag for a default of the other suite. It applies unless one of these keys, or key=value, is given.

    where: only if this section is present
    """

    flag: str
    word: str
    unless: tuple[str, ...] = ()
    where: str = ""

    def is_said(self, flag: str) -> bool:
        """Whether a flag, with dashes, replaces this default."""
        return any(fnmatchcase(flag, one.replace("_", "-")) for one in self.unless)

    def applies(self, given: Mapping[str, TheirSetting]) -> bool:
        """Whether none of the keys that replace this default is given, by itself, by a key below it, or with its value."""
        names = {key.split(".")[0] for key in given} | set(given)
        names |= {f"{source.key}={source.value.lower()}" for source in given.values()}
        said = lambda *keys: any(fnmatchcase(one, key) for one in names for key in keys)
        return not said(*self.unless) and (not self.where or said(self.where))


@dataclass(frozen=True)
class Dialect:
    """The settings of one suite.

    words:    see above
    changed:  key -> how its meaning differs here
    idle:     sentence -> keys without an effect here; the sentence is the reason
    lost:     sentence -> keys without an equivalent
    computed: key -> function of (its words, all sources by key) -> [(flag, words)], for values that are calculated;
              raises ValueError with a message for the user, or NoEffect
    defaults: see Default
    programs: scripts or modules that take these settings
    unsaid:   a default of its scripts without a flag here -> sentence, which is always reported
    presence: section -> the meaning of its presence, written as in a row
    kept:     keys that this suite's scripts take unchanged
    base:     whether other flags are Megatron-LM's
    as_is:    whether it takes Megatron-LM's flags under their own names
    configs:  key of a flag (or "": a word) -> how the file that it names is read: python, tree, or another dialect's name
    apart:    whether a file may follow the value of a flag: `--batch_size=8 config/small.py`
    hydra:    whether config_path and config_name name a file
    plans:    flags with which it only plans a run
    nearby:   keys of programs beside it, which are no keys of this suite's table -> what is meant here
    own:      a module with `of_file` and `of_command`, if its files and commands are unlike those of the others
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
    configs: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    hydra: bool = False
    plans: tuple[str, ...] = ()
    nearby: Mapping[str, str] = field(default_factory=dict)
    own: Any = None
    table: dict[str, str] = field(init=False)

    def __post_init__(self):
        rows = [row for line in self.words.splitlines() if line.strip() for row in _rows(*line.strip().split("  ", 1))]
        assert len(dict(rows)) == len(rows), f"{self.name}: a key is there twice"
        object.__setattr__(self, "table", dict(rows))

    @property
    def unasked(self) -> str:
        """The place that is reported for its defaults."""
        return f"what {self.title} does where nothing is said"

    def flags(self, source: TheirSetting, given: Mapping[str, TheirSetting]) -> list[tuple[str, list[str]]] | None:
        """The flags for a key and its value, with their words; None without a row or a function for the key.

        given: key -> the setting that counts. Raises ValueError for a bad value.
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
        """The key as the tables spell it, with dashes or underscores."""
        spelled = (key, key.replace("_", "-"), "--" + key.removeprefix("--").replace("-", "_"))
        return next(filter(self.names, spelled), key)

    def defaults_note(self, defaults: Iterable[Default]) -> str:
        """A note that lists this suite's defaults that differ."""
        flags = ", ".join(dict.fromkeys(f"{one.flag} {one.word}" for one in defaults))
        return f"{self.title}'s defaults, where this suite has others: {flags} (megatron.tools.translate writes them)"

    def names(self, key: str) -> bool:
        """Whether any of the tables has a key."""
        return self.knows(key) or key in self.computed or bool(sentence(self.idle, key) or sentence(self.lost, key))

    def knows(self, key: str) -> bool:
        """Whether some value of a key has a row."""
        return key in self.table or any(row.startswith(f"{key}=") for row in self.table)

    def keys(self) -> list[str]:
        """The keys that have rows."""
        return [row.partition("=")[0] for row in self.table]

    def flags_of_key(self, key: str) -> list[str]:
        """The flags that a key may mean where it is given; a row of `=false` says what its absence means."""
        pairs = [(*row.partition("=")[::2], meaning) for row, meaning in self.table.items()]
        rows = [meaning for name, value, meaning in pairs if name == key and value != "false"]
        return [word for meaning in rows for word in meaning.replace(";", "").split() if word.startswith("--")]

    def values(self, key: str) -> list[str]:
        """The values of a key that have rows of their own."""
        values = [row.partition("=")[2] for row in self.table if row.startswith(f"{key}=")]
        return list(filter(None, values))


def _rows(key: str, meaning: str) -> list[tuple[str, str]]:
    """Parse a line of words into [(key or key=value, meaning)].

    >>> _rows("=", "--seed --eval_iters")
    [('--seed', '--seed'), ('--eval_iters', '--eval-iters')]
    """
    if key in "-=":
        same = lambda one: dashed(one.lstrip("-").rpartition(".")[2])
        return [row for one in meaning.split() for row in _rows(one, "-" if key == "-" else same(one))]
    names, equals, values = key.partition("=")
    return [(f"{name}{equals}{value}", meaning.strip()) for name in names.split("|") for value in values.split("|")]


def is_switch(meaning: str) -> bool:
    """Whether a row of a key without a value needs no words: `--recompute-granularity full`."""
    first = meaning.split(";")[0].split()
    return meaning == "-" or len(first) > 1 and not first[1].startswith("--")


def flags_of(meaning: str, words: list[str]) -> list[tuple[str, list[str]]]:
    """The flags of a row, with the words in the row or else the given ones.

    >>> flags_of("--adam-beta1 --adam-beta2", ["0.9", "0.95"])
    [('--adam-beta1', ['0.9']), ('--adam-beta2', ['0.95'])]
    >>> flags_of("--max-global-batch-size; --auto-parallel", ["32"])
    [('--max-global-batch-size', ['32']), ('--auto-parallel', [])]

    Raises ValueError if there are more or fewer words than flags.
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
    """The sentence for a key in a table of sentence -> keys and patterns."""
    for text, patterns in table.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return text
    return None


@dataclass(frozen=True)
class Compressed:
    """A model that a file expects to be quantized or pruned. sizes: of the larger model, before it was pruned"""

    what: str
    where: str
    switch: str  # the key that expects it
    sizes: dict[str, int] = field(default_factory=dict)


class OtherSuite:
    """What our commands read of another suite: its flags, its files, and what its programs do where nothing is said.

    There is one for each command line. reader: the `reader.SettingsReader` that asks it.

    title:    its name in messages
    sections: those of its files
    """

    title = ""
    sections: tuple[str, ...] = ()

    def __init__(self, reader):
        self.reader = reader

    def reads(self, word: Word) -> bool:
        """Read a flag or key that is no setting here; False if it is not of this suite."""
        return False

    def knows(self, flag: str) -> bool:
        """Whether it would read a flag."""
        return False

    def reads_file(self, path: str, root) -> bool:
        """Read a file; False if it is not of this suite. root: its YAML as a node; None, before it is parsed."""
        return False

    def overrides(self, word: str, turn: int) -> bool:
        """Read `-o word`; False if it is not of this suite's files."""
        return False

    def read_all(self, placed: dict[str, list[Word]]) -> None:
        """Give the reader what all files and -o say together; words of -o are added to their place in `placed`."""

    def fill(self) -> None:
        """Say what programs of the suite have of their own, such as a vocabulary, where nothing else is given."""

    @classmethod
    def said_any(cls, statements: Iterable[Statement]) -> bool:
        """Whether a key of its files is among the statements."""
        keys = [one.where.rpartition(" ")[2].partition(".") for one in statements]
        return any(dot and section in cls.sections for section, dot, _ in keys)

    @classmethod
    def as_overrides(cls, values: Iterable[tuple[Statement, object]]) -> str:
        """Its words that give settings of the model, said by its files, other values; "" for other settings."""
        return ""

    @classmethod
    def words_for(cls, advice: str) -> str:
        """Its words for the flags in the advice of a message; "" for none."""
        return ""

    @classmethod
    def lacks_vocabulary(cls) -> str:
        """What to do where the vocabulary that it trains with is not found."""
        return ""

    def note_defaults(self) -> None:
        """Note defaults of the suite that differ."""

    def note_chosen(self, chosen: Mapping[str, Statement]) -> None:
        """Note its flags that give way to others. chosen: setting -> the statement that counts"""

    def why_missing(self, name: str) -> list[str]:
        """Reasons why a required setting is not given."""
        return []
