# SPDX-License-Identifier: Apache-2.0
"""The command line, read into frozen groups of settings.

    parse(argv, {"model": Model, "data": Data}) -> {"model": Model(...), "data": Data(...)}

A setting gets its value from the last of: its default, a preset (`--model-name-or-path gpt2-medium`), a file
(`--config run.yaml`), the command line. The environment sets nothing. Underscores in flags are dashes, every switch
may be given a value (`--bf16 true`), and every problem of a command line is reported at once.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megatron.errors import UsageError, did_you_mean, numbered
from megatron.settings import schema
from megatron.settings.dialects.megatron_lm import answer, known_flags
from megatron.settings.plan_file import GivenPlan, read_plan, refuse_another_model
from megatron.settings.presets import SHAPES, cached, preset
from megatron.settings.spelling import BadValue, Setting, Spelling, dashed, settings_of, spellings_of

COMMON = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "position_embedding_type",
    "tokenizer_type",
    "vocab_file",
    "merge_file",
    "data_path",
    "split",
    "mock_data",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "eval_interval",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_warmup_iters",
    "weight_decay",
    "clip_grad",
    "precision",
    "save",
    "load",
    "save_interval",
)


# A flag of another suite -> what it says besides, as a preset does: PaddleNLP's mixed precision is O1, its scale 2^15, and
# its --check_accuracy is training without dropout.
MEANS_TOO = {
    "--use-amp": dict(amp_level="O1", initial_loss_scale=2.0**15),
    "--check-accuracy": dict(attention_dropout=0.0),
}

# what names data -> what else would name them
INSTEAD_OF_FILES = dict(
    mock_data=("data_path", "train_data_path", "valid_data_path", "test_data_path"),
    train_data_path=("data_path", "mock_data"),
    data_path=("train_data_path", "valid_data_path", "test_data_path", "mock_data"),
)


# settings that say which vocabulary it is, so that the name of a model does not
VOCABULARY = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size", "mock_data", "use_checkpoint_args")


@dataclass(frozen=True)
class Given:
    """One setting as somebody gave it."""

    spelling: Spelling | None
    value: object
    origin: str  # "--tp", "run.yaml:3" or "preset gpt2-medium"
    level: int  # DEFAULT, PRESET, FILE or COMMAND
    turn: int = 0  # how many --then stood before it: between turns there are no contradictions, the later one wins


DEFAULT, PRESET, FILE, COMMAND = 0, 1, 2, 3


def parse_pretrain(
    argv: list[str],
    extra_groups: Mapping[str, type] = MappingProxyType({}),
    description: str = "Pretrain a language model.",
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> schema.Config:
    """The settings of a pretraining recipe; its own groups arrive in `Config.extra`. Not yet checked by rules.

    defaults: name -> value of settings whose default is another one for this recipe
    """
    kinds = schema.GROUPS | dict(extra_groups)
    groups, asked = parse_with_origins(argv, kinds, description=description, defaults=defaults)
    return schema.Config(**{name: groups.pop(name) for name in schema.GROUPS}, extra=groups, given=asked)


def parse(argv: list[str], groups: dict[str, type] = schema.GROUPS, **more) -> dict[str, object]:
    """Read a command line into one frozen dataclass per group. more: as in `parse_with_origins`."""
    return parse_with_origins(argv, groups, **more)[0]


def parse_with_origins(
    argv: list[str],
    groups: dict[str, type] = schema.GROUPS,
    *,
    prog: str | None = None,
    description: str = "",
    common: tuple[str, ...] = COMMON,
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> tuple[dict[str, object], dict[str, str]]:
    """(one frozen dataclass per group, the settings that somebody asked for: name -> as it was given).

    `common` names the fields that `--help` shows. `--help`, `--help-all` and `--print-config` print and exit with 0.
    Raises UsageError with every problem at once.
    """
    settings = settings_of(groups)
    reader = FlagReader(settings)
    words = read_argv(argv, reader)
    asked = {flag for flag, _ in words}
    prog = prog or Path(sys.argv[0]).name
    if asked & {"-h", "--help", "--help-all"}:
        from megatron.settings.help import help_text

        own = tuple(set(groups) - set(schema.GROUPS)) if set(schema.GROUPS) <= set(groups) else ()
        _leave(help_text(settings, prog, description, None if "--help-all" in asked else common, own))
    reader.read_files(
        [path for flag, paths in words if flag in ("--config", "-c") for path in paths or [""]],
        [word for flag, pairs in words if flag == "-o" for word in pairs or [""]],
    )
    for flag, values in words:
        if flag == THEN:
            reader.turn += 1
            reader.problems += [f"'{word}' belongs to no flag" for word in values]
        elif flag not in OWN:
            reader.give(flag, values, flag, COMMAND)
    reader.apply_preset()
    chosen = {name: Given(None, value, "the recipe", DEFAULT) for name, value in defaults.items()} | reader.choose()
    reader.take_shape(chosen, groups)
    plan = reader.follow_plan(chosen)
    said = " ".join(reader.problems)  # a value that cannot be read, or a misspelled flag, is not missing as well
    missing = [s for s in settings if s.required and s.name not in chosen and s.flag not in said and s.name not in said]
    if missing:
        reader.problems.append(_missing(missing, "load" in chosen))
    if reader.problems:
        raise usage_error(reader.problems, prog)
    reader.say_notices()
    if "--print-config" in asked:
        from megatron.settings.help import config_text

        _leave(config_text(settings, chosen))
    made = {
        name: group(**{s.name: chosen[s.name].value for s in settings if s.group == name and s.name in chosen})
        for name, group in groups.items()
    }
    if plan:
        refuse_another_model(plan, made["model"])
    return made, {name: _shown(one) for name, one in chosen.items() if _asked(one)}


def given(argv: list[str], name: str, groups: Mapping[str, type] = MappingProxyType(schema.GROUPS)) -> object:
    """What a command line, with its files, gives a setting of pretraining; None: nothing. Judges nothing else.

    groups: those that have it, where a recipe has some of its own
    """
    return all_given(argv, groups).get(name)


def all_given(argv: list[str], groups: Mapping[str, type]) -> dict[str, object]:
    """What a command line, with its files, gives each setting that it gives something."""
    reader = FlagReader(settings_of(dict(groups)))
    words = read_argv(argv, reader)
    reader.read_files([path for flag, paths in words if flag in ("--config", "-c") for path in paths], [])
    for flag, values in words:
        if flag in reader.spellings:
            reader.give(flag, values, flag, COMMAND)
    return {name: one.value for name, one in reader.choose().items() if one.value is not None}


TYPOGRAPHIC_DASHES = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")
THEN = "--then"  # scripts put it between their words and those of whoever calls them
JOINED_LINES = re.compile(r"(true|false|[-+]?[\d.]+(?:[eE][-+]?\d+)?)(--[A-Za-z][\w-]*)", re.IGNORECASE)
OWN = ("-h", "--help", "--help-all", "--config", "-c", "-o", "--print-config", THEN)


def read_argv(argv: list[str], reader: "FlagReader") -> list[tuple[str, list[str]]]:
    """The command line as [(flag, words)], in order, flags with dashes. argparse does the splitting.

    Every flag takes any number of words here; what it may take is judged later, together with everything else.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    argv = [_with_dashes(part) for word in argv if not reader.refuse_word(word) for part in reader.parted(word)]
    parser._negative_number_matcher = re.compile(r"-[.\d]")  # -1e-4 is a value, which argparse doubts before 3.14
    met = [word.partition("=")[0] for word in argv if re.match("--?[A-Za-z]", word)]
    for flag in dict.fromkeys([*OWN, *reader.spellings, *met]):
        parser.add_argument(flag, nargs="*", action=_Record, dest="words")
    namespace, rest = parser.parse_known_args(argv)
    for word in rest:
        reader.problems.append(f"'{word}' belongs to no flag")
    return getattr(namespace, "words", [])


class _Record(argparse.Action):
    def __call__(self, parser, namespace, values, flag=None):
        namespace.words = [*getattr(namespace, "words", []), (flag, values)]


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


class FlagReader:
    """Collects what was given for each setting, and every problem on the way."""

    def __init__(self, settings: list[Setting]):
        self.spellings = spellings_of(settings)
        self.pretraining = set(schema.GROUPS) <= {s.group for s in settings}
        self.given: list[Given] = []
        self.turn = 0
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.notices: dict[str, list[str]] = {}  # sentence -> flags

    def refuse_word(self, word: str) -> bool:
        """Whether a word is what a copy from a web page or a broken line leaves; the user hears of it."""
        flag = "--" + re.sub(r"^\W+", "", word)
        if word and not word.strip():
            self.problems.append("a blank word: is there a space after a backslash at the end of a line?")
        elif word.strip("-")[:1] in TYPOGRAPHIC_DASHES and _with_dashes(flag).partition("=")[0] in self.spellings:
            self.problems.append(f"'{word}' begins with a typographic dash, as web pages make them; type {flag}")
        else:
            return False
        return True

    def parted(self, word: str) -> list[str]:
        """A word as two where it is a value and a flag: what a backslash without a blank before it makes of two lines."""
        joined = JOINED_LINES.fullmatch(word)
        if not joined or _with_dashes(joined[2]) not in self.spellings and not answer(joined[2]):
            return [word]
        self.notes.append(f"'{word}' is read as {joined[1]} and {joined[2]}: the line before lacks a blank at its end")
        return [joined[1], joined[2]]

    def give(self, flag: str, words: list[str], origin: str, level: int) -> None:
        """Take one `flag words` of a command line, or one `key: words` of a file."""
        spelling = self.spellings.get(flag)
        if spelling is None:
            return self.unknown(flag, words, origin, level)
        try:
            value = spelling.value(words)
        except BadValue as bad:
            self.problems.append(f"{origin if level == COMMAND else f'{origin}: {_key(flag)}'} {bad}")
        else:
            if value is not None:
                self.given.append(Given(spelling, value, origin, level, self.turn))
                for name, other in MEANS_TOO.get(flag, {}).items() if value is not False else ():
                    if dashed(name) in self.spellings:
                        self.given.append(Given(self.spellings[dashed(name)], other, origin, PRESET))

    def unknown(self, flag: str, words: list[str], origin: str, level: int) -> None:
        """Answer a flag that is no setting here: of pretraining only, of Megatron-LM, or misspelled."""
        where = "" if level == COMMAND else f"{origin}: "  # run.yaml:3
        if not self.pretraining and flag in spellings_of(settings_of(schema.GROUPS)):
            if level == COMMAND:  # a file may serve several commands
                self.problems.append(f"{flag} is a setting of pretraining; this command has no use for it")
            return
        known = answer(flag, words)
        if known and not known.refused:
            if known.sentence:
                self.notices.setdefault(known.sentence, []).append(where + flag)
        elif known and self.pretraining:
            self.problems.append(f"{where}{flag} is not supported: {known.sentence}")
        else:
            near = self._near(flag)
            spell = str if level == COMMAND else _key
            hint = f"; did you mean {' or '.join(map(spell, near))}?" if near else ""
            self.problems.append(f"{where}unknown {'flag' if level == COMMAND else 'key'} {spell(flag)}{hint}")

    def _near(self, flag: str) -> list[str]:
        flag = "--" + flag.strip("-;,.")  # -tp, --bf16;
        if flag in self.spellings:
            return [flag]
        near = difflib.get_close_matches(flag, self.spellings, n=2, cutoff=0.75)
        near = near or difflib.get_close_matches(flag, known_flags(), n=1, cutoff=0.85)
        # Part of a name: --vocab, --keys.
        return (
            near or [known for known in self.spellings if known.startswith(f"{flag}-") or known.endswith(flag[1:])][:2]
        )

    def read_files(self, paths: list[str], overrides: list[str]) -> None:
        """Take what files say, those of PaddleFleetX included, and each `Section.key=value` that overrides them."""
        from megatron.settings import files
        from megatron.settings.dialects import fleetx

        entries: dict[str, fleetx.Entry] = {}
        for path in paths:
            root = files.compose(path)
            if root is not None and fleetx.is_fleetx(root):
                entries |= fleetx.read(path, files.compose)
            elif root is not None:
                for key, words, line in files.read_settings(root, path):
                    self.give(dashed(key), self._joined(key, words), f"{path}:{line}", FILE)
        for word in overrides:
            key, equals, value = word.partition("=")
            if not equals:
                self.problems.append(f"-o {word}: Section.key=value is wanted, as in -o Model.hidden_size=1024")
                continue
            one = fleetx.entry(value, f"-o {key}")
            if key.partition(".")[0] in fleetx.SECTIONS:
                entries[key] = one
            elif one.words is not None:
                name = key.rpartition(".")[2]
                self.give(dashed(name), self._joined(name, one.words), f"-o {key}", COMMAND)
        self._give_fleetx(fleetx.translate(entries))

    def _give_fleetx(self, found) -> None:
        tools = [] if self.pretraining else [one for one in found.tool_flags if one[0] in self.spellings]
        for flag, words, origin in [*found.flags, *tools]:
            if self.pretraining or flag != "--data-path":  # that of training is no data of another command
                self.give(flag, self._joined(flag[2:], words), origin, FILE)
        for sentence, where in found.notes if self.pretraining else ():
            self.notices.setdefault(sentence, []).append(where)
        self.problems += found.problems if self.pretraining else []

    def _joined(self, key: str, words: list[str]) -> list[str]:
        """Several words of a file as the one that a setting of text takes: split: [969, 30, 1]"""
        spelling = self.spellings.get(dashed(key))
        one = spelling and spelling.setting.kind is str and not spelling.setting.many and len(words) > 1
        return [",".join(words)] if one else words

    def apply_preset(self) -> None:
        """`--model-name-or-path`: a known shape fills what nobody else set; a folder becomes `--load`."""
        names = [g for g in self.given if g.spelling.setting.name == "model_name_or_path"]
        if not names:
            return
        chosen = max(names, key=lambda g: g.level)
        name, values = str(chosen.value), preset(str(chosen.value))
        if values is None and Path(name).is_dir():
            values = {"load": name}
        elif values and cached(name) and not any(g.value for g in self.given if g.spelling.setting.name in VOCABULARY):
            values = {**values, "tokenizer_model": name}
        if values is None:
            known = f"{', '.join(SHAPES)}){did_you_mean(name, SHAPES)}"
            self.problems.append(f"{_shown(chosen)}: neither a folder nor a known shape ({known}")
            return
        for key, value in values.items():
            if dashed(key) in self.spellings:
                self.given.append(Given(self.spellings[dashed(key)], value, f"preset {name}", PRESET))

    def choose(self) -> dict[str, Given]:
        """The winner for each setting: the highest level, the last turn; inside of these two spellings must agree."""
        chosen: dict[str, Given] = {}
        self._drop_other_data()
        self._say_whose_curve()
        for name in dict.fromkeys(g.spelling.setting.name for g in self.given):
            rivals = [g for g in self.given if g.spelling.setting.name == name]
            top = max((g.level, g.turn) for g in rivals)
            rivals = [g for g in rivals if (g.level, g.turn) == top]
            chosen[name] = self._winner([g for g in rivals if not g.spelling.yielding] or rivals)
        return chosen

    def _drop_other_data(self) -> None:
        """Data that the command line names take the place of those that a file names, by whichever setting."""
        mine = {g.spelling.setting.name for g in self.given if g.level == COMMAND and g.value}
        others = {other for name in mine & set(INSTEAD_OF_FILES) for other in INSTEAD_OF_FILES[name]} - mine
        for one in [g for g in self.given if g.level == FILE and g.spelling.setting.name in others and g.value]:
            self.given.remove(one)
            self.notes.append(f"{_shown(one)} gives way to the data of the command line")

    def _say_whose_curve(self) -> None:
        """PaddleNLP's words for learning rates without the curve, which is a cosine there and a line here."""
        named = any(g.spelling.setting.name == "lr_decay_style" for g in self.given)
        theirs = [g.spelling.flag for g in self.given if g.spelling.flag in ("--decay-steps", "--warmup-rate")]
        if theirs and not named and self.pretraining:
            self.notes.append(f"{theirs[0]} without --lr-decay-style: linear, as in Megatron-LM; PaddleNLP's is cosine")

    def _winner(self, rivals: list[Given]) -> Given:
        last = rivals[-1]  # the same flag twice: the last one counts, so that wrappers can override
        for other in rivals:
            if other.value != last.value and other.spelling.flag != last.spelling.flag:
                self.problems.append(
                    f"{_shown(other)} and {_shown(last)} contradict each other "
                    f"(both set {dashed(last.spelling.setting.name)})"
                )
                break
        return last

    def follow_plan(self, chosen: dict[str, Given]) -> GivenPlan | None:
        """`--parallel-plan`: its layout wins over files and earlier turns; a command line that says otherwise is told."""
        if "parallel_plan" not in chosen or not self.pretraining:
            return None
        plan = read_plan(str(chosen["parallel_plan"].value))
        origin, turn = f"--parallel-plan {plan.path}", chosen["parallel_plan"].turn
        if "auto_parallel" in chosen and chosen["auto_parallel"].value:
            self.problems.append(f"--auto-parallel searches a layout, and {origin} gives one; drop one of them")
        for name, value in plan.settings.items():
            spelling = self.spellings[dashed(name)]
            try:
                value = spelling.setting.default if value is None else spelling.value([str(value)])
            except BadValue as bad:
                self.problems.append(f"{origin}: {name} {bad}")
                continue
            own = chosen.get(name)
            if own and own.level == COMMAND and own.turn >= turn and own.value != value:
                self.problems.append(
                    f"{_shown(own)} contradicts {origin}, where {name} is {'not given' if value is None else value}"
                )
            else:
                chosen[name] = Given(spelling, value, origin, FILE)
        return plan

    def take_shape(self, chosen: dict[str, Given], groups: dict[str, type]) -> None:
        """`--use-checkpoint-args`, or `--finetune` without a shape: what nobody gave of it is that of the checkpoint."""
        values = {name: one.value for name, one in chosen.items()}
        lacks_shape = not {"num_layers", "hidden_size", "num_attention_heads"} <= set(chosen)
        asked = values.get("use_checkpoint_args")
        if not self.pretraining or "load" not in values or not (asked or lacks_shape and values.get("finetune")):
            return
        # Here, because it needs packages, and a python without them is told of that by `run_main`.
        from megatron.settings.from_checkpoint import Damaged, saved_record, settings_of_shape, shape_of

        origin = "--use-checkpoint-args" if asked else "--finetune"
        try:
            where, record = saved_record(str(values["load"]), values.get("ckpt_step"))
        except (Damaged, OSError) as error:
            if lacks_shape:  # otherwise it is a run that has not saved yet, and loading says what is wrong
                self.problems.append(f"{origin}: no shape of a model can be taken from --load: {error}")
            return
        mine, theirs = (record.get("model_type", "GPT") for record in (values, record["config"]["model"]))
        if mine != theirs:
            self.problems.append(f"{origin}: {where} holds a model of type {theirs}, and this command trains {mine}")
            return
        given = {name for name, one in chosen.items() if one.level > DEFAULT}
        for name, value in shape_of(record, settings_of_shape(groups), given).items():
            spelling = self.spellings.get(dashed(name))
            if spelling is None:  # of a later version
                continue
            try:
                value = spelling.setting.value([str(one) for one in (value if isinstance(value, list) else [value])])
            except BadValue as bad:
                self.problems.append(f"{origin}: {where}: {name} {bad}")
            else:
                chosen[name] = Given(spelling, value, f"{origin} {where}", PRESET)
        self.notes.append(f"the shape of the model, and its tokenizer, are those of {where} ({origin})")

    def say_notices(self) -> None:
        if os.environ.get("RANK", "0") == "0":
            for note in self.notes:
                print(f"note: {note}", file=sys.stderr, flush=True)
            for sentence, flags in self.notices.items():
                flags = list(dict.fromkeys(flags))
                verb = "has" if len(flags) == 1 else "have"
                print(f"note: {', '.join(flags)} {verb} no effect: {sentence}", file=sys.stderr, flush=True)


def _asked(given: Given) -> bool:
    """Whether somebody asked for something by this. A file may spell out all settings, and `--bf16 false` is no wish."""
    if given.level < FILE or given.spelling is None or given.origin.startswith("--parallel-plan"):
        return False
    setting = given.spelling.setting
    return given.value != setting.default or given.level == COMMAND and setting.kind is not bool


def _shown(given: Given) -> str:
    alone = given.spelling.implies is not None or isinstance(given.value, bool)
    many = isinstance(given.value, list)
    value = "" if alone else f" {' '.join(map(str, given.value)) if many else given.spelling.setting.word(given.value)}"
    where = "" if given.level == COMMAND else f" ({given.origin})"
    return f"{given.spelling.flag}{value}{where}"


def _key(flag: str) -> str:
    return flag[2:].replace("-", "_")


def _missing(settings: list[Setting], loading: bool = False) -> str:
    shape = ""
    if settings[0].name in (preset("gpt2") or ()):
        there = ", or the checkpoint's: --use-checkpoint-args" if loading else ""
        shape = f" (or a whole shape: --model-name-or-path gpt2-medium{there})"
    return "missing: " + ", ".join(s.flag for s in settings) + shape


def usage_error(problems: list[str], prog: str) -> UsageError:
    """One error for all problems of a command line."""
    if len(problems) == 1:
        return UsageError(problems[0], do=f"{prog} --help (or --help-all) lists what there is")
    return UsageError(
        f"{len(problems)} problems with the command line:{numbered(problems)}", do=f"{prog} --help (or --help-all)"
    )


def _leave(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text)
    sys.exit(0)
