# SPDX-License-Identifier: Apache-2.0
"""The arguments of Megatron-LM for Nemotron-H and Nemotron 3 (examples/post_training/modelopt/conf/nvidia), and those with
which it trains hybrids (examples/mamba/train.sh), but for data, tokenizer and batches, through --dry-run unchanged.
"""

import pytest

import pretrain_hybrid

TRAIN = """--sequence-parallel --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce
    --distributed-backend nccl --train-samples 73242188 --lr-warmup-samples 50000 --lr-decay-samples 73192188
    --save x --split 99,1,0 --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad
    1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 10
    --save-interval 2000 --eval-interval 2000 --eval-iters 32 --spec
    megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --no-create-attention-mask-in-dataloader
    --mock-data --vocab-size 131071 --tokenizer-type NullTokenizer --global-batch-size 768 --dry-run
    --device-name H100-80GB"""
COMMON = """--save-interval 100000 --micro-batch-size 1 --disable-bias-linear --untie-embeddings-and-output-weights
    --normalization RMSNorm --squared-relu --num-attention-heads 32 --group-query-attention --is-hybrid-model
    --mamba-head-dim 64 --max-position-embeddings 8192 --use-mcore-models --bf16"""
DENSE = """--no-masked-softmax-fusion --use-rotary-position-embeddings --no-rope-fusion --no-position-embedding
    --num-layers 52 --hidden-size 4096 --ffn-hidden-size 21504 --num-query-groups 8 --mamba-num-heads 128
    --mamba-num-groups 8 --hybrid-override-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-
    --mamba-state-dim 128 --seq-length 4096 --make-vocab-size-divisible-by 1 --rotary-percent 0.5 --rotary-base
    500000"""
ROUTED = """--enable-experimental --moe-permute-fusion --use-fused-weighted-squared-relu --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl native --moe-router-score-function sigmoid --moe-grouped-gemm
    --moe-aux-loss-coeff 1e-4 --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --attention-backend flash --disable-gloo-process-groups
    --position-embedding-type none --num-query-groups 2 --kv-channels 128 --seq-length 8192
    --expert-tensor-parallel-size 1"""
NANO = """--moe-token-dispatcher-type allgather --num-experts 128 --moe-router-topk 6 --moe-router-topk-scaling-factor
    2.5 --moe-shared-expert-intermediate-size 3712 --mamba-num-heads 64 --hybrid-override-pattern
    MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME --init-method-std 0.0173 --num-layers 52 --hidden-size
    2688 --ffn-hidden-size 1856"""
SUPER = """--moe-token-dispatcher-type alltoall --num-experts 512 --moe-router-topk 22 --moe-router-topk-scaling-factor
    5.0 --moe-shared-expert-intermediate-size 5376 --moe-latent-size 1024 --mamba-num-heads 128
    --init-method-std 0.014 --hybrid-layer-pattern
    MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME --hidden-size 4096
    --ffn-hidden-size 2688"""
CASES = {
    "Nemotron-H 8B": (f"{DENSE} --tensor-model-parallel-size 4 --world-size 256", "GPT of 8.1 B parameters: 52 layers"),
    "Nemotron 3 Nano": (
        f"{ROUTED} {NANO} --tensor-model-parallel-size 2 --expert-model-parallel-size 16 --world-size 256",
        "GPT of 31.6 B parameters, 6 of 128 experts for each token",
    ),
    "Nemotron 3 Super": (
        f"{ROUTED} {SUPER} --tensor-model-parallel-size 2 --expert-model-parallel-size 64 --world-size 768 "
        "--recompute-granularity full",
        "GPT of 120.7 B parameters, 22 of 512 experts for each token",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_arguments_of_megatron_lm_are_planned(name, capsys):
    words, said = CASES[name]
    pretrain_hybrid.main(f"{TRAIN} {COMMON} {words}".split())
    found = " ".join(capsys.readouterr().out.split())
    assert "dry run: no problems found" in found and said in found, found[:2000]
