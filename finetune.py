# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a task: those of GLUE and CLUE, or one of your own. The loop is that of pretraining.

    python finetune.py --task SST2 --data-path glue/SST-2 --load checkpoints/gpt_345M --save runs/sst2
    torchrun --nproc-per-node 4 finetune.py --task my_task.yaml --data-path data --load checkpoints/gpt_345M \\
        --tensor-model-parallel-size 2 --sharding-stage 2 --save runs/my_task

docs/finetuning.md has more.
"""

from megatron.errors import run_main
from megatron.tasks import finetune
from megatron.tasks.finetune import recipe_for
from megatron.tools.pretrain import start

recipe = finetune.recipe


def main(argv: list[str]) -> None:
    """Settings that the task and the checkpoint give, then those of the command line; then train."""
    start(*recipe_for(argv))


if __name__ == "__main__":
    run_main(main)
