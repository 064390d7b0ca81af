# SPDX-License-Identifier: Apache-2.0
"""A run of another suite in the flags of this one: its file or command, line by line, with the source beside each line.

    python -m megatron.tools.translate --from deepspeed ds_config.json
    python -m megatron.tools.translate --from paddlenlp run.sh
    python -m megatron.tools.translate --from llmacc torchrun --nproc_per_node 8 -m llmacc.pretrain --num-layers 48
    python -m megatron.tools.translate --from nemo --format yaml megatron_gpt_config.yaml
    python -m megatron.tools.translate --to deepspeed pretrain_gpt.py --bf16 --sharding-stage 2

What changed in meaning stands behind a line, what has no effect here and what has no equivalent below. Nothing is run.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import SettingsError, UsageError, did_you_mean, run_main
from megatron.settings.dialects import fleetx, programs
from megatron.settings.dialects.table import Dialect, FlagLine, TheirSetting
from megatron.settings.parse import parse
from megatron.settings.schema import GROUPS, setting
from megatron.settings.sources import Command, read_commands, read_python, read_tree, read_words
from megatron.settings.spelling import BadValue, Spelling, spellings_of
from megatron.settings.translate import DIALECTS, Translation, back, spellings, translate, translate_fleetx


@dataclass(frozen=True)
class TranslateOptions:
    """Whose words, and in which form they are wanted."""

    from_dialect: Optional[str] = setting(f"the other suite: {', '.join(DIALECTS)}", None, "--from")
    to_dialect: Optional[str] = setting("instead: a command of this suite in the words of that one", None, "--to")
    format: Literal["command", "yaml"] = setting(
        "what is printed: a command for bash, or a file for --config", "command"
    )
    strict: bool = setting("exit with code 3 where something has no equivalent", False)
    debug: bool = setting("tracebacks with error messages", False)


SWITCHES = ("--strict", "--debug", "--help", "-h", "--help-all", "--print-config")


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
    lost = 0
    for one in translations(dialect, words):
        if isinstance(one, str):
            print(one)
            continue
        print("\n".join(shown(one, dialect, options.format)))
        lost += len(one.found.lost)
    if options.strict and lost:
        raise SettingsError(f"{lost} settings of {dialect.title} have no equivalent", do="see 'no equivalent' above")


def divided(argv: list[str]) -> tuple[list[str], list[str]]:
    """(this command's own words, those to translate): these begin with the first that is no flag of ours, nor its value."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        if "--to" in argv[:at] and argv[at].partition("=")[0].replace("_", "-") in spellings():
            break  # a command of this suite without the name of its script
        at += 1 if argv[at] in SWITCHES or "=" in argv[at] else 2
    return argv[:at], argv[at:]


@dataclass
class TranslatedRun:
    """One run: what it was made of, what starts it, and what is odd about the source."""

    found: Translation
    launcher: list[str]
    program: str
    notes: list[str]
    known: Mapping[str, Spelling] = field(default_factory=spellings)


def translations(dialect: Dialect, words: list[str]) -> list[TranslatedRun | str]:
    """What the words name: a file of settings, a script with commands, or one command. Text: of what prepares its data."""
    if len(words) > 1:
        return [of_any(dialect, read_words(words, dialect.programs), Path("."))]
    [name] = words
    path = Path(name)
    if not path.is_file():
        if " " not in name:
            raise UsageError(f"{name}: no such file", do="give a file, or a command in quotes or as words")
        commands = read_commands(name, "command", dialect.programs) or read_commands(name, "command")
        return [of_any(dialect, one, Path(".")) for one in commands]
    if path.suffix in (".yaml", ".yml", ".json", ".py"):
        return [of_file(dialect, name)]
    commands = read_commands(path.read_text(encoding="utf-8"), name, dialect.programs)
    if not commands:
        raise UsageError(
            f"{name}: no command of {dialect.title} in it", f"it would start {' or '.join(dialect.programs)}"
        )
    return [of_any(dialect, one, path.parent) for one in commands]


def of_any(dialect: Dialect, command: Command, folder: Path) -> TranslatedRun | str:
    name = Path(command.program).name
    tool = programs.TOOLS.get(name)
    if tool and find_spec(f"megatron.tools.{tool}"):
        ours = f"-m megatron.tools.{tool}"
    elif name in programs.OURS:
        ours = programs.OURS[name]
    elif name in programs.INSTEAD or command.program in programs.INSTEAD:
        sentence = programs.INSTEAD.get(command.program) or programs.INSTEAD[name]
        return f"# {command.where}: {command.program}: {sentence}"
    else:
        return of_command(dialect, command, folder)
    many = f"\n# {command.where}: once for each file; --input FOLDER takes all of them" if "{}" in command.words else ""
    return f"# {command.where}: {command.program}: its flags are taken as they are{many}\n" + " ".join(
        ["python", ours, *map(quoted, command.words)]
    )


def of_file(dialect: Dialect, path: str) -> TranslatedRun:
    if dialect.name == "fleetx":
        return of_fleetx([path], [], ["python"], [])
    if path.endswith(".py"):
        sources = read_python(path)
    else:
        sources = read_tree(path)
    return TranslatedRun(translate(dialect, sources), ["python"], "pretrain_gpt.py", [])


def of_fleetx(paths: list[str], overrides: list[str], launcher: list[str], notes: list[str]) -> TranslatedRun:
    entries: fleetx.Entries = {}
    for path in paths:
        entries = fleetx.over(entries, fleetx.read(path))
    for word in overrides:
        key, _, value = word.partition("=")
        entries = fleetx.override(entries, key, value)
    program, groups = command_for(fleetx.purpose_of(entries))
    known = spellings_of(groups)
    found = translate_fleetx(entries, known)
    return TranslatedRun(found, launcher, program, notes, known)


def command_for(purpose: str) -> tuple[str, dict[str, type]]:
    """(program, groups of settings) of the command that a file of PaddleFleetX is for."""
    from megatron.inference.sampling import Sampling, Search
    from megatron.tasks import finetune
    from megatron.tools import evaluate, generate

    return dict(
        train=("pretrain_gpt.py", GROUPS),
        task=("finetune.py", {**GROUPS, **finetune.groups()}),
        generate=("-m megatron.tools.generate", dict(one=generate.GenerateOptions, two=Sampling, three=Search)),
        evaluate=("-m megatron.tools.evaluate", dict(one=evaluate.EvaluateOptions)),
    )[purpose]


def of_command(dialect: Dialect, command: Command, folder: Path) -> TranslatedRun:
    """A command, with the files that its flags name."""
    launcher, notes = started(command.launcher)
    sources, others, program = list(command.sources), [], "pretrain_gpt.py"
    if dialect.name == "fleetx":
        paths = [word for one in sources if one.key in ("-c", "--config") for word in one.words]
        overrides = [word for one in sources if one.key in ("-o", "--override") for word in one.words]
        return of_fleetx([str(folder / path) for path in paths], overrides, launcher, command.notes + notes)
    if not dialect.base:
        sources = [one._replace(key=_bare(one.key), words=one.words or ["true"]) for one in sources]
    if dialect.name == "nemo":
        sources, missing = with_hydras_file(sources, folder)
        others += missing
    for one in list(sources):
        reader = CONFIGS.get((dialect.name, _bare(one.key)))
        if reader and one.words:
            path = next((path for path in (folder / one.value, Path(one.value)) if path.is_file()), None)
            sources.remove(one)
            if path is None:
                others.append((one, f"{one.value}: no such file; translate it by itself"))
            elif reader == "deepspeed":
                others.append(translate(DIALECTS["deepspeed"], read_tree(str(path))))
            else:
                sources = (read_python(str(path)) if reader == "python" else read_tree(str(path))) + sources
    found = translate(dialect, sources)
    for other in others:
        _join(found, other)
    if dialect.name == "llmacc" and any(one.key in ("--world-size", "--world_size") for one in sources):
        launcher, program = ["python", "-m"], "megatron.tools.plan"
    return TranslatedRun(found, launcher, program, command.notes + notes)


def with_hydras_file(sources: list[TheirSetting], folder: Path) -> tuple[list[TheirSetting], list]:
    """`--config-path=conf --config-name=c` as what conf/c.yaml says, before the words that override it."""
    named = {one.key: one for one in sources if one.key in ("config_path", "config_name")}
    if "config_name" not in named:
        return sources, []
    name = named["config_name"].value.removesuffix(".yaml") + ".yaml"
    inside = Path(named["config_path"].value if "config_path" in named else "conf") / name
    rest = [one for one in sources if one.key not in named]
    path = next((path for path in (folder / inside, inside) if path.is_file()), None)
    if path is None:
        return rest, [(named["config_name"], f"{inside}: no such file; translate it by itself")]
    return read_tree(str(path)) + rest, []


def _bare(key: str) -> str:
    """A flag as a key of a file: --learning-rate is learning_rate."""
    return key.lstrip("-").replace("-", "_") if key.startswith("-") else key


# (dialect, flag) -> how the file that it names is read
CONFIGS = {
    ("colossalai", "config"): "python",
    ("megatron-deepspeed", "deepspeed_config"): "deepspeed",
    ("hf-trainer", "deepspeed"): "deepspeed",
}


def _join(found: Translation, other) -> None:
    """Add what another file says; where both say a setting, the command's word stays."""
    if not isinstance(other, Translation):
        found.lost.append(other)
        return
    known = spellings()
    name = lambda line: known[line.flag].setting.name
    said = {name(line): line for line in found.lines if line.source is not None}
    found.lines = [line for line in found.lines if line.source or name(line) not in map(name, other.lines)]
    found.lines += [line for line in other.lines if name(line) not in said]
    for line in other.lines:
        if line.source and name(line) in said:
            found.idle.append((line.source, f"the command says {said[name(line)].source.text}"))
    found.idle += other.idle
    found.lost += other.lost


def started(launcher: list[str]) -> tuple[list[str], list[str]]:
    """(what starts this suite's script, notes) for what starts another's."""
    words = [part for word in launcher for part in word.split("=", 1)]
    values = {_bare(words[i]): words[i + 1] for i in range(len(words) - 1) if words[i][:1] == "-"}
    torchs = [i for i, word in enumerate(launcher) if word == "torchrun" or word.startswith("torch.distributed")]
    if torchs:
        return ["torchrun", *(word for word in launcher[torchs[0] + 1 :] if word != "--use_env")], []
    ranks = values.get("num_gpus") or values.get("num_processes") or values.get("nproc_per_node")
    cards = values.get("gpus") or values.get("devices")
    if cards:
        ranks = str(len(cards.split(",")))
    more = ["--nnodes", values[name]] if (name := "nnodes" if "nnodes" in values else "num_nodes") in values else []
    if "log_dir" in values:
        more += ["--log-dir", values["log_dir"], "-r", "3"]
    notes = [
        f"hosts of {values[name]}: start torchrun on each of them" for name in ("hostfile", "ips") if name in values
    ]
    if not ranks and not more:
        return ["python"], notes
    return ["torchrun", "--nproc-per-node", ranks or "gpu", *more], notes


# What is printed ------------------------------------------------------------------------------------------------------


def shown(one: TranslatedRun, dialect: Dialect, form: str) -> list[str]:
    told: set[str] = set()  # what changed is said once for each source
    rows = [
        (as_yaml(line, one.known) if form == "yaml" else as_flag(line), beside(line, dialect, told))
        for line in one.found.lines
    ]
    width = max([len(row) for row, _ in rows if len(row) <= 60], default=0)
    body = [f"{row:{width}}  # {comment}" for row, comment in rows]
    head = [f"# from {dialect.title}, by megatron.tools.translate"] + [f"# {note}" for note in one.notes]
    if form == "command":
        start = " ".join([*map(quoted, one.launcher), one.program])
        body = ["FLAGS=(", *(f"    {row}" for row in body), ")", f'{start} "${{FLAGS[@]}}"']
    for title, pairs in (("no effect here", one.found.idle), ("no equivalent", one.found.lost)):
        if pairs:
            body += [f"# {title}:", *(f"#   {_place(source)}: {text}" for source, text in pairs)]
    return head + body


def _place(source: TheirSetting) -> str:
    return f"{source.where}: {source.text}" if source.text and source.text != source.where else source.where


def as_flag(line: FlagLine) -> str:
    return " ".join([line.flag, *map(quoted, line.words)])


def as_yaml(line: FlagLine, known: Mapping[str, Spelling]) -> str:
    spelling = known[line.flag]
    value = spelling.value(line.words)
    if isinstance(value, list):
        return f"{spelling.setting.name}: [{', '.join(map(plain, line.words))}]"
    word = line.words[0] if line.words and spelling.implies is None else str(value)
    return f"{spelling.setting.name}: {plain(word.lower() if isinstance(value, bool) else word)}"


def plain(word: str) -> str:
    """A word as YAML reads it."""
    safe = word and all(letter.isalnum() or letter in "._/+-" for letter in word) and word[0] not in "-"
    return word if safe else "'" + word.replace("'", "''") + "'"


def quoted(word: str) -> str:
    """A word for bash; variables in it stay variables."""
    return f'"{word}"' if "$" in word and '"' not in word else shlex.quote(word)


def beside(line: FlagLine, dialect: Dialect, told: set[str]) -> str:
    if line.source is None:
        return f"what {dialect.title} does where nothing is said"
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
