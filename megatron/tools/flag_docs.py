# SPDX-License-Identifier: Apache-2.0
"""Write docs/flags.md from the settings: `python -m megatron.tools.flag_docs --output docs/flags.md`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import run_main
from megatron.model.recipe import MODEL_TYPES, named_recipe
from megatron.settings import schema
from megatron.settings.dialects import megatron_lm
from megatron.settings.help import placeholder, setting_help, value_text
from megatron.settings.positional import parse_one
from megatron.settings.presets import NAMES, preset, published_rows
from megatron.settings.schema import setting
from megatron.settings.spelling import Setting, settings_of

INTRO = """# Flags

Written by `python -m megatron.tools.flag_docs --output docs/flags.md` from the settings of the
suite and of each model; do not edit.

- Names, defaults and meanings are Megatron-LM's wherever Megatron-LM has the setting. `-` and `_` are the same.
- A switch takes an optional value: `--bf16`, `--bf16 true`, `--bf16=false`. One that is on by default is `--no-...`.
- A setting comes from the last of: its default, a named shape (`--model-name-or-path gpt2-medium`), a file
  (`--config run.yaml`), the command line. The environment sets nothing. `--print-config` shows each value and its
  source, as a file that `--config` reads. Within one source the last flag wins, and `--x false` cancels `--x`.
  Two flags for different values (`--bf16 --fp16`) are an error, unless `--then` is between them: then those after it
  win. Scripts put it between their own flags and their arguments.
- A file has `key: value` lines, flat or under group names; keys are the names below without `--`, with `_` for `-`.
- All problems of a command line are reported together. Exit code 2: it cannot be parsed; 3: its settings cannot work.
"""

TABLES = (
    (
        megatron_lm.IGNORED,
        "## Megatron-LM flags that are accepted and have no effect",
        "Their values are ignored, with a note.",
    ),
    (
        megatron_lm.REFUSED,
        "## Megatron-LM flags that are not supported",
        f"They are refused, except with `false` or a value that asks for nothing:\n"
        f"{', '.join(f'`{pair}`'.replace('=', ' ') for pair in megatron_lm.NEUTRAL.split())}.",
    ),
)


@dataclass(frozen=True)
class DocsOptions:
    """The output file."""

    output: Optional[str] = setting("file to write (default: the terminal)", None)


def main(argv: list[str]) -> None:
    """Write or print the page."""
    asked = parse_one(argv, DocsOptions, "python -m megatron.tools.flag_docs", __doc__)
    if asked.output:
        Path(asked.output).write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


def page() -> str:
    """The text of docs/flags.md."""
    settings = settings_of(schema.GROUPS)
    parts = [INTRO]
    for name, group in schema.GROUPS.items():
        rows = "\n".join(_row(s) for s in settings if s.group == name)
        parts.append(f"## {name}\n\n{group.__doc__}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}\n")
    for name, (group, module) in _of_models().items():
        rows = "\n".join(_row(s) for s in settings_of({name: group}))
        words = f"Of `{module}.py` alone. {group.__doc__}"
        parts.append(f"## {name}\n\n{words}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}\n")
    parts.append(_shapes())
    for table, title, words in TABLES:
        lines = "\n".join(
            f"- {sentence}:\n  {' '.join(f'`{name}`' for name in names)}"
            for sentence, names in megatron_lm.sentences(table).items()
        )
        parts.append(f"{title}\n\n{words} `*` matches any ending.\n\n{lines}\n")
    return "\n".join(parts)


def _of_models() -> dict[str, tuple[type, str]]:
    """Name of a model's additional group of settings -> (the group, the module with the recipe)."""
    return {
        name: (group, module)
        for kind, module in MODEL_TYPES.items()
        for name, group in named_recipe(kind).groups.items()
    }


def _row(s: Setting) -> str:
    default = "required" if s.required else "" if s.default is None else value_text(s.default).strip('"')
    if s.kind is bool:
        default = "on" if s.default else "off"
    head = f"{s.flag} {placeholder(s)}".strip().replace("|", "\\|")
    return f"| `{head}` | {default} | {setting_help(s, aliases=True, default=False).replace('|', chr(92) + '|')} |"


def _shapes() -> str:
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    rows = "".join(
        f"| {name} | {' | '.join(str(preset(name)[size]) for size in sizes)} | {published_rows(name)} |\n"
        for name in NAMES
    )
    return (
        "## Named shapes\n\n`--model-name-or-path NAME`; `gpt3-` in front and `-en` at the end are optional, 7B is the "
        "6.7B, mistral-7b is v0.1.\n\nThe vocabulary is that of the published embedding, in rows. A plan, and a run "
        "without a tokenizer, have as many. Beside a\ntokenizer, the embedding has them if the difference may be padding, "
        "else as many as the tokenizer has tokens; a note says so.\n\n"
        f"| name | layers | hidden size | heads | sequence length | vocabulary |\n|---|---|---|---|---|---|\n{rows}"
    )


if __name__ == "__main__":
    run_main(main)
