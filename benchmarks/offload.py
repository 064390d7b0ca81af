# SPDX-License-Identifier: Apache-2.0
"""What it costs to keep the optimizer's state elsewhere (in the host's memory, in files), or in bf16.

    OMP_NUM_THREADS=1 python benchmarks/offload.py --dir /a/local/disk
    python benchmarks/offload.py --dir /a/local/disk --ways memory host disk --tokens 1024 --device cuda

Each way is a process of its own with the same model (bf16, one rank), so that its memory is its own; they take turns, so
that whatever else the machine does hits all alike. A ratio is the median over rounds of (time of the way / time of state
in memory). On a CPU, "host" is memory like the other, with a copy of the gradients.

    memory       main weights and moments beside the model
    host         --optimizer-cpu-offload
    disk         --nvme-offload-fraction 1: parts, read and written past the page cache
    page-cache   the same without O_DIRECT: the kernel keeps what it has room for
    mapped       state in a mapped file, updated in place: the alternative that was not taken
    moments      --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
    nearest      the same with --no-stochastic-rounding
    gradients    --grad-reduce-in-bf16
    bf16         moments and gradients

Times are of the process in all its threads with --cpu-time, which other programs disturb less, and of the clock otherwise.
Memory: the most that was resident, of that in mapped files; and what the page cache grew by while the way was built and
took a step. That is the kernel's to reclaim, but for pages that are not written yet.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time

import torch

from megatron.data.loader import MicroBatch
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.optimizer.scratch import Scratch
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Model, Optimizer

WAYS = ("memory", "host", "disk", "page-cache", "mapped")
_MOMENTS = dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
FORMATS = {
    "moments": _MOMENTS,
    "nearest": _MOMENTS | dict(stochastic_rounding=False),
    "gradients": dict(grad_reduce_in_bf16=True),
    "bf16": _MOMENTS | dict(grad_reduce_in_bf16=True),
}
VOCABULARY = 1024


def build(way: str, arguments: argparse.Namespace) -> tuple[GPT, DistributedOptimizer]:
    """The model, and its optimizer with state in the way's place."""
    model = Model(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.hidden // 64,
        seq_length=arguments.tokens,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    settings = Optimizer(
        optimizer_cpu_offload=way == "host",
        nvme_offload_dir=arguments.dir,
        nvme_offload_fraction=float(way in ("disk", "page-cache")),
        **FORMATS.get(way, {}),
    )
    if way == "page-cache":
        Scratch._go_direct = lambda self: False
    gpt = GPT(model, Mesh(), VOCABULARY, dtype=torch.bfloat16, device="meta")
    optimizer = DistributedOptimizer(gpt, Mesh(), settings, dtype=torch.bfloat16, device=arguments.device, seed=1)
    if way == "mapped":
        (state,) = optimizer.states
        state.main = mapped(state.main, arguments.dir)
        state.moments = {name: mapped(moment, arguments.dir) for name, moment in state.moments.items()}
    return gpt, optimizer


def mapped(tensor: torch.Tensor, folder: str) -> torch.Tensor:
    """A copy in a mapped file that has no name any more."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        copy = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def contender(way: str, arguments: argparse.Namespace, pipe) -> None:
    """A process: makes a step for each message, and answers with (seconds of the step, of the update in it, loss)."""
    gpt, optimizer = build(way, arguments)
    tokens = torch.randint(VOCABULARY, (arguments.tokens + 1, 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(arguments.device)
    batch = MicroBatch(tokens[:-1], tokens[1:], torch.arange(1, device=arguments.device))
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    pipe.send(sum(parameter.numel() for parameter in gpt.parameters()))
    while pipe.recv():
        start = clock()
        loss, count = gpt(None, batch)[1].values()
        loss.backward()
        sums, norm = optimizer.finalize_grads(torch.stack((loss.detach(), count)).double())
        behind_passes = clock()
        optimizer.step(3e-4, 0.1, min(1.0, sums[1].item() / (norm + 1e-6)) / sums[1].item())
        if arguments.device != "cpu":
            torch.cuda.synchronize()
        end = clock()
        pipe.send((end - start, end - behind_passes, (sums[0] / sums[1]).item()))
    files = sum(getattr(state, "on_disk", 0) for state in optimizer.states)
    pipe.send(dict(memory_of("/proc/self/status", "VmHWM", "RssFile"), files=files, held=optimizer.memory()))


def memory_of(path: str, *names: str) -> dict[str, int]:
    """Lines of a file of /proc in bytes."""
    with open(path) as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return {name: int(lines[name].split()[0]) * 1024 for name in names}


def measure(arguments: argparse.Namespace) -> dict[str, dict]:
    """way -> times of its steps and updates, and its memory."""
    context, found, running = multiprocessing.get_context("spawn"), {}, {}
    for way in arguments.ways:
        here, there = context.Pipe()
        cached = memory_of("/proc/meminfo", "Cached")["Cached"]
        process = context.Process(target=contender, args=(way, arguments, there))
        process.start()
        count = here.recv()
        here.send(True)
        here.recv()  # a step whose time does not count
        grown = memory_of("/proc/meminfo", "Cached")["Cached"] - cached
        found[way] = dict(parameters=count, page_cache=grown, steps=[], updates=[])
        running[way] = process, here
    for _ in range(arguments.rounds):
        for way, (_, pipe) in running.items():
            pipe.send(True)
            step, update, loss = pipe.recv()
            found[way]["steps"].append(step)
            found[way]["updates"].append(update)
            found[way]["loss"] = loss
    for way, (process, pipe) in running.items():
        pipe.send(False)
        found[way] |= pipe.recv()
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="folder of the files")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *FORMATS), default=list(WAYS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-time", action="store_true", help="measure the processes' time")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    found = measure(arguments)
    first = found[arguments.ways[0]]
    print(
        f"{first['parameters']:,} parameters, bf16, {arguments.tokens} tokens a step, {arguments.device}, "
        f"{os.environ['OMP_NUM_THREADS']} threads, torch {torch.__version__}"
    )
    print(
        f"{'':12} {'step':>8} {'ratio':>6} {'update':>8} {'ratio':>6} {'most resident':>14} {'of it mapped':>13} "
        f"{'page cache':>11} {'on disk':>9}   loss"
    )
    for way, seen in found.items():
        for kind in ("steps", "updates"):
            rounds = [own / base for own, base in zip(seen[kind], first[kind])]
            seen[f"{kind}_ratio"] = statistics.median(rounds)
        print(
            f"{way:12} {statistics.median(seen['steps']):7.3f}s {seen['steps_ratio']:6.2f} "
            f"{statistics.median(seen['updates']):7.3f}s {seen['updates_ratio']:6.2f} {seen['VmHWM'] >> 20:10,} MiB "
            f"{seen['RssFile'] >> 20:9,} MiB {seen['page_cache'] >> 20:7,} MiB {seen['files'] >> 20:5,} MiB   "
            f"{seen['loss']:.6f}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
