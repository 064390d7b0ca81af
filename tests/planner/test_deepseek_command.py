# SPDX-License-Identifier: Apache-2.0
"""The arguments with which Megatron-LM's model zoo trains DeepSeek-V3, but for the data, through --dry-run unchanged."""

import re

import pretrain_gpt

COMMAND = """--distributed-timeout-minutes 60 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 16
    --expert-model-parallel-size 64 --context-parallel-size 1 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel
    --use-flash-attn --disable-bias-linear --micro-batch-size 1 --global-batch-size 8192 --train-samples 585937500
    --exit-duration-in-mins 220 --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl te --manual-gc --manual-gc-interval 10 --enable-experimental --transformer-impl
    transformer_engine --seq-length 4096 --mock-data --vocab-size 129280 --tokenizer-type NullTokenizer --split 99,1,0
    --no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-workers 6 --num-layers 61 --hidden-size 7168
    --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232 --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --multi-latent-attention --attention-dropout 0.0
    --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr-decay-samples 584765624
    --lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine --adam-beta1
    .9 --adam-beta2 .95 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8
    --moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-pre-softmax --moe-grouped-gemm
    --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32 --moe-permute-fusion --moe-router-fusion --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim
    128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --eval-iters 32 --eval-interval 200 --auto-detect-ckpt-format
    --save x --save-interval 500 --dist-ckpt-strictness log_all --init-method-std 0.02 --log-timers-to-tensorboard
    --log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard
    --log-throughput --log-interval 1 --logging-level 40 --tensorboard-dir t --bf16 --recompute-granularity selective
    --recompute-modules mla_up_proj mlp moe layernorm --pipeline-model-parallel-layout Et*3|(tt|)*29m|L --dry-run
    --world-size 2048 --device-name H100-80GB"""


def test_deepseek_v3_of_the_model_zoo_is_planned(capsys):
    pretrain_gpt.main(COMMAND.split())
    said = capsys.readouterr().out
    assert "dry run: no problems found" in said
    # 671.0 B of the network (arXiv:2412.19437, section 4.2), and a depth of 11.6 B, which shares embedding and output.
    assert "GPT of 682.6 B parameters, 8 of 256 experts for each token" in said
    assert "m in a stage before the last" in " ".join(said.split())
    stages = re.findall(r"^ +(\d+) +(\d+-\d+)(?: (\d+-\d+))?  ", said, re.M)
    assert stages[:2] == [("0", "0-2", "33-34"), ("1", "3-4", "35-36")]
