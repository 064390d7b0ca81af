# SPDX-License-Identifier: Apache-2.0
"""Validation losses of layers of several kinds, trained with equally many FLOPs on the same text: a table and a picture.

    python -m benchmarks.kinds --data-path runs/quickstart/train_text_document --vocab-file runs/quickstart/vocab.json \\
        --merge-file runs/quickstart/merges.txt --output runs/kinds

Each shape is trained with each seed, for as many steps as `--flops` allow: model FLOPs as `Facts.flops(seen=True)` counts
them, so attention counts the pairs that it sees. Shapes have the same width, and dense ones about equally many weights.
Seconds are those of this machine; on one that does other work they say little. A run that is there is not repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LENGTH, BATCH = 128, 256, 8
COMMON = f"""--hidden-size {WIDTH} --num-attention-heads 4 --seq-length {LENGTH} --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --micro-batch-size {BATCH}
    --global-batch-size {BATCH} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1
    --adam-beta2 0.95 --split 95,5,0 --eval-iters 8 --eval-same-samples --device cpu --log-interval 20"""
DELTA = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 32 --linear-value-head-dim 32"
SHAPES = {
    "attention": "--hybrid-layer-pattern *-*-*-*-",
    "latent attention": "--hybrid-layer-pattern +-+-+-+- --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 --qk-layernorm",
    "3 gated delta nets to 1 attention": f"--hybrid-layer-pattern G-G-G-*- {DELTA}",
    "3 Mamba-2 to 1 attention": "--hybrid-layer-pattern M-M-M-*- --mamba-num-groups 1 --mamba-head-dim 32 "
    "--mamba-state-dim 32",
    "attention, 8 experts of which 2": "--hybrid-layer-pattern *E*E*E*E --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 160 --moe-aux-loss-coeff 0.01",
}


def flags_of(shape: str, data: list[str]) -> list[str]:
    return [*f"{COMMON} {SHAPES[shape]}".split(), *data]


def size_of(flags: list[str], vocabulary: int) -> tuple[float, int, int]:
    """(FLOPs of a step, weights, weights that a token uses)."""
    config = parse_any([*flags, "--train-iters", "1"])
    facts = facts_of(config, vocabulary)
    return facts.flops(seen=True) * LENGTH * BATCH, facts.parameters, facts.active_parameters


def trained(flags: list[str], steps: int, seed: int, folder: Path) -> dict:
    """The last validation loss of a run, and the seconds of a step."""
    done = folder / "result.json"
    if not done.exists():
        command = [sys.executable, "pretrain_hybrid.py", *flags, "--train-iters", str(steps), "--seed", str(seed)]
        command += ["--eval-interval", str(steps), "--tensorboard-dir", str(folder)]
        began = time.monotonic()
        out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        [loss, *_] = [line for line in out.splitlines() if "validation loss at iteration" in line]
        result = dict(loss=float(loss.partition("lm loss value: ")[2].split()[0]), seconds=time.monotonic() - began)
        folder.mkdir(parents=True, exist_ok=True)
        done.write_text(json.dumps(result))
    return json.loads(done.read_text())


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.2))
    for place, row in enumerate(reversed(rows)):
        axes.scatter(row["losses"], [place] * len(row["losses"]), s=36, color="tab:blue")
        axes.scatter([row["mean"]], [place], s=160, marker="|", color="black")
    axes.set_yticks(range(len(rows)), [row["shape"] for row in reversed(rows)])
    axes.set_xlabel("validation loss after equally many FLOPs (points: seeds; bar: mean)")
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--output", default="runs/kinds")
    parser.add_argument("--flops", type=float, default=3e13, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    data = ["--data-path", asked.data_path, "--vocab-file", asked.vocab_file, "--merge-file", asked.merge_file]
    vocabulary = len(json.loads(Path(asked.vocab_file).read_text()))
    output, rows = Path(asked.output), []
    print("| layers | weights, used | steps | tokens | validation loss, mean | of seeds | seconds a step |")
    print("|---|---|---|---|---|---|---|")
    for number, shape in enumerate(SHAPES):
        flags = flags_of(shape, data)
        of_step, weights, used = size_of(flags, vocabulary)
        steps = round(asked.flops / of_step)
        found = [trained(flags, steps, 1234 + seed, output / f"{number}-{seed}") for seed in range(asked.seeds)]
        losses = [one["loss"] for one in found]
        seconds = statistics.median(one["seconds"] for one in found) / steps
        rows.append(dict(shape=shape, losses=losses, mean=statistics.mean(losses)))
        each = ", ".join(f"{loss:.3f}" for loss in losses)
        sizes = f"{weights / 1e6:.2f} M, {used / 1e6:.2f} M | {steps} | {steps * LENGTH * BATCH / 1e6:.2f} M"
        print(f"| {shape} | {sizes} | {rows[-1]['mean']:.3f} | {each} | {seconds:.2f} |", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "kinds.json").write_text(json.dumps(rows, indent=1))
    draw(rows, output / "kinds.png")


if __name__ == "__main__":
    main(sys.argv[1:])
