#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 13B parameters on 4 nodes: tensor parallel 2, ZeRO stage 1 over 16 ranks. The shape is that of GPT-3
# (arXiv:2005.14165, table 2.1).
#
# needs      32 x A100-80GB: 4 nodes of 8
# predicted  61.9 of 85.9 GB on the fullest rank
# predicted  25.57 s a step of 2,097,152 tokens, 82,005 tokens/s, 210 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 14% in 3 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 32 A100-80GB \
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 --vocab-size 50257 \
    --tensor-model-parallel-size 2 --sequence-parallel --recompute-activations \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 2 --global-batch-size 1024 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 127000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
