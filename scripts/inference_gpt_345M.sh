#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Let write what pretrain_gpt_345M_single.sh trained. One GPU, or a CPU; NPROC=2: two ranks share the model.
#
#   CHECKPOINTS=... bash scripts/inference_gpt_345M.sh --prompt "The sun is"
#   EXPORT=... bash scripts/inference_gpt_345M.sh --prompt "The sun is"        # what export_gpt_345M.sh wrote
source "$(dirname "$0")/_trained.sh"
generate_text 345M 1 "$@"
