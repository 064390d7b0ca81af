# SPDX-License-Identifier: Apache-2.0
"""`--profile`: the chosen steps of the chosen ranks, as a trace and as tables."""

import gzip
import json
import re
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.telemetry import profiler
from megatron.telemetry.profiler import overview

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --device cpu --num-workers 0 --train-iters 5 --profile "
)


def _names(trace):
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("ph") == "X"]


@pytest.mark.sampled(5)
def test_chosen_steps_of_chosen_ranks(run_ranks, tmp_path):
    flags = f"{TINY} --tensor-model-parallel-size 2 --profile-step-start 2 --profile-step-end 4 --profile-ranks 1 "
    run_ranks(2, lambda rank: pretrain_gpt.main([*flags.split(), "--profile-dir", str(tmp_path)]))
    files = ["rank_1.lanes.json", "rank_1.trace.json.gz", "rank_1.txt", "timeline.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    names = _names(tmp_path / "rank_1.trace.json.gz")
    steps, micro_batches = 2, 2
    assert names.count("update weights") == names.count("reduce gradients") == steps
    assert names.count("forward") == names.count("backward") == steps * micro_batches
    tables = (tmp_path / "rank_1.txt").read_text()
    assert tables.startswith("iterations 2 to 3 of rank 1")
    shares = re.search(
        r"Overview: [\d.]+ ms: computing ([\d.]+)%, communicating ([\d.]+)% \(.*neither ([\d.]+)%", tables
    )
    computing, communicating, neither = (float(share) for share in shares.groups())
    assert 100 - 0.2 <= computing + communicating + neither <= 200
    communication = tables.partition("\nCommunication")[2].partition("\nMemory")[0]
    assert "c10d::allreduce_" in communication and "aten::" not in communication
    assert "aten::" in tables.partition("\nMemory")[2]


@pytest.mark.sampled(10)
def test_passes_that_take_turns(run_ranks, tmp_path):
    """Backward passes run in a thread of their own, and are in the trace, too. F0 F1 & B0 F2 & B1 B2."""
    flags = (
        f"{TINY} --global-batch-size 12 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
        f"--overlap-moe-expert-parallel-comm --profile-step-start 2 --profile-step-end 3 --profile-dir {tmp_path}"
    )
    run_ranks(2, lambda rank: pretrain_gpt.main(flags.split()))
    names, layers, micro_batches = _names(tmp_path / "rank_0.trace.json.gz"), 2, 3
    assert names.count("forward and backward in turns") == 2 and names.count("forward") == names.count("backward") == 1
    assert names.count("aten::gelu_backward") == layers * micro_batches


def rows_of(text: str, title: str) -> dict[str, dict[str, str]]:
    """First cell of a row -> its cells, by the heads of the columns."""
    head, *rows = text.partition(f"\n{title}")[2].partition("\n\n")[0].splitlines()[1:]
    columns, cells = re.split(r"\s{2,}", head.strip()), [re.split(r"\s{2,}", row.strip()) for row in rows]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in cells}


def test_its_tables_say_how_much(tmp_path):
    """What GELU's backward pass makes: 16 tokens x 2 sequences x 4 x 32 channels in fp32, 2 layers, 2 x 2 micro-batches.

    Percentages are those of the time that was profiled, whatever rows a table has: here from the times of the trace.
    """
    flags = f"{TINY} --precision fp32 --profile-step-start 2 --profile-step-end 4 --profile-dir {tmp_path}"
    pretrain_gpt.main(flags.split())
    text = (tmp_path / "rank_0.txt").read_text()
    made = 16 * 2 * 4 * 32 * 4 * 2 * 2 * 2
    assert rows_of(text, "Memory")["aten::gelu_backward"]["Self CPU Mem"] == f"{made / 1000:.1f} kB"
    phases = rows_of(text, "Phases of a step")
    trace = json.loads(gzip.decompress((tmp_path / "rank_0.trace.json.gz").read_bytes()))["traceEvents"]
    elapsed = 1000 * float(re.search(r"Overview: ([\d.]+) ms", text)[1])
    for phase in ("forward", "backward", "update weights"):
        bars = [event for event in trace if event.get("cat") == "user_annotation" and event["name"] == phase]
        share = float(phases[phase]["CPU total %"].rstrip("%"))
        assert share == pytest.approx(100 * sum(bar["dur"] for bar in bars) / elapsed, abs=0.2)
    for table in (phases, rows_of(text, "Operators"), rows_of(text, "Memory")):
        assert 0 < max(float(row["CPU total %"].rstrip("%")) for row in table.values()) <= 100
    assert "Self CPU %" in next(iter(rows_of(text, "Operators").values())) and "Self CPU %" not in phases["forward"]


def test_a_table_of_a_gpu_has_the_times_of_both():
    """Of 10 ms; the longest on the GPU first. A kernel has no time of the host."""
    event = lambda **more: SimpleNamespace(
        **dict.fromkeys("self_cpu_time_total cpu_time_total self_cpu_memory_usage".split(), 0)
        | dict.fromkeys("self_device_time_total device_time_total self_device_memory_usage".split(), 0)
        | more
    )
    kernel = event(key="gemm" * 20, count=1200, self_device_time_total=2500.0, device_time_total=2500.0)
    linear = event(key="aten::mm", count=1200, self_cpu_time_total=50.0, cpu_time_total=100.0, device_time_total=2500.0)
    linear.self_device_memory_usage = -1500
    table = profiler._table([linear, kernel], "self_device_time_total", 5, 10_000.0)
    heads, *rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    assert heads == [
        *("Name", "Self CPU %", "Self CPU", "CPU total %", "CPU total"),
        *("Self CUDA %", "Self CUDA", "CUDA total %", "CUDA total", "Self CUDA Mem", "# of Calls"),
    ]
    assert [row[1:] for row in rows] == [
        ["0.00%", "0.000 ms", "0.00%", "0.000 ms", "25.00%", "2.500 ms", "25.00%", "2.500 ms", "0", "1,200"],
        ["0.50%", "0.050 ms", "1.00%", "0.100 ms", "0.00%", "0.000 ms", "25.00%", "2.500 ms", "-1.5 kB", "1,200"],
    ]
    assert rows[0][0] == "gemm" * 14 + "g..."
    assert profiler._table([linear, kernel], "cpu_time_total", 1, 1e4).count("\n") == 1


def test_times_that_overlap_count_once():
    told = overview((100.0, 1100.0), [(100, 200), (150, 300), (400, 500)], [(250, 450), (900, 1000)])
    assert (
        told
        == "Overview: 1.0 ms: computing 30.0%, communicating 30.0% (33.3% of it overlapped by computing), neither 50.0%"
    )
    assert overview((0.0, 1000.0), [(0, 1000)], []).endswith("computing 100.0%, communicating 0.0%, neither 0.0%")


@pytest.mark.sampled(2)
def test_a_run_that_ends_early_still_writes(tmp_path, capsys):
    pretrain_gpt.main([*TINY.split(), *f"--profile-step-start 5 --save {tmp_path} --profile-detailed".split()])
    assert "profile of iterations 5 to 5" in capsys.readouterr().out
    assert _names(tmp_path / "profile" / "rank_0.trace.json.gz").count("update weights") == 1


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("--profile-step-start 5 --profile-step-end 5", "leave nothing to profile"),
        ("--profile-step-start 100 --profile-step-end 110", "leave nothing to profile of iterations 1 to"),
        ("--profile-ranks 0 3", "this job has the ranks 0 to 0"),
    ],
)
def test_refused(wrong, said):
    with pytest.raises(SettingsError, match=said):
        pretrain_gpt.main([*TINY.split(), *wrong.split()])
