# SPDX-License-Identifier: Apache-2.0
"""Pretraining with an automatically chosen layout: the planner's search, then the training in its result.

    torchrun --nproc-per-node gpu -m megatron.pretrain --task-type GPT --max-global-batch-size 16 --num-layers 48 ...
    python -m megatron.pretrain --task-type GPT --world-size 64 --local-world-size 8 --max-global-batch-size 16 ...

On the ranks of a job it is `pretrain_gpt.py --auto-parallel`. With --world-size, outside of a job, it prints the layouts
that such a cluster could have, as `python -m megatron.tools.plan` does, and trains nothing.
"""

import os
from collections.abc import Mapping

from megatron.entry import start
from megatron.errors import UsageError, run_main
from megatron.model.recipe import named_recipe
from megatron.settings import rank_env
from megatron.settings.parse import said

TASKS = ("GPT",)


def main(argv: list[str], env: Mapping[str, str] = os.environ) -> None:
    """Train, or plan. The command line is that of pretrain_gpt.py and of megatron.tools.plan, and --task-type."""
    task, flags = split_task(rank_env.adopt(argv))
    if task.rpartition(".")[2].upper() not in TASKS:
        raise UsageError(f"--task-type {task}: there is {', '.join(TASKS)}", do="leave it out, or say --task-type GPT")
    asked = said(flags)
    if "world_size" in asked and not rank_env.is_started(env) and not {"dry_run", "preflight"} & set(asked):
        from megatron.tools import plan

        return plan.main(flags)
    start(["--auto-parallel", *flags], named_recipe("GPT"))


def split_task(argv: list[str]) -> tuple[str, list[str]]:
    """(the value of --task-type, the other words).

    >>> split_task(["--task-type", "megatron.GPT", "--num-layers", "4"])
    ('megatron.GPT', ['--num-layers', '4'])
    """
    task, rest, words = TASKS[0], [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != "--task-type":
            rest.append(word)
        elif not equals and (value := next(words, "")) == "":
            raise UsageError("--task-type needs a value", do="--task-type GPT")
        else:
            task = value
    return task, rest


if __name__ == "__main__":
    run_main(main)
