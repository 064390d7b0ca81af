#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# 32 experts, 20.9B parameters of which a token uses 3.6B, attention sinks, windows in every other layer, on 2 nodes:
# gpt-oss-20b (arXiv:2508.10925).
#
# needs      16 x H100-80GB: 2 nodes of 8
# predicted  58.0 of 85.9 GB on the fullest rank
# predicted  22.07 s a step of 4,194,304 tokens, 190,075 tokens/s, 287 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 44% in 7 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 16 H100-80GB \
    --model-name-or-path gpt-oss-20b --seq-length 4096 --vocab-size 201088 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \
    --expert-model-parallel-size 8 --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather \
    --recompute-granularity selective --recompute-modules core_attn mlp \
    --micro-batch-size 1 --global-batch-size 1024 --bf16 \
    --train-iters 500000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
