#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPT of 1.3B parameters on the 8 GPUs of a node. The layout is searched for the GPUs that there are when it
# starts; add --tune-steps 5 and the best three are timed first.
# Learning rate, batch and precision are this suite's. PaddleFleetX's:
# python pretrain_gpt.py -c ppfleetx/configs/nlp/gpt/auto/pretrain_gpt_1.3B_dp8.yaml
#
# needs      8 x A100-40GB: one node
# layout     dp8-zero1, micro-batch 4: the planner's choice for these
# predicted  19.7 of 42.9 GB on the fullest rank
# predicted  3.10 s a step of 524,288 tokens, 169,093 tokens/s, 179 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 8 A100-40GB \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257 \
    --auto-parallel \
    --global-batch-size 512 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 50000 --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine \
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
