# SPDX-License-Identifier: Apache-2.0
"""One training step of ours against Hugging Face's GPT-2, in one process, taking turns.

    python benchmarks/train_step.py --size 5m
    python benchmarks/train_step.py --size 124m --rounds 12 --only ours-bf16 hf-bf16-compiled

Every round runs one step of each contender, so that whatever else the machine does hits all alike; a ratio is the median
over rounds of (time of the peer / time of ours). A step is forward, backward, clipping and AdamW on fp32 weights, without
dropout. Peers: fp32, or bf16 by autocast; eager, or compiled by torch.compile; fused AdamW; from the package transformers.
All contenders share the process, so the peers profit from `keep_memory`, too (`--default-malloc` leaves it out).
"""

import argparse
import json
import statistics
import time

import torch

from megatron.data.loader import MicroBatch
from megatron.model.gpt.module import GPT
from megatron.mpu.cpu_memory import keep_memory
from megatron.mpu.mesh import Mesh
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Kernels, Model, Optimizer

# name: layers, hidden, heads, sequence, micro-batch, vocabulary
SIZES = {"5m": (4, 256, 8, 256, 16, 8192), "124m": (12, 768, 12, 1024, 1, 50257)}
PAIRS = [
    ("ours-bf16", "hf-bf16-compiled"),
    ("ours-bf16-compiled", "hf-bf16-compiled"),
    ("ours-bf16", "hf-bf16"),
    ("ours-fp32", "hf-fp32"),
    ("ours-fp32", "hf-fp32-compiled"),
    ("ours-bf16-compiled", "ours-bf16"),
]


def ours(size: str, dtype: torch.dtype, compiled: bool):
    """A step function of the suite's own model and optimizer."""
    layers, hidden, heads, s, b, v = SIZES[size]
    model = Model(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=s,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    mesh = Mesh()
    gpt = GPT(model, mesh, v, kernels=Kernels(torch_compile=compiled), dtype=dtype, device="meta")
    optimizer = DistributedOptimizer(gpt, mesh, Optimizer(), dtype=dtype, device="cpu", seed=1)

    def step(tokens: torch.Tensor) -> float:
        tokens = tokens.t().contiguous()  # [s + 1, b]
        loss, count = gpt(None, MicroBatch(tokens[:-1], tokens[1:], torch.arange(b)))[1].values()
        loss.backward()
        sums, norm = optimizer.finalize_grads(torch.stack((loss.detach(), count)).double())
        optimizer.step(3e-4, 0.1, min(1.0, sums[1].item() / (norm + 1e-6)) / sums[1].item())
        return (sums[0] / sums[1]).item()

    return step


def hugging_face(size: str, autocast: bool, compiled: bool):
    """A step function of transformers' GPT2LMHeadModel with fused AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, hidden, heads, s, b, v = SIZES[size]
    config = GPT2Config(
        vocab_size=v,
        n_positions=s,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled else model

    def step(tokens: torch.Tensor) -> float:
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = run(inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


CONTENDERS = {
    "ours-bf16": lambda size: ours(size, torch.bfloat16, False),
    "ours-bf16-compiled": lambda size: ours(size, torch.bfloat16, True),
    "hf-bf16": lambda size: hugging_face(size, True, False),
    "hf-bf16-compiled": lambda size: hugging_face(size, True, True),
    "ours-fp32": lambda size: ours(size, torch.float32, False),
    "hf-fp32": lambda size: hugging_face(size, False, False),
    "hf-fp32-compiled": lambda size: hugging_face(size, False, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--default-malloc", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    kept = not arguments.default_malloc and keep_memory()
    _, _, _, s, b, v = SIZES[arguments.size]
    generator = torch.Generator().manual_seed(0)
    steps = {name: CONTENDERS[name](arguments.size) for name in arguments.only}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(-arguments.warmup, arguments.rounds):
        tokens = torch.randint(0, v, (b, s + 1), generator=generator)
        for name, step in steps.items():
            start = time.perf_counter()
            loss = step(tokens)
            if round_ >= 0:
                times[name].append(time.perf_counter() - start)
            if round_ == arguments.rounds - 1:
                print(f"{name:20s} loss {loss:.4f}", flush=True)
    report(arguments.size, times, kept)


def report(size: str, times: dict[str, list[float]], kept: bool) -> None:
    """Print a table, the ratios of the pairs, and one line of JSON with all of it."""
    _, _, _, s, b, _ = SIZES[size]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratios = {}
    print(f"\n{size}, {torch.get_num_threads()} threads, torch {torch.__version__}, keep_memory {kept}")
    for name, median in medians.items():
        print(
            f"{name:20s} {median * 1e3:8.1f} ms a step (best {min(times[name]) * 1e3:.1f}), {s * b / median:8.0f} tokens/s"
        )
    for mine, peer in PAIRS:
        if mine in times and peer in times:
            rounds = sorted(theirs / own for own, theirs in zip(times[mine], times[peer]))
            low, high = rounds[len(rounds) // 4], rounds[-1 - len(rounds) // 4]
            ratios[f"{mine} / {peer}"] = statistics.median(rounds)
            print(f"{mine:20s} is {statistics.median(rounds):.2f} x {peer} (quartiles {low:.2f} to {high:.2f})")
    print(
        json.dumps(
            dict(
                size=size,
                threads=torch.get_num_threads(),
                torch=torch.__version__,
                ratios=ratios,
                tokens_per_second={name: s * b / median for name, median in medians.items()},
            )
        )
    )


if __name__ == "__main__":
    main()
