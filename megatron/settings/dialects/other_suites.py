# SPDX-License-Identifier: Apache-2.0
"""The suites whose words our own commands read (`table.OtherSuite`), beside those that `megatron.tools.translate` knows."""

import os
from pathlib import Path

from megatron.errors import did_you_mean
from megatron.settings.argv import with_dashes
from megatron.settings.declare import dashed, declared
from megatron.settings.dialects.colossalai import COLOSSALAI
from megatron.settings.dialects.commands import (
    CHINESE,
    PROFILER,
    TABLES,
    answer_of_paddlenlp,
    defaults_of_paddlenlp,
    profiler_options,
)
from megatron.settings.dialects.fleetx_command_line import FleetX
from megatron.settings.dialects.megatron_lm import DATA_FILES, answer, data_in_file
from megatron.settings.dialects.table import OtherSuite, Word
from megatron.settings.files import read_python
from megatron.settings.schema import GROUPS, Data
from megatron.settings.spelling import spellings_of
from megatron.settings.statements import SaidBy, Statement

DATA = declared("replaces", Data)  # settings that name data


class MegatronLM(OtherSuite):
    """Flags of Megatron-LM that this suite does not have."""

    def reads(self, word: Word) -> bool:
        reader, known = self.reader, answer(word.flag, word.words)
        if word.flag in DATA_FILES and reader.trains:
            self._read_data(word)
        elif known is None or known.refused and not reader.trains:
            return False
        elif known.refused:
            near = did_you_mean(word.flag, spellings_of(GROUPS), cutoff=0.9)  # patterns match misspellings, too
            reader.problems.append(f"{word} is not supported: {known.sentence}{near}")
        elif known.sentence:
            reader.notices.setdefault(known.sentence, []).append(str(word))
        return True

    def knows(self, flag: str) -> bool:
        return answer(flag) is not None

    def _read_data(self, word: Word) -> None:
        """`--data-args-path FILE` and `--per-split-data-args-path FILE`."""
        if len(word.words) != 1:
            self.reader.problems.append(f"{word} takes one file, got {len(word.words)}")
            return
        where = f"{word.where or word.flag} {word.words[0]}"
        try:
            for flag, words in data_in_file(word.flag, word.words[0]):
                self.reader.read(word._replace(flag=flag, words=words, where=where))
        except (OSError, ValueError) as error:
            self.reader.problems.append(f"{where}: {getattr(error, 'strerror', None) or error}")


# (a flag that others override, setting) -> what it means without them
GIVES_WAY = {("--use-amp", "precision"): "is fp16"}
GIVES_WAY |= {("--check-accuracy", f"{kind}_dropout"): "is no dropout" for kind in ("hidden", "attention")}


class PaddleNLP(OtherSuite):
    """Flags of PaddleNLP that this suite does not have."""

    def reads(self, word: Word) -> bool:
        reader = self.reader
        if word.flag in map(with_dashes, PROFILER) and reader.trains:
            self._read_profiler(word)
            return True
        idle, refused = answer_of_paddlenlp(word.flag, word.words) if reader.purpose else ("", "")
        if idle:
            reader.notices.setdefault(idle, []).append(str(word))
        elif refused:
            reader.problems.append(f"{word} {refused}")
        return bool(idle or refused)

    def knows(self, flag: str) -> bool:
        return any(answer_of_paddlenlp(flag, []))

    def _read_profiler(self, word: Word) -> None:
        """`--profiler_options "batch_range=[10,20];..."`"""
        try:
            for flag, words in profiler_options(word.words):
                self.reader.read(word._replace(flag=flag, words=words, where=word.where or word.flag))
        except ValueError as error:
            self.reader.problems.append(f"{word} {error}")
        if idle := [part.strip() for part in " ".join(word.words).split(";") if part.strip().startswith(TABLES)]:
            why = "the tables have all times, of the host and the device"
            self.reader.notices.setdefault(why, []).extend(idle)

    def note_defaults(self) -> None:
        """Note learning rate flags without a decay style, whose default is cosine there, and other defaults."""
        reader, words = self.reader, self.reader.line.words
        theirs = [one.flag for one in reader.statements if one.flag in ("--decay-steps", "--warmup-rate")]
        if "--warmup-rate" in theirs and ("--lr-decay-style", ["none"]) in words:
            reader.notes.append("--warmup-rate with --lr-decay-style none warms up; PaddleNLP has no warm-up then")
        if theirs and reader.trains and not reader.is_said("--lr-decay-style"):
            reader.notes.append(
                f"{theirs[0]} without --lr-decay-style: linear, as in Megatron-LM; PaddleNLP's is cosine"
            )
        said = {one.name for one in reader.statements}
        if ("--model-type", ["gpt-cn"]) in words and "tokenizer_model" not in said:
            reader.notes.append(f"--model-type gpt-cn trains a GPT; {CHINESE}")
        if reader.trains:
            reader.notes += defaults_of_paddlenlp(words, reader.is_said)

    def note_chosen(self, chosen: dict[str, Statement]) -> None:
        for one in self.reader.statements:
            by, why = chosen.get(one.name), GIVES_WAY.get((one.flag, one.name))
            if why and by and not one.withdraws and by.is_given and by.flag != one.flag and by.value != one.value:
                self.reader.notes.append(f"{one.words} {why}, and gives way to {by.words}")


class ColossalAI(OtherSuite):
    """Python files of Colossal-AI."""

    read_any = False  # whether a file is one

    def reads_file(self, path: str, root) -> bool:
        if root is not None or not (path.endswith(".py") and Path(path).is_file()):
            return False
        from megatron.settings.dialects.translate import translate  # it needs `rules`, which reads this module

        reader = self.reader
        sources = read_python(path, COLOSSALAI.names)
        if not any(
            COLOSSALAI.knows(one.key) and dashed(one.key.split(".")[-1]) not in reader.spellings for one in sources
        ):
            return False
        self.read_any = True
        names = {flag: one.setting.name for flag, one in reader.spellings.items()}
        data = [flag for flag, _ in reader.line.words if names.get(flag) in DATA]
        if data and (named := [one for one in sources if one.key == "DATA"]):
            reader.notices.setdefault(f"{data[0]} says the data", []).extend(f"{one.where}: DATA" for one in named)
            sources = [one for one in sources if one.key != "DATA"]
        translation = translate(COLOSSALAI, sources)
        for line in translation.lines:
            where = line.source.where if line.source else COLOSSALAI.unasked
            reader.read(Word(line.flag, line.words, SaidBy.FILE, where))
        started = "ranks are numbered by torchrun or srun, or by --rank and --world-size of the command line"
        for source, sentence in [*translation.idle, *((one.source, started) for one in translation.kept)]:
            reader.notices.setdefault(sentence, []).append(f"{source.where}: {source.key}")
        wrong = (*translation.lost, *translation.unknown)
        reader.problems += [f"{source.where}: {source.text}: {sentence}" for source, sentence in wrong]
        return True

    def fill(self) -> None:
        """Name the data of the environment, which its GPT reads, if none is given."""
        if self.read_any and (data := os.environ.get("DATA")) and not self.reader.given_names() & set(DATA):
            self.reader.notes.append(f"DATA={data} of the environment is not read: {_data_by_flags(data)}")


def _data_by_flags(data: str) -> str:
    """What to do with data that Colossal-AI's GPT reads: lines of text, or token files of this suite."""
    if Path(f"{data}.idx").is_file():
        return f"say --data-path {data}"
    stem = Path(data).name.partition(".")[0]
    return (
        f"python preprocess_data.py --input {data} --output-prefix {stem} --append-eod and the tokenizer's flags make "
        f"tokens of its texts; then add --data-path {stem}_text_document --dataset-type webtext here"
    )


OTHER_SUITES = (MegatronLM, PaddleNLP, FleetX, ColossalAI)
