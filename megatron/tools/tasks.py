# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's `tasks/main.py` by its own words: fine-tuning is finetune.py, and evaluation without training
`megatron.tools.evaluate`.

    python -m megatron.tasks.main --task MNLI --train-data train.tsv --valid-data dev_matched.tsv dev_mismatched.tsv \\
        --pretrained-checkpoint checkpoints/gpt_345M --epochs 3 --save runs/mnli
    python -m megatron.tasks.main --task LAMBADA --valid-data lambada_test.jsonl --load checkpoints/gpt_345M
"""

import contextlib
import sys
from dataclasses import fields

from megatron.errors import SettingsError, run_main
from megatron.settings import messages
from megatron.settings.from_checkpoint import saved_record
from megatron.settings.parse import said
from megatron.settings.rank_env import ranks
from megatron.settings.reader import SettingsReader
from megatron.settings.schema import GROUPS, ON_RESUME, Model, TokenizerSettings, from_record
from megatron.settings.spelling import spellings_of
from megatron.settings.statements import Statement
from megatron.settings.words import split
from megatron.storage.durable import Damaged
from megatron.tasks.description import WITHOUT_TRAINING
from megatron.tasks.settings import GROUP, TaskSettings

# settings of the model that a checkpoint decides
SHAPE = {field.name for field in fields(Model) if field.metadata.get("on_resume") in ON_RESUME[:2]}
# settings with a default that others give -> the property with their value
FILLED_BY = dict(ffn_hidden_size="ffn_size", kv_channels="head_dim", num_query_groups="query_groups")
FILLED_BY |= dict(max_position_embeddings="position_table")


def main(argv: list[str]) -> None:
    """Fine-tune, or evaluate, as --task says."""
    task = said(argv, {**GROUPS, GROUP: TaskSettings}).get("task")
    if task is not None and str(task.value).upper() in WITHOUT_TRAINING:
        from megatron.tools import evaluate

        return evaluate.main(_zero_shot(argv))
    from megatron.tasks.finetune import recipe
    from megatron.training.entry import start

    start(_without_keep_last(argv), recipe())


def _zero_shot(argv: list[str]) -> list[str]:
    """The words that `evaluate` knows. The model's shape is compared with the checkpoint's; a note names other settings."""
    from megatron.tools.evaluate import EvaluateOptions

    own, training = dict(evaluate=EvaluateOptions, tokenizer=TokenizerSettings), spellings_of(GROUPS)
    line, mine, others = split(argv, {*spellings_of(own), *training}), [], []
    for flag, words in line.words:
        (others if flag in training and flag not in spellings_of(own) else mine).extend([flag, *words])
    reader = SettingsReader(GROUPS)
    reader.read_command(others)
    if line.problems or not others:
        return argv
    if reader.problems:
        raise messages.usage_error(reader.problems, "python -m megatron.tasks.main")
    asked, load = reader.chosen(), said(mine, own).get("load")
    shape = {name: asked.pop(name) for name in sorted(SHAPE & set(asked))}
    with contextlib.suppress(Damaged):  # which `evaluate` reports
        if load is not None and shape:
            _compare(shape, str(load.value))
    if asked and ranks().rank == 0:
        listed = ", ".join(one.words for one in asked.values())
        print(f"note: settings of training, which an evaluation does not do: {listed}", file=sys.stderr)
    return mine


def _compare(shape: dict[str, Statement], load: str) -> None:
    """Raise SettingsError if the checkpoint has another shape than the command line says."""
    place, record = saved_record(load)
    model = from_record(record["config"]).model
    saved = {name: getattr(model, FILLED_BY.get(name, name)) for name in shape}
    wrong = [f"{one.words}: {saved[name]} in the checkpoint" for name, one in shape.items() if saved[name] != one.value]
    if wrong:
        raise SettingsError(
            f"{place} holds another model",
            "\n  ".join(wrong),
            "leave flags of the shape out: they come from the checkpoint",
        )


def _without_keep_last(argv: list[str]) -> list[str]:
    """Megatron-LM's --keep-last has no value and keeps the last partial batch, as here is always done; with a number it is
    that of checkpoints.
    """
    return [
        word
        for word, after in zip(argv, [*argv[1:], "--"])
        if word.replace("_", "-") != "--keep-last" or not after.startswith("--")
    ]


if __name__ == "__main__":
    run_main(main)
