#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama-like model of 1B parameters on the 8 GPUs of a node, in the shape of Llama 3.2 1B.
#
# needs      8 x H100-80GB: one node
# predicted  24.5 of 85.9 GB on the fullest rank
# predicted  3.16 s a step of 1,048,576 tokens, 332,050 tokens/s, 375 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 2%, worst 8% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 8 H100-80GB \
    --num-layers 16 --hidden-size 2048 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 8192 \
    --seq-length 4096 --vocab-size 128256  \
    --hidden-dropout 0 --attention-dropout 0 \
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather \
    --recompute-activations \
    --micro-batch-size 2 --global-batch-size 256 --bf16 \
    --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
