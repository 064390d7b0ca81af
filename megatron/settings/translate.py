# SPDX-License-Identifier: Apache-2.0
"""Another suite's settings in the flags of this one, each beside the line that it comes from.

    translate(DEEPSPEED, read_tree("ds.json")) -> Translation([FlagLine("--bf16", [], TheirSetting(...), "")], ...)
    back(DEEPSPEED, [("--bf16", [])]) -> ({"bf16.enabled": "true"}, [])

Nothing is dropped: a source is a line, has no effect here for a reason that is said, or has no equivalent, with what
there is instead. Files are read, and never run.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from megatron.settings import schema
from megatron.settings.dialects import fleetx
from megatron.settings.dialects.colossalai import COLOSSALAI
from megatron.settings.dialects.commands import LLMACC, MEGATRON_DEEPSPEED, PADDLENLP
from megatron.settings.dialects.deepspeed import DEEPSPEED
from megatron.settings.dialects.hf_trainer import HF_TRAINER
from megatron.settings.dialects.megatron_lm import answer
from megatron.settings.dialects.nemo import NEMO
from megatron.settings.dialects.table import Dialect, FlagLine, TheirSetting, sentence
from megatron.settings.spelling import BadValue, Spelling, dashed, spellings_of

FLEETX = fleetx.TABLES["train"]
DIALECTS = {
    one.name: one for one in (PADDLENLP, FLEETX, COLOSSALAI, DEEPSPEED, MEGATRON_DEEPSPEED, NEMO, LLMACC, HF_TRAINER)
}
ANYWAY = "it is done anyway, or asks for nothing"
NO = ("false", "no", "0")
EMPTY = ("", "null", "none", "~", "???")


@dataclass
class Translation:
    """lines: what this suite is told. idle, lost: (source, sentence) of what has no effect here, and no equivalent."""

    lines: list[FlagLine] = field(default_factory=list)
    idle: list[tuple[TheirSetting, str]] = field(default_factory=list)
    lost: list[tuple[TheirSetting, str]] = field(default_factory=list)


@cache
def spellings() -> dict[str, Spelling]:
    return spellings_of(schema.GROUPS)


def translate(dialect: Dialect, sources: Iterable[TheirSetting]) -> Translation:
    """What the sources mean here; of two that say the same setting, the last one counts, as it does there."""
    out, sources = Translation(), [one._replace(key=dialect.name_of(one.key)) for one in sources]
    given, known = {source.key: source for source in sources}, spellings()
    for source in sources:
        _one(dialect, source, given, known, out)
    _say_presence(dialect, given, known, out)
    _keep_last(out, known)
    said = {_setting(line.flag, known) for line in out.lines}
    for default in dialect.defaults:
        if default.where and not _said((default.where,), given):
            continue
        if _setting(default.flag, known) not in said and not _said(default.unless, given):
            out.lines.append(FlagLine(default.flag, [default.word], None))
    return out


def _said(keys: tuple[str, ...], given: Mapping[str, TheirSetting]) -> bool:
    """Whether one of the keys is given, itself or something below it, or with its value."""
    below = {key.split(".")[0] for key in given} | set(given)
    pairs = {f"{source.key}={source.value.lower()}" for source in given.values()}
    return bool(set(keys) & (below | pairs))


def _one(dialect: Dialect, source: TheirSetting, given, known: Mapping[str, Spelling], out: Translation) -> None:
    empty = source.value.lower() in EMPTY and f"{source.key}={source.value.lower()}" not in dialect.table
    if empty and not dialect.base:
        return  # a key without a value says nothing
    try:
        flags = dialect.flags(source)
    except ValueError as error:
        if source.value != "auto":
            out.lost.append((source, str(error)))
            return
        flags = None
    section = given.get(f"{source.key.rpartition('.')[0]}.enabled")
    if section is not None and section.value.lower() == "false" and section is not source:
        out.idle.append((source, f"{section.key} is false"))
    elif source.value == "auto" and not dialect.base:
        out.lost.append((source, "auto: whoever starts DeepSpeed says it; say it here by its flag"))
    elif source.key in dialect.computed:
        try:
            flags = dialect.computed[source.key](source.words, given)
            out.idle += [(source, ANYWAY)] * (not flags)
            _add(source, flags, dialect, known, out)
        except ValueError as error:
            out.lost.append((source, str(error)))
    elif flags is not None:
        if not flags:
            out.idle.append((source, ANYWAY))
        _add(source, flags, dialect, known, out)
    else:
        _without_row(dialect, source, known, out)


def _without_row(dialect: Dialect, source: TheirSetting, known: Mapping[str, Spelling], out: Translation) -> None:
    idle, lost = sentence(dialect.idle, source.key), sentence(dialect.lost, source.key)
    if lost is not None and source.value.lower() in NO and not dialect.knows(source.key):
        out.idle.append((source, ANYWAY))
    elif lost is not None and (idle is None or dialect.knows(source.key)):
        out.lost.append((source, lost))
    elif idle is not None:
        out.idle.append((source, idle))
    elif dialect.knows(source.key):
        out.lost.append((source, f"'{source.value}' is none of {', '.join(dialect.values(source.key))}"))
    elif dialect.base:
        _flag_of_megatron(source, dialect, known, out)
    else:
        near = difflib.get_close_matches(source.key, [key.partition("=")[0] for key in dialect.table], n=1, cutoff=0.8)
        hint = f"; did you mean {near[0]}?" if near else ""
        out.lost.append((source, f"no key that is known of {dialect.title}{hint}"))


def _flag_of_megatron(source: TheirSetting, dialect: Dialect, known: Mapping[str, Spelling], out: Translation) -> None:
    flag = dashed(source.key.lstrip("-"))
    spelling = known.get(flag)
    if spelling is not None:
        _add(source, [(flag, source.words)], dialect, known, out)
    elif (found := answer(flag, source.words)) is not None:
        target = out.lost if found.refused else out.idle
        target.append((source, found.sentence or "it asks for nothing"))
    else:
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
        out.lost.append((source, "no flag that is known" + (f"; did you mean {near[0]}?" if near else "")))


def _add(source: TheirSetting, flags, dialect: Dialect, known: Mapping[str, Spelling], out: Translation) -> None:
    """Add lines in this suite's main spelling. A value that is none here is told instead."""
    for flag, words in flags:
        spelling = known.get(flag)
        if spelling is None:
            out.lost.append((source, f"there is no {flag}"))
            continue
        try:
            value = spelling.value(words)
        except BadValue as bad:
            out.lost.append((source, f"{flag} {bad}"))
            continue
        if value is not None:
            changed = dialect.changed.get(source.key, "")
            out.lines.append(FlagLine(*_canonical(spelling, flag, value, words), source, changed))


def _canonical(spelling: Spelling, flag: str, value, words: list[str]) -> tuple[str, list[str]]:
    """The setting's main flag, and its value where the flag alone does not say it."""
    setting = spelling.setting
    if setting.kind is bool:
        return (dashed(setting.name), [str(value).lower()]) if value == setting.default else (setting.flag, [])
    if flag in ("--bf16", "--fp16"):
        return flag, []  # as everybody says it
    if spelling.implies is not None:
        return dashed(setting.name), [str(value)]
    return dashed(setting.name), [also if isinstance(also := setting.also.get(word), str) else word for word in words]


def _say_presence(dialect: Dialect, given: Mapping[str, TheirSetting], known, out: Translation) -> None:
    """A section that means something by being there: `zero = dict(...)` of Colossal-AI."""
    for name, made in dialect.computed.items():
        inside = [source for key, source in given.items() if key.startswith(f"{name}.")]
        if inside and name not in given:
            first = inside[0]
            section = TheirSetting(name, [], first.where, f"{name} = ...")
            lines = Translation()
            _add(section, made([], given), dialect, known, lines)
            said = {_setting(line.flag, known) for line in out.lines}
            out.lines[:0] = [line for line in lines.lines if _setting(line.flag, known) not in said]


def _setting(flag: str, known: Mapping[str, Spelling]) -> str:
    return known[flag].setting.name


def _keep_last(out: Translation, known: Mapping[str, Spelling]) -> None:
    last = {_setting(line.flag, known): number for number, line in enumerate(out.lines)}
    dropped = [line for number, line in enumerate(out.lines) if last[_setting(line.flag, known)] != number]
    for line in dropped:
        winner = out.lines[last[_setting(line.flag, known)]]
        if line.source is not None and line.source != winner.source:
            says = "the same" if line.words == winner.words else "another value"
            out.idle.append((line.source, f"{winner.source.where}: {winner.source.text} says {says}"))
    out.lines = [line for number, line in enumerate(out.lines) if last[_setting(line.flag, known)] == number]


def translate_fleetx(entries: fleetx.Entries, known: Mapping[str, Spelling]) -> Translation:
    """The same of PaddleFleetX's YAML, which has a reader of its own. known: the flags of the command that it is for."""
    found, out = fleetx.translate(entries, fleetx.purpose_of(entries)), Translation()

    for flag, words, one in found.flags:
        spelling = known.get(flag)
        text = spelling is not None and spelling.setting.kind is str and not spelling.setting.many
        _add(one, [(flag, [",".join(words)] if text else words)], FLEETX, known, out)
    out.idle, out.lost = out.idle + [(one, why) for why, one in found.notes], out.lost + found.problems
    told = {one.key for one, _ in out.idle + out.lost} | {line.source.key for line in out.lines}
    out.idle += [(one, ANYWAY) for key, one in found.given.items() if key not in told]
    _keep_last(out, known)
    return out


def back(dialect: Dialect, flags: Iterable[tuple[str, list[str]]]) -> tuple[dict[str, list[str]], list[str]]:
    """({key of the other suite: words}, flags that it has no one word for) of flags of this suite."""
    known, rows, found, lost = spellings(), _rows_back(dialect), {}, []
    for flag, words in flags:
        spelling = known[flag]
        setting = spelling.setting
        try:
            value = spelling.value(words)
        except BadValue as bad:
            raise BadValue(f"{flag} {bad}") from None
        for (name, fixed, place), key in rows.items():
            if name == setting.name and fixed is not None and fixed == value:
                key, _, word = key.partition("=")
                found[key] = [word] if word else []
                break
            if name == setting.name and fixed is None:
                shown = [str(one).lower() if isinstance(one, bool) else str(one) for one in words or [value]]
                if place is None:
                    found[key] = shown
                else:
                    found.setdefault(key, _defaults(dialect.table[key], known))[place] = shown[0]
                break
        else:
            if dialect.as_is:
                found[flag] = words
            else:
                lost.append(" ".join([flag, *words]))
    return found, lost


def _defaults(meaning: str, known: Mapping[str, Spelling]) -> list[str]:
    """A list of another suite with this one's defaults, of which some places are said then."""
    return [str(known[flag].setting.default) for flag in meaning.split()]


def _rows_back(dialect: Dialect) -> dict[tuple, str]:
    """(setting, its value or None for any, place in a list) -> the first key that says it."""
    known, rows = spellings(), {}
    for key, meaning in dialect.table.items():
        if meaning == "-" or ";" in meaning:
            continue
        words = meaning.split()
        if any(word.startswith("--") and word not in known for word in words):
            continue
        spelling = known[words[0]]
        if len(words) > 1 and words[1].startswith("--"):
            for place, flag in enumerate(words):
                rows.setdefault((known[flag].setting.name, None, place), key)
        elif "=" in key or len(words) > 1:
            if len(words) > 1 or spelling.implies is not None or spelling.setting.kind is bool:
                rows.setdefault((spelling.setting.name, spelling.value(words[1:]), None), key)
        else:
            rows.setdefault((spelling.setting.name, None, None), key)
    return rows
