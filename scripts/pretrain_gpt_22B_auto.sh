#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 22B parameters on 2 nodes; the layout is searched for the GPUs that there are, with a global batch of
# up to 32.
#
# needs      16 x A100-80GB: 2 nodes of 8
# layout     tp2sp-pp2vp8-dp4-zero1, micro-batch 1: the planner's choice for these
# predicted  70.1 of 85.9 GB on the fullest rank
# predicted  2.82 s a step of 65,536 tokens, 23,215 tokens/s, 203 TFLOP/s a GPU, bubble 2.7% (speeds assumed)
# assumed    speeds of eager FSDP: error 11% in 6 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 16 A100-80GB \
    --num-layers 48 --hidden-size 6144 --num-attention-heads 64 --seq-length 2048 --vocab-size 51200 \
    --auto-parallel --max-global-batch-size 32 \
    --max-position-embeddings 2048 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 100 --lr 2e-4 --min-lr 2e-4 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
