# SPDX-License-Identifier: Apache-2.0
"""Attention of samples packed of documents: told where each begins, against a mask of all pairs, by the same kernels.

    python benchmarks/documents.py
    python benchmarks/documents.py --seq-length 8192 --documents 32 --dtype fp32

Every round runs a forward and a backward pass of each contender, so that whatever else the machine does hits all alike.
Time is what one thread spends on its core, to which programs beside it add little; a ratio is the median over rounds of
(time with a mask / time of the contender). Memory is what a process of its own needs at most for one such pass, beyond
queries, keys and values. The mask is made beforehand: a run would make it once for all layers.
"""

import argparse
import multiprocessing
import resource
import statistics
import time

import numpy as np
import torch

from megatron.fused_kernels import attention, explicit_attention
from megatron.fused_kernels.documents import Documents
from megatron.model.kinds.attention.module import allowed_pairs
from megatron.mpu.cpu_memory import keep_memory

HEADS, WIDTH = 12, 64
CONTENDERS = {  # name: kernel, how it is told; the first two of each kernel make a ratio
    "block-causal, mask": (explicit_attention.in_blocks, "mask"),
    "block-causal, documents": (explicit_attention.in_blocks, "documents"),
    "block-causal, one document": (explicit_attention.in_blocks, "nothing"),
    "sdpa, mask": (attention.sdpa, "mask"),
    "sdpa, documents": (attention.sdpa, "documents"),
    "sdpa, one document": (attention.sdpa, "nothing"),
}


def layout(s: int, documents: int) -> np.ndarray:
    """[1, s] starts of documents of lengths that differ up to sevenfold, the same on every call."""
    lengths = np.random.RandomState(1).uniform(0.25, 1.75, documents)
    begins = (lengths.cumsum()[:-1] * (s / lengths.sum())).astype(int)
    starts = np.zeros((1, s), np.int32)
    starts[0, begins] = begins
    return np.maximum.accumulate(starts, axis=1)


def contender(name: str, s: int, documents: int, dtype: torch.dtype):
    """A function of one forward and one backward pass, with its inputs already there."""
    run, told = CONTENDERS[name]
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(s, 1, HEADS, 3, WIDTH, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(s, 1, HEADS * WIDTH, generator=generator).to(dtype)
    starts = layout(s, documents)
    how = {}
    if told == "mask":
        how["allowed"] = allowed_pairs(torch.from_numpy(starts.T), torch.from_numpy(starts.T))
    elif told == "documents":
        how["documents"] = Documents.of(starts, "cpu")

    def step():
        parts = fused[:, :, :, :1], fused[:, :, :, 1], fused[:, :, :, 2]
        run(*parts, scale=WIDTH**-0.5, causal=True, **how).backward(upstream)
        gradient, fused.grad = fused.grad, None
        return gradient

    return step


def memory(name: str, s: int, documents: int, dtype: torch.dtype, sent) -> None:
    """Send the bytes by which one pass raises the most that this process ever had."""
    contender(name, 256, 2, dtype)()  # libraries, threads
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender(name, s, documents, dtype)()
    operands = 5 * s * HEADS * WIDTH * dtype.itemsize  # three inputs, upstream, and the draw of these
    sent.send(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) - operands)


def measured_memory(name: str, *case) -> int:
    context = multiprocessing.get_context("spawn")
    received, sent = context.Pipe(False)
    process = context.Process(target=memory, args=(name, *case, sent))
    process.start()
    found = received.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    dtype = dict(bf16=torch.bfloat16, fp32=torch.float32)[arguments.dtype]
    case = arguments.seq_length, arguments.documents, dtype
    most = {name: measured_memory(name, *case) for name in CONTENDERS}
    keep_memory()
    torch.set_num_threads(1)
    steps = {name: contender(name, *case) for name in CONTENDERS}
    gradients = {name: step() for name, step in steps.items()}
    for kernel in ("block-causal", "sdpa"):
        mine, theirs = (gradients[f"{kernel}, {told}"] for told in ("documents", "mask"))
        print(f"{kernel}: gradients differ by {((mine - theirs).norm() / theirs.norm()).item():.1e} of their norm")
    seconds = {name: [] for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    keys = [int(n) for n in np.diff(np.flatnonzero(np.append(layout(*case[:2])[0] == np.arange(case[0]), True)))]
    print(f"{arguments.dtype}, {case[0]} tokens in documents of {keys}, {HEADS} heads of {WIDTH}")
    for name, times in seconds.items():
        base = f"{name.partition(',')[0]}, mask"
        ratios = [peer / own for peer, own in zip(seconds[base], times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:28} {1e3 * statistics.median(times):8.1f} ms, {middle:5.2f} ({low:.2f}-{high:.2f}) x as fast as "
            f"with a mask; {most[name] / 2**20:7.1f} MiB, {most[base] / max(most[name], 1):5.2f} x less"
        )


if __name__ == "__main__":
    main()
