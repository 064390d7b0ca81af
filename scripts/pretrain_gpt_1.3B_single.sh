#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 1.3B parameters on one GPU, 26 billion tokens; activations are computed again.
#
# needs      1 x A100-40GB: one GPU
# predicted  26.9 of 42.9 GB on the fullest rank
# predicted  30.91 s a step of 524,288 tokens, 16,960 tokens/s, 144 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 1 A100-40GB \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257 \
    --recompute-granularity full \
    --micro-batch-size 8 --global-batch-size 512 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 50000 --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
