#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT-2 small by ZeRO stage 3 with everything on the host that can be there: parameters, gradients, optimizer
# state. Activations are computed again.
#
# needs      2 x V100-16GB: one node
# predicted  3.4 of 17.2 GB on the fullest rank, and 1.1 GB of the host's memory for each rank
# predicted  925.26 ms a step of 65,536 tokens, 70,830 tokens/s, 30 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error unknown (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 2 V100-16GB \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 \
    --sharding-stage 3 --param-cpu-offload --optimizer-cpu-offload --recompute-granularity full \
    --micro-batch-size 8 --global-batch-size 64 --fp16 \
    --train-iters 100000 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
