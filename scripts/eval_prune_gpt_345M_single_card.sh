#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How good is what prune_gpt_345M_single_card.sh trained? One GPU, or a CPU; NPROC=8 shares the work between so many
# ranks.
#
#   CHECKPOINTS=... bash scripts/eval_prune_gpt_345M_single_card.sh --task LAMBADA --valid-data lambada_test.jsonl
#   CHECKPOINTS=... bash scripts/eval_prune_gpt_345M_single_card.sh --data-path held_out_text_document
source "$(dirname "$0")/_launch.sh"
run_tool_on_ranks megatron.tools.evaluate --load "${CHECKPOINTS:-checkpoints/prune_gpt_345M}" \
    --micro-batch-size 8 --then "$@"
