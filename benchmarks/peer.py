# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's GPT-2 under torch's own DistributedDataParallel: what `layouts.py` compares data parallelism with.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peer.py --micro-batch-size 8 --metrics-file peer.jsonl

The model of `layouts.py` (4 layers of 256, 8 heads, 256 tokens, 8,191 words) in fp32 without dropout, fused AdamW, or
torch's ZeroRedundancyOptimizer around it; clipping by the global norm. One line a step: {"kind": "step", "seconds": 0.5}.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH = 8191, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--train-iters", type=int, default=15)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--metrics-file", required=True)
    asked = parser.parse_args()
    torch.manual_seed(1)
    shape = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=256,
        n_layer=4,
        n_head=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(shape).train()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    parameters, adam = list(model.parameters()), dict(lr=1e-3, weight_decay=0.1, fused=True)
    optimizer = (
        ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, **adam)
        if asked.use_distributed_optimizer
        else torch.optim.AdamW(parameters, **adam)
    )
    with open(asked.metrics_file if os.environ.get("RANK", "0") == "0" else os.devnull, "w") as file:
        for _ in range(asked.train_iters):
            start = time.perf_counter()
            tokens = torch.randint(0, VOCABULARY, (asked.micro_batch_size, LENGTH + 1))
            labels = tokens[:, 1:].contiguous()
            loss = model(tokens[:, :-1].contiguous(), labels=labels, shift_labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            file.write(json.dumps(dict(kind="step", seconds=time.perf_counter() - start)) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
