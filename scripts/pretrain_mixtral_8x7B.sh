#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# 8 experts, 46.7B parameters of which a token uses 12.9B, on 8 nodes: Mixtral 8x7B (arXiv:2401.04088).
#
# needs      64 x H100-80GB: 8 nodes of 8
# predicted  64.7 of 85.9 GB on the fullest rank
# predicted  3.55 s a step of 1,048,576 tokens, 295,770 tokens/s, 383 TFLOP/s a GPU, bubble 10.3% (speeds assumed)
# assumed    speeds of eager FSDP: error 29% in 3 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 64 H100-80GB \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 \
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --seq-length 4096 --vocab-size 32000 --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 \
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --swiglu --disable-bias-linear \
    --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather --recompute-granularity selective \
    --recompute-modules layernorm mlp_act \
    --micro-batch-size 1 --global-batch-size 256 --bf16 \
    --train-iters 500000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
