#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Llama-like model of 70B parameters on 16 nodes, in the shape of Llama 3 70B (arXiv:2407.21783, table 3).
#
# needs      128 x H100-80GB: 16 nodes of 8
# predicted  45.2 of 85.9 GB on the fullest rank
# predicted  46.69 s a step of 4,194,304 tokens, 89,842 tokens/s, 338 TFLOP/s a GPU, bubble 4.5% (speeds assumed)
# assumed    speeds of eager FSDP: error unknown (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 128 H100-80GB \
    --num-layers 80 --hidden-size 8192 --num-attention-heads 64 \
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 28672 \
    --seq-length 8192 --vocab-size 128256 --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 \
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather --recompute-granularity full_attn \
    --micro-batch-size 1 --global-batch-size 512 --bf16 \
    --train-iters 240000 --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
