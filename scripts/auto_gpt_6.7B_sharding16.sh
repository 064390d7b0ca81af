#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 6.7B parameters on 16 GPUs; ZeRO stage 2 is kept, the rest of the layout is searched. The shape is
# that of GPT-3 (arXiv:2005.14165, table 2.1).
# Learning rate, batch and precision are this suite's. PaddleFleetX's:
# python pretrain_gpt.py -c ppfleetx/configs/nlp/gpt/auto/pretrain_gpt_6.7B_sharding16.yaml
#
# needs      16 x A100-80GB: 2 nodes of 8
# layout     dp16-zero2/8, micro-batch 8: the planner's choice for these
# predicted  68.5 of 85.9 GB on the fullest rank
# predicted  12.85 s a step of 1,048,576 tokens, 81,592 tokens/s, 212 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 16 A100-80GB \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --vocab-size 50257 \
    --auto-parallel --sharding-stage 2 \
    --global-batch-size 1024 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 128000 --lr 1.2e-4 --min-lr 1.2e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
