# SPDX-License-Identifier: Apache-2.0
"""Translate a run of another suite to flags of this one: its file or command, line by line, with the source of each line.

    python -m megatron.tools.translate --from deepspeed ds_config.json
    python -m megatron.tools.translate --from paddlenlp run.sh
    python -m megatron.tools.translate --from llmacc torchrun --nproc_per_node 8 -m llmacc.pretrain --num-layers 48
    python -m megatron.tools.translate --from nemo --format yaml megatron_gpt_config.yaml
    python -m megatron.tools.translate --from nemo --recipe llama3_8b trainer.max_steps=100
    python -m megatron.tools.translate --from megatron-bridge --recipe llama32_1b_pretrain_config -tp 2
    python -m megatron.tools.translate --to deepspeed pretrain_gpt.py --bf16 --sharding-stage 2

A comment after a line says how the meaning of a setting changes. Settings without an effect or an equivalent are listed
below the command. Nothing is executed.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Optional

from megatron.errors import SettingsError, UsageError, did_you_mean, numbered, run_main
from megatron.settings.dialects.in_common import NOTHING, InCommon, Reasons, in_common, place_and_why, reasons
from megatron.settings.dialects.nemo import NEMO
from megatron.settings.dialects.nemo2 import NEMO2
from megatron.settings.dialects.recipes import RecipeRuns
from megatron.settings.dialects.runs import DIALECTS, is_source, translations
from megatron.settings.dialects.shell import LITERAL, quoted, read_words
from megatron.settings.dialects.start import TranslatedRun, Untranslated, WithoutFile, as_is, place_of, ranks_note
from megatron.settings.dialects.table import VARIABLE, Dialect, FlagLine
from megatron.settings.dialects.translate import HELD_BY_SHELL, back, spellings
from megatron.settings.parse import parse
from megatron.settings.schema import GROUPS, setting
from megatron.settings.spelling import BadValue, Spelling


@dataclass(frozen=True)
class TranslateOptions:
    """The other suite, and the format of the output."""

    from_dialect: Optional[str] = setting(f"the other suite: {', '.join(DIALECTS)}", None, "--from")
    to_dialect: Optional[str] = setting("instead: a command of this suite in the words of that one", None, "--to")
    recipe: Optional[str] = setting(
        "a recipe of NeMo 2 or Megatron-Bridge by its name; key=value overrides may follow", None
    )
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
    dialect, words = chosen_recipe(options, words) if options.recipe else (chosen_dialect(options, words), words)
    if options.to_dialect:
        print_back(dialect, words)
    else:
        print_runs(dialect, words, options)


def divided(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the words into (this command's own flags, what to translate).

    What to translate begins with the first word that is no flag of this command, nor the value of one. Flags of this
    command may also follow a file, or a command that is one quoted word.
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


def chosen_recipe(options: TranslateOptions, words: list[str]) -> tuple[Dialect, list[str]]:
    """The suite of --recipe, and the command that starts the recipe. NeMo's recipes are those of NeMo 2."""
    suites = {name: one for name, one in DIALECTS.items() if isinstance(one.own, RecipeRuns)}
    name = NEMO2.name if options.from_dialect == NEMO.name else options.from_dialect
    if name not in suites or options.to_dialect:
        raise UsageError(f"--recipe {options.recipe}: whose recipe it is", do=f"--from {' or --from '.join(suites)}")
    own = suites[name].own
    return suites[name], [*own.command, own.flag, options.recipe, *words]


def chosen_dialect(options: TranslateOptions, words: list[str]) -> Dialect:
    """The suite of --from or --to. Raises UsageError if it is unknown, or if there is nothing to translate."""
    given = [name for name in (options.from_dialect, options.to_dialect) if name]
    if len(given) != 1 or not words:
        raise UsageError(
            "a suite and what to translate are wanted" if len(given) < 2 else "--from and --to: give one of them",
            do=f"python -m megatron.tools.translate --from NAME FILE_OR_COMMAND; NAME is one of {', '.join(DIALECTS)}",
        )
    [name] = given
    if name in ("megatron", "megatron-lm", "megatron_lm"):
        raise UsageError(
            f"'{name}': Megatron-LM's flags are this suite's, and are not translated",
            do="start its command as it is; docs/flags.md says what becomes of each flag",
        )
    if name not in DIALECTS:
        raise UsageError(f"'{name}' is no suite that is known: {', '.join(DIALECTS)}{did_you_mean(name, DIALECTS)}")
    recipes = name == NEMO.name and (words[0].split()[0] in NEMO2.programs or words[0].endswith(".py"))
    return NEMO2 if recipes and not options.to_dialect else DIALECTS[name]


# From another suite ---------------------------------------------------------------------------------------------------


def print_runs(dialect: Dialect, words: list[str], options: TranslateOptions) -> None:
    """Print the translation. Raises UsageError for missing files, and with --strict SettingsError if something is lost."""
    parts = list(translations(dialect, words, command_for))
    runs = [one for one in parts if isinstance(one, TranslatedRun)]
    gone = "\n".join(one.lstrip("# ") for one in parts if isinstance(one, WithoutFile))
    if gone and not runs:
        raise UsageError(gone, do="check the path: nothing is translated")
    if len(runs) > 1 and options.format == "yaml":
        raise UsageError(f"{len(runs)} runs cannot be one YAML file", do="translate one command at a time")
    shared = in_common(runs)
    lines = [
        line for one in {common.name: common for common in shared}.values() for line in lines_in_common(one, dialect)
    ]
    for one in parts:
        if isinstance(one, TranslatedRun):
            lines += lines_of(one, dialect, options.format, shared[runs.index(one)])
        elif options.format == "yaml":
            lines += [f"# {line.lstrip('# ')}" for line in one.splitlines()]
        else:
            lines.append(one)
    print("\n".join(lines).replace(LITERAL, "$"))
    if gone:
        raise UsageError(gone, do="check the path: the other commands are translated")
    if unknown := [place_and_why((source, why)) for one in runs for source, why in one.found.unknown]:
        which = "this setting is" if len(unknown) == 1 else f"{len(unknown)} settings are"
        text = unknown[0] if len(unknown) == 1 else numbered(unknown)
        raise UsageError(
            f"{which} unknown to {dialect.title}: {text}", do="correct or remove it: the other ones are translated"
        )
    lost = sum(len(one.found.lost) for one in runs)
    untranslated = sum(isinstance(one, Untranslated) for one in parts)
    problems = [f"{lost} settings of {dialect.title} have no equivalent"] * bool(lost)
    problems += [f"{untranslated} commands are not translated"] * bool(untranslated)
    if options.strict and problems:
        raise SettingsError(", and ".join(problems), do="see 'no equivalent' and 'not translated' above")


def command_for(purpose: str) -> tuple[str, dict[str, type]]:
    """(program, groups of settings) of the command here for a file of PaddleFleetX with this purpose."""
    from megatron.inference.sampling import Sampling, Search
    from megatron.tasks import finetune_start
    from megatron.tools import evaluate, export, generate

    return dict(
        train=("pretrain_gpt.py", GROUPS),
        task=("finetune.py", {**GROUPS, **finetune_start.groups()}),
        generate=("-m megatron.tools.generate", dict(one=generate.GenerateOptions, two=Sampling, three=Search)),
        evaluate=("-m megatron.tools.evaluate", dict(one=evaluate.EvaluateOptions)),
        export=("-m megatron.tools.export", dict(one=export.ExportOptions, two=Sampling, three=Search)),
    )[purpose]


def lines_in_common(common: InCommon, dialect: Dialect) -> list[str]:
    """The array of flags that several runs share, and what has no effect, or no equivalent, in all of them."""
    if not common.name:
        return []
    commented: set[str] = set()
    rows = [(as_flag(line), comment(line, dialect, commented)) for line in common.lines]
    head = f"# from {dialect.title}, by megatron.tools.translate: what several commands below have in common"
    return [
        head,
        f"{common.name}=(",
        *(f"    {row}" for row in aligned(rows)),
        ")",
        *left_out(common.idle, common.lost),
    ]


def lines_of(run: TranslatedRun, dialect: Dialect, form: str, common: InCommon = NOTHING) -> list[str]:
    """The lines of a run: a command for bash, or a file for --config; then what has no effect, and no equivalent.

    common: what is printed before it, for other runs as well
    """
    commented: set[str] = set()  # sources whose change of meaning is said already
    as_row = (lambda line: as_yaml(line, run.known)) if form == "yaml" else as_flag
    rows = [(as_row(line), comment(line, dialect, commented)) for line in common.without(run.found.lines, "lines")]
    kept = [(as_flag(line), comment(line, dialect, commented)) for line in run.found.kept]
    head = [f"# from {dialect.title}, by megatron.tools.translate"]
    head += [f"# {note}" for note in (*ranks_note(run), *run.notes)]
    if run.found.unknown:
        head += ["# unknown, and left out:", *(f"#   {place_and_why(one)}" for one in run.found.unknown)]
    behind = map(as_is, run.behind)
    if form == "yaml":
        held = [any(map(VARIABLE.search, line.words)) for line in run.found.lines]
        advice = "  (a variable of a shell, which YAML has not: write its value)"
        rows = [(row, text + advice * variable) for variable, (row, text) in zip(held, rows)]
        run.found.lost += [(line.source, HELD_BY_SHELL) for line, variable in zip(run.found.lines, held) if variable]
        words = [*run.start, run.program, "--config FILE", *(row for row, _ in kept), *behind]
        head.append(f"# {' '.join(words)}")
        body = aligned(rows)
    else:
        words = [*run.start, run.program, '"${FLAGS[@]}"', *behind]
        shared = [f'"${{{common.name}[@]}}"'] * bool(common.name)
        body = ["FLAGS=(", *(f"    {row}" for row in shared + aligned(rows + kept)), ")", " ".join(words)]
    idle, lost = (common.without(getattr(run.found, name), name) for name in ("idle", "lost"))
    return head + body + left_out(idle, lost)


def left_out(idle: Reasons, lost: Reasons) -> list[str]:
    """Comments on settings without an effect, and without an equivalent."""
    body = ["# no effect here:"] * bool(idle) + [f"#   {line}" for line in reasons(idle)]
    return body + ["# no equivalent:"] * bool(lost) + [f"#   {place_and_why(one)}" for one in lost]


def aligned(rows: list[tuple[str, str]]) -> list[str]:
    """Rows with their comments in one column, apart from those of long rows."""
    width = max([len(row) for row, _ in rows if len(row) <= 60], default=0)
    return [f"{row:{width}}  # {text}" for row, text in rows]


def comment(line: FlagLine, dialect: Dialect, commented: set[str]) -> str:
    """The source of a line, and how the meaning of its setting changes, which is said once for each source."""
    if line.source is None:
        return dialect.unasked
    place = place_of(line.source)
    changed = f"  ({line.changed})" if line.changed and place not in commented else ""
    commented.add(place)
    return place + changed


def as_flag(line: FlagLine) -> str:
    """A line for bash: `--lr 1e-4`."""
    return " ".join([line.flag, *map(quoted, line.words)])


def as_yaml(line: FlagLine, known: Mapping[str, Spelling]) -> str:
    """A line of a file for --config: `lr: 1e-4`."""
    spelling = known[line.flag]
    try:
        value = spelling.value(line.words)
    except BadValue:  # a variable of a shell
        value = line.words[0]
    if isinstance(value, list):
        return f"{spelling.setting.name}: [{', '.join(map(yaml_word, line.words))}]"
    word = line.words[0] if line.words and spelling.implies is None else "null" if value is None else str(value)
    return f"{spelling.setting.name}: {yaml_word(word.lower() if isinstance(value, bool) else word)}"


def yaml_word(word: str) -> str:
    """A word with quotes, if YAML needs them."""
    safe = word and all(letter.isalnum() or letter in "._/+-" for letter in word) and word[0] not in "-"
    return word if safe else "'" + word.replace("'", "''") + "'"


# To another suite -----------------------------------------------------------------------------------------------------


def print_back(dialect: Dialect, words: list[str]) -> None:
    """Print this suite's command in another's words, as `key: value` lines or flags."""
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
