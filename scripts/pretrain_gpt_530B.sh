#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 530B parameters on 35 nodes: tensor parallel 8, pipeline 35 with 3 chunks of a layer each, as in
# arXiv:2205.05198, table 3.
#
# needs      280 x A100-80GB: 35 nodes of 8
# predicted  64.6 of 85.9 GB on the fullest rank
# predicted  33.44 s a step of 573,440 tokens, 17,149 tokens/s, 198 TFLOP/s a GPU, bubble 10.3% (speeds assumed)
# assumed    speeds of eager FSDP: error 11% in 6 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 280 A100-80GB \
    --num-layers 105 --hidden-size 20480 --num-attention-heads 128 --seq-length 2048 --vocab-size 51200 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 35 --num-layers-per-virtual-pipeline-stage 1 \
    --sequence-parallel --recompute-activations \
    --micro-batch-size 1 --global-batch-size 280 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.005 \
    --train-iters 470000 --lr 5e-5 --min-lr 5e-6 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
