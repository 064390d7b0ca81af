#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 125M parameters on one GPU, 5 billion tokens. The shape is that of GPT-3 (arXiv:2005.14165, table
# 2.1).
#
# needs      1 x A100-40GB: one GPU
# predicted  9.3 of 42.9 GB on the fullest rank
# predicted  3.60 s a step of 524,288 tokens, 145,688 tokens/s, 124 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 1 A100-40GB \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 \
    --micro-batch-size 16 --global-batch-size 512 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 10000 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
