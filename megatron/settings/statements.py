# SPDX-License-Identifier: Apache-2.0
"""Resolve settings that are given in several places, such as a file and the command line.

Each setting of a command line, a file, a preset, a checkpoint or a plan becomes a `Statement`. `resolve` picks one for each
setting: the last turn of the command line counts, in it the source of the highest precedence, and in that the last flag. A
turn ends at `--then`; a file and a preset belong to the turn that names them.

    --bf16                        precision is bf16
    --bf16 --bf16 false           precision has its default
    --bf16 --fp16                 refused: two flags with different values, and neither switches the other off
    --use-sharding false --sharding-stage 2    stage 0, in any order: a switch that is off overrides its neighbours

`Config.said` returns the result. Later decisions use it, rather than comparing a value with its default.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Optional

from megatron.settings.declare import dashed


class SaidBy(IntEnum):
    """The source of a statement, in ascending precedence."""

    RECIPE = 0  # a default of the recipe
    PRESET = 1  # a named shape, a checkpoint's shape, or an implication of another suite's flag
    FILE = 2
    PLAN = 3  # --parallel-plan
    COMMAND = 4
    DERIVED = 5  # by the suite, from other settings: --auto-parallel, --train-epochs


@dataclass(frozen=True)
class Statement:
    """A value given for one setting, and its source.

    name, value  the setting, and its value
    flag         the spelling that was used, with dashes: --tp
    words        as messages show it: "--tp 8", "--lr 0.1 (run.yaml:3)"
    where        its place, if not the command line: "run.yaml:3", "preset gpt2-medium"
    turn         the number of --then before it, or before the file or preset that it is from, on the command line
    yields       more specific spellings override it: --use-distributed-optimizer yields to --sharding-stage 2, not to 0
    switch_off   it switches something off (`--x false`, `--no-x`), and contradicts no flag before or after it
    withdraws    it excludes a value without giving one: --bf16 false
    decides      it is a switch, and off, which overrides other flags of the setting: --use-sharding false
    default      the setting's default; None if it must be given
    earlier      of a derived value: the statement that it replaced
    """

    name: str
    value: object
    source: SaidBy
    flag: str = ""
    words: str = ""
    where: str = ""
    turn: int = 0
    yields: bool = False
    switch_off: bool = False
    withdraws: bool = False
    decides: bool = False
    default: object = None
    earlier: Optional["Statement"] = None

    @property
    def origin(self) -> str:
        """The source, in a word."""
        return self.where or self.flag or self.words

    @property
    def is_given(self) -> bool:
        """Whether the user gave it, on the command line or in a file."""
        return self.source in (SaidBy.FILE, SaidBy.COMMAND)

    @property
    def is_request(self) -> bool:
        """Whether the user asks for a change. Defaults in a file, `--bf16 false` and `--use-sharding false` are none."""
        on_command = self.source == SaidBy.COMMAND and not isinstance(self.value, bool) and not self.decides
        return self.is_given and (self.value != self.default or on_command)

    @property
    def by_user(self) -> Optional["Statement"]:
        """This statement, or of a derived value the user's statement that it replaced; None if the user made none."""
        statement = self
        while statement is not None and statement.source == SaidBy.DERIVED:
            statement = statement.earlier
        return statement if statement is not None and statement.is_given else None


NONE: Mapping[str, Any] = MappingProxyType({})


def words_of(given: Mapping[str, Statement], name: str, value: object) -> str:
    """A setting and its value as the user gave them: `--top-p 1.5 (-o Generation.top_p)`."""
    return given[name].words if name in given else f"{dashed(name)} {value}"


def in_users_words(text: str, said: Mapping[str, Statement]) -> str:
    """A message in the user's words. `--flag value` becomes what the user wrote, and a flag alone gets the place of its
    value in a file. Text after a semicolon is advice, and is unchanged.

    >>> split = Statement("split", "1,2", SaidBy.FILE, "--split", "--split 1,2 (run.yaml:3)", "run.yaml:3")
    >>> in_users_words("--split leaves nothing for test; raise --split", dict(split=split))
    '--split (run.yaml:3) leaves nothing for test; raise --split'
    """
    parted = [line.partition("; ") for line in text.split("\n")]
    for name, one in said.items():
        if (given := one.by_user) is None:
            continue
        flag = dashed(name)
        value = " ".join(map(str, one.value)) if isinstance(one.value, list) else str(one.value)
        valued = re.compile(rf"{re.escape(f'{flag} {value}')}(?![\w-]|[.,]\w| \()")
        parted = [
            (valued.sub(lambda _, words=given.words: words, wrong, count=1), *advice) for wrong, *advice in parted
        ]
        if given.where and given.where not in text and not valued.search(text):
            alone = re.compile(rf"{flag}(?![\w=-]| [\dA-Z(])")
            place = f"{flag} ({given.where})"
            parted = [(alone.sub(lambda _, place=place: place, wrong, count=1), *advice) for wrong, *advice in parted]
    return "\n".join("".join(parts) for parts in parted)


def placed(text: str, said: Mapping[str, Statement]) -> str:
    """A message that begins with a path, after the place of the setting that names it: a file, or -o.

    >>> data = Statement("data_path", ["d/x"], SaidBy.FILE, where="run.yaml:3: Data.input_dir")
    >>> placed("d/x.idx: no such file", dict(data_path=data))
    'run.yaml:3: Data.input_dir: d/x.idx: no such file'
    """
    for one in said.values():
        given, values = one.by_user, one.value if isinstance(one.value, list) else [one.value]
        paths = "|".join(re.escape(value) for value in values if value and isinstance(value, str))
        unnamed = paths and given and given.where and given.where not in text
        if unnamed and re.match(rf"({paths})([.:/]|(?<=/))", text):
            return f"{given.where}: {text}"
    return text


def resolve(statements: Iterable[Statement]) -> tuple[dict[str, Statement], list[str]]:
    """Resolve statements to (setting -> the statement that counts, messages about contradictions).

    >>> one = Statement("tensor_model_parallel_size", 2, SaidBy.FILE)
    >>> other = Statement("tensor_model_parallel_size", 4, SaidBy.COMMAND)
    >>> resolve([other, one])[0]["tensor_model_parallel_size"].value
    4
    """
    by_name: dict[str, list[Statement]] = {}
    for statement in sorted(statements, key=_precedence):  # a stable sort
        rivals = by_name.setdefault(statement.name, [])
        if statement.withdraws:
            rivals[:] = [other for other in rivals if not _withdrawn(other, statement)]
        else:
            rivals.append(statement)
    chosen, problems = {}, []
    for name, rivals in by_name.items():
        if rivals:
            since = _since_switched_off(rivals)
            top = [one for one in since if not one.yields] or since
            chosen[name] = last = top[-1]
            for other in top[:-1] if last.value != last.default else since:
                if other.value != last.value and other.flag != last.flag and not last.switch_off:
                    both = f"(both set {dashed(name)})"
                    problems.append(f"{other.words} and {last.words} contradict each other {both}")
                    break
    return chosen, problems


def overruled(statements: Iterable[Statement], chosen: Mapping[str, Statement]) -> list[tuple[Statement, Statement]]:
    """(statement, the one that counts instead) for each user statement that another of its source and turn replaces.

    >>> lr = [Statement("lr", value, SaidBy.COMMAND, "--lr", f"--lr {value}") for value in (0.1, 0.2)]
    >>> [(one.words, by.words) for one, by in overruled(lr, {"lr": lr[1]})]
    [('--lr 0.1', '--lr 0.2')]
    """
    by_place: dict[tuple, list[Statement]] = {}
    for one in statements:
        if one.is_given:
            by_place.setdefault((one.name, one.source, one.turn), []).append(one)
    pairs = []
    for (name, *_), rivals in by_place.items():
        counts = chosen.get(name)
        if not any(one is counts for one in rivals):  # it was withdrawn, or another source counts
            counts = rivals[-1] if rivals[-1].withdraws else None
        for one in rivals if counts else ():
            own = one.flag == counts.flag
            asks_less = (one.yields or one.withdraws) and not own and not counts.decides
            same = (one.value, one.withdraws) == (counts.value, counts.withdraws)
            replaced = own or one.value == counts.value if counts.withdraws else not asks_less
            if one is not counts and replaced and not same:
                pairs.append((one, counts))
    return pairs


def given_values(group: type, said: Mapping[str, Statement]) -> dict[str, Any]:
    """The given settings of a group -> their values, even if these are the defaults."""
    return {one.name: said[one.name].value for one in fields(group) if one.name in said}


def _precedence(one: Statement) -> tuple[float, int]:
    """The turn and the source. Defaults and implications come before all turns, derived values after them."""
    before_all = one.source == SaidBy.RECIPE or one.source == SaidBy.PRESET and one.yields
    return -1 if before_all else math.inf if one.source == SaidBy.DERIVED else one.turn, one.source


def _withdrawn(other: Statement, by: Statement) -> bool:
    """Whether `--bf16 false` withdraws another statement: one of the same flag, or `--precision bf16`."""
    return other.flag == by.flag or not by.yields and other.value == by.value


def _since_switched_off(rivals: list[Statement]) -> list[Statement]:
    """The statements of the highest source and turn after the last one that switches off, or else only that one.

    A switch that is off (`decides`) is the only result, wherever it is.
    """
    last = rivals[-1]
    top = [one for one in rivals if (one.source, one.turn) == (last.source, last.turn)]
    switches = [one for one in top if one.yields or one.decides]
    if switches and switches[-1].decides:
        return switches[-1:]
    top = [one for one in top if not one.decides] or top
    after = max((number for number, one in enumerate(top, 1) if one.switch_off), default=0)
    return top[after:] or [last]
