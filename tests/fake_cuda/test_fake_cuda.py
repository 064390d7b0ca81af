# SPDX-License-Identifier: Apache-2.0
"""Steps of every kind of layout on fake CUDA devices, as one rank of a job of up to 64, and planted mistakes.

Needs g++ (or what CXX names), which compiles the device in a few seconds, and a torch without CUDA: one with it has a
device of its own to register.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda import branches

HERE = Path(__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
pytestmark = [
    pytest.mark.skipif(not COMPILER, reason="no C++ compiler: apt-get install g++, or set CXX"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA: tests/gpu runs on a device"),
]

BASE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 --lr 1e-2
    --micro-batch-size 2 --train-iters 4 --eval-iters 0 --device cuda --num-workers 0 --precision bf16"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --disable-bias-linear --group-query-attention --num-query-groups 2 --qk-layernorm"""
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
PP = "--num-layers 4 --pipeline-model-parallel-size 2"
IN_BF16 = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
LATENT = """--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --qk-layernorm
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"""
FP8 = "--hidden-size 256 --ffn-hidden-size 512 --fp8-format hybrid"
CASES = {  # name: flags, rank, ranks
    "latent attention, tp2 sp, up products again": (
        f"{LATENT} {TP} --recompute-granularity selective --recompute-modules mla_up_proj --rotary-scaling-factor 4",
        1,
        2,
    ),
    "latent attention, documents, pp2 zb-h1": (
        f"{LATENT} {PP} --pipeline-schedule zb-h1 --global-batch-size 8 --reset-attention-mask --precision bf16",
        0,
        2,
    ),
    "states, cp2, documents": (
        "--hybrid-layer-pattern MG --mamba-num-groups 1 --mamba-head-dim 16 --mamba-state-dim 8 --linear-num-key-heads 1 "
        "--linear-num-value-heads 2 --linear-key-head-dim 8 --linear-value-head-dim 8 --hidden-dropout 0 "
        "--context-parallel-size 2 --reset-attention-mask",
        1,
        2,
    ),
    "QK-clip, tp2 sp, accumulation": (
        f"{TP} --qk-clip --log-max-attention-logit --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0",
        1,
        4,
    ),
    "fp16": ("--precision fp16", 0, 1),
    "O1": (f"--precision bf16 --amp-level O1 {DROPOUT}", 0, 1),
    "masks, accumulation": (
        "--reset-attention-mask --reset-position-ids --eod-mask-loss --gradient-accumulation-fusion --global-batch-size 4",
        0,
        1,
    ),
    "offload": ("--optimizer-cpu-offload", 0, 1),
    "bf16 state, dp2 zero1": (f"{IN_BF16} --grad-reduce-in-bf16 --sharding-stage 1", 1, 2),
    "bf16 state, zero3, Muon": (f"{IN_BF16} --main-grads-dtype bf16 --sharding-stage 3 --optimizer muon", 1, 2),
    "Muon, dp2 zero2": ("--optimizer muon --sharding-stage 2", 1, 2),
    "Lion, z-loss, caps": (
        "--optimizer lion --z-loss-coeff 1e-3 --attn-logit-softcapping 30 --final-logit-softcapping 30 "
        "--attention-backend explicit --window-size 7,0",
        0,
        1,
    ),
    "dp4 zero1 overlap, spikes": (
        "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather --on-spike skip --check-replicas-interval 3",
        3,
        4,
    ),
    "SGD, mean of micro-batches": ("--optimizer sgd --precision fp16 --loss-averaging micro-batch", 0, 1),
    "dp8 zero2 of 64": (f"{TP} {DROPOUT} --sharding-stage 2 --recompute-granularity selective", 37, 64),
    "dp8 zero3": (f"{LLAMA} --sharding-stage 3", 7, 8),
    "tp4": (f"{DROPOUT} --tensor-model-parallel-size 4 --recompute-granularity full", 2, 4),
    "pp2 last, Llama, tp2 sp": (f"{PP} {TP} {LLAMA} --global-batch-size 8", 3, 4),
    "cp2 tp2 sp, documents": (
        f"{TP} {DROPOUT} --context-parallel-size 2 --reset-attention-mask --sharding-stage 1",
        3,
        8,
    ),
    "cp4 of 64, grouped": (f"{LLAMA} --context-parallel-size 4 --hidden-dropout 0 --attention-dropout 0", 37, 64),
    "cp2 by heads, zero3": (f"{LLAMA} --context-parallel-size 2 --cp-comm-type a2a --sharding-stage 3", 1, 4),
    "cp4 by heads in a ring": (
        f"{LLAMA} --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        1,
        4,
    ),
    "cp2 gathers, documents": (
        f"{DROPOUT} --context-parallel-size 2 --cp-comm-type allgather --reset-attention-mask",
        1,
        2,
    ),
    "pp2 interleaved": (f"{PP} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8", 1, 2),
    "pp2 zb-h1": (f"{PP} --pipeline-schedule zb-h1 --global-batch-size 8", 0, 2),
    "T5, tp2 sp, pp2 zb-h1": (
        f"--model-type T5 --decoder-seq-length 16 --position-embedding-type relative --unscaled-attention {TP} {DROPOUT} "
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --global-batch-size 8",
        3,
        4,
    ),
    "T5, rope, grouped": (
        f"--model-type T5 {LLAMA.replace('--qk-layernorm', '')} --hidden-dropout 0 --attention-dropout 0",
        0,
        1,
    ),
    "BERT, tp2 sp": (f"--model-type BERT {TP} {DROPOUT}", 1, 2),
    "BERT, published": ("--model-type BERT --post-norm --hidden-dropout 0 --attention-dropout 0", 0, 1),
    "pp2 zb-v zero2": (f"{PP} --pipeline-schedule zb-v --sharding-stage 2 --global-batch-size 16", 2, 4),
}
VARLEN = "varlen (CUDA)"  # torch's own attention of documents, which is called on fake tensors, as on a GPU it would be
DOCUMENTS = f"{LLAMA} --reset-attention-mask --hidden-dropout 0 --attention-dropout 0"
IN_VARLEN = {  # name: flags, rank, ranks, calls in two steps
    "varlen, accumulation, O1": (f"{DOCUMENTS} --global-batch-size 4 --amp-level O1", 0, 1, 8),
    "varlen, cp2 tp2, window, recompute": (
        f"{DOCUMENTS} {TP} --context-parallel-size 2 --cp-comm-type allgather --window-size 9,0 --window-attn-skip-freq 2 "
        "--recompute-granularity full",
        3,
        4,
        16,
    ),
}
SCALED_MM = "scaled_mm"  # torch's products of fp8 numbers
IN_FP8 = {  # name: flags, rank, ranks, products in two steps
    # 2 layers x 4 linear ones x 2 steps x 3 products.
    "fp8 of tensors, tp2 sp": (f"{FP8} {TP}", 1, 2, 48),
    "fp8 of tensors, recomputed, 33 tokens": (
        f"{FP8} --seq-length 33 --micro-batch-size 1 --recompute-granularity full --precision bf16 --fp8-param-gather",
        0,
        1,
        64,
    ),
    "fp8 of blocks, zero3": (
        f"{FP8} {LLAMA} --fp8-recipe blockwise --sharding-stage 3 --precision bf16 --fp8-param-gather",
        1,
        2,
        48,
    ),
    "fp8 of blocks, biases, accumulation": (
        f"{FP8} --fp8-recipe blockwise --global-batch-size 4 --gradient-accumulation-fusion",
        0,
        1,
        96,
    ),
    "mxfp8, 33 tokens": (f"{FP8} --fp8-recipe mxfp8 --seq-length 33 --micro-batch-size 1", 0, 1, 48),
    # Two products of each linear layer of experts: gradients of weights are in bf16.
    "fp8 of experts": (
        f"{FP8} {LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --precision bf16",
        0,
        1,
        2 * 2 * (2 * 3 + 2 * 2),
    ),
    "fp8, weights' gradients in bf16, pp2 zb-h1": (
        f"{FP8} {PP} --no-fp8-wgrad --pipeline-schedule zb-h1 --global-batch-size 8",
        0,
        2,
        2 * 4 * 2 * 2 * 4,
    ),
}
FLASH = "flash (CUDA)"  # of a part of the keys
IN_RING = {  # name: flags, rank, ranks, calls of its forward pass in two steps
    # Layers x steps x micro-batches x (a causal piece, and one of each other rank).
    "ring of four": (f"{LLAMA} --context-parallel-size 4 --hidden-dropout 0 --attention-dropout 0", 2, 4, 2 * 2 * 4),
    "ring of two, documents, window": (
        f"{DOCUMENTS} --context-parallel-size 2 --window-size 9,0 --recompute-granularity selective",
        1,
        2,
        None,
    ),
}
COUNTS = "wait for an event of this step in megatron/mpu/transfer.py: read"  # how many rows go to each rank
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
EP, CAPACITY = "--expert-model-parallel-size 2", "--moe-expert-capacity-factor 1.0"
FULL, TURNS = "--recompute-granularity full", "--overlap-moe-expert-parallel-comm"
WITH_EXPERTS = {  # name: flags, rank, ranks, reads of counts: layers of the stage x micro-batches
    "one process": (f"{EXPERTS} --global-batch-size 4", 0, 1, 0),
    "drops": (f"{EXPERTS} {CAPACITY} --moe-router-num-groups 2 --moe-router-group-topk 1", 0, 1, 2),
    "ep2, accumulation": (f"{EXPERTS} {EP} --global-batch-size 8", 1, 2, 2 * 2),
    "ep2, recomputed": (f"{EXPERTS} {EP} {FULL}", 0, 2, 2),
    "ep2, recomputed MLP": (f"{EXPERTS} {EP} --recompute-granularity selective --recompute-modules mlp", 1, 2, 2),
    "ep2, balanced, jitter, shared": (
        f"{EXPERTS} {EP} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-z-loss-coeff 1e-3 "
        "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-2 "
        "--moe-input-jitter-eps 1e-2 --moe-shared-expert-intermediate-size 32 --sharding-stage 2",
        0,
        2,
        2,
    ),
    "ep2 of 8, zero3": (f"{EXPERTS} {TP} {EP} --expert-tensor-parallel-size 1 --sharding-stage 3", 5, 8, 2),
    "pp2 ep2 zb-h1": (
        f"{EXPERTS} {EP} {PP} --pipeline-schedule zb-h1 --global-batch-size 16 --gradient-accumulation-fusion",
        3,
        4,
        2 * 4,
    ),
    "ep4 in two hops of 8, tp2, recomputed, shared": (
        f"{EXPERTS} {TP} {FULL} --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 --moe-ranks-per-node 2 "
        "--moe-token-dispatcher-type flex --moe-shared-expert-intermediate-size 32 --sharding-stage 1",
        5,
        8,
        2,
    ),
    "ep2, passes in turns, zero3": (f"{EXPERTS} {EP} {TURNS} --global-batch-size 8 --sharding-stage 3", 1, 2, 2 * 2),
    "pp2 ep2 zb-v, passes in turns": (
        f"{EXPERTS} {EP} {PP} {TURNS} --pipeline-schedule zb-v --global-batch-size 16",
        2,
        4,
        2 * 4,
    ),
    "padded, ep2 etp2, recomputed": (
        f"{EXPERTS} {TP} {EP} {CAPACITY} {FULL} --expert-tensor-parallel-size 2 --moe-pad-expert-input-to-capacity",
        2,
        4,
        0,
    ),
}
MEASURED = "18 steps, dp2 tp2"  # in which times of ranks are gathered twice, and read
OFFLOAD_WAITS = {  # the host has to have the gradients before it updates, and sends what it has updated
    "wait for an event of this step in megatron/mpu/transfer.py: read",
    "copy that waits in megatron/optimizer/state.py: step",
    "copy that waits in megatron/mpu/collectives.py: start_all_gather",
}
MISTAKES = {  # name in mistakes.py: (more flags, what is said of it)
    "a_table_on_the_cpu": ("--position-embedding-type rope", "megatron/model/positions.py"),
    "a_message_in_another_format": (PP, "megatron/pipeline/wire.py"),
    "memory_that_is_not_pinned": ("", "copy of pageable memory"),
    "a_copy_that_waits": ("", "copy that waits"),
    "a_step_count_made_on_the_host": ("", "megatron/optimizer/state.py"),
    "a_loss_read_for_the_log": ("", "item in megatron/training/step.py"),
    "a_branch_on_a_value": ("", "__bool__ in megatron/optimizer/zero.py"),
    "a_norm_of_numpy": ("", "cpu in megatron/model/layer.py"),
    "documents_read_from_the_device": ("--reset-attention-mask", "cpu in megatron/fused_kernels/documents.py"),
    "samples_sent_to_the_device": (DROPOUT, "tolist in megatron/mpu/random.py"),
    "a_sum_of_two_devices": ("", "megatron/training/step.py"),
    "a_weight_of_an_expert_read": (EXPERTS, "item in megatron/model/kinds/experts/layer.py"),
    "times_that_are_read_too_early": ("", "wait for an event of this step in megatron/telemetry/rank_times.py"),
}


CALLED = {  # in fake_calls.py: what comes of it, or device, format and shape
    "int8, few rows": ["cuda", "torch.float32", 3, 5],
    "int8, many rows": ["cuda", "torch.float32", 40, 8],
    "likeliest": ["cuda", "torch.int64", 2],
    "cache": "torch.bfloat16",
    "pair": ["cuda", "torch.bfloat16", 5, 4],
    "packed rows": None,
    "samples": ["cuda", "torch.bfloat16", 4, 3],
    "padding": ["cuda", "torch.bfloat16", 4, 6, 5],
    "grouped, with a window": ["cuda", "torch.bfloat16", 6, 2, 48],
    "grouped": ["cuda", "torch.bfloat16", 6, 2, 48],
    "gradient of a block": ["cuda", "torch.float32", 4, 3],
    "seed": True,
    "memory": [11, 21, 12, 22],
    "memory in use": [3, 1, 8, 21, 22, 38],
    "sum of bits": ["cuda", "torch.int64"],
    "synchronized": 1,
    "timers": True,
    "memory in reports": "tensors on cuda",
    "pace": 1,
    "lanes": "_DeviceClock",
    "device": "cuda:0",
}
ASKED = "test_runs_reach_the_branches_that_they_are_said_to"


@pytest.fixture(scope="module")
def found(tmp_path_factory, request) -> dict:
    """{name: what was seen} of the cases and mistakes that are run, in one process that forks: importing takes longer."""
    library = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    home = Path(torch.__file__).parent
    places = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}", f"-L{home / 'lib'}"]
    source = str(HERE / "fake_cuda.cpp")
    flags = ["-O1", "-shared", "-fPIC", "-std=c++20", *places, "-lc10", "-ltorch_cpu"]
    subprocess.run([COMPILER, source, "-o", str(library), *flags], check=True)
    cases = {name: dict(flags=flags, rank=rank, world=world) for name, (flags, rank, world) in CASES.items()}
    for name, (flags, rank, world, _) in IN_VARLEN.items():
        cases[name] = dict(flags=flags, rank=rank, world=world, kernel=VARLEN)
    for name, (flags, rank, world, _) in IN_RING.items():
        cases[name] = dict(flags=flags, rank=rank, world=world, kernel=FLASH)
    for name, (flags, rank, world, _) in IN_FP8.items():
        cases[name] = dict(flags=flags, rank=rank, world=world, kernel=SCALED_MM)
    for name, (flags, rank, world, _) in WITH_EXPERTS.items():
        cases[name] = dict(flags=flags, rank=rank, world=world)
    cases[MEASURED] = dict(flags=f"{TP} --train-iters 100", rank=0, world=4, steps=18)
    cases |= {name: dict(flags=flags, mistake=name, world=1 + (flags == PP)) for name, (flags, _) in MISTAKES.items()}
    cases |= {f"{name}, asked": dict(case, asks=True) for name, case in cases.items() if name not in MISTAKES}
    run = [item for item in request.session.items if item.path == Path(__file__) and "found" in item.fixturenames]
    names = [
        item.callspec.params["name"]
        for item in run
        if not item.get_closest_marker("skip") and hasattr(item, "callspec")
    ]
    if any(item.originalname == ASKED for item in run if not item.get_closest_marker("skip")):
        names += [name for name in cases if name.endswith(", asked")]
    cases = {name: dict(cases[name], flags=f"{BASE} {cases[name]['flags']}") for name in names if name in cases}
    cases["calls"] = "calls"
    command = [sys.executable, str(HERE / "run_cases.py"), str(library)]
    done = subprocess.run(command, input=json.dumps([*cases.values()]), capture_output=True, text=True, timeout=600)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert len(answers) == len(cases), done.stderr[-3000:]
    return dict(zip(cases, answers, strict=True))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_a_step_runs_and_the_host_waits_for_nothing(found, name):
    """Not even for what the guards judge, and the largest logit: they are read in the next step."""
    assert "waits" in found[name], found[name]
    late = 0 if name == "offload" else 1 + ("--log-max-attention-logit" in CASES[name][0])
    assert set(found[name]["waits"]) == (set() if late else OFFLOAD_WAITS) and found[name]["late"] == late


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_host_waits_for_counts_of_rows_once_a_layer(found, name):
    """Not with one rank and no drops, nor with padding, nor again in recomputation."""
    assert found[name].get("waits") == [COUNTS] * WITH_EXPERTS[name][3], found[name]


@pytest.mark.parametrize("name", [MEASURED])
def test_times_of_ranks_are_compared_and_the_host_waits_for_nothing(found, name):
    assert (found[name].get("waits"), found[name].get("windows")) == ([], 2), found[name]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", IN_VARLEN)
def test_a_step_with_documents_runs_in_torchs_kernel_and_waits_for_nothing(found, name):
    assert (found[name].get("waits"), found[name].get("calls")) == ([], IN_VARLEN[name][3]), found[name]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", IN_FP8)
def test_products_in_fp8_are_torchs_and_wait_for_nothing(found, name):
    """With the layouts of scales, paddings and formats that an H100's kernels ask for."""
    assert (found[name].get("waits"), found[name].get("calls")) == ([], IN_FP8[name][3]), found[name]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", IN_RING)
def test_a_ring_runs_in_torchs_kernel_and_waits_for_nothing(found, name):
    """Its messages are waited for by the device, and a step of documents needs nothing of them that the host lacks."""
    calls = IN_RING[name][3]
    assert found[name].get("waits") == [] and found[name]["calls"] == (calls or found[name]["calls"]) > 0, found[name]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_with_its_place(found, name):
    said = found[name]
    assert MISTAKES[name][1] in str(said.get("where", said.get("waits"))), said
    assert "error" in said or said["waits"]


def test_functions_work_on_a_device(found):
    assert found["calls"].get("calls") == CALLED, found["calls"]


def test_every_branch_for_a_device_is_reached_somewhere(found):
    """A new `if` on the kind of a device needs a run, a call or a test that takes it."""
    called = {branches.place_of(branch) for branch in found["calls"]["reached"]}
    there = {branches.place_of(branch) for branch in branches.branches()}
    assert there - called - branches.REACHED.keys() == set() and branches.REACHED.keys() - there == set()
    root = HERE.parents[1]
    assert [place for place in set(branches.REACHED.values()) - {"runs"} if not (root / place).is_file()] == []


@pytest.mark.full
def test_runs_reach_the_branches_that_they_are_said_to(found):
    reached = {
        branches.place_of(one) for name, case in found.items() if name.endswith(", asked") for one in case["reached"]
    }
    assert {place for place, where in branches.REACHED.items() if where == "runs"} - reached == set()
