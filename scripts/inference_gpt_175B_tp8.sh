#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Let write what pretrain_gpt_175B_tp8_pp16.sh trained: eight GPUs of 80 GB share the model.
#
#   CHECKPOINTS=... bash scripts/inference_gpt_175B_tp8.sh --prompt "The sun is"
source "$(dirname "$0")/_trained.sh"
generate_text 175B 8 "$@"
