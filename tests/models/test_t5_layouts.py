# SPDX-License-Identifier: Apache-2.0
"""Every layout trains the same encoder-decoder: each is compared with one process in loss, gradient norm and every weight.

One process is compared with Hugging Face's models in test_t5_oracle.py.
"""

import pytest

from tests.models.in_layouts import check_bf16, check_layout

SIZES = """--model-type T5 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --decoder-seq-length 8
    --encoder-num-layers 4 --decoder-num-layers 4 --mock-data --vocab-size 90 --make-vocab-size-divisible-by 8 --lr 1e-3
    --global-batch-size 8 --train-iters 10 --eval-iters 0 --precision fp32"""
T5 = """--position-embedding-type relative --normalization RMSNorm --disable-bias-linear --unscaled-attention
    --feed-forward-proj gated-gelu --untie-embeddings-and-output-weights"""
ROPE = """--position-embedding-type rope --num-query-groups 2 --swiglu --normalization RMSNorm
    --attn-logit-softcapping 0.5"""
RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
    "cheap": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp_act",
    "mlp": "--recompute-granularity selective --recompute-modules layernorm mlp",
    "full_attn": "--recompute-granularity full_attn --no-recompute-layers 0,5",
}
# layout, then features: t5 (relative positions, an output layer of its own), rope (grouped queries, gated SiLU, capped
# scores), dropout, micro2, a granularity of recomputation
CASES = """
    tp2sp-pp2 t5 dropout
    pp2-dp2-zero3-zbh1 full
    tp2sp-pp2vp2-dp2-zero2 dropout cheap
""".strip().splitlines()
FULL = """
    pp2vp2 rope dropout selective
    pp2-zbv t5 full_attn
    tp2 dropout
    tp4sp t5
    tp2sp rope full dropout
    pp2 t5 dropout
    pp4 dropout micro2
    pp4-zbh1 t5
    pp8
    pp2-gpipe dropout
    pp2-zbv dropout
    pp2-vhalf t5 dropout mlp
    pp4-zbv
    pp2vp4 t5
    pp4vp2 full
    dp2-zero1 dropout
    dp2-zero2 t5
    dp2-zero3 dropout t5 cheap
    dp4-zero3 selective rope
    tp2-pp2-dp2-zero1 t5 full_attn
    tp2sp-pp2-zbh1 t5 selective
    pp2-dp2-zero2-zbv full rope
    pp4-dp2-zero3-gpipe t5 micro2
""".strip().splitlines()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "case",
    [" ".join(case.split()) for case in CASES]
    + [pytest.param(" ".join(case.split()), marks=pytest.mark.full) for case in FULL],
)
def test_layout_trains_the_same_model(case):
    layout, *features = case.split()
    check_layout(layout, flags_of(features))


@pytest.mark.sampled(5)
def test_bf16_over_two_processes():
    check_bf16(flags_of(["t5"]))


def flags_of(features):
    words = [SIZES, "--micro-batch-size", "2" if "micro2" in features else "1"]
    words += ["" if "dropout" in features else "--hidden-dropout 0 --attention-dropout 0"]
    words += [T5] * ("t5" in features) + [ROPE] * ("rope" in features)
    return " ".join([*words, *(flags for name, flags in RECOMPUTE.items() if name in features)])
