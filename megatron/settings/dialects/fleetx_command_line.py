# SPDX-License-Identifier: Apache-2.0
"""PaddleFleetX's files and overrides on a command line of ours."""

import re
from collections.abc import Iterable
from functools import cache, cached_property

from megatron.settings import schema
from megatron.settings.dialects.commands import PROMPT
from megatron.settings.dialects.fleetx import DEFAULTS, TABLES
from megatron.settings.dialects.fleetx_files import COMMAND, SECTIONS, Entries, Layers, dropped, in_words, is_fleetx
from megatron.settings.dialects.fleetx_keys import problem_text, translate_entries
from megatron.settings.dialects.table import OtherSuite, Word
from megatron.settings.presets import VOCABULARY, cache_folder, cached
from megatron.settings.spelling import BadValue, Spelling, spellings_of
from megatron.settings.statements import SaidBy, Statement

FLAGS = re.compile(r"(--[a-z][\w-]*)(?: ([\w./-]*[\w/]))?")
CHECKPOINTS = "-o Engine.save_load.ckpt_dir=FOLDER"


# A flag with a default -> settings that leave it out where the command line has them
TOGETHER = {
    "--train-iters": "train_samples train_epochs",
    "--eval-iters": "eval_interval full_validation eval_epoch",
    "--eval-interval": "eval_iters eval_epoch",
}


class FleetX(OtherSuite):
    """PaddleFleetX's files and overrides on a command line of ours."""

    title = "PaddleFleetX"
    sections = tuple(SECTIONS)

    def __init__(self, reader):
        super().__init__(reader)
        self.turns: dict[str, int] = {}  # the key of a file -> its turn
        self.given: Entries = {}  # what files and -o say in the end, if there is a file
        self.emptied: list[str] = []  # sections that are left empty

    @cached_property
    def layers(self) -> Layers:
        """The files and overrides."""
        return Layers()

    def reads_file(self, path: str, root) -> bool:
        if root is None or not is_fleetx(root):
            return False
        self.turns |= dict.fromkeys(self.layers.read(path), self.reader.turn)
        return True

    def overrides(self, word: str, turn: int) -> bool:
        key, equals, _ = word.partition("=")
        if key.partition(".")[0] not in SECTIONS or not equals:
            return False
        self.layers.override(word, turn)
        return True

    def read_all(self, placed: dict[str, list[Word]]) -> None:
        if "layers" not in vars(self):
            return  # there are no files and overrides
        reader, entries = self.reader, self.layers.entries
        translated = translate_entries(entries, reader.purpose, bool(reader.shape))
        self.emptied = [f"{one.where} {text}" for one, text in dropped(entries)]
        reader.notes += self.layers.notes + self.emptied + translated.remarks
        reader.replaced += map(in_words, self.layers.replaced)
        self.given = translated.given if reader.line.values("--config", "-c") else {}
        reader.compressed += translated.compressed
        for flag, words, one in translated.flags:
            by = [word for word in placed if f"{one.key}.".startswith(word.partition("=")[0] + ".")]
            on_command = one.where.startswith(COMMAND)
            word = reader.of_key(flag[2:], words, SaidBy.COMMAND if on_command else SaidBy.FILE, one.where)
            reader.turn = self.turns.get(one.key, 0)
            placed[by[-1]].append(word) if on_command else reader.read(word)
        for sentence, one in translated.notes:
            reader.notices.setdefault(sentence, []).append(one.where)
        reader.usual |= translated.usual
        reader.problems += [problem_text(one, why) for one, why in translated.problems]

    def fill(self) -> None:
        """What its programs have where nothing is said: defaults of its engine, GPT-2's vocabulary, a prompt."""
        reader, said = self.reader, self.reader.given_names()
        if not self.given:
            return
        if reader.purpose == "train" and any(key.startswith("Engine.") for key in self.given):
            self._say_defaults()
        if reader.purpose == "train" and not said & ({*VOCABULARY, "tokenizer_type"} - {"vocab_size"}):
            if problem := chinese(self.given):
                reader.problems.append(problem)
            elif folder := cached("gpt2"):
                reader.notes.append(f"the vocabulary is GPT-2's of {folder}, which PaddleFleetX trains with")
                reader.say(dict(tokenizer_model="gpt2"), SaidBy.PRESET, "PaddleFleetX's vocabulary")
        if reader.purpose == "generate" and not said & {"prompt", "prompt_file"}:
            reader.notes.append(
                f"the prompt is {PROMPT!r}, which PaddleFleetX has in its program: --prompt TEXT is another"
            )
            reader.say(dict(prompt=[PROMPT]), SaidBy.PRESET, "PaddleFleetX's prompt")

    def _say_defaults(self) -> None:
        """Defaults of its engine. Those of length and validation give way to words of the command line about these."""
        reader, theirs = self.reader, {}
        on_command = [one for one in reader.statements if one.source == SaidBy.COMMAND and not one.where]
        said = {one.name for one in on_command}
        for one in DEFAULTS:
            about = TOGETHER.get(one.flag, "").split()
            if one.applies(self.given) and not reader.is_said(one.flag) and not said & set(about):
                theirs[one.flag] = one.word
        if theirs:
            named = ", ".join(f"{flag} {word}" for flag, word in theirs.items())
            reader.notes.append(f"PaddleFleetX's defaults, where the file says nothing: {named}")
        values = {reader.spellings[flag].setting.name: reader.spellings[flag].value([theirs[flag]]) for flag in theirs}
        reader.say(values, SaidBy.PRESET, "PaddleFleetX's default")

    def why_missing(self, name: str) -> list[str]:
        for_training = name == "task" and self.given
        why = ["a file for pretraining: pretrain_gpt.py -c FILE"] * bool(for_training)
        return why + [f"of a PaddleFleetX file: {CHECKPOINTS}"] * bool(name == "load" and self.given) + self.emptied

    @classmethod
    def as_overrides(cls, values: Iterable[tuple[Statement, object]]) -> str:
        keys = [(one.where.rpartition(" ")[2], value) for one, value in values if one]
        return " ".join(f"-o {key}={value}" for key, value in keys if key.startswith("Model."))

    @classmethod
    def words_for(cls, advice: str) -> str:
        """
        >>> FleetX.words_for("--load runs/ck resumes that run; otherwise give another --save, or --load DIR")
        '-o Engine.save_load.ckpt_dir=runs/ck, -o Engine.save_load.output_dir=...'
        """
        found: dict[str, str] = {}
        for flag, word in FLAGS.findall("" if "-o " in advice else advice):
            spelling = spellings_of(schema.GROUPS).get(flag)
            if spelling and (key := _keys().get(spelling.setting.name)):
                found.setdefault(key, f"-o {key}={word if _is_value(word, spelling) else '...'}")
        return ", ".join(found.values())

    @classmethod
    def lacks_vocabulary(cls) -> str:
        cache = f"{cache_folder() / 'gpt2'} ($MEGATRON_CACHE/gpt2: vocab.json, merges.txt)"
        return (
            f"PaddleFleetX's GPT-2 vocabulary is neither in {cache} nor in ~/.cache/ppfleetx (gpt2-vocab.json, gpt2-merges"
            ".txt); put it there, or --vocab-file vocab.json --merge-file merges.txt, or --tokenizer-model FILE"
        )


@cache
def _keys() -> dict[str, str]:
    """Setting of pretraining -> the key that says it with the same value."""
    known, found = spellings_of(schema.GROUPS), {}
    for purpose in ("train", "task", "evaluate"):
        for key, meaning in TABLES[purpose].table.items():
            if "=" not in key and meaning in known:
                found.setdefault(known[meaning].setting.name, key)
    return found


def _is_value(word: str, spelling: Spelling) -> bool:
    """Whether the word behind a flag in a sentence is its value: N, DIR, a number, a path, one of its choices."""
    if word.isupper() or re.search(r"[\d/_.]", word):
        return True
    try:
        return spelling.setting.kind is not str and bool(word) and spelling.value([word]) is not None
    except BadValue:
        return False


def chinese(entries: Entries) -> str:
    """The problem of a file for training with a Chinese vocabulary, where none is given; else ""."""
    name = entries.get("Model.name")
    if name is None or name.value.lower() != "gpt-cn":
        return ""
    return (
        f"{name.where}: PaddleFleetX's GPT-cn has GPTChineseTokenizer, and no vocabulary is given: say --tokenizer-model "
        "FILE (its sentencepiece.model) and --tokenizer-type GPTChineseTokenizer"
    )
