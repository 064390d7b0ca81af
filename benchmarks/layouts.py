# SPDX-License-Identifier: Apache-2.0
"""What parallelism costs on this CPU: two processes of one thread against one process of two, same global batch.

    python benchmarks/layouts.py                       # dp2, dp2-zero1, tp2, pp2 in turns, three rounds
    python benchmarks/layouts.py --precision bf16 --rounds 5

Every figure is a whole run of pretrain_gpt.py; the layouts take turns, and a layout's ratio is the median of its rounds'
ratios to the one-process run of the same round. Real overlap of communication needs devices of its own; here compute and
communication share two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = """--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --mock-data --vocab-size 8191
    --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --global-batch-size 16 --eval-iters 0 --log-interval 1000
    --device cpu"""
LAYOUTS = {  # name -> processes, flags
    "one process": (1, "--micro-batch-size 16"),
    "dp2": (2, "--micro-batch-size 8"),
    "dp2-zero1": (2, "--micro-batch-size 8 --use-distributed-optimizer"),
    "tp2": (2, "--micro-batch-size 16 --tensor-model-parallel-size 2"),
    "tp2-sp": (2, "--micro-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2 (4 micro-batches)": (2, "--micro-batch-size 4 --pipeline-model-parallel-size 2"),
    "pp2 (8 micro-batches)": (2, "--micro-batch-size 2 --pipeline-model-parallel-size 2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument(
        "--layouts", nargs="+", default=list(LAYOUTS), help="names from the table: " + ", ".join(LAYOUTS)
    )
    asked = parser.parse_args()
    names = list(dict.fromkeys(["one process", *asked.layouts]))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked.rounds):
        for name in names:
            seconds[name].append(step_time(*LAYOUTS[name], asked.precision, asked.steps))
            print(f"round {number + 1} {name:<24} {seconds[name][-1] * 1e3:8.1f} ms a step", flush=True)
    print(f"\n5.3 M parameters, {asked.precision}, global batch 16 x 256 tokens, median of {asked.rounds} rounds")
    print(f"{'layout':<24} {'ms a step':>10} {'speed against one process':>26}")
    for name in names:
        ratios = [one / own for one, own in zip(seconds["one process"], seconds[name])]
        print(f"{name:<24} {statistics.median(seconds[name]) * 1e3:10.1f} {statistics.median(ratios):26.2f}")


def step_time(processes: int, flags: str, precision: str, steps: int) -> float:
    """Median seconds of a step of a run of its own, its first three steps left out."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        launch = (
            [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        )
        subprocess.run(
            [sys.executable, *launch, "pretrain_gpt.py", *MODEL.split(), *flags.split(), "--precision", precision,
             "--train-iters", str(steps + 3), "--metrics-file", str(metrics)],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(2 // processes)},
        )  # fmt: skip
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median([record["seconds"] for record in records if record["kind"] == "step"][3:])


if __name__ == "__main__":
    main()
