#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prune what pretrain_gpt_345M_single.sh has trained, and fine-tune it on one GPU. As in PaddleFleetX's YAML file
# an eighth of the heads and of the MLP channels goes. The pruned model, before fine-tuning, is in CHECKPOINTS-pruned.
# Differs: 100,000 steps (theirs 500,000), bf16 (fp16), --adam-beta2 0.95 (0.999), a validation in 1000 steps (500).
#
#   PRETRAINED=runs/345M CHECKPOINTS=runs/prune_345M DATA_PATH=... VOCAB_FILE=vocab.json MERGE_FILE=merges.txt \
#       bash scripts/prune_gpt_345M_single_card.sh
#
# The vocabulary is that of PRETRAINED: its files, or a folder or file in TOKENIZER_MODEL.
#
# needs      1 x A100-40GB: one GPU
# predicted  13.8 of 42.9 GB on the fullest rank
# predicted  137.52 ms a step of 8,192 tokens, 59,571 tokens/s, 129 TFLOP/s a GPU (speeds assumed)
# assumed    speeds of eager FSDP: error 3%, worst 28% (docs/planning.md); not measured: not yet run on GPUs
source "$(dirname "$0")/_launch.sh"
prune_first --prune-criterion l1_norm --prune-ratio 0.125
launch 1 A100-40GB \
    --num-layers 24 --hidden-size 1024 --num-attention-heads 14 --kv-channels 64 --ffn-hidden-size 3584 \
    --seq-length 1024 --vocab-size 50257 --micro-batch-size 8 --global-batch-size 8 --bf16 \
    --hidden-dropout 0 --attention-dropout 0 \
    --train-iters 100000 --lr 2.5e-5 --min-lr 5e-6 --lr-decay-style cosine --lr-decay-iters 90000 \
    --weight-decay 0 --adam-beta2 0.95 --clip-grad 1.0 \
    --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    "$@"
