# SPDX-License-Identifier: Apache-2.0
"""A training step with LoRA against a step of the whole model, and against PEFT with Hugging Face's GPT-2, on this machine.

    python -m benchmarks.lora --layers 6 --hidden 512 --rank 8

Rounds alternate, and each column is the median of the ratios to full training in its own round. PEFT (if it is installed)
trains the same network with the same pairs, in eager mode, with AdamW of torch.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch

import pretrain_gpt
from megatron.model.command_line import parse_any
from megatron.training.build import build_run
from megatron.training.rules import resolve
from megatron.training.step import train_step


def ours(args, words: str, folder: str):
    """A function that makes a step of ours, and the bytes of state that it holds."""
    flags = f"""--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {args.hidden // 64}
        --seq-length {args.length} --vocab-size {args.vocabulary} --mock-data --micro-batch-size {args.batch} --lr 1e-4
        --train-iters 100000 --eval-iters 0 --device cpu --precision {args.precision} --num-workers 0
        --hidden-dropout 0 --attention-dropout 0 --log-interval 100000 {words}"""
    config = resolve(parse_any(flags.split()), 1)
    run = build_run(config, pretrain_gpt.recipe())
    for stage in run.stages:
        stage.train()
    return (lambda: train_step(run)), sum(run.optimizer.memory().values())


def peft_step(args):
    """The same network and pairs in PEFT, or None without it."""
    try:
        import peft
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return None
    sizes = dict(n_layer=args.layers, n_embd=args.hidden, n_head=args.hidden // 64, n_positions=args.length)
    drops = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=args.vocabulary, **sizes, **drops))
    targets = ["c_attn", "c_proj", "c_fc"]
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=targets, fan_in_fan_out=True)
    )
    model = model.to(torch.bfloat16) if args.precision == "bf16" else model
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        tokens = torch.randint(args.vocabulary, (args.batch, args.length))
        model(input_ids=tokens, labels=tokens).loss.backward()
        adam.step()
        adam.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in dict(layers=6, hidden=512, length=256, vocabulary=8192, batch=4, rank=8, rounds=9).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = dict(
            zip(
                ("full", "lora", "lora_attention"),
                (
                    ours(args, words, folder)
                    for words in ("", f"--lora-rank {args.rank}", f"--lora-rank {args.rank} --lora-target attention.*")
                ),
                strict=True,
            )
        )
    state = {name: size for name, (_, size) in steps.items()}
    takes = {name: step for name, (step, _) in steps.items()} | ({"peft": step} if (step := peft_step(args)) else {})
    times = {name: [] for name in takes}
    for number in range(args.rounds + 1):
        for name, step in takes.items():
            started = time.process_time(), time.perf_counter()
            step()
            if number:  # the first one warms up
                times[name].append((time.process_time() - started[0], time.perf_counter() - started[1]))
    for name, own in times.items():
        ratios = [statistics.median(a[n] / b[n] for a, b in zip(own, times["full"], strict=True)) for n in (0, 1)]
        print(
            json.dumps(
                {
                    "step": name,
                    "seconds": round(statistics.median(wall for _, wall in own), 4),
                    "cpu ratio to full": round(ratios[0], 3),
                    "wall ratio to full": round(ratios[1], 3),
                    "bytes of weights, gradients, state": state.get(name),
                }
            )
        )


if __name__ == "__main__":
    main()
