#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Hand what pretrain_gpt_345M_single.sh trained to Hugging Face transformers: weights, settings, vocabulary.
# On a CPU; nothing is written unless both models answer alike.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/export_gpt_345M.sh
source "$(dirname "$0")/_launch.sh"
checkpoints=${CHECKPOINTS:-checkpoints/gpt_345M}
run_tool megatron.tools.checkpoint to-hf "$checkpoints" "${EXPORT:-$checkpoints-hf}" "$@"
