#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How good is what pretrain_gpt_345M_single.sh trained? One GPU, or a CPU; NPROC=8 shares the work between so many ranks.
# --dry-run predicts memory and time per token, and reads nothing.
#
#   CHECKPOINTS=... bash scripts/evaluate_gpt_345M.sh --data-path held_out_text_document
#   CHECKPOINTS=... bash scripts/evaluate_gpt_345M.sh --task LAMBADA --valid-data lambada_test.jsonl
#   CHECKPOINTS=... bash scripts/evaluate_gpt_345M.sh --task WIKITEXT103 --valid-data wiki.test.tokens
source "$(dirname "$0")/_trained.sh"
evaluate_model 345M "" "$@"
