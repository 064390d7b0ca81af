# SPDX-License-Identifier: Apache-2.0
"""--qk-clip and --log-max-attention-logit against plain torch: whole trainings in every layout, single updates, kernels."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.data.mock import MockDataset
from megatron.errors import SettingsError
from megatron.fused_kernels import explicit_attention
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.explicit_attention import largest_scores
from megatron.model.command_line import parse_any
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.attention import module
from megatron.model.layer_ops import LargestScores, RankSetup
from megatron.model.recipe import recipe_of
from megatron.mpu.forked import run_ranks
from megatron.planner.cluster import Cluster
from megatron.planner.device import find
from megatron.planner.layout import Job, Layout
from megatron.planner.speed import _layer
from megatron.settings.kernel_sizes import SCORE_BYTES
from megatron.settings.schema import Model
from megatron.telemetry.log_lines import console_line
from megatron.telemetry.step_metrics import Interval, RunSizes, StepMetrics, step_record, step_tags
from megatron.training import build
from megatron.training.rules import check, resolve
from megatron.training.step import train_step
from tests.model.test_ring_attention import _Largest as LargestTensor
from tests.models.in_layouts import check_layout
from tests.models.plain_clip import ALPHA, FAMILIES
from tests.models.plain_state import EOD, LAYERS, LENGTH, LINE, VOCABULARY, compare, read_all
from tests.ranks import trains
from tests.training.test_plain_loop import records

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
LAYOUTS = {
    "one process": (1, "groups", ""),
    "one process, heads": (1, "heads", "--attention-backend sdpa"),
    "gates": (1, "gates", ""),
    "documents": (1, "documents, window", ""),
    "documents, flash attention": (1, "documents, window", "--attention-backend sdpa"),
    "cap": (1, "cap", ""),
    "latent": (1, "latent", ""),
    "latent, one product": (1, "latent, one product for queries", "--attention-backend sdpa"),
    "latent, up products and core again": (
        1,
        "latent",
        "--recompute-granularity selective --recompute-modules mla_up_proj core_attn",
    ),
    "core again": (1, "groups", "--recompute-granularity selective --recompute-modules core_attn"),
    "attention again": (1, "groups", "--recompute-granularity full_attn"),
    "layers again": (1, "documents, window", "--recompute-granularity full"),
    "tp2": (2, "groups", f"{TP} --micro-batch-size 1"),
    "tp2 with sequence parallelism": (2, "latent", SP),
    "tp2, latent": (2, "latent, one product for queries", TP),
    "pp2": (2, "groups", PP),
    "pp2, zb-h1": (2, "latent", f"{PP} --pipeline-schedule zb-h1 --micro-batch-size 1"),
    "pp2, zb-v": (2, "groups", f"{PP} --pipeline-schedule zb-v --micro-batch-size 1"),
    "pp2, interleaved": (2, "heads", f"{PP} --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1"),
    "dp2": (2, "groups", ""),
    "zero1": (2, "narrow", "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "zero2": (2, "latent", "--sharding-stage 2"),
    "zero3": (2, "narrow", "--sharding-stage 3 --overlap-param-gather"),
    "cp2 in a ring": (2, "groups", CP),
    "cp2 in a ring, documents": (2, "documents, window", CP),
    "cp2, gathered": (2, "documents, window", f"{CP} --cp-comm-type allgather"),
    "cp2, heads for rows": (2, "groups", f"{CP} --cp-comm-type a2a"),
    "cp2 in a ring, latent": (2, "latent", CP),
    "cp2, gathered, latent": (2, "latent", f"{CP} --cp-comm-type allgather"),
    "cp2, heads for rows, latent": (2, "latent", f"{CP} --cp-comm-type a2a --recompute-granularity full"),
    "tp2 cp2, heads for rows": (4, "heads", f"{SP} {CP} --cp-comm-type a2a"),
    "tp2 pp2, zb-h1, zero3": (
        8,
        "latent",
        f"{SP} {PP} --pipeline-schedule zb-h1 --micro-batch-size 1 --sharding-stage 3",
    ),
}
LONG = {name for name, (world, *_) in LAYOUTS.items() if world > 2}


pretrain = trains(pretrain_gpt, LINE)


@cache
def trained(family: str):
    return FAMILIES[family].train()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in LAYOUTS])
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    """--qk-clip --qk-clip-alpha --qk-clip-threshold --log-max-attention-logit"""
    world, family, words = LAYOUTS[layout]
    one = FAMILIES[family]
    clip = f"--qk-clip --qk-clip-alpha {ALPHA} --qk-clip-threshold {one.threshold}"
    run_ranks(world, pretrain, f"{one.flags} {clip} {words} --save {tmp_path} --check-replicas-interval 2")
    steps, wanted = trained(family)
    compare(tmp_path, steps, wanted)


@pytest.mark.full
def test_two_ways_of_context_parallelism_are_one_process():
    sizes = "--seq-length 16 --precision fp32 --qk-clip --qk-clip-threshold 0.1 --hidden-dropout 0.1"
    check_layout("cp4a2a2", f"{LINE} {sizes}".replace("--seq-length 12", ""))


# ---- single updates --------------------------------------------------------------------------------------------------

HOW = {
    "muon": (1, "--optimizer muon --muon-fp32-matmul-prec highest"),
    "muon, zero1": (2, "--optimizer muon --muon-fp32-matmul-prec highest --sharding-stage 1"),
    "sgd": (1, "--optimizer sgd"),
    "bf16, muon": (1, "--bf16 --optimizer muon"),
    "bf16, zero1": (2, "--bf16 --sharding-stage 1 --overlap-param-gather"),
    "bf16, zero3": (2, "--bf16 --sharding-stage 3"),
    "bf16, zero3, shards on the host": (2, "--bf16 --sharding-stage 3 --param-cpu-offload"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
    "autocast": (1, "--bf16 --amp-level O1"),
    "bf16, on the host": (1, "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    "on the host": (1, "--optimizer-cpu-offload"),
    "in files": (1, "--nvme-offload-fraction 0.6"),
    "bf16, in files": (1, "--bf16 --nvme-offload-fraction 1"),
    "bf16, in files, zero3": (2, "--bf16 --nvme-offload-fraction 1 --sharding-stage 3"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("how", HOW)
def test_an_update_is_scaled_after_it(how, tmp_path):
    """Main weights are those of the update times eta, moments those of the update; and the model has its part: a run that
    reads the main weights goes on alike, to the bit.
    """
    (world, words), one = HOW[how], FAMILIES["narrow"]
    words = f"{one.flags} {words} --adam-eps 1e-8"
    words += f" --nvme-offload-dir {tmp_path}" if "nvme" in words else ""
    clip = f"{words} --qk-clip --qk-clip-alpha {ALPHA} --qk-clip-threshold {one.threshold}"
    for name, flags, steps in (("plain", words, 1), ("clipped", clip, 1), ("straight", clip, 2)):
        run_ranks(world, pretrain, f"{flags} --train-iters {steps} --save {tmp_path / name}")
    run_ranks(world, pretrain, f"{clip} --train-iters 2 --save {tmp_path / 'clipped'} --load {tmp_path / 'clipped'}")
    weights = one.initial_weights()
    data = MockDataset(1 << 20, LENGTH, VOCABULARY, EOD, 1234, 0)
    one.network(weights, torch.stack([torch.from_numpy(data[place]) for place in range(8)])[:, :-1])
    factors = {name: torch.ones_like(values) for name, values in weights.items()}
    one.clip(factors)
    plain, found = read_all(tmp_path / "plain", 1), read_all(tmp_path / "clipped", 1)
    assert sum((values < 1).any().item() for values in factors.values()) == LAYERS
    exact = "16" not in words
    for name, values in plain.items():
        wanted = values.double() * factors.get(name, 1.0)
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-5 if exact else 5e-3, atol=0.0)
    straight, resumed = read_all(tmp_path / "straight", 2), read_all(tmp_path / "clipped", 2)
    assert all(torch.equal(straight[name], values) for name, values in resumed.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("late", [False, True])
def test_a_skipped_step_clips_nothing(late, monkeypatch, tmp_path):
    """Every step overflows: the host decides, or a flag on the device."""
    if late:
        monkeypatch.setattr(build, "defers_host_sync", lambda config, context, optimizer: True)
    one = FAMILIES["groups"]
    words = "--fp16 --loss-scale 1e18 --qk-clip --qk-clip-threshold 0.01 --on-nan skip"
    pretrain(0, f"{one.flags} {words} --train-iters 2 --save {tmp_path}")
    found = read_all(tmp_path, 2)
    assert all(torch.equal(found[name], values.float()) for name, values in one.initial_weights().items())
    assert [("max_attention_logit" in step, step["skipped"]) for step in records(tmp_path, "step")] == [
        (False, True)
    ] * 2


def test_logs_have_megatrons_words():
    step = StepMetrics(1, 8, 8, {}, 1e-3, max_attention_logit=12.3456)
    rates = dict(tokens_per_second=1.0, tflops_per_rank=1.0)
    assert " | max attention logit: 12.346 | number of skipped" in console_line(
        step, Interval(1.0, 8, 1), RunSizes(2, 8), rates
    )
    assert (
        step_tags(step, {})["max_attention_logit"] == 12.3456 == step_record(step, {}, 1.0, {})["max_attention_logit"]
    )


def test_a_run_goes_on_with_it(tmp_path):
    """From a checkpoint of a run without it: a note says so. Checkpoints have nothing of it."""
    pretrain(0, f"--train-iters 1 --save {tmp_path}")
    before = set(read_all(tmp_path, 1))
    pretrain(0, f"--train-iters 2 --save {tmp_path} --load {tmp_path} --qk-clip --qk-clip-threshold 0.1")
    assert set(read_all(tmp_path, 2)) == before
    assert ["max_attention_logit" in step for step in records(tmp_path, "step")] == [False, True]


# ---- models, kinds of attention, kernels -----------------------------------------------------------------------------

SMALL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 24 --mock-data --vocab-size 90 --global-batch-size 4 "
    "--micro-batch-size 2 --train-iters 3 --eval-iters 0 --device cpu --num-workers 0 --lr 1e-3 --precision fp32"
)
MODELS = {
    "T5": f"--model-type T5 {SMALL} --num-layers 4 --decoder-seq-length 12",
    "T5, relative positions": (
        f"--model-type T5 {SMALL} --num-layers 4 --decoder-seq-length 12 --position-embedding-type relative "
        "--unscaled-attention --attention-dropout 0 --hidden-dropout 0"
    ),
    "BERT": f"--model-type BERT {SMALL} --num-layers 2",
    "depths": f"{SMALL} --num-layers 2 --position-embedding-type rope --mtp-num-layers 2 --num-query-groups 2",
    "a pattern": (
        f"{SMALL} --hybrid-layer-pattern M-*- --mamba-num-groups 2 --mamba-head-dim 8 --mamba-state-dim 8 "
        "--window-size 5,0 --reset-attention-mask"
    ),
}


def visible(layer, context, query, key) -> torch.Tensor:
    """[b, s, t] bool: which keys each query sees, pair by pair."""
    (s, b), t = query.shape[:2], len(key)
    seen = torch.ones(b, s, t, dtype=torch.bool)
    for sample in range(b):
        for i in range(s):
            for j in range(t):
                place = i + t - s
                if layer.causal:
                    near = layer.window is None or place - j <= layer.window
                    own = context.documents is None or j >= context.documents.starts[sample, i]
                    seen[sample, i, j] = j <= place and near and own
                if context.padding is not None:
                    seen[sample, i, j] &= context.padding[sample, j]
    if context.documents is not None and not layer.causal:  # several samples in a row
        seen, first = torch.zeros_like(seen), 0
        for part in context.documents.parts[0]:
            seen[:, first : first + part.keys, first : first + part.keys] = True
            first += part.keys
    return seen


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MODELS)
def test_heads_of_every_kind(name, monkeypatch):
    """The largest logits are those of all pairs; weights are those of a run without clipping, times eta."""
    found: dict = {}
    usual = module.scaled_dot_product_attention

    def watched(query, key, value, layer, context, dropout=None):
        scores = torch.einsum("sbgqd,tbgd->bgqst", query, key).detach() * layer.scale
        scores = scores.masked_fill(~visible(layer, context, query, key)[:, None, None], -torch.inf).amax((0, 3, 4))
        found[layer] = torch.maximum(found.get(layer, torch.zeros(())), scores)
        return usual(query, key, value, layer, context, dropout)

    monkeypatch.setattr(module, "scaled_dot_product_attention", watched)
    weights = {}
    for clip in ("", f"--qk-clip --qk-clip-threshold 1e-3 --qk-clip-alpha {ALPHA}"):
        config = parse_any(f"{MODELS[name]} {clip} --log-max-attention-logit".split())
        run, largest = build.build_run(resolve(config, 1), recipe_of(config)), {}
        found.clear()
        step = train_step(run)
        for heads in run.optimizer.heads:
            layer = run.stages[0].get_submodule(heads.name)
            largest[heads.name] = found.pop(layer)
            torch.testing.assert_close(heads.logits.last, largest[heads.name])
        assert not found and step.max_attention_logit == pytest.approx(max(one.max() for one in largest.values()))
        weights[clip] = {piece.name: piece.tensor.clone() for piece in run.optimizer.pieces(moments=False)}
        run.close()
    before, after = weights.values()
    for name, values in before.items():
        mixer, _, own = name.rpartition(".attention.") if ".attention." in name else name.rpartition(".cross.")
        heads = name.removesuffix(own).rstrip(".")
        factor = torch.ones_like(values)
        if own in ("qkv.weight", "q.weight", "kv.weight"):
            eta = (1e-3 / largest[heads].amax(1)).clamp(max=1)
            factor = factor.view(len(eta), -1, *values.shape[-2:]) if values.ndim < 4 else factor
            queries = largest[heads].shape[1]
            if own[0] == "q":
                factor[:, :queries] *= eta.pow(ALPHA).view(-1, 1, 1, 1)
            if own != "q.weight":
                factor[:, -2] *= eta.pow(1 - ALPHA).view(-1, 1, 1)
        torch.testing.assert_close(after[name], values * factor.view(values.shape))


@pytest.mark.parametrize("size", [1, 700, 1 << 20])
def test_scores_are_computed_in_blocks(size, monkeypatch):
    """Of any size: one row, several, all."""
    monkeypatch.setattr(explicit_attention, "SCORE_BYTES", dict(cpu=size))
    draw = torch.Generator().manual_seed(3)
    starts = np.array([[0] * 3 + [3] * 5 + [8] * 2, [0] * 9 + [9]], np.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        query = torch.randn(10, 2, 3, 2, 4, generator=draw).to(dtype)
        key = torch.randn(10, 2, 3, 4, generator=draw).to(dtype)
        if dtype == torch.float16:
            query *= 2000  # products above the largest number of this format
        scores = torch.einsum("sbgqd,tbgd->bgqst", query.double(), key.double()) * 0.7
        allowed = torch.rand(2, 10, 10, generator=draw) < 0.3
        padding = torch.arange(10).expand(2, -1) < torch.tensor([[10], [4]])
        for more in (
            dict(causal=True),
            dict(causal=True, window=2),
            dict(causal=True, documents=Documents.of(starts, "cpu")),
            dict(causal=True, window=3, documents=Documents.of(starts, "cpu")),
            dict(causal=True, allowed=allowed),
            dict(causal=False),
            dict(causal=False, padding=padding),
        ):
            layer = SimpleNamespace(causal=more["causal"], window=more.get("window"))
            context = SimpleNamespace(documents=more.get("documents"), padding=more.get("padding"))
            seen = visible(layer, context, query, key)
            seen &= more.get("allowed", seen)
            wanted = scores.masked_fill(~seen[:, None, None], -torch.inf).amax((0, 3, 4))
            torch.testing.assert_close(
                largest_scores(query, key, scale=0.7, **more).double(), wanted, rtol=1e-6, atol=0
            )


def test_scores_of_long_sequences_take_a_block():
    query, key = torch.randn(2048, 1, 2, 2, 8), torch.randn(2048, 1, 2, 8)
    with LargestTensor() as seen:
        largest_scores(query, key, scale=1.0, causal=True)
    assert seen.largest <= SCORE_BYTES["cpu"] < 4 * 4 * 2048**2 / 10


@pytest.mark.parametrize("own", [{}, dict(window_size="7,0"), dict(num_query_groups=2, num_attention_heads=8)])
def test_plans_have_the_product(own):
    """It adds time to the forward pass, and neither model FLOPs nor saved bytes."""
    model = Model(**dict(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=128) | own)
    facts = GPTFacts(model, 100)
    plain, more = (RankSetup(micro_batch_size=3, largest_scores=on) for on in (False, True))
    kind = facts.layer_kind(0)
    [product] = [op for op in facts.layer_ops(more, kind) if isinstance(op, LargestScores)]
    seen = sum(min(i + 1, (model.window or 128) + 1) for i in range(128))
    assert product.products == pytest.approx(2 * 3 * 64 * seen, rel=0.01)
    assert facts.layer_saved_bytes(plain, kind) == +facts.layer_saved_bytes(more, kind)
    jobs = [Job(facts, 8, largest_scores=on) for on in (False, True)]
    cluster, layout = Cluster(find("H100-80GB"), 1), Layout(micro_batch_size=3)
    alone, beside = (_layer(job, layout.rank_setup(job), kind, (), cluster) for job in jobs)
    assert beside.forward > alone.forward and beside.backward == pytest.approx(alone.backward)


def test_what_cannot_be_clipped():
    said = check(parse_any(f"{LINE} --qk-clip --qk-layernorm".split()), 1)
    assert [one for one in said if one.startswith("--qk-clip scales weights of queries and keys, and --qk-layernorm")]
    for words, said in (
        ("--qk-clip-alpha 1", "--qk-clip-alpha 1.0 must be above 0 and below 1"),
        ("--qk-clip-threshold 0", "--qk-clip-threshold 0.0 must be above 0"),
    ):
        with pytest.raises(SettingsError, match=said):
            resolve(parse_any(f"{LINE} --qk-clip {words}".split()), 1)
    for words in ("--hybrid-layer-pattern M-M- --mamba-num-heads 8", "--model-type tests.models.mlp_language_model"):
        said = check(parse_any(f"{LINE} {words} --qk-clip --log-max-attention-logit".split()), 1)
        assert [one for one in said if one.startswith("--qk-clip and --log-max-attention-logit: no layer of this")], (
            said
        )
    for words in ("--lora-rank 2", "--freeze blocks.1.*"):
        config = resolve(parse_any(f"{LINE} {words} --qk-clip".split()), 1)
        with pytest.raises(SettingsError, match=r"--qk-clip scales .* blocks.*attention.qkv.weight.* frozen"):
            build.build_run(config, pretrain_gpt.recipe())
