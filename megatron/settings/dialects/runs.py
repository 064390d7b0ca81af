# SPDX-License-Identifier: Apache-2.0
"""Runs of other suites: their files of settings, their scripts and their commands, with the settings in them translated."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.errors import UsageError, no_such_file
from megatron.settings.dialects import fleetx_runs
from megatron.settings.dialects.bridge import BRIDGE
from megatron.settings.dialects.colossalai import COLOSSALAI
from megatron.settings.dialects.commands import ALONE, INSTEAD, LLMACC, MEGATRON_DEEPSPEED, OURS, PADDLENLP
from megatron.settings.dialects.deepspeed import DEEPSPEED
from megatron.settings.dialects.fleetx import TABLES
from megatron.settings.dialects.hf_trainer import HF_TRAINER
from megatron.settings.dialects.launchers import LAUNCHERS
from megatron.settings.dialects.nanogpt import NANOGPT
from megatron.settings.dialects.nemo import NEMO
from megatron.settings.dialects.nemo2 import NEMO2
from megatron.settings.dialects.shell import CLOSES, OPENS, Command, name_among, read_commands, read_words
from megatron.settings.dialects.start import (
    PYTHON,
    CommandFor,
    Script,
    TranslatedRun,
    Untranslated,
    WithoutFile,
    as_is,
    place_of,
    place_of_python,
    started,
    started_by,
)
from megatron.settings.dialects.table import Dialect, TheirSetting
from megatron.settings.dialects.translate import Translation, translate
from megatron.settings.files import read_python, read_text, read_tree

FLEETX = replace(TABLES["train"], own=fleetx_runs)
SUFFIXES = (".yaml", ".yml", ".json", ".sh")  # of files that are the whole source
DIALECTS = {
    one.name: one
    for one in (
        PADDLENLP,
        FLEETX,
        COLOSSALAI,
        DEEPSPEED,
        MEGATRON_DEEPSPEED,
        NEMO,
        NEMO2,
        BRIDGE,
        LLMACC,
        HF_TRAINER,
        NANOGPT,
    )
}


def translations(dialect: Dialect, words: list[str], command_for: CommandFor) -> Iterator[TranslatedRun | str]:
    """The runs of a file of settings, of a script, or of one command; text for other lines of a script.

    words: the file, the script, or the words of the command
    """
    path = Path(words[0])
    script = Script([Path("."), *[path.parent] * (path.is_file() and path.parent != Path("."))], command_for)
    if len(words) == 1 and path.suffix in (".yaml", ".yml", ".json", ".py") and path.is_file():
        yield of_file(dialect, words[0], script)
        return
    variables: list[TheirSetting] = []  # of the environment, which the suite reads
    empty = False  # whether a loop or a condition contains only comments, which a shell refuses
    commands = commands_of(dialect, words)
    for command in commands:
        script.pass_by(command)
        instead = INSTEAD.get(name_among(command.program, INSTEAD))
        if command.kind == "other" or instead or command.in_condition:
            yield Untranslated(f"# {command.where}: not translated: {command.text}{instead and f': {instead}' or ''}")
        if command.kind == "other" or instead and not command.in_condition:
            continue
        inside = [name for name in dialect.programs if re.search(rf"(\$\(|`).*\b{re.escape(name)}\b", command.text)]
        if inside and command.kind in ("assigns", "shell"):
            yield Untranslated(f"# {command.where}: not translated: {inside[0]} in {command.text}")
        word = command.text.partition(" ")[0]
        if empty and word in CLOSES:
            yield ":"
        known = [one for one in command.sources if command.kind == "assigns" and dialect.names(one.key)]
        empty = command.kind == "shell" and word in OPENS or empty and known == command.sources != []
        if command.kind == "shell":
            yield command.text
        elif command.kind == "assigns":
            variables += known
            yield from (one.text for one in command.sources if one not in known)
        elif name_among(command.program, OURS):
            yield from of_tool(command)
        elif is_another(dialect, command):
            what = f"{command.program} is no program of {dialect.title} that is known ({', '.join(dialect.programs)})"
            if len(commands) == 1:
                raise UsageError(
                    f"{command.where}: {what}", do="for the settings of a pretraining give its flags alone"
                )
            yield Untranslated(f"# {command.where}: not translated: {command.text}: {what}")
        else:
            yield of_command(dialect, command, variables, script)


def is_another(dialect: Dialect, command: Command) -> bool:
    """Whether a command starts a program whose job is not known, and would become a pretraining."""
    is_module = any(one.key in ("-m", "--module") for one in command.sources)
    is_program = is_module or command.program.endswith(".py")
    return is_program and bool(dialect.programs) and not name_among(command.program, dialect.programs)


def commands_of(dialect: Dialect, words: list[str]) -> list[Command]:
    """The commands of a script, of a text, or the one that the words are."""
    [name, *others], path = words, Path(words[0])
    if others and dialect is FLEETX and path.is_file() and path.suffix != ".sh" and others[0][0] == "-":
        commands = [read_words(["train.py", "-c", *words], dialect.programs)]
    elif others and is_source(name):
        raise UsageError(
            f"{name}: nothing is read after it, and there is {' '.join(others)}",
            do="change the file, or give the command that starts it; of several files translate one at a time",
        )
    elif others:
        commands = [read_words(words, dialect.programs)]
    elif path.is_file():
        commands = read_commands(read_text(name), name, dialect.programs)
    elif " " in name:
        commands = read_commands(name, "command", dialect.programs) or read_commands(name, "command")
    else:
        raise UsageError(f"{name}: {no_such_file(name)}", do="give a file, or a command in quotes or as words")
    if not commands:
        raise UsageError(
            f"{name}: no command of {dialect.title} in it", f"it would start {' or '.join(dialect.programs)}"
        )
    return commands


def of_tool(command: Command) -> Iterator[str]:
    """The lines for a command that prepares data or uses a trained model: a program here takes its flags unchanged."""
    place, many = f"# {command.where}: {command.program}: ", ""
    if {"{}", "'{}'"} & {*command.words}:
        many = f"\n# {command.where}: once for each file; --input FOLDER takes all of them"
    found = Translation()
    start, notes = started(command, found)
    yield from (f"# {note}" for note in notes)
    yield from (Untranslated(f"# {place_of(source)}: not translated: {text}") for source, text in found.lost)
    ours = OURS[name_among(command.program, OURS)]
    if ours in ALONE and "torchrun" in start:
        yield f"# {command.where}: one process writes what each rank needs"
        start = [word for word in start[: start.index("torchrun")] if "=" in word] + ["python"]
    words = [*start, ours, *command.words, *map(as_is, command.behind)]
    yield f"{place}its flags are taken as they are{many}\n" + " ".join(words)


def of_file(dialect: Dialect, path: str, script: Script) -> TranslatedRun:
    """A file of settings."""
    if dialect.own:
        return dialect.own.of_file(path, script)
    sources = read_python(path, dialect.names) if path.endswith(".py") else read_tree(path)
    if not count_known(dialect, sources):
        most = max(DIALECTS.values(), key=lambda one: count_known(one, sources))
        whose = f"its keys are those of {most.title}: --from {most.name}" if count_known(most, sources) else None
        raise UsageError(f"{path}: no setting of {dialect.title} in it", do=whose)
    found = translate(dialect, sources)
    start, notes = started_by(found) if found.start else (["python"], [])
    return TranslatedRun(found, start, "pretrain_gpt.py", notes=notes)


def count_known(dialect: Dialect, sources: list[TheirSetting]) -> int:
    """How many keys a dialect knows."""
    keys = {dialect.name_of(one.key) for one in sources}
    sections = (*dialect.presence, *dialect.kept)
    return sum(dialect.names(key) or key.partition(".")[0] in sections for key in keys)


def is_source(word: str) -> bool:
    """Whether a word is the whole source, a file or a text, and not the first word of a command."""
    launchers = (one for launcher in LAUNCHERS for one in launcher.programs)
    program = PYTHON.fullmatch(word) or word.endswith(".py") or name_among(word, [*launchers])
    return " " in word or word.endswith(SUFFIXES) or Path(word).is_file() and not program


def of_command(
    dialect: Dialect, command: Command, variables: list[TheirSetting], script: Script
) -> TranslatedRun | WithoutFile:
    """A command whose settings are translated, with those of the files that its flags name."""
    if dialect.own:
        return dialect.own.of_command(command, script)
    own, sources, missing = Translation(), [*variables, *command.sources], []
    start, notes = started(command, own)
    if not dialect.base:
        sources = [one._replace(key=_bare(one.key), words=one.words or ["true"]) for one in sources]
    if dialect.hydra:
        sources = with_hydras_file(sources, script, missing, command.notes)
    sources = [part for one in sources for part in configs_apart(one, dialect)]
    for one in list(sources):
        reader, name = dialect.configs.get(_bare(one.key)), one.value
        if reader is None and one.key.endswith((".json", ".py")):
            reader, name = dialect.configs.get(""), one.key
        if reader is None or name in ("", "true"):
            continue
        at = sources.index(one)
        sources.remove(one)
        if (path := script.file(one, name, missing, command.notes)) is None:
            continue
        if reader in DIALECTS:
            own = translate(DIALECTS[reader], read_tree(path), own)
        else:
            place = at if name == one.key else 0  # among words that follow each other, or below them
            sources[place:place] = read_python(path, dialect.names) if reader == "python" else read_tree(path)
    found, program = translate(dialect, sources, own), "pretrain_gpt.py"
    found.lost += missing
    if "torchrun" in start:
        found.idle += [(line.source, f"the command says {' '.join(start)}") for line in found.start]
    elif found.start:
        words, more = started_by(found)
        start, notes = [*start[: place_of_python(start)], *words], notes + more
    if any(one.key in dialect.plans for one in sources):
        start, program = [word for word in start if word == "python"] or ["python"], "-m megatron.tools.plan"
    return TranslatedRun(found, start, program, command.behind, command.notes + notes)


def configs_apart(one: TheirSetting, dialect: Dialect) -> list[TheirSetting]:
    """Split `--batch_size=8 config/small.py` into a setting and a file, if files may follow the value of a flag."""
    if not dialect.apart:
        return [one]
    values = [word for word in one.words if not word.endswith(".py")]
    files = [TheirSetting(word, [], one.where, word) for word in one.words if word.endswith(".py")]
    text = f"{one.key} {' '.join(values)}" if files else one.text
    return [one._replace(words=values, text=text), *files]


def with_hydras_file(sources: list[TheirSetting], script: Script, *told: list) -> list[TheirSetting]:
    """Replace hydra's `--config-path=conf --config-name=c` by the settings of conf/c.yaml, which other words override."""
    named = {one.key: one for one in sources if one.key in ("config_path", "config_name")}
    if "config_name" not in named:
        return sources
    name = named["config_name"].value.removesuffix(".yaml") + ".yaml"
    inside = Path(named["config_path"].value if "config_path" in named else "conf") / name
    path = script.file(named["config_name"], str(inside), *told)
    return (read_tree(path) if path else []) + [one for one in sources if one.key not in named]


def _bare(key: str) -> str:
    """A flag as a key of a file: --learning-rate is learning_rate."""
    return key.lstrip("-").replace("-", "_") if key.startswith("-") else key
