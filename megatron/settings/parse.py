# SPDX-License-Identifier: Apache-2.0
"""Parse a command line into frozen groups of settings.

    parse(argv, {"model": Model, "data": Data}) -> {"model": Model(...), "data": Data(...)}

A setting takes its value from the last of: its default, the recipe's, a preset (`--model-name-or-path gpt2-medium`),
a file (`--config run.yaml`), the command line. The environment sets nothing. Underscores in flags are dashes, every switch
takes an optional value (`--bf16 true`), and all problems of a command line are reported together.

    argv.py        the command line as words            files.py, dialects/   files as words
    reader.py      words to statements                  statements.py         which statement wins
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.errors import UsageError
from megatron.settings import messages, schema
from megatron.settings.declare import dashed, declared
from megatron.settings.plan_file import refuse_another_model
from megatron.settings.reader import FOR_USE, SIZES, SettingsReader
from megatron.settings.spelling import settings_of
from megatron.settings.statements import NONE, Statement

COMMON = tuple(
    """
    model_name_or_path num_layers hidden_size num_attention_heads seq_length position_embedding_type
    tensor_model_parallel_size pipeline_model_parallel_size
    tokenizer_type vocab_file merge_file tokenizer_model data_path split mock_data
    micro_batch_size global_batch_size train_iters eval_interval lr min_lr lr_decay_style
    lr_warmup_iters weight_decay clip_grad recompute_granularity precision save load save_interval finetune
    log_interval dry_run
    """.split()
)
# A recipe's own defaults: setting -> value, or a function that returns this dict from the statements made so far. A
# value may also be a function of them: it returns the value, or None to leave the default.
Defaults = Mapping[str, Any] | Callable[[Mapping[str, Statement]], Mapping[str, Any]]


def parse_pretrain(
    argv: list[str],
    extra_groups: Mapping[str, type] = NONE,
    description: str = "Pretrain a language model.",
    defaults: Defaults = NONE,
    starts_from: tuple[str, ...] = (),
) -> schema.Config:
    """Parse the settings of a pretraining recipe; its own groups are in `Config.extra`. Rules are not checked yet."""
    groups, said = parse_with_record(
        argv, schema.GROUPS | dict(extra_groups), description=description, defaults=defaults, starts_from=starts_from
    )
    return schema.Config(**{name: groups.pop(name) for name in schema.GROUPS}, extra=groups, statements=said)


def parse(argv: list[str], groups: dict[str, type] = schema.GROUPS, **more) -> dict[str, object]:
    """Read a command line into one frozen dataclass per group. more: as in `parse_with_record`."""
    return parse_with_record(argv, groups, **more)[0]


def _of_recipe(defaults: Defaults, reader: SettingsReader, prog: str) -> Mapping[str, Any]:
    """The recipe's defaults. Raises UsageError for what they lack, or for unknown words, which may have meant to say it."""
    try:
        return defaults(reader.chosen()) if callable(defaults) else defaults
    except UsageError:
        if reader.problems:
            raise messages.usage_error(reader.problems, prog) from None
        raise


def parse_with_record(
    argv: list[str],
    groups: dict[str, type] = schema.GROUPS,
    *,
    prog: str | None = None,
    description: str = "",
    common: tuple[str, ...] = COMMON,
    defaults: Defaults = NONE,
    serves_training: bool = False,
    starts_from: tuple[str, ...] = (),
) -> tuple[dict[str, object], dict[str, Statement]]:
    """Parse a command line into (one frozen dataclass per group, setting -> the statement that set its value).

    `common` names the fields that `--help` shows; serves_training: see `SettingsReader`; starts_from: other model types
    whose shape --finetune takes. `--help`, `--help-all` and
    `--print-config` print and exit with 0; the last one then raises UsageError if a value is out of range. Raises
    UsageError with all problems together.
    """
    settings = settings_of(groups)
    reader, prog = SettingsReader(groups, serves_training), prog or _command()
    reader.read_command(argv)
    asked = {flag for flag, _ in reader.line.words}
    if asked & {"-h", "--help", "--help-all"}:
        own = tuple(set(groups) - set(schema.GROUPS)) if set(schema.GROUPS) <= set(groups) else ()
        _help(reader, settings, prog, description, common, own)
        sys.exit(0)
    reader.say_defaults(_of_recipe(defaults, reader, prog), "the recipe")
    if not callable(defaults):  # a function reads the checkpoint itself
        reader.read_checkpoint(groups, starts_from)
    plan = reader.read_plan()
    chosen = reader.resolve()
    said = " ".join(reader.problems)  # a bad value or a misspelled flag is not reported as missing too
    gives = declared("gives", *groups.values())
    named = set(re.findall(r"--[\w-]+", said))
    wrong = {one.setting.name for flag, one in reader.spellings.items() if flag in named}
    unread = {name for giver in wrong & gives.keys() for name in gives[giver]} | {
        s.name for s in settings if s.flag in said or s.name in said
    }
    unread |= SIZES if wrong & {"model_name_or_path", "load"} else set()  # they give the shape
    missing = [s for s in settings if s.required and s.name not in chosen and s.name not in unread]
    if missing:
        why = [sentence for suite in reader.other_suites for sentence in suite.why_missing(missing[0].name)]
        follows = not callable(defaults) and callable(defaults.get(missing[0].name))
        givers = [dashed(giver) for giver, names in gives.items() if follows and missing[0].name in names]
        reader.problems.append("; ".join([messages.missing(missing, "load" in chosen, givers), *why]))
    if reader.problems:
        raise messages.usage_error(reader.problems, prog)
    reader.print_notes()
    values = {name: {} for name in groups}
    for s in settings:
        if s.name in chosen and s.group in values:
            values[s.group][s.name] = chosen[s.name].value
    made = {name: group(**values[name]) for name, group in groups.items()}
    if "--print-config" in asked:
        from megatron.settings.help import config_text
        from megatron.settings.rules import out_of_range

        _print(config_text(settings, chosen))
        given = {name: one.words for name, one in chosen.items() if one.is_given}
        if wrong := [words for group in made.values() for words in out_of_range(group, given).values()]:
            raise messages.usage_error(wrong, prog)
        sys.exit(0)
    if plan:
        refuse_another_model(plan, made["model"])
    shape = {name: chosen[name] for name in sorted(reader.shape & set(chosen))}
    if shape and "load" in chosen:  # the command reports a missing --load
        from megatron.settings.from_checkpoint import refuse_another_shape

        refuse_another_shape(shape, chosen)
    if reader.compressed and reader.purpose in FOR_USE and "load" in chosen:
        from megatron.settings.from_checkpoint import refuse_uncompressed

        refuse_uncompressed(reader.compressed, chosen)
    return made, chosen


def _command() -> str:
    """The running command as users type it: `pretrain_gpt.py`, or `python -m megatron.pretrain`."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    return f"python -m {module}" if module.startswith("megatron.") else Path(sys.argv[0]).name


def said(argv: list[str], groups: Mapping[str, type] = MappingProxyType(schema.GROUPS)) -> dict[str, Statement]:
    """Read the statements of a command line and its files, for callers that need some settings before they can parse.

    groups: the groups that have the settings. Checks nothing: `parse` does.
    """
    reader = SettingsReader(groups)
    reader.read_command(argv)
    return reader.chosen()


def _help(reader: SettingsReader, settings, prog: str, description: str, common: tuple[str, ...], own) -> None:
    """Print `--help`, `--help-all`, or `--help GROUP`. Another word behind it is no path of a command, such as OUT."""
    from megatron.settings.help import group_help, help_text

    names = [word for flag, words in reader.line.words if flag in ("-h", "--help") for word in words[:1]]
    if names and (names[0].isidentifier() or names[0] in {s.group for s in settings}):
        return _print(group_help(settings, names[0]))
    everything = any(flag == "--help-all" for flag, _ in reader.line.words)
    _print(help_text(settings, prog, description, None if everything else common, own))


def _print(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text)
