#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time generation by MP ranks (8 unless set) that share an exported or trained model: PaddleFleetX's prompt of 128 tokens
# and 10 measured batches.
#
#   EXPORT=output bash scripts/run_benchmark.sh                  # what export_gpt_175B_tp8.sh wrote
#   MP=1 CHECKPOINTS=checkpoints/gpt_345M bash scripts/run_benchmark.sh
source "$(dirname "$0")/_trained.sh"
NPROC=${MP:-${NPROC:-8}} FLAGS=("$@")
! given --dry-run || predict 175B "$NPROC" benchmark
run_tool_on_ranks megatron.tools.benchmark_inference --load "${EXPORT:-${CHECKPOINTS:-checkpoints/gpt_175B}}" \
    --prompt-length 128 --iterations 10 --tensor-model-parallel-size "$NPROC" --then "$@"
