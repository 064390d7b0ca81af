#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Export what prune_gpt_345M_single_card.sh trained as a program of torch. --format onnx works, too; Hugging Face and
# llama.cpp have no GPT-2 whose heads together are narrower than its hidden size.
# On a CPU; nothing is written unless both sides compute the same. SHRINK=1 prunes and exports a tiny model.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/export_prune_gpt_345M_single_card.sh
CHECKPOINTS=${CHECKPOINTS:-checkpoints/prune_gpt_345M}
SHAPE=(--num-attention-heads 14 --kv-channels 64 --ffn-hidden-size 3584) # for --dry-run
PRUNE=(--prune-ratio 0.25)                                               # of a tiny model, which has few heads
source "$(dirname "$0")/_trained.sh"
export_model 345M 1 "--format torch-export" "$@"
