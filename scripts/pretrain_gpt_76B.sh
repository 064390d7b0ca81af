#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 76B parameters on 128 nodes: tensor parallel 8, pipeline 4, data parallel 32, as in arXiv:2104.04473,
# table 1, with the sequence parallelism of arXiv:2205.05198.
#
# needs      1024 x A100-80GB: 128 nodes of 8
# predicted  29.5 of 85.9 GB on the fullest rank
# predicted  10.02 s a step of 3,670,016 tokens, 366,207 tokens/s, 169 TFLOP/s a GPU, bubble 11.1% (speeds assumed)
# assumed    speeds of eager FSDP: error 2%, worst 8% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 1024 A100-80GB \
    --num-layers 60 --hidden-size 10240 --num-attention-heads 80 --seq-length 2048 --vocab-size 51200 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel --recompute-activations \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 2 --global-batch-size 1792 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 82000 --lr 8e-5 --min-lr 8e-6 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
