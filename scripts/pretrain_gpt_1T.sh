#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of a trillion parameters on 64 nodes: tensor parallel 8, pipeline 64, as in arXiv:2205.05198, table 3.
#
# needs      512 x A100-80GB: 64 nodes of 8
# predicted  70.8 of 85.9 GB on the fullest rank
# predicted  65.57 s a step of 1,048,576 tokens, 15,992 tokens/s, 191 TFLOP/s a GPU, bubble 17.7% (speeds assumed)
# assumed    speeds of eager FSDP: error 11% in 6 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 512 A100-80GB \
    --num-layers 128 --hidden-size 25600 --num-attention-heads 160 --seq-length 2048 --vocab-size 51200 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 64 --sequence-parallel \
    --recompute-activations \
    --micro-batch-size 1 --global-batch-size 512 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.004 \
    --train-iters 286000 --lr 4e-5 --min-lr 4e-6 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
