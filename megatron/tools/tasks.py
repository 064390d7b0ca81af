# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's `tasks/main.py` by its own words: fine-tuning is finetune.py, and evaluation without training
`megatron.tools.evaluate`.

    python -m megatron.tasks.main --task MNLI --train-data train.tsv --valid-data dev_matched.tsv dev_mismatched.tsv \\
        --pretrained-checkpoint checkpoints/gpt_345M --epochs 3 --save runs/mnli
    python -m megatron.tasks.main --task LAMBADA --valid-data lambada_test.jsonl --load checkpoints/gpt_345M
"""

from megatron.errors import run_main
from megatron.model.recipe import Recipe
from megatron.settings.parse import said
from megatron.settings.schema import GROUPS
from megatron.tasks import chat_settings
from megatron.tasks.description import WITHOUT_TRAINING
from megatron.tasks.settings import GROUP, TaskSettings


def recipe_of_command(argv: list[str]) -> Recipe:
    """The recipe of a command line, whose files may name the task, too."""
    task = said(argv, {**GROUPS, GROUP: TaskSettings}).get("task")
    if task is not None and str(task.value).lower() in chat_settings.TASKS:
        from megatron.tasks import chat

        return chat.recipe()
    from megatron.tasks import finetune

    return finetune.recipe()


def main(argv: list[str]) -> None:
    """Fine-tune, or evaluate, as --task says."""
    task = said(argv, {**GROUPS, GROUP: TaskSettings}).get("task")
    if task is not None and str(task.value).upper() in WITHOUT_TRAINING:
        from megatron.tools import evaluate

        return evaluate.main(argv, serves_training=True)
    from megatron.entry import start

    argv = _without_keep_last(argv)
    start(argv, recipe_of_command)


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
