#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Quantization aware training of what pretrain_gpt_345M_single.sh has trained, on one GPU: int8 weights and inputs, with
# PaddleFleetX's settings. 4000 steps of the 100,000 are enough, they report.
#
#   PRETRAINED=runs/345M CHECKPOINTS=runs/qat_345M DATA_PATH=... VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       bash scripts/qat_gpt_345M_single_card.sh
#
# The vocabulary is that of PRETRAINED: its files, or a folder or file in TOKENIZER_MODEL.
#
# needs      1 x A100-40GB: one GPU
# predicted  19.6 of 42.9 GB on the fullest rank
# predicted  207.31 ms a step of 8,192 tokens, 39,517 tokens/s, 96 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 1 A100-40GB \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257 \
    --quantization --weight-quantize-type abs_max --activation-preprocess-type PACT \
    --micro-batch-size 8 --global-batch-size 8 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 100000 --lr 5e-6 --min-lr 1e-6 --lr-decay-style cosine --lr-decay-iters 72000 \
    --lr-warmup-fraction 0.01 --weight-decay 0.02 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
