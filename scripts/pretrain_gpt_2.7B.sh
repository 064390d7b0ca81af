#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 2.7B parameters on the 8 GPUs of a node, ZeRO stage 1. The shape is that of GPT-3 (arXiv:2005.14165,
# table 2.1).
#
# needs      8 x A100-40GB: one node
# predicted  35.0 of 42.9 GB on the fullest rank
# predicted  12.59 s a step of 1,048,576 tokens, 83,258 tokens/s, 186 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 8 A100-40GB \
    --num-layers 32 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 --vocab-size 50257 \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather \
    --recompute-activations \
    --micro-batch-size 2 --global-batch-size 512 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 50000 --lr 1.6e-4 --min-lr 1.6e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
