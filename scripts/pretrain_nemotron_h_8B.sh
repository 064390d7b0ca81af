#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Mamba-2, MLPs and four layers of attention, 8.1B parameters, on 4 nodes: Nemotron-H 8B (arXiv:2504.03624).
#
# needs      32 x H100-80GB: 4 nodes of 8
# predicted  31.0 of 85.9 GB on the fullest rank
# predicted  23.65 s a step of 6,291,456 tokens, 266,010 tokens/s, 393 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 1% in 2 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 32 H100-80GB \
    --num-layers 52 --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- \
    --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 \
    --ffn-hidden-size 21504 --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8 \
    --seq-length 8192 --vocab-size 131072 --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 \
    --position-embedding-type none --normalization RMSNorm --squared-relu --disable-bias-linear \
    --tensor-model-parallel-size 4 --sequence-parallel \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather \
    --micro-batch-size 1 --global-batch-size 768 --bf16 \
    --train-iters 500000 --lr 8e-4 --min-lr 8e-6 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
