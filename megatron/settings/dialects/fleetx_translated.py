# SPDX-License-Identifier: Apache-2.0
"""The entries of PaddleFleetX's files while they are translated to flags (`fleetx_keys`)."""

import re
from dataclasses import dataclass, field
from typing import Optional

from megatron.settings.dialects.fleetx import KINDS, TABLES, owners_of
from megatron.settings.dialects.fleetx_files import COMMAND, Entries
from megatron.settings.dialects.table import VARIABLE, Compressed, TheirSetting, sentence, unread
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import NO, YES, BadValue, one_value, spellings_of


@dataclass
class Translated:
    """Entries translated for a command: flags; notes (sentence, entry) of no effect; problems (entry, sentence).

    A function that handles an entry takes it. Entries that none takes are translated one by one, or unknown.
    """

    given: Entries
    purpose: str
    compared: bool = False
    flags: list[tuple[str, list[str], TheirSetting]] = field(default_factory=list)
    notes: list[tuple[str, TheirSetting]] = field(default_factory=list)
    usual: set[str] = field(default_factory=set)  # sentences of notes that are of no consequence: no result changes
    problems: list[tuple[TheirSetting, str]] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)  # keys among the problems that PaddleFleetX does not have
    taken: set[str] = field(default_factory=set)
    parts: dict[str, str] = field(default_factory=dict)  # key -> the flag to whose value it contributes with others
    emptied: Entries = field(default_factory=dict)  # keys and sections that are null
    remarks: list[str] = field(default_factory=list)  # on keys that have another meaning here
    compressed: list[Compressed] = field(default_factory=list)  # what the checkpoint to load has to be

    def word(self, key: str, default: str = "") -> str:
        """The value in lower case."""
        return self.given[key].value.lower() if key in self.given else default

    def is_on(self, key: str) -> Optional[bool]:
        """Whether a switch is on; None if it is not given, or has another value, which is refused."""
        value = self.word(key)
        if key in self.given and value not in YES + NO:
            given = self.given[key].value
            self.refuse(key, unread(given) if VARIABLE.search(given) else f"'{given}' is neither true nor false")
        return value in YES if value in YES + NO else None

    def left(self, pattern: str) -> list[str]:
        """Known keys with this prefix that are not taken yet."""
        return [key for key in self.given if key.startswith(pattern) and key not in self.taken and owners_of(key)]

    def take(self, *keys: str) -> None:
        self.taken.update(keys)

    def say(self, flag: str, words: Optional[list[str]], *keys: str) -> None:
        """Add a flag for the first key and take it; words None: its value. The other keys contribute to the value: the
        flag's place is that of the last key given by -o, but of the first key where -o gives its value, or nothing.
        """
        said = [self.given[key] for key in keys if key in self.given]
        overrides = [one for one in self.given.values() if one in said and one.where.startswith(COMMAND)]
        own = words is None and said[0] in overrides or not overrides
        self.flags.append((flag, said[0].words if words is None else words, said[0] if own else overrides[-1]))
        self.parts |= dict.fromkeys(keys, flag)
        self.take(keys[0])

    def note(self, why: str, *keys: str, usual: bool = False) -> None:
        """Note keys that have no effect; a value that is none of the key's kind is refused all the same.

        usual: most files have such keys, and no result changes
        """
        self.usual |= {why} if usual else set()
        for key in keys:
            if key in self.given and key not in self.taken:
                try:
                    _check_kind(key, self.given[key])
                except BadValue as bad:
                    self.refuse(key, str(bad))
                else:
                    self.notes.append((why, self.given[key]))
        self.take(*keys)

    def refuse(self, key: str, why: str) -> None:
        self.problems.append((self.given[key], why))
        self.take(key)


def _check_kind(key: str, one: TheirSetting) -> None:
    """Raise BadValue for a word that is no number or switch where the key, or the flag that it becomes, takes one."""
    key, train = re.sub(r"^Data\.(Eval|Test)\b", "Data.Train", key), TABLES["train"]
    flags = [spellings_of(GROUPS)[flag].setting for flag in train.flags_of_key(key) if flag in spellings_of(GROUPS)]
    kind, also = (flags[0].kind, flags[0].also) if flags else (sentence(KINDS, key) or str, {})
    if {"true", "false"} & set(train.values(key)):
        kind, also = bool, {}
    if not isinstance(kind, tuple) and not VARIABLE.search(one.value):
        for word in one.words:
            one_value(kind, word, also)
