# SPDX-License-Identifier: Apache-2.0
"""Translate a run of another suite to flags of this one: its file or command, line by line, with the source of each line.

    python -m megatron.tools.translate --from deepspeed ds_config.json
    python -m megatron.tools.translate --from paddlenlp run.sh
    python -m megatron.tools.translate --from llmacc torchrun --nproc_per_node 8 -m llmacc.pretrain --num-layers 48
    python -m megatron.tools.translate --from nemo --format yaml megatron_gpt_config.yaml
    python -m megatron.tools.translate --to deepspeed pretrain_gpt.py --bf16 --sharding-stage 2

Changes in meaning follow a line; settings without an effect or an equivalent are listed below. Nothing is executed.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import SettingsError, UsageError, did_you_mean, no_such_file, run_main
from megatron.settings.dialects import fleetx_files as fleetx
from megatron.settings.dialects import fleetx_guest
from megatron.settings.dialects.fleetx_joint import purpose_of
from megatron.settings.dialects.launchers import LAUNCHERS, UNREAD, meeting
from megatron.settings.dialects.programs import ALONE, INSTEAD, OURS
from megatron.settings.dialects.table import VARIABLE, Dialect, FlagLine, TheirSetting, sentence, unread
from megatron.settings.files import read_text
from megatron.settings.parse import parse
from megatron.settings.presets import cached
from megatron.settings.schema import GROUPS, setting
from megatron.settings.sources import (
    CLOSES,
    LITERAL,
    LOOPS,
    OPENS,
    REDIRECTION,
    Command,
    flags_of_words,
    name_among,
    quoted,
    read_commands,
    read_python,
    read_tree,
    read_words,
)
from megatron.settings.spelling import BadValue, Spelling, spellings_of
from megatron.settings.translate import (
    DIALECTS,
    HELD_BY_SHELL,
    Translation,
    back,
    overruled,
    spellings,
    translate,
    translate_fleetx,
)


@dataclass(frozen=True)
class TranslateOptions:
    """The other suite, and the format of the output."""

    from_dialect: Optional[str] = setting(f"the other suite: {', '.join(DIALECTS)}", None, "--from")
    to_dialect: Optional[str] = setting("instead: a command of this suite in the words of that one", None, "--to")
    format: Literal["command", "yaml"] = setting(
        "what is printed: a command for bash, or a file for --config", "command"
    )
    strict: bool = setting("exit with code 3 where something has no equivalent", False)
    debug: bool = setting("tracebacks with error messages", False)


SWITCHES = ("--strict", "--debug", "--help", "-h", "--help-all", "--print-config")
FILES = (".yaml", ".yml", ".json", ".sh")


def main(argv: list[str]) -> None:
    own, words = divided(argv)
    options = parse(
        own,
        dict(translate=TranslateOptions),
        prog="python -m megatron.tools.translate",
        description="--from NAME FILE_OR_COMMAND: a run of another suite in the flags of this one.",
        common=tuple(TranslateOptions.__dataclass_fields__),
    )["translate"]
    given = [name for name in (options.from_dialect, options.to_dialect) if name]
    if len(given) != 1 or not words:
        raise UsageError(
            "a suite and what to translate are wanted" if len(given) < 2 else "--from and --to: give one of them",
            do=f"python -m megatron.tools.translate --from NAME FILE_OR_COMMAND; NAME is one of {', '.join(DIALECTS)}",
        )
    if given[0] not in DIALECTS:
        raise UsageError(
            f"'{given[0]}' is no suite that is known: {', '.join(DIALECTS)}{did_you_mean(given[0], DIALECTS)}"
        )
    dialect = DIALECTS[given[0]]
    if options.to_dialect:
        return print_back(dialect, words)
    lost, named, text = 0, 0, []
    runs = list(translations(dialect, words))
    gone = [one.lstrip("# ") for one in runs if isinstance(one, WithoutFile)]
    found = [one for one in runs if isinstance(one, TranslatedRun)]
    if gone and not found:
        raise UsageError("\n".join(gone), do="check the path: nothing is translated")
    several = found[1:]
    if several and options.format == "yaml":
        raise UsageError(f"{len(several) + 1} runs cannot be one YAML file", do="translate one command at a time")
    for one in runs:
        if isinstance(one, str):
            commented = [f"# {line.lstrip('# ')}" for line in one.splitlines()]
            text += [one] if options.format == "command" else commented
            named += isinstance(one, Untranslated)
            continue
        text += shown(one, dialect, options.format)
        lost += len(one.found.lost)
    print("\n".join(text).replace(LITERAL, "$"))
    told = [f"{lost} settings of {dialect.title} have no equivalent"] * bool(lost)
    told += [f"{named} commands are not translated"] * bool(named)
    if gone:
        raise UsageError("\n".join(gone), do="check the path: the other commands are translated")
    if options.strict and told:
        raise SettingsError(", and ".join(told), do="see 'no equivalent' and 'not translated' above")


def divided(argv: list[str]) -> tuple[list[str], list[str]]:
    """(this command's own words, those to translate): these begin with the first that is no flag of ours, nor its value.
    Our flags may also stand after a file, or after a command that is one word.
    """
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        if "--to" in argv[:at] and argv[at].partition("=")[0].replace("_", "-") in spellings():
            break  # a command of this suite without the name of its script
        at += 1 if argv[at] in SWITCHES or "=" in argv[at] else 2
    own, words = argv[:at], argv[at:]
    for number in range(len(words) - 1, 0, -1) if words and is_source(words[0]) else ():
        flag, equals, _ = words[number].partition("=")
        if flag in (*SWITCHES, "--format", "--from", "--to"):
            end = number + (1 if flag in SWITCHES or equals else 2)
            own, words = own + words[number:end], words[:number] + words[end:]
    return own, words


def is_source(word: str) -> bool:
    """Whether a word is the whole source, a file or a text, and not the first word of a command."""
    launchers = (one for launcher in LAUNCHERS for one in launcher.programs)
    program = PYTHON.fullmatch(word) or word.endswith(".py") or name_among(word, [*launchers])
    return " " in word or word.endswith(FILES) or Path(word).is_file() and not program


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
    """The state of a script for its commands: folders that may contain files, and known values of variables."""

    folders: list[Path]
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


def translations(dialect: Dialect, words: list[str]) -> Iterator[TranslatedRun | str]:
    """What the words name: a file of settings, a script with commands, or one command. Text: lines of a shell, such as
    commands that prepare its data."""
    path = Path(words[0])
    if len(words) == 1 and path.suffix in (".yaml", ".yml", ".json", ".py") and path.is_file():
        yield of_file(dialect, words[0])
        return
    variables: list[TheirSetting] = []  # of the environment, which the suite reads
    empty = False  # whether a loop or a condition contains only comments, which a shell refuses
    script = Script([Path("."), *[path.parent] * (path.is_file() and path.parent != Path("."))])
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
    if others and dialect is DIALECTS["fleetx"] and path.is_file() and path.suffix != ".sh" and others[0][0] == "-":
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
    """A command that prepares data, or uses what was trained, by the program of ours that takes its flags."""
    place = f"# {command.where}: {command.program}: "
    many = (
        f"\n# {command.where}: once for each file; --input FOLDER takes all of them"
        if {"{}", "'{}'"} & {*command.words}
        else ""
    )
    found = Translation()
    start, notes = started(command, found)
    yield from (f"# {note}" for note in notes)
    yield from (Untranslated(f"# {_place(source)}: not translated: {text}") for source, text in found.lost)
    ours = OURS[name_among(command.program, OURS)]
    if ours in ALONE and "torchrun" in start:
        yield f"# {command.where}: one process writes what each rank needs"
        start = [word for word in start[: start.index("torchrun")] if "=" in word] + ["python"]
    words = [*start, ours, *command.words, *map(as_is, command.behind)]
    yield f"{place}its flags are taken as they are{many}\n" + " ".join(words)


def of_file(dialect: Dialect, path: str) -> TranslatedRun:
    if dialect.name == "fleetx":
        return of_fleetx(path, [])
    sources = read_python(path, dialect.names) if path.endswith(".py") else read_tree(path)
    if not count_known(dialect, sources):
        most = max(DIALECTS.values(), key=lambda one: count_known(one, sources))
        whose = f"its keys are those of {most.title}: --from {most.name}" if count_known(most, sources) else None
        raise UsageError(f"{path}: no setting of {dialect.title} in it", do=whose)
    found = translate(dialect, sources)
    start, notes = started_by(found) if found.start else (["python"], [])
    return TranslatedRun(found, start, "pretrain_gpt.py", notes=notes)


def count_known(dialect: Dialect, sources: list[TheirSetting]) -> int:
    keys = {dialect.name_of(one.key) for one in sources}
    sections = (*dialect.presence, *dialect.kept)
    return sum(dialect.names(key) or key.partition(".")[0] in sections for key in keys)


def of_fleetx(path: str | None, overrides: list[str]) -> TranslatedRun:
    """A file, and `Section.key=value` over it, as the command that it is for."""
    entries: fleetx.Entries = fleetx.read(path) if path else {}
    said: fleetx.Entries = {}
    replaced: list[tuple[TheirSetting, TheirSetting]] = []
    notes = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"-o {word}: Section.key=value is wanted, as in -o Model.hidden_size=1024")
        if not value.strip():
            notes.append(f"-o {word} is empty: {key} is left out, as by {key}=null")
        own = fleetx.override({}, key, value)
        replaced += fleetx.replaced(said, own)
        said, entries = fleetx.over(said, own), fleetx.over(entries, own)
    program, groups = command_for(purpose_of(entries))
    known = spellings_of(groups)
    found = translate_fleetx(entries, known)
    found.idle += [(one, overruled(False, by)) for one, by in replaced]
    if program == "pretrain_gpt.py":
        add_vocabulary(found, entries, path or "command")
    return TranslatedRun(found, ["python"], program, notes=notes, known=known)


def add_vocabulary(found: Translation, entries: fleetx.Entries, where: str) -> None:
    """Add the vocabulary of a training, which PaddleFleetX's files do not name: GPT-2's, as `-c FILE` takes it."""
    source = TheirSetting("vocabulary", [], where, "the vocabulary, which PaddleFleetX's program names")
    if chinese := fleetx_guest.chinese({key: one for key, one in entries.items() if one.words is not None}):
        found.lost.append((source, chinese))
    elif folder := cached("gpt2"):
        found.lines.append(FlagLine("--tokenizer-model", ["gpt2"], source, f"GPT-2's of {folder}"))
    else:
        found.lost.append((source, fleetx_guest.vocabulary()))


def command_for(purpose: str) -> tuple[str, dict[str, type]]:
    """(program, groups of settings) of the command that a file of PaddleFleetX is for."""
    from megatron.inference.sampling import Sampling, Search
    from megatron.tasks import finetune
    from megatron.tools import evaluate, export, generate

    return dict(
        train=("pretrain_gpt.py", GROUPS),
        task=("finetune.py", {**GROUPS, **finetune.groups()}),
        generate=("-m megatron.tools.generate", dict(one=generate.GenerateOptions, two=Sampling, three=Search)),
        evaluate=("-m megatron.tools.evaluate", dict(one=evaluate.EvaluateOptions)),
        export=("-m megatron.tools.export", dict(one=export.ExportOptions)),
    )[purpose]


def of_fleetx_command(command: Command, script: Script) -> TranslatedRun | WithoutFile:
    """tools/train.py, or tools/auto.py, which searches a layout. Its last -c counts, alone, and has to exist."""
    named = {flag: [one for one in command.sources if FLEETX.get(one.key, "") == flag] for flag in ("-c", "-o", "")}
    lost = [(one, HELD_BY_SHELL if one.key[0] == "$" else "no word of PaddleFleetX's tools") for one in named[""]]
    path = script.file(named["-c"][-1], named["-c"][-1].value, lost, command.notes) if named["-c"] else None
    if path is None and named["-c"] and not VARIABLE.search(named["-c"][-1].value):
        return WithoutFile(f"# {named['-c'][-1].where}: not translated: -c {named['-c'][-1].value}: no such file")
    run = of_fleetx(path, [word for one in named["-o"] for word in one.words])
    run.found.lost += lost
    run.found.idle += [
        (one, overruled(one.words == named["-c"][-1].words, named["-c"][-1])) for one in named["-c"][:-1]
    ]
    if Path(command.program).name == "auto.py" and "--auto-parallel" in run.known:
        search(run.found, TheirSetting("", [], command.where, command.program))
    run.start, notes = started(command, run.found)
    run.behind, run.notes = command.behind, run.notes + command.notes + notes
    return run


def search(found: Translation, source: TheirSetting) -> None:
    """tools/auto.py makes the layout that its file has; without one it is searched, for a batch that is given."""
    flags = {line.flag: line for line in found.lines}
    if any(flag.endswith(("-model-parallel-size", "--data-parallel-size", "--dp-degree")) for flag in flags):
        return found.idle.append((source, "its file has a layout; without one --auto-parallel would search it"))
    found.lines.append(FlagLine("--auto-parallel", [], source))
    if "--local-batch-size" in flags and "--global-batch-size" not in flags:
        found.lines.remove(flags["--local-batch-size"])
        found.lost.append((flags["--local-batch-size"].source, "of a search the whole batch is: --global-batch-size N"))


def of_command(
    dialect: Dialect, command: Command, variables: list[TheirSetting], script: Script
) -> TranslatedRun | WithoutFile:
    """A command, with the files that its flags name."""
    if dialect.name == "fleetx":
        return of_fleetx_command(command, script)
    own, sources, missing = Translation(), [*variables, *command.sources], []
    start, notes = started(command, own)
    if not dialect.base:
        sources = [one._replace(key=_bare(one.key), words=one.words or ["true"]) for one in sources]
    if dialect.name == "nemo":
        sources = with_hydras_file(sources, script, missing, command.notes)
    sources = [part for one in sources for part in configs_apart(one, dialect)]
    for one in list(sources):
        reader, name = CONFIGS.get((dialect.name, _bare(one.key))), one.value
        if reader is None and one.key.endswith((".json", ".py")):
            reader, name = CONFIGS.get((dialect.name, "")), one.key
        if reader is None or name in ("", "true"):
            continue
        at = sources.index(one)
        sources.remove(one)
        if (path := script.file(one, name, missing, command.notes)) is None:
            continue
        if reader == "deepspeed":
            own = translate(DIALECTS["deepspeed"], read_tree(path), own)
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
    if dialect.name == "llmacc" and any(one.key in ("--world-size", "--world_size") for one in sources):
        start, program = [word for word in start if word == "python"] or ["python"], "-m megatron.tools.plan"
    return TranslatedRun(found, start, program, command.behind, command.notes + notes)


def configs_apart(one: TheirSetting, dialect: Dialect) -> list[TheirSetting]:
    """`--batch_size=8 config/small.py` of nanoGPT is a word, and a file behind it."""
    if dialect.name != "nanogpt":
        return [one]
    values = [word for word in one.words if not word.endswith(".py")]
    files = [TheirSetting(word, [], one.where, word) for word in one.words if word.endswith(".py")]
    text = f"{one.key} {' '.join(values)}" if files else one.text
    return [one._replace(words=values, text=text), *files]


def with_hydras_file(sources: list[TheirSetting], script: Script, *told: list) -> list[TheirSetting]:
    """`--config-path=conf --config-name=c` as what conf/c.yaml says, before the words that override it."""
    named = {one.key: one for one in sources if one.key in ("config_path", "config_name")}
    if "config_name" not in named:
        return sources
    name = named["config_name"].value.removesuffix(".yaml") + ".yaml"
    inside = Path(named["config_path"].value if "config_path" in named else "conf") / name
    path = script.file(named["config_name"], str(inside), *told)
    return (read_tree(path) if path else []) + [one for one in sources if one.key not in named]


def place_of_python(words: list[str]) -> int:
    """Where the interpreter stands among the words before a script: python3, or a variable named after it, $PYTHON."""
    places = [i for kind in (PYTHON, PYTHON_VARIABLE) for i, word in enumerate(words) if kind.fullmatch(word)]
    return places[0] if places else len(words)


def _bare(key: str) -> str:
    """A flag as a key of a file: --learning-rate is learning_rate."""
    return key.lstrip("-").replace("-", "_") if key.startswith("-") else key


PYTHON = re.compile(r"(.*/)?python[\d.]*")
PYTHON_VARIABLE = re.compile(r'"?\$\{?\w*PY\w*\}?"?', re.IGNORECASE)
FLEETX = {"-c": "-c", "--config": "-c", "-o": "-o", "--override": "-o"}
# (dialect, flag) -> how the file that it names is read
CONFIGS = {
    ("colossalai", "config"): "python",
    ("megatron-deepspeed", "deepspeed_config"): "deepspeed",
    ("hf-trainer", "deepspeed"): "deepspeed",
    ("hf-trainer", ""): "tree",  # run_clm.py args.json
    ("nanogpt", ""): "python",  # train.py config/train_gpt2.py
}


# What starts it -------------------------------------------------------------------------------------------------------


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
    variables = (
        bool(before) and "=" not in before[-1] and "=" in start[0]
    )  # which another program would take for a command
    return [*map(quoted, before), *["env"] * variables, *start], notes + told


def started_by(found: Translation) -> tuple[list[str], list[str]]:
    """(torchrun with the words found for it, and variables of its environment before it; notes of where they come from)."""
    notes = [f"{_place(line.source)}: {' '.join([line.flag, *line.words])}" for line in found.start]
    lines, told = meeting(found.start)
    variables = [quoted(line.flag) for line in lines if line.flag[0] != "-"]
    words = [quoted(word) for line in lines if line.flag[0] == "-" for word in (line.flag, *line.words)]
    count = [] if "--nproc-per-node" in words else ["--nproc-per-node", "gpu"]
    found.start = []
    return [*variables, "torchrun", *count, *words], notes + told


# What is printed ------------------------------------------------------------------------------------------------------


def shown(one: TranslatedRun, dialect: Dialect, form: str) -> list[str]:
    told: set[str] = set()  # what changed is said once for each source
    rows = [
        (as_yaml(line, one.known) if form == "yaml" else as_flag(line), beside(line, dialect, told))
        for line in one.found.lines
    ]
    kept = [(as_flag(line), beside(line, dialect, told)) for line in one.found.kept]
    rows += kept if form == "command" else []
    if form == "yaml":
        written = "  (a variable of a shell, which YAML has not: write its value)"
        held = [any(map(VARIABLE.search, line.words)) for line in one.found.lines]
        rows = [(row, comment + written * variable) for variable, (row, comment) in zip(held, rows)]
        one.found.lost += [(line.source, HELD_BY_SHELL) for line, variable in zip(one.found.lines, held) if variable]
    width = max([len(row) for row, _ in rows if len(row) <= 60], default=0)
    body = [f"{row:{width}}  # {comment}" for row, comment in rows]
    head = [f"# from {dialect.title}, by megatron.tools.translate"] + [f"# {note}" for note in one.notes]
    if form == "yaml":
        words = [*one.start, one.program, "--config FILE", *(row for row, _ in kept), *map(as_is, one.behind)]
        head.append(f"# {' '.join(words)}")
    else:
        words = [*one.start, one.program, '"${FLAGS[@]}"', *map(as_is, one.behind)]
        body = ["FLAGS=(", *(f"    {row}" for row in body), ")", " ".join(words)]
    for title, pairs in (("no effect here", one.found.idle), ("no equivalent", one.found.lost)):
        if pairs:
            body += [f"# {title}:", *(f"#   {_place(source)}: {text}" for source, text in pairs)]
    return head + body


def as_is(word: str) -> str:
    return word if REDIRECTION.fullmatch(word) else quoted(word)


def _place(source: TheirSetting) -> str:
    return f"{source.where}: {source.text}" if source.text and source.text != source.where else source.where


def as_flag(line: FlagLine) -> str:
    return " ".join([line.flag, *map(quoted, line.words)])


def as_yaml(line: FlagLine, known: Mapping[str, Spelling]) -> str:
    spelling = known[line.flag]
    try:
        value = spelling.value(line.words)
    except BadValue:  # a variable of a shell
        value = line.words[0]
    if isinstance(value, list):
        return f"{spelling.setting.name}: [{', '.join(map(plain, line.words))}]"
    word = line.words[0] if line.words and spelling.implies is None else "null" if value is None else str(value)
    return f"{spelling.setting.name}: {plain(word.lower() if isinstance(value, bool) else word)}"


def plain(word: str) -> str:
    """A word as YAML reads it."""
    safe = word and all(letter.isalnum() or letter in "._/+-" for letter in word) and word[0] not in "-"
    return word if safe else "'" + word.replace("'", "''") + "'"


def beside(line: FlagLine, dialect: Dialect, told: set[str]) -> str:
    if line.source is None:
        return dialect.unasked
    place = _place(line.source)
    changed = f"  ({line.changed})" if line.changed and place not in told else ""
    told.add(place)
    return place + changed


def print_back(dialect: Dialect, words: list[str]) -> None:
    """This suite's command in another's words, as `key: value` lines or flags."""
    known = spellings()
    command = read_words(words, ("pretrain_gpt.py",))
    unknown = [one.key for one in command.sources if one.key.replace("_", "-") not in known]
    if unknown:
        raise UsageError(f"no flags of this suite: {', '.join(unknown)}", do="docs/flags.md lists what there is")
    try:
        found, lost = back(dialect, [(one.key.replace("_", "-"), one.words) for one in command.sources])
    except BadValue as bad:
        raise UsageError(str(bad)) from None
    for key, values in found.items():
        print(f"{key} {' '.join(values)}" if key.startswith("-") else f"{key}: {', '.join(values)}")
    for flag in lost:
        print(f"# no word for it: {flag}", file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
