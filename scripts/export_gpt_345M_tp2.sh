#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Weights of what pretrain_gpt_345M_single.sh trained, for two tensor parallel ranks: a file for each, which then reads
# nothing else. On a CPU, in bounded memory, from whatever layout has written the checkpoint. TP=4: for four.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/export_gpt_345M_tp2.sh
source "$(dirname "$0")/_launch.sh"
checkpoints=${CHECKPOINTS:-checkpoints/gpt_345M}
run_tool megatron.tools.checkpoint reshard "$checkpoints" "${EXPORT:-$checkpoints-tp${TP:-2}}" \
    --tensor-model-parallel-size "${TP:-2}" --weights-only "$@"
