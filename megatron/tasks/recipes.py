# SPDX-License-Identifier: Apache-2.0
"""The recipe that --task of finetune.py names: a task with labels, or conversations."""

from megatron.model.recipe import Recipe
from megatron.settings.parse import said
from megatron.settings.schema import GROUPS
from megatron.tasks import chat_settings
from megatron.tasks.settings import GROUP, TaskSettings


def recipe_of_command(argv: list[str]) -> Recipe:
    """The recipe of a command line, whose files may name the task, too."""
    task = said(argv, {**GROUPS, GROUP: TaskSettings}).get("task")
    if task is not None and str(task.value).lower() in chat_settings.TASKS:
        from megatron.tasks import chat

        return chat.recipe()
    from megatron.tasks import finetune

    return finetune.recipe()
