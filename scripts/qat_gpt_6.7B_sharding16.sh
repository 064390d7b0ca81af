#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Quantization aware training of what pretrain_gpt_6.7B_sharding16.sh has trained, on 2 nodes: 16 ranks share optimizer
# state and gradients (ZeRO stage 2), with the quantization of PaddleFleetX's YAML file.
# Differs: bf16 (theirs fp16), --adam-beta2 0.95 (0.999), a validation in 1000 steps (500).
#
#   PRETRAINED=runs/6.7B CHECKPOINTS=runs/qat_6.7B DATA_PATH=... VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       bash scripts/qat_gpt_6.7B_sharding16.sh
#
# The vocabulary is that of PRETRAINED: its files, or a folder or file in TOKENIZER_MODEL.
#
# needs      16 x A100-80GB: 2 nodes of 8
# predicted  29.6 of 85.9 GB on the fullest rank
# predicted  2.44 s a step of 131,072 tokens, 53,809 tokens/s, 140 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
launch 16 A100-80GB \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --vocab-size 50257 \
    --sharding-stage 2 --sharding-degree 16 --overlap-grad-reduce --overlap-param-gather \
    --recompute-granularity full --recompute-method uniform \
    --quantization --weight-quantize-type abs_max --activation-preprocess-type PACT \
    --micro-batch-size 8 --global-batch-size 128 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 100000 --lr 5e-6 --min-lr 1e-6 --lr-decay-style cosine --lr-decay-iters 72000 \
    --lr-warmup-fraction 0.01 --weight-decay 0.02 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
