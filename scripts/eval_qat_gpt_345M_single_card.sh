#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# How good is what qat_gpt_345M_single_card.sh trained, with products of int8? One GPU, or a CPU; NPROC=8 shares the work
# between so many ranks.
# --dry-run predicts memory and time per token, and reads nothing.
#
#   CHECKPOINTS=... bash scripts/eval_qat_gpt_345M_single_card.sh --task LAMBADA --valid-data lambada_test.jsonl
#   CHECKPOINTS=... bash scripts/eval_qat_gpt_345M_single_card.sh --data-path held_out_text_document
CHECKPOINTS=${CHECKPOINTS:-checkpoints/qat_gpt_345M}
SHAPE=(--quantize int8) # for --dry-run
source "$(dirname "$0")/_trained.sh"
evaluate_model 345M "--quantize int8" "$@"
