# SPDX-License-Identifier: Apache-2.0
"""Layouts for generation: weights and cache to the byte against the tensors of loaded models, times against formulas."""

import json
import statistics
from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron.errors import SettingsError
from megatron.inference.engine import BLOCK_SIZE, Engine
from megatron.inference.load import build_model
from megatron.inference.quantize import linear_layers, quantize_layers, weight_bytes
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.inference.stages import stages_of
from megatron.model.gpt.facts import GPTFacts
from megatron.model.quantization import QuantizeOptions
from megatron.model.recipe import facts_of, recipe_of
from megatron.mpu.mesh import Mesh
from megatron.optimizer.units import flat_units_of
from megatron.pipeline.build import build_stages
from megatron.planner import device as devices
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job
from megatron.planner.serving import BLOCK, Requests, ServingShare, plan_of, plans
from megatron.planner.serving_text import rejected
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Model, Parallel, Precision
from megatron.tools import plan as tool

GPT = "--num-layers 5 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --mock-data --vocab-size 99"
LLAMA = f"""{GPT} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4 --kv-channels 24"""
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16)


def config_of(flags: str, precision: str = "bf16"):
    return parse_pretrain([*flags.split(), "--precision", precision, "--micro-batch-size", "1"])


def job_of(flags: str, precision: str = "bf16", device: str = "cuda", vocab: int = 100) -> Job:
    return Job(facts_of(config_of(flags, precision), vocab), 1, precision, device)


def held(flags: str, precision: str, tp: int, pp: int, rank: int, vocab: int) -> tuple[int, int]:
    """(bytes of the weights that `inference.load` allocates on a rank, its layers), without its numbers."""
    parallel = Parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    config = replace(config_of(flags), parallel=parallel, precision=Precision(precision))
    mesh = Mesh(rank * tp, tp=tp, pp=pp, create_groups=False)
    build = partial(recipe_of(config).build_model, config, mesh, vocab, dtype=DTYPES[precision], device="meta")
    pipeline = stages_of(facts_of(config, vocab), pp)
    chunks = build_stages(build, pipeline, mesh) if pp > 1 else [build()]
    units = flat_units_of(chunks, partial(getattr, mesh))
    layers = sum(len(pipeline.layers[stage]) for stage in pipeline.stages_of(rank))
    return sum(unit.size for unit in units) * torch.empty((), dtype=DTYPES[precision]).element_size(), layers


@pytest.mark.parametrize("flags, precision", [(GPT, "bf16"), (LLAMA, "fp32")], ids=["gpt2", "llama"])
def test_weights_are_those_that_are_loaded(flags, precision):
    vocab = 100 if flags == GPT else 4000  # the output layer takes as long as 1.5 layers: the last stage has fewer
    job = job_of(flags, precision, vocab=vocab)
    for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (1, 5), (2, 2), (4, 5)):
        share = ServingShare(job, Cluster(devices.cpu(), tp * pp), tp, pp)
        for rank in range(pp):
            found, layers = held(flags, precision, tp, pp, rank, vocab)
            assert share.weight_bytes(rank) == found
            assert len(share._layers(rank)) == layers


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_quantized_weights_are_those_that_are_held(how):
    """Of whole models, and of tensor parallel ranks; the model's own layers are rounded."""
    quantize = QuantizeOptions(how, quantize_group_size=8, quantize_skip="blocks.0.mlp.*")
    for flags, precision, tp in ((GPT, "bf16", 1), (LLAMA, "fp32", 1), (LLAMA, "bf16", 2)):
        job, config = job_of(flags, precision), config_of(flags, precision)
        mesh = Mesh(0, tp=tp, create_groups=False)
        built = build_model(config, 100, device="cpu", precision=precision, mesh=mesh)
        built.weights.normal_()
        for _, layer in linear_layers([built.model]):
            layer.tp = Mesh().tp if tp > 1 else layer.tp  # no messages: the sizes do not depend on them
        quantize_layers([built.model], job.facts, quantize)
        share = ServingShare(job, Cluster(devices.cpu(), tp), tp, 1, quantize)
        assert share.weight_bytes(0) == weight_bytes(built.model)


@pytest.mark.parametrize("flags, precision", [(GPT, "fp32"), (LLAMA, "bf16")], ids=["gpt2", "llama"])
def test_a_texts_keys_and_values_are_those_of_an_engine(flags, precision):
    config = config_of(flags, precision)
    model = recipe_of(config).build_model(config, Mesh(), 100, dtype=DTYPES[precision], device="cpu")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    engine = Engine(model.eval(), longest=40, blocks=9)
    engine.add(Request((1, 2, 3), Sampling(2, greedy=True)))
    engine.step()
    found = sum(tensor.nbytes for layer in engine.stage.cache._layers.values() for tensor in layer)
    share = ServingShare(job_of(flags, precision, "cpu"), Cluster(devices.cpu(), 1), 1, 1)
    assert found == 9 * BLOCK * share.cache_bytes(0) and BLOCK == BLOCK_SIZE


def test_a_text_of_a_model_with_states_has_copies_of_them():
    """Its own and two snapshots, beside keys and values in whole blocks of 16 tokens."""
    flags = f"{GPT} --hybrid-layer-pattern MM*MM --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8"
    job, cluster = job_of(flags), Cluster(devices.find("A100-80GB"), 1)
    share = ServingShare(job, cluster, 1, 1)
    states, each = share.state_bytes(0), share.cache_bytes(0)
    assert states > 0 and each == 2 * 64 * 2  # a layer of attention
    for length, blocks in ((32, 2), (33, 3)):
        assert plan_of(job, cluster, Requests(length - 8, 8, 1), 1, 1).cache == 16 * blocks * each + 3 * states


def test_layouts_that_do_not_fit_say_by_how_much():
    plan = plan_of(job_of(GPT), Cluster(devices.find("A100-80GB"), 1), Requests(32, 8, 5), 1, 1)
    plan = replace(plan, weights=70 * 10**9, workspace=2 * 10**9, cache=3 * 10**9, texts=5)
    device = replace(devices.find("A100-80GB"), memory_gb=80.0, margin=0.0)
    assert rejected([plan], Cluster(device, 1)) == f"{plan.short()}: out of memory by 7.00 GB with 5 texts a replica"


FAST = replace(
    devices.find("A100-80GB"),
    flops=dict(bf16=1e30),
    attention=dict(bf16=1e30),
    bandwidth=1e9,
    latency=0.0,
    launch=0.0,
    inner=1e30,
    outer=1e30,
    unfused=1e-9,
)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_a_token_reads_all_weights_and_the_keys_and_values(n):
    """With arithmetic and messages for nothing: bytes over bandwidth. Also of fewer texts than stages."""
    job, length = job_of(LLAMA), 50
    h, e, d = 64, 2, 24
    layer = h * (8 + 2 * 4) * d + 8 * d * h + 3 * h * job.facts.settings.ffn_size
    for tp, pp in ((1, 1), (2, 1), (1, 5), (4, 5)):
        share = ServingShare(job, Cluster(FAST, tp * pp), tp, pp)
        token, parts = share.token_seconds(n, length)
        output = h * job.facts.vocabulary_rows(tp)
        each = -(-n // min(n, pp))
        stages = [(layer / tp + output * (rank == pp - 1)) * e for rank in range(pp)]
        if pp == 1:
            stages = [(5 * layer / tp + output) * e]
        cached = [each * length * share.cache_bytes(rank) for rank in range(pp)]
        through = [(one + kv) / 1e9 for one, kv in zip(stages, cached, strict=True)]
        assert token == pytest.approx(max(sum(through), min(pp, n) * max(through)), rel=1e-3)
        assert parts["weights and arithmetic"] == pytest.approx(sum(stages) / 1e9, rel=1e-3)


def test_times_follow_the_speeds_of_the_device():
    job, requests = job_of(LLAMA), Requests(32, 16, 8)
    plain = replace(FAST, latency=1e-5)
    one = lambda device, tp=2, pp=1: plan_of(job, Cluster(device, tp * pp), requests, tp, pp)
    assert one(plain).token - one(FAST).token == pytest.approx((2 * 5 + 1) * 1e-5)  # two sums a layer, and the logits
    assert one(replace(FAST, bandwidth=2e9)).token == pytest.approx(one(FAST).token / 2, rel=1e-6)
    started = one(replace(FAST, launch=1e-6)).token - one(FAST).token
    assert started == pytest.approx(5 * (2 * 15 + 4) * 1e-6)  # two branches of a layer, and the cache
    slow = replace(FAST, flops=dict(bf16=1e9))
    flops = 2 * 32 * job.facts.parameters
    assert one(slow, 1).first == pytest.approx(flops / 1e9, rel=4)


def test_the_best_of_all_layouts_is_the_first():
    job = job_of(LLAMA)
    for memory, latency in ((80.0, False), (80.0, True), (2.4, False)):
        cluster = Cluster(replace(devices.find("A100-80GB"), memory_gb=memory), 8)
        found = plans(job, cluster, Requests(32, 16, 64), latency=latency)
        sizes = {(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 8}  # 4 heads of keys, 5 layers
        assert {(plan.tp, plan.pp) for plan in found} == sizes
        cost = [plan.token if latency else 1 / plan.tokens_per_second for plan in found if plan.fits]
        assert cost[0] <= 1.1 * min(cost)
        alike = [plan for plan, each in zip(found, cost, strict=False) if each <= 1.1 * min(cost)]
        assert found[0].ranks == min(plan.ranks for plan in alike)
        for plan in found:
            fits = plan.bytes <= cluster.device.usable_bytes
            assert fits == plan.fits and plan.texts * plan.replicas == 64
            assert plan.cache % (BLOCK * 2) == 0


def test_of_layouts_that_do_not_fit_the_smallest_comes_first():
    cluster = Cluster(replace(devices.find("A100-80GB"), memory_gb=0.5), 8)
    found = plans(job_of(LLAMA), cluster, Requests(32, 16, 64))
    sizes = [plan.weights + plan.cache for plan in found]
    assert not any(plan.fits for plan in found) and sizes == sorted(sizes) and len(set(sizes)) > 5


@pytest.mark.parametrize("texts", [1, 7, 8, 9, 17])
def test_all_texts_that_are_asked_for_have_a_place(texts):
    """Replicas need not divide them."""
    cluster = Cluster(devices.find("A100-80GB"), 8)
    for tp, replicas in ((1, 8), (2, 4), (4, 2)):
        plan = plan_of(job_of(LLAMA), cluster, Requests(32, 16, texts), tp, 1)
        assert (plan.replicas, plan.texts) == (replicas, -(-texts // replicas))


def test_as_many_texts_as_fit():
    job, device = job_of(LLAMA), devices.find("A100-80GB")
    share = ServingShare(job, Cluster(device, 1), 1, 1)
    need = share.weight_bytes(0) + share.workspace_bytes(256)
    for room in (1, 7, 300):
        usable = need + room * 48 * share.cache_bytes(0)
        cluster = Cluster(replace(device, memory_gb=(usable + 2) / 1e9, margin=0.0), 1)
        plan = plan_of(job, cluster, Requests(30, 10), 1, 1)
        assert (plan.room, plan.texts) == (room, min(room, 256))
    assert not plan_of(job, Cluster(replace(device, memory_gb=need / 1e9, margin=0.0), 1), Requests(30, 10), 1, 1).fits


COMMAND = "--mode inference --world-size 8 --device-name A100 --model-name-or-path 22B --vocab-size 51200 --bf16"


def test_the_command(capsys):
    tool.main([*COMMAND.split(), "--top", "3"])
    out = capsys.readouterr().out
    assert out.startswith("the best layout: tp2 x 4\n  memory: ") and "out of the question" not in out
    assert out.rstrip().endswith(
        "python -m megatron.tools.launch --nproc-per-node 2 -m megatron.tools.serve --load DIR "
        "--tensor-model-parallel-size 2"
    )
    assert max(map(len, out.splitlines()[:-1])) <= 110
    tool.main([*COMMAND.split(), "--json", "--prefer", "latency", "--max-batch-size", "8"])
    record = json.loads(capsys.readouterr().out)
    best = record["plans"][0]
    assert best["fits"] and best["tp"] * best["pp"] == 8 and best["texts"] == 8
    assert best["bytes"] == best["weights"] + best["workspace"] + best["texts"] * best["cache"]
    tool.main([*COMMAND.split(), "--picture", "x.svg", "--tokens", "1e9", "--batch-size", "4"])
    said = capsys.readouterr().err
    assert said.count("has no effect without --mode training") == 3 and "--batch-size 4 has no effect" in said
    tool.main([*COMMAND.split(), "--lr", "1e-4", "--save", "x", "--zero-stage", "1", "--prompt-length", "9"])
    said = capsys.readouterr().err
    assert "without effect on --mode inference: --lr 0.0001, --save x, --zero-stage 1\n" in said, said


@pytest.mark.sampled(2)
def test_what_cannot_be_planned_is_refused():
    with pytest.raises(SettingsError, match=r"(?s)no layout of 1 x 20 GB holds the model.*out of memory by"):
        tool.main([*COMMAND.replace("size 8", "size 1").split(), "--device-memory-gb", "20"])
    with pytest.raises(SettingsError, match="--prompt-length 4000 and --output-length 128 are more than the 2048"):
        tool.main([*COMMAND.split(), "--prompt-length", "4000"])
    shape = "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 99"
    with pytest.raises(SettingsError, match="plans models that continue texts"):
        tool.main(["--mode", "inference", "--world-size", "1", "--model-type", "T5", *shape.split()])
    for flag in ("--prompt-length", "--output-length", "--max-batch-size"):
        with pytest.raises(SettingsError, match=f"{flag} 0 must be at least 1"):
            tool.main([*COMMAND.split(), flag, "0"])


# Llama 2 in fp16 on A100-80GB: texts, tp, tokens of prompt and continuation, and what was published. LMDeploy 0.1.0a1
# (docs/en/benchmark/a100_fp16.md): tokens/s, median ms a token. TensorRT-LLM 0.6.1 (docs/source/performance.md): tokens/s
# of all GPUs, and ms to the first token.
LMDEPLOY = """7B 1 1 128 128 102 10; 7B 1 1 2048 2048 94 11; 7B 16 1 128 128 1272 11; 7B 16 1 128 2048 1011 15
7B 16 1 2048 128 349 20; 7B 64 1 128 128 3024 14; 7B 64 1 128 2048 1852 30; 13B 1 1 128 128 56.6 17
13B 1 1 2048 2048 52.1 19; 13B 16 1 128 128 757 19; 13B 16 1 128 2048 606 26; 13B 16 1 2048 128 258 33
13B 64 1 128 128 2033 24; 70B 1 4 128 128 33.6 29; 70B 1 4 2048 2048 31.9 31; 70B 16 4 128 128 440 30
70B 16 4 2048 128 189 35; 70B 64 4 128 128 1160 37; 70B 64 4 128 2048 1392 43"""
TENSORRT = """7B 384 1 128 128 5586; 7B 60 1 128 2048 1928; 7B 52 1 2048 128 591; 7B 64 2 2048 2048 1564
70B 1280 4 128 128 2680; 70B 240 4 128 2048 2100; 70B 120 4 2048 128 316"""
FIRST = "7B 1 128 16; 7B 1 2048 133; 70B 4 128 47; 70B 4 2048 377"
LLAMAS = dict(
    zip(
        ("7B", "13B", "70B"),
        ((32, 4096, 32, 32, 11008), (40, 5120, 40, 40, 13824), (80, 8192, 64, 8, 28672)),
        strict=True,
    )
)


def llama_job(name: str) -> Job:
    layers, hidden, heads, groups, ffn = LLAMAS[name]
    more = dict(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", disable_bias_linear=True)
    sizes = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, ffn_hidden_size=ffn)
    grouped = dict(group_query_attention=groups < heads, num_query_groups=groups, seq_length=4096)
    model = Model(**sizes, **grouped, **more, untie_embeddings_and_output_weights=True)
    return Job(GPTFacts(model, 32000), 1, "fp16")


def rows_of(table: str):
    for row in table.replace("\n", "; ").split("; "):
        name, *numbers = row.split()
        yield llama_job(name), *map(float, numbers)


def planned(job, texts, tp, prompt, output):
    cluster = Cluster(devices.find("A100-80GB"), int(tp))
    return plan_of(job, cluster, Requests(int(prompt), int(output), int(texts)), int(tp), 1)


def test_predictions_against_published_figures():
    """No constant is fitted to them. This suite's layers start kernels one by one, which those programs do not."""
    tokens, rates = [], []
    for job, texts, tp, prompt, output, rate, token in rows_of(LMDEPLOY):
        plan = planned(job, texts, tp, prompt, output)
        tokens.append(1000 * plan.token / token)
        rates.append(plan.tokens_per_second / rate)
    assert 0.95 < min(tokens) and max(tokens) < 1.3 and 1.1 < statistics.median(tokens) < 1.25, tokens
    for job, texts, tp, prompt, output, rate in rows_of(TENSORRT):
        rates.append(planned(job, texts, tp, prompt, output).tokens_per_second / rate)
    assert 0.65 < min(rates) and max(rates) < 1.45 and 0.8 < statistics.median(rates) < 1, rates
    firsts = [1000 * planned(job, 1, tp, prompt, 8).first / first for job, tp, prompt, first in rows_of(FIRST)]
    assert 0.88 < min(firsts) and max(firsts) < 1, firsts
