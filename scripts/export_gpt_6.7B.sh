#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# As export_gpt_345M.sh, of what pretrain_gpt_6.7B_sharding16.sh trained.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/export_gpt_6.7B.sh --format gguf --dtype bf16
source "$(dirname "$0")/_trained.sh"
export_model 6.7B 1 "" "$@"
