# SPDX-License-Identifier: Apache-2.0
"""An error of memory says what was planned and in use, which part exceeds the plan, and what would fit."""

import re
from dataclasses import replace

import pytest
import torch

import pretrain_gpt
from megatron.errors import Failure
from megatron.planner import out_of_memory, target
from megatron.planner.layout import Layout
from megatron.planner.memory import memory_report, peaks
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Recompute
from megatron.telemetry.events import read_events
from megatron.telemetry.memory import MemoryInUse
from megatron.training import loop
from megatron.training.rules import resolve

GB = 10**9
LARGE = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257 --mock-data
    --lr 1 --micro-batch-size 16 --global-batch-size 64 --train-iters 9
    --bf16 --device cuda --device-name A100-40GB --world-size 4
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0""".split()


@pytest.fixture(scope="module")
def large():
    """(config, job, layout, cluster) of a job on four A100."""
    config = resolve(parse_pretrain(LARGE), 4)
    cluster, _ = target.cluster_of(config)
    layout = Layout.of(config, 4)
    return config, target.job_of(config, cluster, layout.dp)[0], layout, cluster


def in_use(large, **more):
    """Memory as planned, but for the parts of `more` (GB)."""
    _, job, layout, cluster = large
    parts = out_of_memory.planned_parts(memory_report(job, layout, cluster.device, 0))
    state, step, reserve, outside = (
        parts[name] + int(more.get(word, 0) * GB)
        for name, word in zip(out_of_memory.PARTS, ("state", "step", "reserve", "outside"), strict=True)
    )
    return MemoryInUse(3, 0, state, state + step, state + step + reserve, outside)


@pytest.mark.parametrize(
    "word, part",
    [
        ("state", "weights and optimizer take 2.5 GB"),
        ("step", "activations and workspaces take 2.5 GB"),
        ("reserve", "reserve takes 2.5 GB"),
        ("outside", "outside of torch take 2.5 GB"),
    ],
)
def test_the_part_that_exceeds_the_plan_is_named(word, part, large):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    failure = out_of_memory.explained(error, large[0], in_use(large, **{word: 2.5}))
    assert failure.what == f"out of memory on rank 3: {part} more than planned" and failure.code == 1
    assert "Tried to allocate 2.00 GiB" in failure.why
    planned, used = (list(map(float, re.findall(r" (\d+\.\d)\b", line))) for line in failure.why.splitlines()[-2:])
    differences = [round(b - a, 1) for a, b in zip(planned, used, strict=True)]
    assert sorted(map(abs, differences))[-2:] == pytest.approx([2.5, 2.5], abs=0.11)  # the sum, and the part
    assert planned[0] == pytest.approx(sum(planned[1:]), abs=0.25)


def test_three_settings_that_fit_are_named_and_do_fit(large):
    """Also with the excess: each is planned again by itself."""
    config, job, layout, cluster = large
    failure = out_of_memory.explained(MemoryError(), config, in_use(large, step=3.0))
    found = re.findall(r"(--[^()]+?) \((\d+\.\d) GB\)", failure.do)
    assert len(found) == 3 and failure.do.endswith("would fit")
    changes = {
        "--micro-batch-size 1": dict(micro_batch_size=1),
        "--recompute-granularity core_attn": dict(recompute=Recompute("core_attn")),
        "--recompute-granularity full": dict(recompute=Recompute(recompute_granularity="full")),
        "--use-distributed-optimizer": dict(zero=1, shard=layout.weight_ranks, parallel=None),
        "--sharding-stage 3": dict(zero=3, shard=layout.weight_ranks, parallel=None),
        "--optimizer-cpu-offload": dict(offload=1.0, disk=0.0),
    }
    both = "--micro-batch-size 1 --recompute-granularity full"
    changes[both] = changes["--micro-batch-size 1"] | changes["--recompute-granularity full"]
    for words, size in found:
        need = max(peaks(job, replace(layout, **changes[words.strip().removeprefix("or ")]), cluster.device)) / GB + 3.0
        assert float(size) == pytest.approx(need, abs=0.06) and need <= cluster.device.usable_bytes / GB


def test_a_plan_that_is_too_large_itself_blames_no_part(large):
    failure = out_of_memory.explained(MemoryError(), large[0], in_use(large))
    assert failure.what == "out of memory on rank 3"


def test_a_run_that_loses_its_memory_says_so_everywhere(tmp_path, monkeypatch):
    """On a CPU: torch's own words in the second step."""
    step, calls = loop.train_step, []

    def small(run):
        calls.append(run)
        if len(calls) == 2:
            held = torch.ones(2**27)  # 0.5 GB: the peak of the process
            raise RuntimeError(
                f"can't allocate memory: you tried to allocate {held.numel() * 2048} bytes. Error code 12"
            )
        return step(run)

    monkeypatch.setattr(loop, "train_step", small)
    words = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100
        --lr 1e-3 --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --device cpu --train-iters 4""".split()
    with pytest.raises(Failure) as caught:
        pretrain_gpt.main([*words, "--save", str(tmp_path)])
    failure = caught.value
    assert failure.what.startswith("out of memory on rank 0: ")  # the whole process counts, with other tests' peaks
    assert "tried to allocate 274.9 GB" in failure.why and "in use  " in failure.why and "planned " in failure.why
    end = read_events(tmp_path)[-1]
    assert end["event"] == "end" and failure.what in end["why"]


@pytest.mark.sampled(2)
def test_settings_without_an_estimate_keep_the_plain_message(monkeypatch, large):
    from megatron import entry

    def none(*_):
        raise ValueError("no estimate")

    monkeypatch.setattr(out_of_memory, "memory_report", none)
    failure = entry._explain_memory(MemoryError("x"), large[0], in_use(large))
    assert failure.what == "out of memory" and "--micro-batch-size" in failure.do
