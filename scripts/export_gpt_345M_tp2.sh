#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Programs that continue text, of what pretrain_gpt_345M_single.sh trained, for two ranks that share the model: one for
# each. On a CPU, from whatever layout has written the checkpoint. TP=4: for four.
#
#   CHECKPOINTS=... EXPORT=exported bash scripts/export_gpt_345M_tp2.sh
#   NPROC=2 EXPORT=exported bash scripts/inference_gpt_345M.sh --prompt "The sun is"
source "$(dirname "$0")/_trained.sh"
export_model 345M "${TP:-2}" "--format torch-export --kind generation" "$@"
