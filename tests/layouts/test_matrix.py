# SPDX-License-Identifier: Apache-2.0
"""The main gate: every layout trains the same model. Each case is compared with one process in loss, gradient norm and
every weight; the cases are chosen so that every pair of features occurs together somewhere (and that is tested too).
"""

import itertools
from functools import cache

import pytest

import pretrain_gpt
from megatron.planner.parity import compare, laid_out, parse_layout, trace
from megatron.settings.parse import parse_pretrain

STEPS = 3
GPT = """--hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --global-batch-size 8 --train-iters 10 --eval-iters 1 --precision fp32"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm
    --num-query-groups 4 --num-attention-heads 8 --untie-embeddings-and-output-weights"""
RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
    "cheap": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp_act",
    "mlp": "--recompute-granularity selective --recompute-modules layernorm mlp",
    "full_attn": "--recompute-granularity full_attn --no-recompute-layers 0,3",
}

DOCUMENTS = "--tokenizer-type NullTokenizer --reset-attention-mask --reset-position-ids --eod-mask-loss"

# layout, then features: recompute granularity, llama, dropout, micro2 (two samples a micro-batch instead of one), documents
CASES = """
    tp2 dropout
    tp2sp selective dropout
    pp2 dropout
    pp4 micro2
    pp2vp2 full_attn
    pp2-gpipe dropout micro2
    pp2-zbh1 full_attn
    pp2-zbv dropout
    dp2
    dp2-zero1 dropout
    dp2-zero2 llama
    dp2-zero3 full dropout
    dp4-zero3 selective llama
    tp2-pp2 llama dropout
    tp2sp-pp2vp2 llama
    tp2sp-dp2-zero2 selective
    tp2-dp2-zero1 full llama
    pp2-dp2-zero1-zbv full
    pp2-dp2-zero1-gpipe full_attn
    pp2-dp2-zero2-zbh1 full
    pp2-dp2-zero3 dropout
    pp2-dp2-zero3-zbv selective
    pp2vp2-dp2-zero2-gpipe selective
    pp2-dp2-zero2-zbv llama dropout micro2 cheap
    pp4-zbv full_attn dropout
    tp4-pp2-zbh1 selective
    tp2sp-pp2vp2-gpipe full llama dropout micro2
    pp4-dp2-zero1-zbh1 cheap llama dropout micro2
    tp2sp-pp2-dp2-zero2-zbv full_attn
    pp4vp2-dp2-zero3-gpipe full
    tp4sp-dp2-zero3 full_attn llama dropout micro2
    tp2sp-pp2vp2-dp2-zero1 micro2
    tp2sp-pp2-dp2-zero3-zbh1
    tp2sp-pp4 cheap
    tp4-pp2vp2-gpipe mlp
    tp4-pp2-zbv mlp llama
    pp4-dp2-zero2 mlp dropout
    tp4-dp2-zero2
    tp4-dp2-zero1 cheap
    tp2sp-pp2-dp2-zero1 dropout
    cp2 llama dropout documents
""".strip().splitlines()
FULL = """
    tp4sp llama
    tp4 full dropout
    tp2sp-dp2-zero3 mlp
    pp2-dp2-zero1-zbh1 mlp
    cp2a2a documents dropout full_attn
    cp2-pp2 documents micro2
    cp2-dp2-zero2 full documents
    cp4-zero3 dropout micro2 documents
    cp2-dp2-zero3 documents dropout cheap
    cp2a2a-pp2vp2-gpipe documents dropout cheap
    cp2a2a-pp2-zbh1-zero1 llama documents dropout micro2
    cp2a2a-pp2-zbv-zero2 selective documents
    cp2-tp2-a2a-zero3 llama documents full
    cp2-tp2sp-a2a-zero1 llama dropout mlp
    cp2-tp2sp-a2a-zero1 dropout
    cp2-tp4sp-zero3 documents dropout full_attn
    cp2a2a-pp4-zbv selective dropout documents
    cp2-pp2-dp2-zero3-gpipe full llama documents
    cp2-tp2sp-pp2 selective documents dropout micro2
    cp4a2a-dp2-zero1 documents llama selective
    cp4 documents dropout llama
    cp4a2a2 documents dropout micro2
    cp4a2a2-tp2sp-zero3 full llama
    cp4a2a2-pp2-zbh1 selective documents micro2
    cp2gather-tp2sp-pp2-zbv selective documents dropout micro2
    cp4gather-zero3 llama documents
    cp2gather-dp2-zero2 full
""".strip().splitlines()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "case",
    [" ".join(case.split()) for case in CASES]
    + [pytest.param(" ".join(case.split()), marks=pytest.mark.full) for case in FULL],
)
def test_layout_trains_the_same_model(case):
    layout, *features = case.split()
    layout = parse_layout(layout)
    flags = flags_of(features, stages=layout.stages)
    found = trace(laid_out(parse_pretrain(flags.split()), layout), pretrain_gpt.recipe(), layout.world_size, STEPS)
    difference = compare(one_process(flags), found)
    assert difference.passes("fp32"), difference


@cache
def one_process(flags):
    """The trace that layouts have to reproduce. Recomputation and micro-batches are theirs alone."""
    return trace(laid_out(parse_pretrain(flags.split()), parse_layout("")), pretrain_gpt.recipe(), 1, STEPS)


def flags_of(features, stages):
    words = [GPT, "--num-layers", str(max(stages, 4)), "--micro-batch-size", "2" if "micro2" in features else "1"]
    words += [DOCUMENTS] * ("documents" in features)
    words += ["" if "dropout" in features else "--hidden-dropout 0 --attention-dropout 0"]
    words += [LLAMA] * ("llama" in features) + [flags for name, flags in RECOMPUTE.items() if name in features]
    return " ".join(words)


def described(case):
    """(feature, value) pairs of a case. Documents matter where ranks share sequences, and are there alone."""
    layout, *features = case.split()
    layout = parse_layout(layout)
    found = {(name, getattr(layout, name)) for name in ("tp", "cp", "pp", "vp", "dp", "zero", "sp")}
    found |= {
        ("a2a", layout.a2a > 0),
        ("schedule", layout.schedule or "1f1b"),
        ("llama", "llama" in features),
        ("dropout", "dropout" in features),
    }
    return found | {("recompute", next((name for name in RECOMPUTE if name in features), "none"))}


def impossible(a, b):
    """Pairs that no layout of at most eight ranks can have."""
    pair = dict([a, b])
    return (
        (pair.get("pp") == 1 and (pair.get("vp", 1) > 1 or pair.get("schedule", "1f1b") != "1f1b"))
        or (pair.get("tp") == 1 and pair.get("sp"))
        or (pair.get("dp") == 1 and pair.get("zero", 0) > 0)
        or (pair.get("vp", 1) > 1 and pair.get("schedule", "").startswith("zb"))
        or (pair.get("tp") == 4 and pair.get("pp") == 4)
        or (4 in (pair.get("dp"), pair.get("cp")))  # cases beyond the grid
        or (pair.get("cp") == 1 and pair.get("a2a"))
        or (pair.get("tp") == 4 and pair.get("a2a"))  # one group of heads a rank: nothing to exchange
    )


def test_cases_cover_every_pair_of_features():
    seen = [described(case) for case in CASES + FULL]
    values = set().union(*seen)
    missing = [
        (a, b)
        for a, b in itertools.combinations(sorted(values, key=str), 2)
        if a[0] != b[0] and not impossible(a, b) and not any({a, b} <= case for case in seen)
    ]
    assert missing == []
