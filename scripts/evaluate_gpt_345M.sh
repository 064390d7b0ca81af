#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How good is what pretrain_gpt_345M_single.sh trained? One GPU, or a CPU; NPROC=8 shares the work between so many ranks.
#
#   CHECKPOINTS=... bash scripts/evaluate_gpt_345M.sh --data-path held_out_text_document
#   CHECKPOINTS=... bash scripts/evaluate_gpt_345M.sh --task LAMBADA --valid-data lambada_test.jsonl
#   CHECKPOINTS=... bash scripts/evaluate_gpt_345M.sh --task WIKITEXT103 --valid-data wiki.test.tokens
source "$(dirname "$0")/_launch.sh"
run_tool_on_ranks megatron.tools.evaluate --load "${CHECKPOINTS:-checkpoints/gpt_345M}" --micro-batch-size 8 --then "$@"
