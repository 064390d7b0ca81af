#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Programs that continue text, of what pretrain_gpt_175B_tp8_pp16.sh trained, for eight ranks that share the model. Without
# the comparison, which would need the memory of the whole model in fp32; one rank's part is in memory at a time.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/export_gpt_175B_tp8.sh
source "$(dirname "$0")/_trained.sh"
export_model 175B "${TP:-8}" "--format torch-export --kind generation --no-check" "$@"
