# SPDX-License-Identifier: Apache-2.0
"""Read the words of a command line, and of the files that it names, into statements about settings.

All words take one path: `SettingsReader.read` tries its readers in turn, and a word that none takes is an error. The
sources are the command line, files of settings, a preset shape, a layout file, a checkpoint.
"""

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Optional

from megatron.errors import did_you_mean
from megatron.settings import files, messages, schema
from megatron.settings.argv import OWN, THEN, CommandLine, split
from megatron.settings.declare import ON_RESUME, dashed, declared
from megatron.settings.dialects.other_suites import OTHER_SUITES
from megatron.settings.dialects.table import Word
from megatron.settings.plan_file import GivenPlan, read_plan
from megatron.settings.presets import NAMES, VOCABULARY, cached, nearest, preset, published_rows
from megatron.settings.spelling import BadValue, Spelling, spellings_of
from megatron.settings.statements import SaidBy, Statement, overruled, resolve
from megatron.storage import hub
from megatron.storage.urls import location

IMPORT = "python -m megatron.tools.checkpoint from-hf hf://{} DIR, then --load DIR --finetune"  # a model of the hub
FOR_USE = ("generate", "evaluate", "export", "prune")  # groups of the commands that use a trained model
# Settings of the model that a checkpoint decides. A command that loads one compares them with it.
SHAPE = {one.name for one in fields(schema.Model) if one.metadata.get("on_resume") in ON_RESUME[:2]}
SIZES = {"num_layers", "hidden_size", "num_attention_heads"}  # those without a default

REPLACES = declared("replaces", schema.Data)  # a setting that names data -> those whose place it takes


class SettingsReader:
    """Collects the statements of all sources, and all problems.

    serves_training: the command line is also that of a training, whose settings are named in a note, as those of files are
    """

    def __init__(self, groups: Mapping[str, type], serves_training: bool = False):
        self.spellings, self.groups = spellings_of(groups), set(groups)
        self.trains = set(schema.GROUPS) <= set(groups)
        self.purpose = next((one for one in ("task", *FOR_USE) if one in groups), "train" * self.trains)
        own = {spelling.setting.name for spelling in self.spellings.values()}
        self.shape = SHAPE - own if self.purpose in FOR_USE else set()
        self.serves_training = serves_training
        self.statements: list[Statement] = []
        self.turn = 0
        self.line = CommandLine()
        self.other_suites = [suite(self) for suite in OTHER_SUITES]
        self.compressed: list[Any] = []  # `from_checkpoint.Compressed`: what files expect of the checkpoint
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.notices: dict[str, list[str]] = {}  # sentence -> words without effect
        self.usual: set[str] = set()  # those sentences that are of no consequence: no result changes
        self.replaced: list[tuple[str, str]] = []  # (overridden words, the later ones that count)

    def read_command(self, argv: list[str]) -> None:
        """Read a command line and the files that it names."""
        self.line = split(argv, self.spellings)
        self.problems += self.line.problems
        self.notes += self.line.notes
        overrides = self._read_files(self.line.values("--config", "-c"), self.line.values("-o"))
        for flag, words in self.line.words:
            if flag == THEN:
                self.turn += 1
                self.problems += [f"'{word}' belongs to no flag" for word in words]
            elif flag == "-o":
                for word in words or [""]:
                    for one in overrides.pop(word, ()):
                        self.read(one)
            elif flag not in OWN:
                self.read(Word(flag, words, SaidBy.COMMAND))
        self._read_preset()
        for suite in self.other_suites:
            suite.fill()

    def read(self, word: Word) -> None:
        """Read one word: a setting, one of another command, or another suite's. Any other is unknown."""
        readers = (self._of_setting, self._of_another_command, *(suite.reads for suite in self.other_suites))
        if not any(reader(word) for reader in readers):
            self.problems.append(messages.unknown(word, self.spellings))

    def _spelling(self, flag: str) -> Optional[Spelling]:
        """The setting of a flag: of this command in all spellings that pretraining has, or compared with the checkpoint."""
        own = self.spellings.get(flag)
        theirs = None if own or self.trains else spellings_of(schema.GROUPS).get(flag)
        if theirs is None or (self.shape and theirs.setting.name in self.shape):
            return own or theirs
        shared = self.spellings.get(dashed(theirs.setting.name))
        return replace(theirs, setting=shared.setting) if shared else None

    def _of_setting(self, word: Word) -> bool:
        spelling = self._spelling(word.flag)
        if spelling is None:
            return False
        try:
            statement = spelling.statement(word.words, word.source, word.where, self.turn)
        except BadValue as bad:
            self.problems.append(f"{word} {bad}")
            return True
        self.statements.append(statement)
        for name, value in spelling.setting.also_sets.get(word.flag, {}).items():
            if dashed(name) in self.spellings:
                implied = replace(statement, name=name, value=value, source=SaidBy.PRESET, yields=True)
                self.statements.append(replace(implied, withdraws=statement.switch_off or statement.withdraws))
        return True

    def _of_another_command(self, word: Word) -> bool:
        if self.trains or word.flag not in spellings_of(schema.GROUPS):
            return False
        if word.flag == "--debug" and word.source == SaidBy.COMMAND and set(word.words) <= {"true", "false"}:
            return True  # `errors.run_main` reads it, for every command
        if word.source == SaidBy.COMMAND and not self.serves_training:
            why = "this command has no use for it"
            if self.shape and spellings_of(schema.GROUPS)[word.flag].setting.group == "model":
                why = "leave it out: it is read from the checkpoint"
                if word.flag == "--model-name-or-path":
                    why = f"a trained model is given by --load {' '.join(word.words)}"
            self.problems.append(f"{word.flag} is a setting of pretraining; {why}")
        else:  # a file may serve several commands
            self.notices.setdefault(messages.OF_TRAINING, []).append(str(word))
        return True

    def _read_files(self, paths: list[tuple[str, int]], overrides: list[tuple[str, int]]) -> dict[str, list[Word]]:
        """Read the files. Returns each `Section.key=value` of -o -> its words, which the caller reads in order.

        paths, overrides: each with its turn
        """
        placed: dict[str, list[Word]] = {word: [] for word, _ in overrides}
        for path, self.turn in paths:
            flag = "-c" if ("-c", [path]) in self.line.words else "--config"
            path = os.path.expanduser(path)
            if any(suite.reads_file(path, None) for suite in self.other_suites):
                continue
            root = files.compose(path, flag)
            if root is None:
                self.notes.append(f"{path} is empty: it sets nothing")
            elif not any(suite.reads_file(path, root) for suite in self.other_suites):
                self._read_plain(files.read_settings(root, path), path, getattr(root, "helpers", ()))
        for word, turn in overrides:
            if not any(suite.overrides(word, turn) for suite in self.other_suites):
                placed[word] += self._override(word)
        for suite in self.other_suites:
            suite.read_all(placed)
        self.turn = 0
        return placed

    def _override(self, word: str) -> list[Word]:
        """The words of `-o key=value` for a setting's own name, with or without its group."""
        key, equals, value = word.partition("=")
        section, group = key.partition(".")[0], key.rpartition(".")[0].lower()
        if not equals:
            self.problems.append(f"-o {word}: Section.key=value is wanted, as in -o Model.hidden_size=1024")
        elif not value.strip():
            self.problems.append(f"-o {word}: is empty (a shell variable that is not set?)")
        elif group and group not in self.groups:
            near = did_you_mean(section, [*self.groups, *self._sections()])
            self.problems.append(f"-o {key}: there is no section {section}{near}")
        else:
            node = files.node_of(value)
            pairs = [(f"{key}.{one.value}", value) for one, value in files.merged(node)] if node.id == "mapping" else []
            said = {name: files.words_of(value) for name, value in pairs or [(key, node)]}
            return [
                self.of_key(name.rpartition(".")[2], words, SaidBy.COMMAND, f"-o {name}")
                for name, words in said.items()
                if words is not None
            ]
        return []

    def _sections(self) -> list[str]:
        return [section for suite in self.other_suites for section in suite.sections]

    def _read_plain(
        self, rows: list[tuple[str, Optional[list[str]], int]], path: str, helpers: Collection[str]
    ) -> None:
        """Read (key, words, line) of a file. helpers: Python names that other lines use; they need not be settings."""
        if empty := [f"{key} (line {line})" for key, words, line in rows if words is None]:
            self.notes.append(f"{path}: without a value, and left out as by null: {', '.join(empty)}")
        for key, words, line in rows:
            if key in helpers and dashed(key) not in self.spellings:
                continue
            if words is not None and words is not files.NULL:
                self.read(self.of_key(key, words, SaidBy.FILE, f"{path}:{line}"))
            elif key not in {*self.groups, *self._sections()} and not self._knows(dashed(key)):
                self.problems.append(
                    messages.unknown(Word(dashed(key), [], SaidBy.FILE, f"{path}:{line}"), self.spellings)
                )

    def _knows(self, flag: str) -> bool:
        """Whether some reader takes a flag."""
        known = self._spelling(flag) or flag in spellings_of(schema.GROUPS)
        return bool(known) or any(suite.knows(flag) for suite in self.other_suites)

    def of_key(self, key: str, words: list[str], source: SaidBy, where: str) -> Word:
        """A key of a file as a word; a list becomes one word for a setting of text: split: [969, 30, 1]"""
        spelling = self._spelling(dashed(key))
        one = spelling and spelling.setting.kind is str and not spelling.setting.many and len(words) > 1
        return Word(dashed(key), [",".join(words)] if one else words, source, where)

    def _read_preset(self) -> None:
        """Read `--model-name-or-path`: a known shape fills unset settings; a folder becomes `--load`."""
        said = self.chosen()
        chosen = said.get("model_name_or_path")
        if chosen is None or chosen.source < SaidBy.FILE:
            return
        name = str(chosen.value)
        values = preset(name) or (dict(load=name, use_checkpoint_args=True) if Path(name).is_dir() else None)
        if values is None:
            known = nearest(name) or f" ({', '.join(NAMES)})"
            what = f"neither a folder nor a known shape{known}"
            if named := hub.hint(name.removeprefix(hub.SCHEME), IMPORT):
                what = f"no such folder{nearest(name)}{' (the shape alone)' * bool(nearest(name))}; {named}"
            self.problems.append(f"{chosen.words}: {what}")
        else:
            values = values | (self._vocabulary_of_preset(name, said) if preset(name) else {})
            self.say(values, SaidBy.PRESET, f"preset {name}", chosen.turn)

    def _vocabulary_of_preset(self, name: str, said: Mapping[str, Statement]) -> dict[str, Any]:
        """The vocabulary of a named shape, if none is given: the cache's, else as many numbers as it was published with.

        In training, one of the numbers ends documents. Beside a tokenizer, `tokenizer.rows_of` counts them.
        """
        given = {other: one.value for other, one in said.items() if one.value}
        if cached(name) and not given.keys() & set(VOCABULARY):
            return dict(tokenizer_model=name)
        kind = given.get("tokenizer_type", "NullTokenizer")
        if kind != "NullTokenizer" or given.keys() & (set(VOCABULARY) - {"mock_data"}):
            return {}
        texts = "tokenizer_type" not in given and given.keys() & set(REPLACES["mock_data"])
        return dict(vocab_size=published_rows(name) - (self.trains and not texts))

    def say(self, values: Mapping[str, Any], source: SaidBy, where: str, turn: Optional[int] = None) -> None:
        """Add statements for values of a preset, a recipe, a checkpoint or a plan. Unknown names are skipped.

        turn: default: the last one
        """
        for name, value in values.items():
            spelling = self.spellings.get(dashed(name))
            if spelling is None:
                continue
            try:
                value = spelling.setting.checked(value)
            except BadValue as bad:
                self.problems.append(f"{where}: {name} {bad}")
            else:
                words, default = f"{spelling.flag} {spelling.setting.word(value)} ({where})", spelling.setting.default
                common = dict(
                    turn=self.turn if turn is None else turn, default=None if spelling.setting.required else default
                )
                self.statements.append(Statement(name, value, source, spelling.flag, words, where, **common))

    def say_defaults(self, defaults: Mapping[str, Any], recipe: str) -> None:
        """Add a recipe's own defaults. An unknown setting or a bad value is a problem."""
        known = {spelling.setting.name for spelling in self.spellings.values()}
        for name in defaults:
            if name not in known:
                self.problems.append(f"defaults of {recipe}: there is no setting {name}{did_you_mean(name, known)}")
        values = {name: value(self.chosen()) if callable(value) else value for name, value in defaults.items()}
        self.say({name: value for name, value in values.items() if value is not None}, SaidBy.RECIPE, recipe)

    def chosen(self) -> dict[str, Statement]:
        """Map each setting to the statement that wins, of those read so far."""
        return resolve(self.statements)[0]

    def given_names(self) -> set[str]:
        """The settings that have a value so far, apart from empty ones."""
        return {name for name, one in self.chosen().items() if one.value}

    def is_said(self, flag: str) -> bool:
        """Whether there is a statement for the setting of a flag."""
        return any(one.name == self.spellings[flag].setting.name for one in self.statements)

    def resolve(self) -> dict[str, Statement]:
        """Resolve all statements at the end; contradictions are added to the problems."""
        self._drop_replaced_data()
        for suite in self.other_suites:
            suite.note_defaults()
        chosen, contradictions = resolve(self.statements)
        self.problems += contradictions
        lists: dict[str, str] = {}  # flags for several values that are given twice
        for one, by in overruled(self.statements, chosen):
            if by.decides and one.flag != by.flag:
                self.notices.setdefault(f"overridden by {by.words}", []).append(one.words)
            else:
                self.replaced.append((one.words, by.words))
                setting = self.spellings[one.flag].setting if one.flag in self.spellings else None
                if setting and setting.many and setting.kind is str and one.flag == by.flag:
                    lists[one.flag] = f"several values follow one {one.flag}, as in Megatron-LM: {one.flag} A B"
        self.notes += [*messages.replaced(self.replaced), *lists.values()]
        for suite in self.other_suites:
            suite.note_chosen(chosen)
        return chosen

    def _drop_replaced_data(self) -> None:
        """Data of the command line replace data of a file, whichever settings name them."""
        mine = {one.name for one in self.statements if one.source == SaidBy.COMMAND and one.value}
        others = {other for name in mine & set(REPLACES) for other in REPLACES[name]} - mine
        dropped = [one for one in self.statements if one.source == SaidBy.FILE and one.name in others and one.value]
        self.statements = [one for one in self.statements if one not in dropped]
        self.notes += [f"{one.words} gives way to the data of the command line" for one in dropped]

    def read_plan(self) -> Optional[GivenPlan]:
        """Read `--parallel-plan`: its layout overrides files and earlier turns; a flag that contradicts it is a problem."""
        chosen = self.chosen()
        asked = chosen.get("parallel_plan")
        if asked is None or not self.trains:
            return None
        plan = read_plan(str(asked.value))
        origin = f"--parallel-plan {plan.path}"
        if "auto_parallel" in chosen and chosen["auto_parallel"].value:
            self.problems.append(f"--auto-parallel searches a layout, and {origin} gives one; drop one of them")
        values = {
            name: self.spellings[dashed(name)].setting.default if value is None else value
            for name, value in plan.settings.items()
        }
        in_turn = lambda one: one.source < SaidBy.COMMAND or one.turn >= asked.turn
        self.statements = [one for one in self.statements if one.name not in values or in_turn(one)]
        before = len(self.statements)
        self.say(values, SaidBy.PLAN, origin)
        for one in self.statements[before:]:
            own = chosen.get(one.name)
            if own and own.source == SaidBy.COMMAND and own.turn >= asked.turn and own.value != one.value:
                there = plan.settings[one.name]
                self.problems.append(
                    f"{own.words} contradicts {origin}, where {one.name} is {'not given' if there is None else there}"
                )
        return plan

    def read_checkpoint(self, groups: Mapping[str, type], starts_from: tuple[str, ...] = ()) -> None:
        """Read the checkpoint for `--use-checkpoint-args`, or without a shape for `--finetune` and
        `--pretrained-checkpoint`: it fills what is not given.

        starts_from: other model types that --finetune begins with
        """
        chosen = self.chosen()
        values = {name: one.value for name, one in chosen.items()}
        lacks_shape = not SIZES <= set(chosen)
        asked, start = values.get("use_checkpoint_args"), values.get("pretrained_checkpoint")
        if asked and lacks_shape and not {"load", "pretrained_checkpoint"} & set(values):
            self.problems.append("--use-checkpoint-args needs --load: there is no checkpoint to take them from")
        if not self.trains:
            return
        folder, step = values.get("load"), values.get("ckpt_step")
        if start is not None and self._begins_with(str(start), values):
            folder, step, values["finetune"] = start, None, True
        if folder is None or not (asked or lacks_shape):
            return
        # Imported here: it needs packages that may be missing, which `run_main` reports.
        from megatron.settings.from_checkpoint import (
            Damaged,
            megatron_format_problem,
            pretrained_record,
            saved_record,
            settings_of_shape,
            shape_of,
        )

        if not (asked or start is not None or values.get("finetune")):
            if problem := megatron_format_problem(location(str(folder))):
                self.problems.append(f"{chosen['load'].words}: {problem}, then --load OUT --finetune")
            return

        if lacks_shape and folder == start:
            pretrained_record(start, values.get("save"))
        by_folder = asked and chosen["use_checkpoint_args"].source == SaidBy.PRESET
        source = "--pretrained-checkpoint" if start is not None else "--finetune"
        origin = chosen["model_name_or_path"].words if by_folder else "--use-checkpoint-args" if asked else source
        try:
            where, record = saved_record(str(folder), step)
        except (Damaged, OSError) as error:
            if lacks_shape:  # otherwise the run has not saved yet, and loading reports what is wrong
                self.problems.append(f"{origin}: no shape of a model can be taken from --load: {error}")
            return
        mine, theirs = (record.get("model_type", "GPT") for record in (values, record["config"]["model"]))
        if theirs not in (mine, *(starts_from if values.get("finetune") else ())):
            begin = "; --finetune begins a new run with its weights" if theirs in starts_from else ""
            if not asked and not starts_from and mine not in ("GPT", "T5", "BERT"):
                begin = f'; a recipe of your own begins with its weights if it has starts_from=("{theirs}",)'
            self.problems.append(
                f"{origin}: {where} holds a model of type {theirs}, and this command trains {mine}{begin}"
            )
            return
        said = {name for name, one in chosen.items() if one.source > SaidBy.RECIPE}
        shape = shape_of(record, settings_of_shape(groups), said)
        self.say(shape, SaidBy.PRESET, f"{origin} {where}")
        rank = shape.get("lora_rank")
        adapters = f", its adapters (--lora-rank {rank}), which this run continues to train" if rank else ""
        self.notes.append(f"the shape of the model{adapters}, and its tokenizer, are those of {where} ({origin})")

    def _begins_with(self, start: str, values: Mapping[str, Any]) -> bool:
        """Whether a run begins with `--pretrained-checkpoint`, as --load has nothing to resume from; says so then."""
        from megatron.settings.from_checkpoint import checkpoint_record

        if checkpoint_record(values.get("load"), values.get("ckpt_step")) is not None:
            return False
        begun = dict(finetune=True) | ({} if "load" in values else dict(load=start))
        self.say(begun, SaidBy.PRESET, "--pretrained-checkpoint")
        return True

    def print_notes(self) -> None:
        """Print the notes, once per job."""
        if os.environ.get("RANK", "0") == "0":
            everything = any(flag == "--print-config" for flag, _ in self.line.words)
            for note in [*self.notes, *messages.without_effect(self.notices, everything, self.usual)]:
                print(note if note.startswith("WARNING") else f"note: {note}", file=sys.stderr, flush=True)
