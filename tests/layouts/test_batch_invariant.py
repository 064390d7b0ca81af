# SPDX-License-Identifier: Apache-2.0
"""--batch-invariant-mode: all weights have the same bits in every layout and with every micro-batch size. Each case is
compared with one process and micro-batches of one sample.
"""

import hashlib
from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.model.kinds.experts.dispatch import Dispatcher
from megatron.mpu.mesh import Mesh
from megatron.planner.parity import compare, laid_out, parse_layout, trace
from megatron.settings.parse import parse_pretrain

PLAIN = """--num-layers 4 --hidden-size 32 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --global-batch-size 8 --train-iters 30 --eval-iters 1"""
FLAGS = f"{PLAIN} --batch-invariant-mode"
MODELS = {
    "gpt": "--num-attention-heads 4",
    "llama": """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --num-attention-heads 8 --num-query-groups 8 --untie-embeddings-and-output-weights""",
    "apart": "--num-attention-heads 4 --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--seq-length 64",
    "experts": "--num-attention-heads 4 --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2",
}
LONG = "--seq-length 128 --hidden-size 64 --num-attention-heads 8"  # with products large enough for parts of a sample
MODELS |= {"long": f"{MODELS['gpt']} {LONG}", "longer": f"{MODELS['llama']} {LONG}"}
# norms of queries and keys: Qwen3's, with groups, as of LayerNorm, and across heads
MODELS["qwen"] = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 12"""
MODELS["normed"] = f"{MODELS['gpt']} --num-attention-heads 8 --qk-layernorm"
MODELS["across"] = f"{MODELS['qwen']} --qk-layernorm-across-heads"
# Experts over tensor parallel ranks, with rows enough for each of them
MODELS["parts"] = f"{MODELS['apart']} --num-attention-heads 8 --swiglu --seq-length 128 --num-experts 8"
MODELS["shared"] = """--swiglu --disable-bias-linear --normalization RMSNorm --num-attention-heads 8 --seq-length 128
    --num-experts 8 --moe-router-topk 3 --moe-router-dtype fp64 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-shared-expert-intermediate-size 32 --qk-layernorm
    --moe-input-jitter-eps 1e-2 --moe-layer-freq [0]+[1]*3"""
MODELS["sinks"] = (
    f"{MODELS['gpt']} --num-attention-heads 8 --softmax-type learnable --label-smoothing 0.1 --vocab-size 300"
)
MODELS |= {f"{name}long": f"{MODELS[name]} {LONG}" for name in ("qwen", "normed", "across", "sinks")}
MODELS["padded"] = f"{MODELS['apart']} --swiglu --moe-expert-capacity-factor 1.1 --moe-pad-expert-input-to-capacity"
# 2 rows
MODELS["capped"] = f"{MODELS['apart']} --swiglu --moe-expert-capacity-factor 1.6 --num-experts 16 --seq-length 16"
FORMATS = {"fp32": "--precision fp32", "bf16": "--bf16"}

# model, format, layout, then the micro-batch size
CASES = """
    gpt fp32 dp2 2
    gpt fp32 dp4 1
    gpt fp32 dp2-zero1 4
    gpt fp32 pp2-zbv 1
    gpt bf16 dp4-zero2 1
    gpt bf16 pp2-dp2-zero3-zbv 2
    gpt bf16 pp2vp2 1
    llama fp32 pp2-dp2-zero1-zbh1 1
    llama bf16 dp4-zero3 2
    experts bf16 pp2-dp2 1
    apart fp32 dp2-ep2 2
    apart fp32 dp4-ep2-zero3 1
    apart bf16 dp4-ep4 1
    apart bf16 pp2-dp4-ep2-zero2-zbv 1
    capped fp32 dp4-ep4-zero1 1
    capped bf16 pp2-dp2-ep2-zbh1 1
    padded fp32 dp4-ep2 1
    padded bf16 dp2-ep2-zero2 4
    gpt fp32 tp4 1
    gpt bf16 tp4sp 2
    gpt bf16 tp2sp-pp2-dp2-zero1-zbh1 1
    gpt bf16 tp2-pp2-zbv 2
    llama fp32 tp4sp-dp2-zero3 1
    llama bf16 tp8 1
    llama bf16 tp2sp-dp4-zero2 1
    long fp32 cp2a2a 2
    long bf16 cp4a2a 1
    long bf16 pp2-cp2a2a-dp2-zero1-zbv 1
    long fp32 tp2-cp2a2a-pp2-zbh1 1
    longer fp32 cp4a2a-zero3 1
    longer bf16 cp2a2a-dp2-zero2 1
    longer bf16 tp2sp-cp4a2a 2
    longer fp32 tp4sp-cp2a2a-zero1 1
    qwen fp32 tp2 2
    qwen bf16 tp4sp-dp2-zero3 1
    normed bf16 tp8sp 1
    across fp32 tp4sp 1
    across bf16 tp2-pp2-zbv 1
    qwenlong fp32 pp2-cp4a2a 1
    qwenlong bf16 tp2sp-cp2a2a-zero2 1
    normedlong fp32 cp2a2a-dp2 2
    acrosslong bf16 tp2sp-cp2a2a 1
    sinks fp32 tp2 2
    sinks bf16 tp8sp 1
    sinks bf16 tp2sp-pp2-dp2-zero1 2
    sinkslong fp32 cp4a2a 1
    sinkslong bf16 tp2-cp2a2a 2
    parts fp32 tp2-ep2-etp1 2
    parts bf16 tp2sp-dp2-ep4-etp1-zero3 1
    parts bf16 tp4-ep4-etp1 1
    parts fp32 tp2sp-dp4-ep4-etp1-zero1 1
    shared fp32 tp4sp-ep4-etp1 1
    shared bf16 tp2-pp2-dp2-ep4-etp1-zero2-zbv 1
    shared bf16 tp2sp-pp2-ep2-etp1-zbh1 2
    shared fp32 tp2-dp2-ep2-etp1 1
    shared bf16 dp4-ep4 1
""".strip().splitlines()
LAYOUTS = """one:8 dp2:4 dp4:2 dp8:1 dp2-zero1:2 dp4-zero2:1 dp4-zero3:1 pp2:2 pp4:1 pp2vp2:1 pp2-gpipe:4 pp2-zbh1:1
    pp2-zbv:2 pp2-vhalf:1 pp2-dp2-zero1-zbh1:1 pp2-dp2-zero3-zbv:2 pp4-dp2-zero2:1""".split()
DIVIDED = "tp2:4 tp4:1 tp2sp:2 tp4sp:1 tp2-dp2-zero1:2 tp2sp-pp2-zbv:1 tp4sp-dp2-zero3:1 tp2-pp2-dp2-zero2:1".split()
APART = """dp2-ep2:4 dp4-ep2:1 dp4-ep4-zero1:2 dp4-ep2-zero3:1 pp2-dp2-ep2:1 pp2-dp4-ep4-zero2-zbv:1
    pp2-dp2-ep2-zbh1:2""".split()
PARTED = """tp2-ep2-etp1:4 tp4sp-ep4-etp1:1 tp2-dp2-ep4-etp1-zero1:2 tp2sp-dp2-ep2-etp1-zero3:1 tp2sp-pp2-ep2-etp1-zbv:1
    dp8-ep4:1 tp2-pp2-dp2-ep4-etp1-zero2-zbh1:1""".split()
SHARED = """cp2a2a:8 cp4a2a:1 cp2a2a-dp2-zero1:2 cp4a2a-dp2-zero3:1 tp2-cp2a2a:4 tp4sp-cp2a2a:1 tp2sp-cp4a2a-zero2:1
    pp2-cp2a2a-dp2-zero3-zbv:1 tp2sp-pp2-cp2a2a-zbh1:2""".split()
TWENTY = dict(gpt=LAYOUTS + DIVIDED, llama=LAYOUTS + DIVIDED, experts=LAYOUTS, apart=APART, padded=APART)
TWENTY |= dict(long=SHARED, longer=SHARED, parts=PARTED, shared=PARTED)
TWENTY |= {name: ["tp4:2", "tp2sp-dp2-zero3:1", "pp2-zbv:1"] for name in ("qwen", "normed", "across", "sinks")}
TWENTY |= {f"{name}long": ["cp4a2a:1", "tp2sp-cp2a2a-zero1:2"] for name in ("qwen", "normed", "across", "sinks")}
TWENTY["capped"] = [*APART, "dp8-ep8:1"]


def run(model, form, layout="", micro=1, steps=3, more=""):
    layout = parse_layout("" if layout == "one" else layout)
    flags = f"{FLAGS} {MODELS[model]} {FORMATS[form]} --micro-batch-size {micro} {more}".split()
    return trace(laid_out(parse_pretrain(flags), layout), pretrain_gpt.recipe(), layout.world_size, steps)


@cache
def one_process(model, form, steps=3, more=""):
    return run(model, form, steps=steps, more=more)


def hash_of(weights):
    hashed = hashlib.sha256()
    for name in sorted(weights):
        hashed.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return hashed.hexdigest()


def check(found, expected):
    different = [name for name, weight in found.weights.items() if not weight.equal(expected.weights[name])]
    assert not different, different
    assert hash_of(found.weights) == hash_of(expected.weights)
    assert found.norms == expected.norms
    names = len(found.losses) // len(found.norms)
    assert found.losses[::names] == expected.losses[::names]  # "lm loss"; others are only logged


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", [" ".join(case.split()) for case in CASES])
def test_weights_have_the_same_bits_in_every_layout(case):
    model, form, layout, micro = case.split()
    check(run(model, form, layout, int(micro)), one_process(model, form))


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("model, place", [(model, place) for model, places in TWENTY.items() for place in places])
def test_weights_of_twenty_steps_have_one_hash(model, place, form):
    layout, _, micro = place.partition(":")
    check(run(model, form, layout, int(micro), steps=20), one_process(model, form, steps=20))


@pytest.mark.full
@pytest.mark.parametrize(
    "model, layouts",
    [("gpt", "pp2-zbv dp4-zero3 tp2-dp2-zero1"), ("long", "cp4a2a-zero1 tp2-cp2a2a pp2-dp2-zero3-zbv")]
    + [("shared", "tp2sp-ep2-etp1 dp4-ep2-zero3 tp2-pp2-dp2-ep4-etp1-zero1")],
)
def test_runs_go_on_with_the_same_bits_in_other_layouts(run_ranks, tmp_path, model, layouts):
    """Six steps in three layouts, two of each, against six steps of one process; the process has micro-batches of eight."""

    def go_on(folder, layout, last, micro):
        layout, flags = parse_layout(layout), f"{FLAGS} {MODELS[model]} --bf16 --device cpu --num-workers 0"
        flags += f" --context-parallel-size {layout.cp}{' --cp-comm-type a2a' * (layout.cp > 1)}"
        flags += f" --expert-model-parallel-size {layout.ep} --expert-tensor-parallel-size 1" * (layout.ep > 1)
        flags += f" --tensor-model-parallel-size {layout.tp} --micro-batch-size {micro}"
        flags += f" --pipeline-model-parallel-size {layout.pp} --sharding-stage {layout.zero} --exit-interval {last}"
        flags += (
            f" --pipeline-schedule {layout.schedule or '1f1b'} --save {folder} --load {folder} --save-interval {last}"
        )
        run_ranks(layout.world_size, lambda rank: pretrain_gpt.main(flags.split()))

    go_on(tmp_path / "one", "", 6, 8)
    for layout, last in zip(layouts.split(), (2, 4, 6), strict=True):
        go_on(tmp_path / "three", layout, last, 1)
    tensors = {}
    for name in ("one", "three"):
        with Reader(tmp_path / name / "iter_0000006") as reader:
            tensors[name] = {tensor: reader.read(tensor) for tensor in reader.tensors}
    assert tensors["one"].keys() == tensors["three"].keys()
    assert not [name for name, value in tensors["one"].items() if not value.equal(tensors["three"][name])]


@pytest.mark.parametrize("each", [1, 2])
def test_rows_of_a_sample_have_as_many_zeros_as_if_a_rank_had_them_all(run_ranks, each):
    """A sum over an expert's rows may depend on their number. With 38 and 44 rows an expert 2 are a unit. each: ranks of a
    sample
    """
    draws = [torch.Generator().manual_seed(rank) for rank in range(2)]
    chosen = [
        torch.randint(0, 8 + 2 * rank, (304 + 48 * rank * (each == 1), 1), generator=draws[rank]).clamp(max=8)
        for rank in (0, 1)
    ]

    def lengths(rank, ranks, chosen, each):
        mesh = Mesh(rank, replicate=ranks, ep=ranks)
        dispatcher = Dispatcher(chosen, 8, mesh.ep, drops=True)
        dispatcher.sample_ranks = each
        n = len(chosen)
        dispatcher.dispatch(torch.ones(n, 3), torch.ones(n, 1))
        return dispatcher.rows.sources

    samples = chosen if each == 1 else [torch.cat(chosen)]
    alone = [run_ranks(1, lambda _, own=own: lengths(0, 1, own, 1))[0] for own in samples]
    together = [row for rows in run_ranks(2, lambda rank: lengths(rank, 2, chosen[rank], each)) for row in rows]
    assert together == [[one for [one] in rows] for rows in zip(*alone, strict=True)]
    assert all(length % 2 == 0 for rows in together for length in rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "model, layout",
    [
        ("gpt", ""),
        pytest.param("longer", "cp2a2a", marks=pytest.mark.sampled(10)),
        pytest.param("qwen", "tp2", marks=pytest.mark.sampled(10)),
        pytest.param("shared", "tp2-ep2-etp1", marks=pytest.mark.sampled(10)),
    ],
)
def test_the_mode_trains_the_same_model_as_without_it(model, layout):
    plain = f"{PLAIN} {MODELS[model]} --precision fp32 --micro-batch-size 4".split()
    expected = trace(laid_out(parse_pretrain(plain), parse_layout("")), pretrain_gpt.recipe(), 1, 3)
    difference = compare(expected, run(model, "fp32", layout) if layout else one_process(model, "fp32"))
    assert difference.passes("fp32"), difference


TWO = "--tp 2 --num-experts 8 --seq-length 64 --disable-bias-linear"


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--device auto", "--device auto"),
        ("--fp16 --optimizer muon", "--fp16 and --optimizer muon"),
        ("--context-parallel-size 2", "--context-parallel-size 2 with keys and values in a ring"),
        (
            "--cp 2 --cp-comm-type allgather",
            "--cp-comm-type allgather: weights would depend on the layout; say --cp-comm-",
        ),
        ("--cp 2 --cp-comm-type a2a", "--seq-length 16, no multiple of 64"),
        ("--cp 2 --cp-comm-type a2a --seq-length 64", "attention.output.weight of 64 / 2 tokens, a product too small"),
        ("--cp 2 --cp-comm-type a2a --seq-length 128 --num-experts 4", "--cp 2 does not cover experts"),
        ("--loss-averaging micro-batch", "--loss-averaging micro-batch"),
        (
            "--tp 2 --seq-length 12 --attention-output-gate",
            "--attention-output-gate; --seq-length 12, no multiple of 8",
        ),
        ("--tp 2 --ffn-hidden-size 100", "mlp.up.weight, whose 100 rows or columns are no multiple of 8"),
        (
            "--tp 2 --num-experts 4",
            "experts without --expert-tensor-parallel-size 1 and --expert-model-parallel-size 2 or",
        ),
        (
            f"{TWO} --ep 2",
            "experts whose weights 2 ranks divide: weights would depend on the layout; say --expert-tensor",
        ),
        (f"{TWO} --ep 1 --etp 1", "experts without"),
        (f"{TWO} --ep 2 --etp 1 --seq-length 32", "--seq-length 32, no multiple of 64"),
        (f"{TWO} --ep 2 --etp 1 --moe-expert-capacity-factor 1", "--moe-expert-capacity-factor 1.0"),
        (
            f"{TWO} --ep 2 --etp 1 --moe-router-load-balancing-type sinkhorn",
            "--moe-router-load-balancing-type sinkhorn",
        ),
        (f"{TWO} --ep 2 --etp 1 --moe-latent-size 16", "the weight mlp.latent_down.weight"),
        (f"{TWO} --ep 2 --etp 1 --num-experts 2", "a router of 2 experts and 64 / 2 tokens, a product too small"),
        ("--global-batch-size 12", "3 data parallel ranks are no power of two; nearest: 2, 4"),
    ],
)
def test_what_the_mode_does_not_cover_is_refused(flags, words):
    from megatron.training.rules import resolve

    ranks = 3 if "power" in words else 2
    with pytest.raises(SettingsError) as error:
        resolve(parse_pretrain(f"{FLAGS} --num-attention-heads 4 --device cpu {flags}".split()), ranks)
    assert words in error.value.what


def test_a_setting_that_follows_from_another_flag_is_refused_by_that_flag():
    with pytest.raises(
        SettingsError, match="cover --lora-rank: weights would .*; leave out --lora-rank, or leave out --b"
    ):
        pretrain_gpt.main(f"{FLAGS} --num-attention-heads 4 --device cpu --lora-rank 2 --dry-run".split())


def test_layouts_pad_a_vocabulary_alike():
    from megatron.training.rules import resolve

    flags = f"{FLAGS} --num-attention-heads 8 --device cpu --vocab-size 300".split()
    rows = {}
    for tp in (1, 2, 8):
        config = resolve(parse_pretrain([*flags, "--tp", str(tp)]), tp)
        word = pretrain_gpt.recipe().facts(config, 300).units(range(1), True, True, False)[0].weights["weight"]
        rows[tp] = word.local_shape({"tp": tp})[0] * tp
    assert rows == {1: 512, 2: 512, 8: 512}
