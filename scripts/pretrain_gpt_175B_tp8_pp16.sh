#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 175B parameters on 16 nodes: tensor parallel 8 inside a node, pipeline 16 across them. The shape is
# that of GPT-3 (arXiv:2005.14165, table 2.1).
#
# needs      128 x A100-80GB: 16 nodes of 8
# predicted  39.0 of 85.9 GB on the fullest rank
# predicted  138.57 s a step of 3,145,728 tokens, 22,701 tokens/s, 191 TFLOP/s a GPU, bubble 5.9% (speeds assumed)
# assumed    speeds of eager FSDP: error 11% in 6 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 128 A100-80GB \
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel --recompute-activations \
    --micro-batch-size 1 --global-batch-size 1536 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.006 \
    --train-iters 95000 --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
