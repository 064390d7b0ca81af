#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# 128 experts, 30.5B parameters of which a token uses 3.3B, on 4 nodes: Qwen3-30B-A3B (arXiv:2505.09388).
#
# needs      32 x H100-80GB: 4 nodes of 8
# predicted  45.9 of 85.9 GB on the fullest rank
# predicted  20.06 s a step of 4,194,304 tokens, 209,042 tokens/s, 182 TFLOP/s a GPU, bubble 3.0% (speeds assumed)
# assumed    speeds of eager FSDP: error 29% in 3 runs (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 32 H100-80GB \
    --num-layers 48 --hidden-size 2048 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --ffn-hidden-size 6144 \
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \
    --seq-length 4096 --vocab-size 151936 --untie-embeddings-and-output-weights \
    --hidden-dropout 0 --attention-dropout 0 \
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu \
    --disable-bias-linear \
    --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 6 \
    --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather --recompute-granularity selective \
    --recompute-modules core_attn mlp \
    --micro-batch-size 1 --global-batch-size 1024 --bf16 \
    --train-iters 500000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
