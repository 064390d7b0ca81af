#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How good is what prune_gpt_345M_single_card.sh trained? One GPU, or a CPU; NPROC=8 shares the work between so many
# ranks.
# --dry-run predicts memory and time per token, and reads nothing.
#
#   CHECKPOINTS=... bash scripts/eval_prune_gpt_345M_single_card.sh --task LAMBADA --valid-data lambada_test.jsonl
#   CHECKPOINTS=... bash scripts/eval_prune_gpt_345M_single_card.sh --data-path held_out_text_document
CHECKPOINTS=${CHECKPOINTS:-checkpoints/prune_gpt_345M}
SHAPE=(--num-attention-heads 14 --kv-channels 64 --ffn-hidden-size 3584) # for --dry-run
source "$(dirname "$0")/_trained.sh"
evaluate_model 345M "" "$@"
