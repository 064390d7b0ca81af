# SPDX-License-Identifier: Apache-2.0
"""Messages about problems of a command line."""

import difflib
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Optional

from megatron.errors import UsageError, numbered
from megatron.settings.dialects.commands import CREATE, ELSEWHERE
from megatron.settings.dialects.fleetx import BELONGS, keys_beside
from megatron.settings.dialects.fleetx_files import SECTIONS
from megatron.settings.dialects.hf_trainer import HF_TRAINER, MEANT_HERE
from megatron.settings.dialects.megatron_lm import known_flags
from megatron.settings.dialects.nanogpt import MEANT, NANOGPT
from megatron.settings.dialects.table import sentence
from megatron.settings.presets import preset
from megatron.settings.spelling import Setting
from megatron.settings.statements import SaidBy

FEW = 4  # the number of words that a note lists on one line
OF_TRAINING = BELONGS["train"]
PLACE = re.compile(r"(.+):(\d+): (\S+)")  # run.yaml:3: key


def unknown(word, flags: Collection[str]) -> str:
    """The message for an unknown flag or key (`reader.Word`), with suggestions."""
    on_command = word.source == SaidBy.COMMAND
    spell = str if on_command else lambda flag: flag[2:].replace("-", "_")
    near = _near(word.flag, flags)
    hint = f"; did you mean {' or '.join(map(spell, near))}?" if near else ""
    where = f"{word.where}: " if word.where else ""
    if "--dataset-impl" in flags and on_command and sentence({"-": CREATE}, word.flag):
        here = f"; here it is {' or '.join(near)}" if near else ""
        return (
            f"{word.flag} is a flag of python -m megatron.tools.create_pretraining_data, which takes PaddleNLP's "
            f"words{here}"
        )
    if here := meant_here(word.flag, flags):
        return f"{where}there is no {spell(word.flag)}: {here}"
    if theirs := of_trainers(word.flag, flags):
        suite, meant, translated = theirs
        return f"{where}{spell(word.flag)} is {suite}'s word: say {' and '.join(map(spell, meant))}{translated}"
    if why := without_a_flag(word.flag, flags):
        return f"{where}there is no {spell(word.flag)}: {why}"
    if near == [word.flag]:  # a flag of Megatron-LM, in a command that trains nothing
        return f"{where}{spell(word.flag)} is for training; this command has no use for it"
    own = sorted(flag for flag in flags if not flag.startswith("--no-"))
    if on_command and not hint and len(own) <= FEW:
        hint = f"; there are {', '.join(own)}"
    return f"{where}unknown {'flag' if on_command else 'key'} {spell(word.flag)}{hint}"


def _near(flag: str, flags: Collection[str]) -> list[str]:
    flag = "--" + flag.strip("-;,.")  # -tp, --bf16;
    if flag in flags:
        return [flag]
    if ELSEWHERE.get(flag, "").split(" ")[0].rstrip(",") in flags and f"{flag}-or-path" not in flags:
        return [ELSEWHERE[flag]]
    near = difflib.get_close_matches(flag, flags, n=2, cutoff=0.75)
    near = near or difflib.get_close_matches(flag, known_flags(), n=1, cutoff=0.85)
    # Part of a name: --vocab, --keys.
    return near or [known for known in flags if known.startswith(f"{flag}-") or known.endswith(flag[1:])][:2]


def meant_here(flag: str, flags: Collection[str]) -> str:
    """What to say instead of a word of TRL, PEFT or a planner, in a command with these flags; "" for any other word.

    >>> meant_here("--torch-dtype", ["--load", "--precision"])
    'say --precision, as in --precision bf16'
    """
    key = flag.lstrip("-").replace("-", "_")
    for keys, text, *known_by in MEANT_HERE:
        if key in keys.split() and any(one in flags for one in known_by or re.findall("--[a-z-]+", text)):
            return text
    return ""


def of_trainers(flag: str, flags: Collection[str]) -> Optional[tuple[str, list[str], str]]:
    """(suite, the flags here, which command translates all of them) of a word of Hugging Face's Trainer, or of nanoGPT.

    >>> of_trainers("--block-size", {"--seq-length"})
    ('nanoGPT', ['--seq-length'], ' (megatron.tools.translate --from nanogpt reads a whole run)')
    """
    key = flag[2:].replace("-", "_")
    for suite, meant in (
        (HF_TRAINER, HF_TRAINER.flags_of_key(key)),
        (NANOGPT, MEANT.get(key, "").replace(" and ", " ").split()),
    ):
        meant = list(dict.fromkeys(meant))
        if meant and set(meant) <= set(flags) and (suite is NANOGPT or key not in MEANT):
            return suite.title, meant, f" (megatron.tools.translate --from {suite.name} reads a whole run)"
    return None


def without_a_flag(flag: str, flags: Collection[str]) -> str:
    """Why a word of Hugging Face's Trainer has no flag in a command that trains, and what there is; "" for other words.

    >>> without_a_flag("--push-to-hub", {"--lr"})
    'nothing is sent to a hub'
    """
    key = flag.lstrip("-").replace("-", "_")
    return "--lr" in flags and (sentence(HF_TRAINER.lost, key) or sentence(HF_TRAINER.idle, key)) or ""


def missing(settings: list[Setting], loading: bool, givers: Sequence[str] = ()) -> str:
    """The message for missing required settings. loading: there is a checkpoint that has them; givers: flags from which the
    first one follows.
    """
    shape = ""
    if settings[0].name in (preset("gpt2") or ()):
        there = (
            ", or the checkpoint's: --finetune for a new run with its weights, --use-checkpoint-args for any" * loading
        )
        shape = (
            f" (or a whole shape: --model-name-or-path gpt2-medium{there}{''.join(f'; or {one}' for one in givers)})"
        )
    return "missing: " + ", ".join(s.flag for s in settings) + shape


def without_effect(
    notices: Mapping[str, list[str]], everything: bool = False, usual: Collection[str] = ()
) -> list[str]:
    """Notes on flags and keys without effect: one for the keys of each file, with their lines, and one for each reason.

    notices: why -> words: `--x`, `-o x`, `run.yaml:3: x`. Keys that are of training alone are counted where they are many
    and stand in files; several keys of files that have no effect for `usual` reasons are one line. everything: list them.

    >>> print(*without_effect({"why": ["d/run.yaml:1: a", "d/run.yaml:2: b", "--c"], "as": ["d/run.yaml:3: d"]}), sep="\\n")
    --c has no effect: why
    3 keys of run.yaml have no effect:
        a (line 1), b (line 2): why
        d (line 3): as
    >>> without_effect({"off": ["run.yaml:1: a", "run.yaml:2: b"]}, usual=["off"])
    ['without effect here: a, b (--print-config says where and why)']
    """
    notes: list[str] = []
    files: dict[str, dict[str, list[tuple[str, str]]]] = {}  # file -> why -> (key, line)
    for why, words in notices.items():
        placed = [(word, PLACE.fullmatch(word)) for word in dict.fromkeys(words)]
        others = [word for word, place in placed if not place]
        if len(others) > FEW:
            notes.append(f"{len(others)} settings have no effect:\n{_row(why, others)}")
        elif others:
            notes.append(f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} no effect: {why}")
        for file, line, key in (place.groups() for _, place in placed if place):
            files.setdefault(file, {}).setdefault(why, []).append((key, line))
    short = _short(files)
    of_training = {short[file]: keys for file, rows in files.items() if (keys := rows.get(OF_TRAINING))}
    if not everything and (count := sum(map(len, of_training.values()))) > FEW:
        files = _but(files, [OF_TRAINING])
        names = ", ".join(of_training)
        notes.append(f"{count} keys of {names} are of training and have no effect here (--print-config lists them)")
    folded = [key for rows in files.values() for why in rows if why in usual for key, _ in rows[why]]
    if not everything and len(folded) > 1:
        files = _but(files, usual)
        notes.append(f"without effect here: {', '.join(folded)} (--print-config says where and why)")
    return [*notes, *(_in_file(short[file], rows) for file, rows in files.items() if rows)]


def _but(files: Mapping[str, Mapping[str, list]], reasons: Collection[str]) -> dict[str, dict[str, list]]:
    """The keys of files, without those that have no effect for these reasons."""
    return {file: {why: keys for why, keys in rows.items() if why not in reasons} for file, rows in files.items()}


def _short(files: Collection[str]) -> dict[str, str]:
    """The names of files without their folders, where no two have the same one."""
    names = [Path(file).name for file in files]
    return {file: name if names.count(name) == 1 else file for file, name in zip(files, names)}


def _in_file(name: str, rows: Mapping[str, list[tuple[str, str]]]) -> str:
    """The note on keys of a file. rows: why -> (key, line)"""
    if (count := sum(map(len, rows.values()))) == 1:
        [(why, [(key, line)])] = rows.items()
        return f"{name}:{line}: {key} has no effect: {why}"
    lines = [_row(why, [f"{key} (line {line})" for key, line in keys]) for why, keys in rows.items()]
    return "\n".join([f"{count} keys of {name} have no effect:", *lines])


def _row(why: str, keys: list[str]) -> str:
    """An indented line on keys; several lines if they are more than FEW, each cut between keys."""
    if len(keys) <= FEW:
        return f"    {', '.join(keys)}: {why}"
    text = f"{why}: {', '.join(key.replace(' ', chr(160)) for key in keys)}"  # chr(160): a blank that stays in its line
    wrap = partial(textwrap.fill, width=110, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return wrap(text, break_long_words=False, break_on_hyphens=False).replace(chr(160), " ")


def replaced(pairs: list[tuple[str, str]]) -> list[str]:
    """A note about settings that are given twice, of which the last counts; an empty list if there are none.

    >>> replaced([("--lr 0.1", "--lr 0.2"), ("--seed 1", "--seed 2")])
    ['the last value of a setting counts: --lr 0.1 is overridden by --lr 0.2, --seed 1 by --seed 2']
    """
    shown = [f"{one}{' is overridden' * (not place)} by {by}" for place, (one, by) in enumerate(dict.fromkeys(pairs))]
    separator = "," if len(shown) <= FEW else ",\n   "
    return [f"the last value of a setting counts: {f'{separator} '.join(shown)}"] if shown else []


def usage_error(problems: list[str], prog: str) -> UsageError:
    """One error for all problems of a command line."""
    if len(problems) == 1:
        return UsageError(problems[0], do=_hint(problems[0], prog))
    return UsageError(
        f"{len(problems)} problems with the command line:{numbered(problems)}", do=f"{prog} --help (or --help-all)"
    )


def _hint(problem: str, prog: str) -> Optional[str]:
    """What to do about the one problem of a command line. None: the message says it, as for -o and the keys of files."""
    key = re.match(r"(?:-o |.+:\d+: )([A-Za-z_]\w*\.[\w.]+)", problem)
    if key is None:
        return f"{prog} --help (or --help-all) lists the flags"
    if "there is no section" in problem and "did you mean" not in problem:
        return f"there are {', '.join(SECTIONS)}"
    section, names = keys_beside(key[1])
    if "did you mean" in problem or not section and "unknown" not in problem:
        return None
    if section:
        return f"{section} has {', '.join(names)}" if "is no known key" in problem else None
    return f"{prog} --help {key[1].partition('.')[0]} lists its settings"
