# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a task: those of GLUE and CLUE, one of your own, or conversations. The loop is that of
pretraining.

    python finetune.py --task chat --train-data talks.jsonl --load checkpoints/345M --chat-template plain --save runs/chat
    python finetune.py --task SST2 --data-path glue/SST-2 --load checkpoints/gpt_345M --save runs/sst2
    torchrun --nproc-per-node 4 finetune.py --task my_task.yaml --data-path data --load checkpoints/gpt_345M \\
        --tensor-model-parallel-size 2 --sharding-stage 2 --save runs/my_task

docs/finetuning.md and docs/chat.md have more.
"""

from megatron.entry import start
from megatron.errors import run_main
from megatron.tasks import finetune
from megatron.tools.tasks import recipe_of_command

recipe = finetune.recipe


def main(argv: list[str]) -> None:
    """Check the settings, those that the task and the checkpoint give among them; then train."""
    start(argv, recipe_of_command)


if __name__ == "__main__":
    run_main(main)
