#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 39B parameters on 64 nodes: tensor parallel 8, pipeline 2, data parallel 32, as in arXiv:2104.04473,
# table 1, with the sequence parallelism of arXiv:2205.05198.
#
# needs      512 x A100-80GB: 64 nodes of 8
# predicted  32.9 of 85.9 GB on the fullest rank
# predicted  9.10 s a step of 3,145,728 tokens, 345,829 tokens/s, 165 TFLOP/s a GPU, bubble 8.3% (speeds assumed)
# assumed    speeds of eager FSDP: error 2%, worst 8% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 512 A100-80GB \
    --num-layers 48 --hidden-size 8192 --num-attention-heads 64 --seq-length 2048 --vocab-size 51200 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel --recompute-activations \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 4 --global-batch-size 1536 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 95000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
