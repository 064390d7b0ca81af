#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Let write what pretrain_gpt_6.7B_sharding16.sh trained. One GPU of 40 GB or more; NPROC=2: two GPUs share the model.
#
#   CHECKPOINTS=... bash scripts/inference_gpt_6.7B.sh --prompt "The sun is"
source "$(dirname "$0")/_trained.sh"
generate_text 6.7B 1 "$@"
