# SPDX-License-Identifier: Apache-2.0
"""How another suite's command starts a run, and how this suite starts the same one."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from megatron.settings.declare import dashed
from megatron.settings.dialects.launchers import LAUNCHERS, MACHINES, UNREAD, meeting
from megatron.settings.dialects.shell import (
    CLOSES,
    LOOPS,
    OPENS,
    REDIRECTION,
    Command,
    flags_of_words,
    name_among,
    quoted,
)
from megatron.settings.dialects.table import VARIABLE, TheirSetting, sentence, unread
from megatron.settings.dialects.translate import Translation, spellings, translate
from megatron.settings.files import read_tree
from megatron.settings.rules import LAYOUT, REPLICAS
from megatron.settings.spelling import Spelling

# The programs here whose ranks share a model
SHARING = ("pretrain_gpt.py", "finetune.py", "-m megatron.tools.generate", "-m megatron.tools.evaluate")
PYTHON = re.compile(r"(.*/)?python[\d.]*")
PYTHON_VARIABLE = re.compile(r'"?\$\{?\w*PY\w*\}?"?', re.IGNORECASE)


# purpose of a file of PaddleFleetX -> (program, groups of settings) of the command here
CommandFor = Callable[[str], tuple[str, dict[str, type]]]


@dataclass
class TranslatedRun:
    """A translated run: its settings, launcher, script, the words after them, and notes on the source."""

    found: Translation
    start: list[str]
    program: str
    behind: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    known: Mapping[str, Spelling] = field(default_factory=spellings)


class Untranslated(str):
    """A comment that names a command of a script that has no translation."""


class WithoutFile(Untranslated):
    """The comment for a command whose file of settings does not exist."""


@dataclass
class Script:
    """The state of a script before a command: folders that may have its files, and known values of variables."""

    folders: list[Path]
    command_for: CommandFor
    held: dict[str, str] = field(default_factory=lambda: {"HOME": str(Path.home())})
    depth: int = 0  # number of loops, conditions and functions around a command
    depends: bool = False  # on the result of the command before it: `[ -z "$X" ] && X=3`

    def pass_by(self, command: Command) -> None:
        """Take a command of the shell: `CONFIG=run.yaml`, `cd projects/gpt`."""
        first, *words = command.text.split() or [""]
        self.depth += (first in OPENS and first != "else") - (first in CLOSES and first not in ("elif", "else"))
        for one in command.sources if command.kind == "assigns" else ():
            self.held.pop(one.key, None)
            if not (self.depth or self.depends or "$" in one.value):
                self.held[one.key] = one.value
        if first == "cd" and len(words) >= 1 and "$" not in words[0]:
            self.folders = [folder / words[0] for folder in self.folders] + self.folders
        if first in LOOPS and words:
            self.held.pop(words[0], None)
        self.depends = command.joined in ("&&", "||")

    def file(self, one: TheirSetting, name: str, missing: list[tuple[TheirSetting, str]], notes: list) -> str | None:
        """The file that a source names, here or in the folder of the script; a missing file is added to `missing`."""
        name = re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: self.held.get(found[1] or found[2], found[0]), name)
        found = [path for folder in self.folders if (path := folder / name).is_file()]
        others = [path for path in found if not path.samefile(found[0])]
        notes += [f"{one.where}: {found[0]} is read, and not {path}" for path in others[:1]]
        why = unread(name) if VARIABLE.search(name) else f"{name}: no such file; translate it by itself"
        missing += [] if found else [(one, why)]
        return str(found[0]) if found else None


def started(command: Command, found: Translation) -> tuple[list[str], list[str]]:
    """(what starts this suite's script, notes) for what starts another's. What it says besides goes to found."""
    words = command.launcher
    interpreter = place_of_python(words)
    launchers = [(i, one) for i, word in enumerate(words) for one in LAUNCHERS if name_among(word, one.programs)]
    at, launcher = launchers[-1] if launchers else (len(words), None)  # mpirun may start a launcher on each machine
    before, own = words[: min(at, interpreter)], words[interpreter + 1 : at]
    unread = [word for word in before for one in UNREAD.split() if fnmatchcase(word, f"{one}=*")]
    notes = [f"{command.where}: {word}: it is kept, and nothing here reads it" for word in unread]
    if launcher is None:
        if any(word in ("|", "xargs") for word in before):
            notes, before, own = [*notes, f"{command.where}: what feeds it: {' '.join(before)}"], [], []
        return [*map(quoted, before), words[interpreter] if own or interpreter < len(words) else "python", *own], notes
    if "-u" in own:
        before.append("PYTHONUNBUFFERED=1")
    notes += [
        f"{command.where}: python {word}: ranks are started without it" for word in own if word not in ("-u", "-m")
    ]
    at += 2 if words[at + 1 : at + 2] in (["launch"], ["run"]) else 1
    tokens = command.tokens[at : interpreter if interpreter > at else None]
    sources = [one._replace(words=one.words or ["true"]) for one in flags_of_words(tokens)]
    if config := next((one for one in sources if one.key == "--config_file" and Path(one.value).is_file()), None):
        read = [one._replace(key=f"--{one.key.rpartition('.')[2]}") for one in read_tree(config.value)]
        sources = read + [one for one in sources if one is not config]
    if launcher is LAUNCHERS[0]:
        found.idle += [(one, text) for one in sources if (text := sentence(launcher.idle, one.key))]
        start = [written for word, _, written in tokens if not sentence(launcher.idle, word)]
        return [*map(quoted, before), "torchrun", *start], notes
    start, told = started_by(translate(launcher, sources, found))
    # Which another program would take for a command
    variables = bool(before) and "=" not in before[-1] and "=" in start[0]
    return [*map(quoted, before), *["env"] * variables, *start], notes + told


def started_by(found: Translation) -> tuple[list[str], list[str]]:
    """(torchrun with the words found for it, and variables of its environment before it; notes of where they come from)."""
    notes = [f"{place_of(line.source)}: {' '.join([line.flag, *line.words])}" for line in found.start]
    lines, told = meeting(found.start)
    variables = [quoted(line.flag) for line in lines if line.flag[0] != "-"]
    words = [quoted(word) for line in lines if line.flag[0] == "-" for word in (line.flag, *line.words)]
    count = [] if "--nproc-per-node" in words else ["--nproc-per-node", "gpu"]
    found.start = []
    return [*variables, "torchrun", *count, *words], notes + told


def ranks_note(run: TranslatedRun) -> list[str]:
    """A note on a command that starts another number of ranks than its layout is for; none where a number is not known."""
    values = {line.says.name: line.says.value for line in run.found.lines if line.says}
    sizes = {name: values.get(name) or 1 for name in (*LAYOUT, *REPLICAS, "data_parallel_size")}
    words = [one.replace("_", "-") if one[:2] == "--" else one for word in run.start for one in word.split("=", 1)]
    count = lambda flag: words[words.index(flag) + 1] if flag in words[:-1] else "1"
    started = [count(flag) for flag in ("--nproc-per-node", "--nnodes")]
    if (
        run.program not in SHARING
        or not all(isinstance(size, int) for size in sizes.values())
        or "world_size" in values
    ):
        return []
    if not all(map(str.isdecimal, started)):
        return []
    each, here = int(started[0]), math.prod(map(int, started))
    model = math.prod(sizes[name] for name in LAYOUT)
    replicas = values.get("data_parallel_size") or sizes["dp_degree"] * sizes["sharding_degree"]
    needed, exact = model * replicas, bool({"data_parallel_size", "dp_degree"} & set(values))
    if here == needed or not exact and here % needed == 0:
        return []
    named = " x ".join(f"{dashed(name)} {size}" for name, size in sizes.items() if size > 1) or "a size of 1 each"
    ranks = f"{needed}{'' if exact else ' or a multiple'}"
    how = f"--nproc-per-node {needed}"
    if here > 1 and needed % each == 0:
        how = f"--nnodes {needed // each}: {MACHINES}"
    elif run.start == ["python"]:
        how = f"torchrun --nproc-per-node {needed} instead of python, or --nnodes N and fewer on each of N machines"
    return [f"{here} rank{'s start' if here > 1 else ' starts'} here, and this layout needs {ranks} ({named}): {how}"]


def place_of_python(words: list[str]) -> int:
    """Where the interpreter stands among the words before a script: python3, or a variable named after it, $PYTHON."""
    places = [i for kind in (PYTHON, PYTHON_VARIABLE) for i, word in enumerate(words) if kind.fullmatch(word)]
    return places[0] if places else len(words)


def as_is(word: str) -> str:
    return word if REDIRECTION.fullmatch(word) else quoted(word)


def place_of(source: TheirSetting) -> str:
    return f"{source.where}: {source.text}" if source.text and source.text != source.where else source.where
