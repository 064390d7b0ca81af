# SPDX-License-Identifier: Apache-2.0
"""The texts of `--help`, and of `--print-config`, YAML that `--config` reads back."""

import json
import re
import shutil
import textwrap

from megatron.errors import UsageError, did_you_mean
from megatron.settings.presets import NAMES, preset, published_rows
from megatron.settings.spelling import Setting

OF_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
PRESETS = "presets"  # a word of --help beside the groups

FILE_HELP = (
    (
        "--config FILE",
        "read settings from YAML (also PaddleFleetX's), JSON or plain Python; the command line overrides it (also -c)",
    ),
    ("-o SECTION.KEY=VALUE", "one setting, written as in a file"),
    ("--then", "flags after it override those before it, in any spelling: scripts use it for the flags given to them"),
    ("--print-config", "print every setting as YAML, with its source, and exit"),
    ("--help-all", "show all settings, in groups"),
)


def help_text(
    settings: list[Setting], prog: str, description: str, common: tuple[str, ...] | None, own: tuple[str, ...] = ()
) -> str:
    """The text of `--help` (the settings named in `common`, and required ones) or of `--help-all` (`common=None`).

    own: groups that a recipe or a command adds to the common ones. They come first, with all their settings.
    """
    settings = sorted(settings, key=lambda setting: setting.group not in own)
    width = min(shutil.get_terminal_size().columns, 118)
    lines = [f"usage: {prog} --flag value ... [--config FILE.yaml]", ""] + ([description, ""] if description else [])
    shown = [s for s in settings if common is None or s.group in own or s.required or s.name in common]
    groups = list(dict.fromkeys(s.group for s in shown))
    for group in groups:
        lines += [f"{group}:"] if common is None or len(groups) > 1 else []
        for setting in shown:
            if setting.group == group:
                lines += _entry(_head(setting), setting_help(setting, aliases=common is None), width)
        lines += [""] if common is None or len(groups) == 1 or group in own else []
    lines += [""] if lines[-1] else []
    for head, text in FILE_HELP:
        lines += _entry(head, text, width)
    if len(groups) > 2:
        every = ", ".join(dict.fromkeys(s.group for s in settings))
        lines += _entry("--help GROUP", f"show all settings of a group: {every}", width)
        lines += _entry("--help presets", "show the names that --model-name-or-path knows, with their sizes", width)
    return "\n".join(lines)


def group_help(settings: list[Setting], name: str) -> str:
    """The text of `--help NAME`: all settings of a group, or the named shapes. Raises UsageError for another name."""
    if name == PRESETS:
        return presets_text()
    groups = list(dict.fromkeys(s.group for s in settings))
    if name not in groups:
        near = did_you_mean(name, [*groups, PRESETS])
        raise UsageError(f"--help {name}: there is no such group{near}", do=f"one of {', '.join(groups)}, {PRESETS}")
    width = min(shutil.get_terminal_size().columns, 118)
    lines = [f"{name}:"]
    for setting in settings:
        if setting.group == name:
            lines += _entry(_head(setting), setting_help(setting, aliases=True), width)
    return "\n".join(lines)


def presets_text() -> str:
    """The named shapes, a line each."""
    rows = [("name", "layers", "hidden", "heads", "sequence", "vocabulary")]
    for name in NAMES:
        values = preset(name)
        sizes = [values[size] for size in (*OF_SHAPE, "seq_length")]
        rows.append((name, *map(str, (*sizes, published_rows(name)))))
    widths = [max(map(len, column)) for column in zip(*rows)]
    pad = lambda row: "  ".join(
        word.ljust(width) if at == 0 else word.rjust(width) for at, (word, width) in enumerate(zip(row, widths))
    )
    return "\n".join(["--model-name-or-path NAME", "", *map(pad, rows)])


def setting_help(setting: Setting, aliases: bool = False, default: bool = True) -> str:
    """The help text of a setting, with its default and optionally its other spellings."""
    text = setting.help
    if default and setting.required:
        text += " [required, if no shape or checkpoint has it]" if setting.name in OF_SHAPE else " [required]"
    elif default and setting.kind is bool and setting.default is True:
        text += " [on without it]"
    elif default and setting.kind is not bool and setting.default not in (None, ()) and "default" not in text:
        text += f" [{str(setting.default) if isinstance(setting.default, str) else value_text(setting.default)}]"
    if _long_choice(setting):
        text += ": " + ", ".join(map(str, setting.kind))
    if aliases and setting.alias:
        text += f" (also {', '.join(_alias_text(alias) for alias in setting.alias)})"
    if aliases and setting.also:
        text += f" (also understood: {', '.join(_also(word, value) for word, value in setting.also.items())})"
    return text


def _alias_text(alias: str) -> str:
    flag, equals, value = alias.replace("~=", "=").partition("=")
    return f"{flag} for {value.partition('/')[0]}" if equals else flag


def _also(word: str, value) -> str:
    """A word and its value, if that is another one; a negative number is only an internal code, and is not shown."""
    return word if value == word or isinstance(value, int) and value < 0 else f"{word} = {value}"


def placeholder(setting: Setting) -> str:
    """The metavar of a flag in help: `N`, `X`, `TEXT` or `{a,b}`."""
    if setting.kind is bool:
        return ""
    if isinstance(setting.kind, tuple):
        word = "NAME" if _long_choice(setting) else "{" + ",".join(map(str, setting.kind)) + "}"
    else:
        word = {int: "N", float: "X", str: "TEXT"}[setting.kind]
    return f"{word} ..." if setting.many else word


def _long_choice(setting: Setting) -> bool:
    return isinstance(setting.kind, tuple) and sum(len(str(choice)) + 1 for choice in setting.kind) > 72


def value_text(value) -> str:
    """Format a value as YAML. Text is quoted where YAML might read another type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_quoted(v) if isinstance(v, str) else value_text(v) for v in value) + "]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z/][\w./+-]*", value, re.ASCII) and value.lower() not in _YAML_WORDS
        return value if plain else _quoted(value)
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text  # YAML 1.1 requires the point


_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def config_text(settings: list[Setting], chosen: dict) -> str:
    """Every setting as YAML, in groups, each with its source as a comment."""
    lines = []
    for group in dict.fromkeys(s.group for s in settings):
        lines.append(f"{group}:")
        for setting in settings:
            if setting.group == group:
                given = chosen.get(setting.name)
                value = setting.word(given.value if given else setting.default)
                entry = f"  {setting.name}: {value_text(value)}"
                lines.append(f"{entry:<50} # {given.origin if given else 'default'}")
    return "\n".join(lines)


def _head(setting: Setting) -> str:
    return f"{setting.flag} {placeholder(setting)}".rstrip()


def _entry(head: str, text: str, width: int, column: int = 34) -> list[str]:
    wrapped = textwrap.wrap(text, max(30, width - column)) or [""]
    first = f"  {head}"
    if len(first) + 2 > column:
        return [first] + [" " * column + line for line in wrapped]
    return [first.ljust(column) + wrapped[0]] + [" " * column + line for line in wrapped[1:]]
