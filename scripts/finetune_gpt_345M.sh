#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fine-tune what pretrain_gpt_345M_single.sh trained on a task of GLUE: TASK [split] [flags]. Batch, learning rate,
# warm-up and epochs are PaddleFleetX's.
# Differs: the decay counts from the end of the warm-up (theirs from step 0: --lr-decay-style linear-from-start), fp32 (fp16).
# One GPU, or a CPU; NPROC=8 divides the batches over so many ranks.
#
#   DATA=glue CHECKPOINTS=checkpoints/gpt_345M bash scripts/finetune_gpt_345M.sh SST2
#   DATA=glue CHECKPOINTS=... bash scripts/finetune_gpt_345M.sh MNLI dev_mismatched     (default: both of its sets)
#   DATA=glue CHECKPOINTS=... bash scripts/finetune_gpt_345M.sh RTE --lr 1e-5 --train-epochs 5
#
# DATA         folder with the tasks' folders as GLUE names them (SST-2, MNLI ...), or that of the task
# CHECKPOINTS  folder of the pretrained checkpoint
# OUT          folder for checkpoints, the best one and predictions; a run that was stopped goes on from there
source "$(dirname "$0")/_launch.sh"
finetune_on_task "${1:-}" "${@:2}"
