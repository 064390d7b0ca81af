# SPDX-License-Identifier: Apache-2.0
"""Runs of PaddleFleetX: a file with overrides, or tools/train.py and tools/auto.py with them."""

from collections.abc import Mapping
from pathlib import Path

from megatron.errors import UsageError
from megatron.settings.dialects.fleetx import TABLES
from megatron.settings.dialects.fleetx_command_line import FleetX, chinese
from megatron.settings.dialects.fleetx_files import Entries, Layers, dropped
from megatron.settings.dialects.fleetx_keys import purpose_of, translate_entries
from megatron.settings.dialects.shell import Command
from megatron.settings.dialects.start import Script, TranslatedRun, WithoutFile, started
from megatron.settings.dialects.table import VARIABLE, FlagLine, TheirSetting
from megatron.settings.dialects.translate import (
    HELD_BY_SHELL,
    Translation,
    add,
    add_defaults,
    keep_last,
    overruled,
    without_flag,
)
from megatron.settings.presets import cached
from megatron.settings.spelling import Spelling, spellings_of

FLAGS = {"-c": "-c", "--config": "-c", "-o": "-o", "--override": "-o"}


def of_file(path: str | None, script: Script, overrides: list[str] | tuple[str, ...] = ()) -> TranslatedRun:
    """A file, and `Section.key=value` over it, as the command that it is for."""
    layers = Layers()
    if path:
        layers.read(path)
    for word in overrides:
        if "=" not in word:
            raise UsageError(f"-o {word}: Section.key=value is wanted, as in -o Model.hidden_size=1024")
        layers.override(word)
    program, groups = script.command_for(purpose_of(layers.entries))
    known = spellings_of(groups)
    found = translate_file(layers.entries, known)
    found.idle += [(one, overruled(False, by)) for one, by in layers.replaced]
    if program == "pretrain_gpt.py":
        add_vocabulary(found, layers.entries, path or "command")
    return TranslatedRun(found, ["python"], program, notes=layers.notes, known=known)


def add_vocabulary(found: Translation, entries: Entries, where: str) -> None:
    """Add the vocabulary of a training, which PaddleFleetX's files do not name: GPT-2's, as `-c FILE` takes it."""
    source = TheirSetting("vocabulary", [], where, "the vocabulary, which PaddleFleetX's program names")
    if problem := chinese({key: one for key, one in entries.items() if one.words is not None}):
        found.lost.append((source, problem))
    elif folder := cached("gpt2"):
        found.lines.append(FlagLine("--tokenizer-model", ["gpt2"], source, f"GPT-2's of {folder}"))
    else:
        found.lost.append((source, FleetX.lacks_vocabulary()))


def translate_file(entries: Entries, known: Mapping[str, Spelling]) -> Translation:
    """Translate PaddleFleetX's YAML, which has its own reader. known: the flags of the command that it is for."""
    translated, out = translate_entries(entries, purpose_of(entries)), Translation()
    for flag, words, one in translated.flags:
        spelling = known.get(flag)
        text = spelling is not None and spelling.setting.kind is str and not spelling.setting.many
        add(one, [(flag, [",".join(words)] if text else words)], TABLES["train"], known, out)
    out.idle += [(one, why) for why, one in translated.notes]
    for one, why in translated.problems:
        (out.unknown if one.key in translated.unknown else out.lost).append((one, why))
    reported = {one.key for one, _ in out.idle + out.lost + out.unknown} | {line.source.key for line in out.lines}
    for key, one in translated.given.items():
        part = translated.parts.get(key)
        out.idle += [(one, f"a part of {part}" if part else without_flag(one.value))] * (key not in reported)
    out.idle += dropped(entries)
    keep_last(out, known)
    if translated.purpose == "train":
        add_defaults(TABLES["train"], translated.given, known, out)
    return out


def of_command(command: Command, script: Script) -> TranslatedRun | WithoutFile:
    """tools/train.py, or tools/auto.py, which searches a layout. Its last -c counts, alone, and has to exist."""
    named = {flag: [one for one in command.sources if FLAGS.get(one.key, "") == flag] for flag in ("-c", "-o", "")}
    lost = [(one, HELD_BY_SHELL) for one in named[""] if one.key[0] == "$"]
    path = script.file(named["-c"][-1], named["-c"][-1].value, lost, command.notes) if named["-c"] else None
    if path is None and named["-c"] and not VARIABLE.search(named["-c"][-1].value):
        return WithoutFile(f"# {named['-c'][-1].where}: not translated: -c {named['-c'][-1].value}: no such file")
    run = of_file(path, script, [word for one in named["-o"] for word in one.words])
    run.found.lost += lost
    others = [one for one in named[""] if one.key[0] != "$"]
    run.found.unknown += [(one, "no word of PaddleFleetX's tools, which take -c and -o") for one in others]
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
