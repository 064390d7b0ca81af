# SPDX-License-Identifier: Apache-2.0
"""Measure the machine at hand for the planner: matrix products, attention, memory, ops, collectives.

`python -m megatron.tools.plan --calibrate FILE` calls it and writes the results; `--calibration FILE` uses them.
"""

import time
from statistics import median

import torch

from megatron.fused_kernels import Case, choose_kernel, cpu_ops
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.layer import Layer
from megatron.mpu import collectives
from megatron.mpu.cpu_memory import keep_memory
from megatron.mpu.cpu_threads import choose_threads
from megatron.mpu.forked import run_ranks
from megatron.mpu.initialize import DTYPES
from megatron.mpu.mesh import Mesh
from megatron.planner import target
from megatron.planner.cluster import Cluster
from megatron.planner.device import Device
from megatron.planner.layout import Job
from megatron.planner.speed import layer_seconds
from megatron.settings.schema import Model

SIZES = dict(cpu=(64, 256, 1024), cuda=(256, 1024, 8192))  # of matrix products: the last is assumed to be fastest
SHAPE = dict(cpu=(512, 512, 8), cuda=(2048, 4096, 32))  # sequence, hidden size, heads of the block that is measured


def measure(log, ranks: int = 1) -> Device:
    """Measure one rank's device: the GPU, or this machine's cores divided by `ranks`."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = target.installed_gpu() if kind == "cuda" else None
    figures: dict = vars(gpu or target.this_cpu(None, ranks)).copy()
    if kind == "cpu":
        links = run_ranks(2, _links)[0]  # before threads start: they would not survive a fork
        torch.set_num_threads(choose_threads(ranks).count)
        keep_memory()  # as training does
        figures |= dict(inner=links["bandwidth"], outer=links["bandwidth"], latency=links["latency"])
        log(f"collectives of 2 ranks: {links['bandwidth'] / 1e9:.2f} GB/s, {1e6 * links['latency']:.0f} us")
    if kind == "cuda":  # at the measured length; a backward pass has 2.5 times as many FLOPs
        figures |= dict(attention_tokens=0.0, attention_backward=2.5)
    figures |= dict(kind=kind, assumed=False, flops={}, attention={}, bandwidth=_bandwidth(kind))
    if kind == "cuda":  # times of CPUs agree with runs without it (docs/proof/planner.md)
        figures |= dict(update_bandwidth=_update_bandwidth(kind, 1 << 28))
    log(f"memory: {figures['bandwidth'] / 1e9:.1f} GB/s")
    for precision in ("fp32", "bf16"):
        if cpu_ops.widens(kind, DTYPES[precision]):
            continue
        best, rows = _products(kind, DTYPES[precision])
        figures["flops"][precision], figures["rows"] = best, rows
        figures["attention"][precision] = _attention(kind, DTYPES[precision])
        log(
            f"{precision}: products {best / 1e9:,.0f} GFLOP/s (half of it at {rows:.0f} rows), attention "
            f"{figures['attention'][precision] / 1e9:,.0f} GFLOP/s"
        )
    for speeds in (figures["flops"], figures["attention"]):
        speeds.setdefault("bf16", speeds["fp32"])
        speeds["fp16"] = speeds["bf16" if kind == "cuda" else "fp32"]
    figures |= _ops(kind, figures)
    log(
        f"ops: {1e6 * figures['launch']:.1f} us each, elementwise work {figures['unfused']:.2f} x that of fused kernels"
    )
    return Device(**figures)


def seconds_of(work, kind: str, least: float = 0.3) -> float:
    """The fastest of several runs of `work()`, over at least `least` seconds. On a GPU a run is ten calls without a wait,
    as in training, where the host is ahead.
    """
    times, started, calls = [], time.perf_counter(), 10 if kind == "cuda" else 1
    work()
    while len(times) < 5 or time.perf_counter() - started < least:
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if kind == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def _products(kind: str, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s of large products, rows at which half of it is reached)."""
    speeds = {}
    large = SIZES[kind][-1]
    for size in SIZES[kind]:
        a, b = (torch.randn(n, large, dtype=dtype, device=kind) for n in (size, large))
        product = choose_kernel("matmul", Case(kind, dtype)).run
        speeds[size] = (
            2 * size * large * large / seconds_of(lambda a=a, b=b, product=product: product(a, b, None), kind)
        )
    best = speeds[large]
    rows = median(max(0.0, size * (best / speed - 1)) for size, speed in speeds.items() if size < large)
    return best * (large + rows) / large, rows


def _attention(kind: str, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention as `planner.speed` counts them."""
    s, h, heads = SHAPE[kind]
    query, key, value = (torch.randn(s, 1, heads, h // heads, dtype=dtype, device=kind) for _ in range(3))
    kernel = choose_kernel("attention", Case(kind, dtype, s, s, causal=True)).run
    took = seconds_of(lambda: kernel(query.unsqueeze(3), key, value, scale=0.1, causal=True), kind)
    return 4 * s * s * h / 2 * (1.2 if kind == "cpu" else 1.0) / took


def _bandwidth(kind: str) -> float:
    """Bytes read and written by a copy, a second."""
    source = torch.ones(1 << (24 if kind == "cpu" else 28), device=kind)
    into = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: into.copy_(source), kind)


def _update_bandwidth(kind: str, size: int) -> float:
    """Bytes a second of a fused AdamW update of `size` weights: reads 4 numbers of each, and writes 3."""
    weights = torch.ones(size, device=kind, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    update = torch.optim.AdamW([weights], fused=True).step
    return 7 * 4 * size / seconds_of(update, kind)


def _ops(kind: str, figures: dict) -> dict:
    """(seconds to launch an op, from a tiny layer; elementwise work, from the rest of a real layer's time)."""
    if kind == "cuda":  # the queue's rate: in training the host is ahead, and a layer's Python costs the device nothing
        small = torch.zeros(1, device=kind)
        launch = seconds_of(lambda: [small.add_(1.0) for _ in range(100)], kind) / 100
    else:
        launch = _block_seconds(kind, 8, 32, 2) / 3 / 30  # thirty ops forward, and twice as many backward
    s, h, heads = SHAPE[kind]
    took = _block_seconds(kind, s, h, heads)
    model = Model(1, h, heads, s, hidden_dropout=0.0, attention_dropout=0.0)
    job = Job(GPTFacts(model, 1), 1, "fp32", kind)

    def predicted(unfused: float) -> float:
        device = Device(**figures | dict(launch=launch, unfused=unfused))
        return 3 * layer_seconds(job, Cluster(device, 1, 1))

    none, one = predicted(0.0), predicted(1.0)
    return dict(launch=launch, unfused=min(50.0, max(1.0, (took - none) / (one - none))))


def _block_seconds(kind: str, s: int, h: int, heads: int) -> float:
    """Forward and backward pass of one layer in fp32, without dropout."""
    model = Model(1, h, heads, s, hidden_dropout=0.0, attention_dropout=0.0)
    facts = GPTFacts(model, 1)
    block = Layer(facts.layer_table(0, False), LayerSetup(facts, 0, Mesh(), device=kind))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.02)
    x = torch.randn(s, 1, h, device=kind, requires_grad=True)
    upstream = torch.randn(s, 1, h, device=kind)

    def work():
        block(x, ForwardContext()).backward(upstream)
        for parameter in (x, *block.parameters()):
            parameter.grad = None

    return seconds_of(work, kind, 1.0)


def _links(rank: int) -> dict[str, float]:
    """Measure two ranks of this machine: bytes/s of a link, as in `Cluster.seconds`, and the time of an empty message."""
    axis = Mesh(rank, replicate=2).dp
    small, large = torch.zeros(16), torch.zeros(1 << 21)
    times = []
    for tensor in (small, large):
        for _ in range(3):
            collectives.all_reduce(tensor, axis)
        start = time.perf_counter()
        for _ in range(10):
            collectives.all_reduce(tensor, axis)
        times.append((time.perf_counter() - start) / 10)
    return dict(latency=times[0], bandwidth=large.nbytes / max(1e-9, times[1] - times[0]))
