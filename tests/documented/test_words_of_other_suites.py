# SPDX-License-Identifier: Apache-2.0
"""Every word of another suite arrives in the translated command, or is named with its place.

others/words.txt has a line for each word: the settings that are other ones with it than without it, as pretrain_gpt.py
reads the printed command; `-`: none, as it is done anyway; `idle` or `lost`: the output names it. Words of launchers are
read by torchrun's own parser. A row of a table without a line there is a failure, and so is a line whose row is gone.
"""

import dataclasses
import json
import re
import shlex
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from megatron.settings.dialects.launchers import LAUNCHERS, TORCHRUNS
from megatron.settings.dialects.runs import DIALECTS
from megatron.settings.dialects.translate import spellings, translate
from megatron.settings.parse import parse_pretrain
from megatron.tools import translate as tool

HERE = Path(__file__).parent
SHAPE = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --then".split()
FILES = {
    "colossalai": "run.py",
    "deepspeed": "run.json",
    "nemo": "run.yaml",
    "hf-trainer": "run.json",
    "nanogpt": "run.py",
}
COMMANDS = {
    "paddlenlp": "run_pretrain.py",
    "megatron-deepspeed": "pretrain_gpt.py",
    "llmacc": "llmacc.pretrain",
    "hf-trainer": "run_clm.py",
    "nemo": "megatron_gpt_pretraining.py",
    "nanogpt": "train.py",
}
# These have tests of their own
TABLES = [name for name in DIALECTS if name not in ("fleetx", "nemo2", "megatron-bridge")]
STARTS = {
    "torchrun": "torchrun",
    "paddle.distributed.launch": "python -m paddle.distributed.launch",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate launch",
    "colossalai run": "colossalai run",
    "mpirun": "mpirun",
}


@cache
def lines() -> dict[str, list[tuple[list[tuple[str, str]], list[str]]]]:
    """suite -> [([(key, value)], what is expected)]."""
    found, suite = {}, ""
    for line in (HERE / "others/words.txt").read_text().splitlines():
        if line.startswith("["):
            suite = line.strip("[]")
            found[suite] = []
        elif line and not line.startswith("#"):
            said, _, expected = line.partition("  ")
            pairs = [(key, value) for key, _, value in (one.partition("=") for one in said.split(" & "))]
            found[suite].append((pairs, expected.split()))
    return found


@cache
def settings(words: tuple[str, ...]) -> dict[str, str]:
    """Every setting that pretrain_gpt.py reads out of these words."""
    groups = parse_pretrain([*SHAPE, *words]).groups.values()
    return {name: str(value).replace(" ", "") for group in groups for name, value in dataclasses.asdict(group).items()}


def printed(dialect: str, words: list[str]) -> str:
    """What the tool prints for a file or a command."""
    runs = tool.translations(DIALECTS[dialect], words, tool.command_for)
    texts = ([run] if isinstance(run, str) else tool.lines_of(run, DIALECTS[dialect], "command") for run in runs)
    return "\n".join(line for text in texts for line in text)


def flags(text: str) -> tuple[str, ...]:
    """The words of the printed command, as a shell has them."""
    return tuple(shlex.split(text[text.index("FLAGS=(") + 7 : text.index("\n)")], comments=True))


def started(text: str) -> list[str]:
    """The words before the script."""
    [line] = [line for line in text.splitlines() if "${FLAGS[@]}" in line]
    words = shlex.split(line)
    return words[: words.index("${FLAGS[@]}") - 1]


def changes(words: tuple[str, ...], others: tuple[str, ...]) -> list[str]:
    """The settings that the words say otherwise than the others."""
    before = settings(others)
    return [f"{name}={value}" for name, value in settings(words).items() if value != before[name]]


# A source with some keys ----------------------------------------------------------------------------------------------


def as_file(dialect: str, pairs: list[tuple[str, str]], folder: Path) -> list[str]:
    """The keys in a file of the suite, one below the other. A key may be there twice."""
    path = folder / FILES[dialect]
    if path.suffix == ".py":
        nested = lambda keys, value: f"dict({keys[0]}={nested(keys[1:], value)})" if keys else value
        rows = [(key.split("."), in_python(key, value)) for key, value in pairs]
        path.write_text("".join(f"{keys[0]} = {nested(keys[1:], value)}\n" for keys, value in rows))
    else:
        nested = lambda keys, value: f'{{"{keys[0]}": {nested(keys[1:], value)}}}' if keys else value
        rows = [nested(key.split("."), in_json(value))[1:-1] for key, value in pairs]
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return [str(path)]


def in_json(value: str) -> str:
    numbers = all(map(is_number, value.split(",")))
    return (
        f"[{value}]"
        if numbers and "," in value
        else value
        if numbers or value in ("true", "false")
        else json.dumps(value)
    )


def in_python(key: str, value: str) -> str:
    if key.endswith(".type") or value.startswith("amp_type"):
        return value  # a class
    return {"true": "True", "false": "False"}.get(value, in_json(value))


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) is not None


def as_command(dialect: str, pairs: list[tuple[str, str]], form: str) -> list[str]:
    """Flags and their words, joined by an equals sign, or the keys that hydra has."""
    words = ["python", COMMANDS[dialect]]
    for key, value in pairs:
        flag = key if key.startswith("-") or form == "hydra" else f"--{key}"
        listed = f"[{value}]" if "," in value and form == "hydra" else value
        words += [flag, value] if form == "words" else [f"{flag}={listed}"]
    return words


def forms(dialect: str, pairs: list[tuple[str, str]], folder: Path) -> list[list[str]]:
    if dialect in ("colossalai", "deepspeed"):
        return [as_file(dialect, pairs, folder)]
    if dialect == "nemo":
        hydra = [as_command(dialect, pairs, "hydra")] * all("." in key for key, _ in pairs)
        return [as_file(dialect, pairs, folder), *hydra]
    commands = [
        as_command(dialect, pairs, form) for form in ("words", "equals") if not any("." in key for key, _ in pairs)
    ]
    return [as_file(dialect, pairs, folder), *commands] if dialect in ("hf-trainer", "nanogpt") else commands


def nothing(dialect: str) -> tuple[str, ...]:
    """The words where nothing is said."""
    return tuple(word for line in translate(DIALECTS[dialect], []).lines for word in (line.flag, *line.words))


def is_named(text: str, key: str) -> bool:
    """Whether a comment names the key, with its place."""
    name, text = key.lstrip("-").rpartition(".")[2].lower(), re.sub(r":\n#     (?=\d)|\n#     ", ":", text)
    return any(
        name in line.lower() and re.search(r"run\.\w+:\d|command:", line) for line in text.splitlines() if "#" in line
    )


def fault(dialect: str, words: list[str], pairs: list[tuple[str, str]], expected: list[str]) -> str:
    """What is wrong with what is printed for a source; "": nothing."""
    text = printed(dialect, words)
    lost = text.partition("# no equivalent")[2]
    if not all(is_named(text, key) for key, _ in pairs):
        return f"a word is not named\n{text}"
    if expected == ["lost"]:
        return "" if is_named(lost, pairs[-1][0]) and "that is known" not in lost else f"it is not told as lost\n{text}"
    got = changes(flags(text), nothing(dialect)) + [
        word for word in expected if word.replace("=", " ") in " ".join(started(text))
    ]
    right = sorted(got) == sorted({*expected} - {"-", "idle"}) and not is_named(lost, pairs[-1][0])
    return "" if right else f"{got}, wanted {expected}\n{text}"


def told(faults: list[str], tried: int) -> str:
    return f"{len(faults)} of {tried} cases:\n" + "\n".join(faults[:4])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dialect", TABLES)
def test_every_word_arrives_or_is_named(dialect, tmp_path):
    faults, tried = [], 0
    for pairs, expected in lines()[dialect]:
        for words in forms(dialect, pairs, tmp_path):
            tried += 1
            if found := fault(dialect, words, pairs, expected):
                faults.append(f"{pairs}: {found}")
    assert not faults, told(faults, tried)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dialect", TABLES)
def test_the_last_word_of_a_key_counts(dialect, tmp_path):
    """Each two values of each key, one after the other: what is printed is what it is for the second alone."""
    values, faults, tried = {}, [], 0
    for pairs, _ in lines()[dialect]:
        if len(pairs) == 1 and DIALECTS[dialect].names(DIALECTS[dialect].name_of(pairs[0][0])):
            values.setdefault(pairs[0][0], []).append(pairs[0][1])
    for key, said in values.items():
        for one in said if len(said) > 1 else [*said, "77"]:
            for other in said:
                for folder in "ab":
                    (tmp_path / folder).mkdir(exist_ok=True)
                twice, once = ([*forms(dialect, pairs, folder)] for pairs, folder in (
                    ([(key, one), (key, other)], tmp_path / "a"), ([(key, other)], tmp_path / "b")))  # fmt: skip
                for first, second in zip(twice, once, strict=True):
                    tried += 1
                    text, alone = printed(dialect, first), printed(dialect, second)
                    same = flags(text) == flags(alone) and started(text) == started(alone)
                    if not same or one != other and one.split(",")[0].lower() not in text.lower():
                        faults.append(f"{key}={one} and {other}:\n{text}\ninstead of\n{alone}")
    assert not faults, told(faults, tried)


@pytest.mark.parametrize("dialect", TABLES)
def test_every_row_has_a_line_here(dialect):
    table, expected = DIALECTS[dialect], lines()[dialect]
    told_of = {f"{key}={value.lower()}" for pairs, _ in expected for key, value in pairs}
    keys = {key for pairs, _ in expected for key, _ in pairs}
    assert [row for row in table.table if row not in (told_of if "=" in row else keys)] == []
    assert set(table.computed) | set(table.kept) <= keys
    switches = {row.rpartition("=")[0] for row in table.table if row.endswith(("=true", "=false"))}
    assert [key for key in switches if not {f"{key}=true", f"{key}=false"} <= told_of] == []
    patterns = [one for known in (table.idle, table.lost) for text in known.values() for one in text.split()]
    assert [one for one in patterns if not any(fnmatchcase(key, one) for key in keys)] == []


# This suite's own words, which commands of suites of Megatron-LM's line use -------------------------------------------

OWN = {int: ["3"], float: ["0.25"], str: ["word"], bool: ["true", "false", ""]}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dialect", ["megatron-deepspeed", "llmacc", "paddlenlp"])
def test_own_words_mean_what_they_mean(dialect):
    """Every spelling of every setting, with each of its values: what comes of the translation is what the words say."""
    faults, tried, empty = [], 0, nothing(dialect)
    for flag, spelling in spellings().items():
        kind = bool if spelling.implies is not None else spelling.setting.kind
        if spelling.setting.name in ("model_name_or_path", "parallel_plan") or DIALECTS[dialect].names(
            DIALECTS[dialect].name_of(flag)
        ):
            continue
        for value in map(str, kind) if isinstance(kind, tuple) else OWN[kind]:
            for before in ([], [flag, "false"], [flag, "true"]) if kind is bool else ([],):
                words = [*before, flag, *([value] if value else [])]
                tried += 1
                text = printed(dialect, ["python", COMMANDS[dialect], *words])
                if settings(flags(text)) != settings((*empty, "--then", *words)) and not is_named(text, flag):
                    faults.append(f"{words}: {text}")
    assert tried > 300 and not faults, told(faults, tried)


# Launchers ------------------------------------------------------------------------------------------------------------


@cache
def torchruns_parser():
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def joined_by_torchrun(words: list[str]) -> list[str]:
    """What torchrun's own parser reads, where that is not its default; variables of the environment as they are."""
    at = words.index("torchrun")
    args, default = (vars(torchruns_parser().parse_args([*one, "x.py"])) for one in (words[at + 1 :], []))
    return [*words[:at], *(f"{name}={value}" for name, value in args.items() if value != default[name])]


@pytest.mark.parametrize("name", [one.name for one in LAUNCHERS])
def test_every_word_of_a_launcher_arrives_or_is_named(name):
    faults = []
    for pairs, expected in lines()[f"launcher {name}"]:
        for form in (
            lambda key, value: [key, value] if value else [key],
            lambda key, value: [f"{key}={value}" if value else key],
        ):
            words = [word for key, value in pairs for word in form(key, value)]
            text = printed("hf-trainer", [*STARTS[name].split(), *words, "run_clm.py", "--seed", "3"])
            lost = text.partition("# no equivalent")[2]
            got = joined_by_torchrun(started(text)) + changes(flags(text), (*nothing("hf-trainer"), "--seed", "3"))
            if expected == ["lost"]:
                good = is_named(lost, pairs[-1][0]) and "that is known" not in lost
            else:
                good = sorted({*got}) == sorted({*expected} - {"idle", "-"})
                good = good and not is_named(lost, pairs[-1][0])
                good = good and (set(expected) - {"idle", "-"} or is_named(text, pairs[-1][0]))
            faults += [] if good else [f"{words}: {got}, wanted {expected}\n{text}"]
    assert not faults, told(faults, 2 * len(lines()[f"launcher {name}"]))


def test_every_row_of_the_launchers_has_a_line_here():
    expected = [pairs for one in LAUNCHERS for pairs, _ in lines()[f"launcher {one.name}"]]
    told_of = {f"{key}={value.lower()}" for pairs in expected for key, value in pairs}
    keys = {key for pairs in expected for key, _ in pairs}
    for launcher in LAUNCHERS:
        own = [row for row, meaning in launcher.table.items() if row.replace("_", "-") != meaning]
        assert [row for row in own if row not in (told_of if "=" in row else keys)] == []
        assert set(launcher.computed) <= keys
        patterns = [one for known in (launcher.idle, launcher.lost) for text in known.values() for one in text.split()]
        assert [one for one in patterns if not any(fnmatchcase(key, one) for key in keys)] == []
    assert set(TORCHRUNS.split()) <= set(torchruns_parser()._option_string_actions)
