# SPDX-License-Identifier: Apache-2.0
"""Translate another suite's settings to flags of this one, each with the line that it comes from.

    translate(DEEPSPEED, read_tree("ds.json")) -> Translation([FlagLine("--bf16", [], TheirSetting(...), "")], ...)
    back(DEEPSPEED, [("--bf16", [])]) -> ({"bf16.enabled": "true"}, [])

Nothing is dropped: a source becomes a line, or has no effect here for a stated reason, or has no equivalent, and an
alternative is named. Files are parsed, never run.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron.errors import did_you_mean
from megatron.settings import schema
from megatron.settings.declare import dashed
from megatron.settings.dialects.megatron_lm import answer
from megatron.settings.dialects.table import (
    VARIABLE,
    Default,
    Dialect,
    FlagLine,
    NoEffect,
    TheirSetting,
    flags_of,
    sentence,
    unread,
)
from megatron.settings.files import CODE
from megatron.settings.rules import range_problem
from megatron.settings.spelling import NO, BadValue, Spelling, spellings_of
from megatron.settings.statements import SaidBy, Statement, resolve

HELD_BY_SHELL = "a variable of the shell: what it holds is not read; translate that"
ANYWAY = "it is done anyway"
ASKS_FOR_NOTHING = "it asks for nothing"
EMPTY = ("", "null", "none", "~", "???")


@dataclass
class Translation:
    """The result of a translation.

    lines: flags of this suite. idle, lost: (source, sentence) of sources without an effect, and without an equivalent.
    unknown: those that are no settings of the other suite, which may be misspelled
    start: flags for torchrun, and NAME=value for its environment. kept: words that are passed on unchanged.
    """

    lines: list[FlagLine] = field(default_factory=list)
    idle: list[tuple[TheirSetting, str]] = field(default_factory=list)
    lost: list[tuple[TheirSetting, str]] = field(default_factory=list)
    unknown: list[tuple[TheirSetting, str]] = field(default_factory=list)
    start: list[FlagLine] = field(default_factory=list)
    kept: list[FlagLine] = field(default_factory=list)


def spellings() -> dict[str, Spelling]:
    return spellings_of(schema.GROUPS)


def translate(dialect: Dialect, sources: Iterable[TheirSetting], out: Translation | None = None) -> Translation:
    """Translate the sources; of two for one setting the last counts, as in that suite. out: a translation to extend."""
    out, sources = out or Translation(), [one._replace(key=dialect.name_of(one.key)) for one in sources]
    given, known = {source.key: source for source in sources}, spellings()
    _add_presence(dialect, given, known, out)
    for source in sources:
        if given[source.key] is source or source.key == CODE:
            _one(dialect, source, given, known, out)
        else:
            out.idle.append((source, overruled(source.words == given[source.key].words, given[source.key])))
    keep_last(out, known)
    out.idle += [(TheirSetting(text, [], dialect.title, text), why) for text, why in dialect.unsaid.items()]
    add_defaults(dialect, given, known, out)
    return out


def add_defaults(dialect: Dialect, given: Mapping[str, TheirSetting], known, out: Translation) -> None:
    """Add lines for the other suite's defaults. A setting with a value that is refused gets no default."""
    wrong = (
        flag
        for one, _ in (*out.lost, *out.unknown)
        for flag in (*dialect.flags_of_key(one.key), dashed(one.key.lstrip("-")))
    )
    said = {_name(line, known) for line in out.lines} | {known[flag].setting.name for flag in wrong if flag in known}
    for default in dialect.defaults:
        if default.applies(given) and _name(default, known) not in said:
            out.lines.append(FlagLine(default.flag, [default.word], None))


def overruled(same: bool, winner: TheirSetting) -> str:
    return f"{winner.where}: {winner.text} says {'the same' if same else 'another value'}"


def _one(dialect: Dialect, source: TheirSetting, given, known: Mapping[str, Spelling], out: Translation) -> None:
    section, value = given.get(f"{source.key.rpartition('.')[0]}.enabled"), source.value.lower()
    if source.key == CODE:
        out.lost.append(
            (source, "it would have to be run, which nothing here does: write what it sets as name = value")
        )
    elif source.key in dialect.kept:
        out.kept.append(FlagLine(dashed(source.key), source.words, source))
    elif not dialect.base and value in EMPTY and f"{source.key}={value}" not in dialect.table:
        out.idle.append((source, "it has no value"))
    elif section is not None and section.value.lower() == "false" and section is not source:
        out.idle.append((source, f"{section.key} is false"))
    elif value == "auto" and not dialect.base and f"{source.key}=auto" not in dialect.table:
        out.lost.append((source, "auto: the program that starts DeepSpeed fills it in; say it here by its flag"))
    elif source.key not in dialect.presence:
        try:
            flags = dialect.flags(source, given)
        except ValueError as error:
            target = out.idle if isinstance(error, NoEffect) else out.lost
            uncounted = re.match("invalid literal|could not convert", str(error))
            target.append((source, unread(source.value) if uncounted else str(error)))
            return
        if flags is None:
            return _without_row(dialect, source, known, out)
        out.idle += [(source, without_flag(source.value))] * (not flags)
        add(source, flags, dialect, known, out)


def without_flag(value: str) -> str:
    """Why a value becomes no flag: `GPTModule` is what is done here, too; `false` asks for nothing."""
    return ASKS_FOR_NOTHING if value.lower() in (*NO, *EMPTY) else ANYWAY


def _without_row(dialect: Dialect, source: TheirSetting, known: Mapping[str, Spelling], out: Translation) -> None:
    idle, lost = sentence(dialect.idle, source.key), sentence(dialect.lost, source.key)
    if lost is not None and source.value.lower() in NO and not dialect.knows(source.key):
        out.idle.append((source, ASKS_FOR_NOTHING))
    elif lost is not None and (idle is None or dialect.knows(source.key)):
        near = "" if dialect.knows(source.key) else did_you_mean(source.key, dialect.keys(), 0.9)
        out.lost.append((source, lost + near))
    elif idle is not None:
        out.idle.append((source, idle))
    elif dialect.knows(source.key):
        known_values = dialect.values(source.key)
        switch = known_values in (["true"], ["true", "false"])
        problem = "is neither true nor false" if switch else f"is none of {', '.join(known_values)}"
        meaning = dialect.table.get(f"{source.key}=true", "").replace(";", "")
        held = unread(source.value) + (f" or, if it is true, {meaning}" if meaning else "")
        out.lost.append((source, held if VARIABLE.search(source.value) else f"'{source.value}' {problem}"))
    elif dialect.base and source.key.startswith("-"):
        _flag_of_megatron(source, dialect, known, out)
    elif source.key.startswith("$"):
        out.lost.append((source, HELD_BY_SHELL))
    elif here := next((text for keys, text in dialect.nearby.items() if source.key.lstrip("-") in keys.split()), ""):
        out.lost.append((source, here))
    else:
        nearest = (
            did_you_mean(key, [*dialect.keys(), *dialect.computed], 0.8) for key in (source.key, source.key.lstrip("-"))
        )
        near = next(filter(None, nearest), "")
        out.unknown.append((source, f"no key that is known of {dialect.title}{near}"))


def _flag_of_megatron(source: TheirSetting, dialect: Dialect, known: Mapping[str, Spelling], out: Translation) -> None:
    flag = dashed(source.key.lstrip("-"))
    if flag in known:
        add(source, [(flag, source.words)], dialect, known, out)
    elif (known_answer := answer(flag, source.words)) is not None:
        target = out.lost if known_answer.refused else out.idle
        target.append((source, known_answer.sentence or ASKS_FOR_NOTHING))
    else:
        out.unknown.append((source, f"no flag that is known{did_you_mean(flag, known, 0.8)}"))


def add(source: TheirSetting, flags, dialect: Dialect, known: Mapping[str, Spelling], out: Translation) -> None:
    """Add lines in this suite's main spelling, and flags of torchrun. A bad value is reported instead."""
    for flag, words in flags:
        spelling = known.get(flag)
        if spelling is None:
            out.start.append(FlagLine(flag, words, source))
            continue
        changed = dialect.changed.get(source.key, "")
        try:
            statement = spelling.statement(words, SaidBy.COMMAND)
        except BadValue as bad:
            if any(map(VARIABLE.search, words)):  # the command checks its value
                statement = Statement(spelling.setting.name, " ".join(words), SaidBy.COMMAND, flag)
                out.lines.append(FlagLine(flag, words, source, changed, statement))
            else:
                out.lost.append((source, f"{flag} {bad}"))
            continue
        if wrong := range_problem(statement.name, statement.value):
            out.lost.append((source, f"{' '.join([flag, *words])} {wrong}"))
            continue
        out.lines.append(FlagLine(*_canonical(spelling, flag, statement.value, words), source, changed, statement))


def _canonical(spelling: Spelling, flag: str, value, words: list[str]) -> tuple[str, list[str]]:
    """The setting's main flag, and its value if the flag does not imply it."""
    setting = spelling.setting
    if setting.kind is bool:
        return (dashed(setting.name), [str(value).lower()]) if value == setting.default else (setting.flag, [])
    if flag in ("--bf16", "--fp16"):
        return flag, []  # the common spelling
    if value is None:
        return flag, words  # --recompute-activations false
    if spelling.implies is not None:
        return dashed(setting.name), [str(value)]
    return dashed(setting.name), [also if isinstance(also := setting.also.get(word), str) else word for word in words]


def _add_presence(dialect: Dialect, given: Mapping[str, TheirSetting], known, out: Translation) -> None:
    """Translate sections whose presence has a meaning: `zero = dict(...)` of Colossal-AI. Their keys come after."""
    for name, meaning in dialect.presence.items():
        inside = [source for key, source in given.items() if f"{key}.".startswith(f"{name}.")]
        if inside and inside[0].value.lower() not in EMPTY:
            section = TheirSetting(name, [], inside[0].where, f"{name} = ...")
            add(section, flags_of(meaning, []), dialect, known, out)


def _name(line: FlagLine | Default, known: Mapping[str, Spelling]) -> str:
    says = line.says if isinstance(line, FlagLine) else None
    return says.name if says else known[line.flag].setting.name


def keep_last(out: Translation, known: Mapping[str, Spelling]) -> None:
    """Keep one of several lines for a setting: the one that would count on a command line."""
    chosen, _ = resolve([line.says for line in out.lines if line.says])
    winners = {line.says.name: line for line in out.lines if line.says and line.says is chosen.get(line.says.name)}
    kept, seen = [], {id(line.source) for line in winners.values()}
    for line in out.lines:
        winner = winners.get(_name(line, known))
        if line is winner or not line.says and winner is None:
            kept.append(line)
        elif line.says and (winner is None or line.says.withdraws):
            out.idle.append((line.source, ASKS_FOR_NOTHING))
        elif line.says and line.source != winner.source:
            same = line.says.value == winner.says.value
            part = f"its {' '.join([line.flag, *line.words])}: " if id(line.source) in seen else ""  # of --use_amp true
            note = (line.source, part + overruled(same, winner.source))
            out.idle += [note] * (note not in out.idle and not (same and part))
    out.lines = kept


def back(dialect: Dialect, flags: Iterable[tuple[str, list[str]]]) -> tuple[dict[str, list[str]], list[str]]:
    """Translate flags of this suite back: ({key of the other suite: words}, flags without a single equivalent). The first
    row with the same meaning counts."""
    known, keys, lost = spellings(), {}, []
    for flag, words in flags:
        name = known[flag].setting.name
        try:
            value = known[flag].value(words)
        except BadValue as bad:
            raise BadValue(f"{flag} {bad}") from None
        shown = [str(one).lower() if isinstance(one, bool) else str(one) for one in words or [value]]
        for row, meaning in dialect.table.items():
            key, equals, word = row.partition("=")
            [first, *others] = meaning.split()
            names = [known[one].setting.name for one in (first, *others) if one in known]
            if name not in names or ";" in meaning:
                continue
            if len(names) > 1:  # a list; its other values are this suite's defaults
                defaults = [str(known[one].setting.default) for one in (first, *others)]
                keys.setdefault(key, defaults)[names.index(name)] = shown[0]
            elif not equals and not others:
                keys[key] = shown
            elif known[first].value(others) == value:
                keys[key] = [word] if word else []
            else:
                continue
            break
        else:
            if dialect.as_is:
                keys[flag] = words
            else:
                lost.append(" ".join([flag, *words]))
    return keys, lost
