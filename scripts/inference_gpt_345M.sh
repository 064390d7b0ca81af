#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Let write what pretrain_gpt_345M_single.sh trained. One GPU, or a CPU.
#
#   CHECKPOINTS=... bash scripts/inference_gpt_345M.sh --prompt "The sun is"
source "$(dirname "$0")/_launch.sh"
FLAGS=("$@")
own=(--tokens-to-generate 60)
given --greedy --num-beams --config -c || own+=(--top-p 0.9 --temperature 0.8)
given --prompt --prompt-file --sample-input-file || own+=(--prompt "The future of")
run_tool megatron.tools.generate --load "${CHECKPOINTS:-checkpoints/gpt_345M}" "${own[@]}" --then "$@"
