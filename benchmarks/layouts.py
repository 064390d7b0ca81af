# SPDX-License-Identifier: Apache-2.0
"""What parallelism costs on this CPU: two processes of one thread against one process of two, same global batch.

    python benchmarks/layouts.py                       # all layouts in turns, three rounds
    python benchmarks/layouts.py --precision bf16 --rounds 5

Every figure is a whole run of pretrain_gpt.py; the layouts take turns, and a layout's ratio is the median of its rounds'
ratios to the one-process run of the same round. "two that share nothing" are two runs of half the batch each at the
same time, without a word between them: no layout can be faster than that, and what a layout is slower is lost in it (the
second ratio). The peers are Hugging Face's GPT-2 of the same shape under torch's own data parallelism (`peer.py`, fp32).
Real overlap of communication needs devices of its own; here compute and communication share two cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MODEL = """--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --mock-data --vocab-size 8191
    --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --eval-iters 0 --log-interval 1000 --device cpu"""
ONE, APART, PEER = "one process", "two that share nothing", "peer, one process"
# The output layer costs as much as 2.7 layers: three layers before, one with it are the balance (`plan` says so, too).
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-stage-layers 3,1"


class Contender(NamedTuple):
    """A layout's processes and flags; `copies` runs at a time share the global batch of 16."""

    processes: int
    flags: str
    copies: int = 1
    peer: bool = False

    def command(self, precision: str, steps: int) -> list[str]:
        """The command line of one run, but for its --metrics-file."""
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.processes}"]
        program = ["benchmarks/peer.py"]
        if not self.peer:
            batch = ["--global-batch-size", str(16 // self.copies)]
            program = ["pretrain_gpt.py", *MODEL.split(), *batch, "--precision", precision]
        return [
            sys.executable,
            *(launch if self.processes > 1 else []),
            *program,
            *self.flags.split(),
            "--train-iters",
            str(steps),
        ]


LAYOUTS = {
    ONE: Contender(1, "--micro-batch-size 16"),
    "one process, micro-batch 2": Contender(1, "--micro-batch-size 2"),
    APART: Contender(1, "--micro-batch-size 8", copies=2),
    "dp2": Contender(2, "--micro-batch-size 8"),
    "dp2-zero1": Contender(2, "--micro-batch-size 8 --use-distributed-optimizer"),
    "tp2": Contender(2, "--micro-batch-size 16 --tensor-model-parallel-size 2"),
    "tp2-sp": Contender(2, "--micro-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2, 4 micro-batches": Contender(2, f"--micro-batch-size 4 {PIPELINE}"),
    "pp2, 8 micro-batches": Contender(2, f"--micro-batch-size 2 {PIPELINE}"),
    "pp2, 8, zb-h1": Contender(2, f"--micro-batch-size 2 {PIPELINE} --pipeline-schedule zb-h1"),
    "pp2, 8, even stages": Contender(2, "--micro-batch-size 2 --pipeline-model-parallel-size 2"),
    PEER: Contender(1, "--micro-batch-size 16", peer=True),
    "peer, dp2": Contender(2, "--micro-batch-size 8", peer=True),
    "peer, dp2-zero1": Contender(2, "--micro-batch-size 8 --use-distributed-optimizer", peer=True),
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
    names = list(dict.fromkeys([ONE, APART, *asked.layouts]))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(asked.rounds):
        for name in names:
            seconds[name].append(step_time(LAYOUTS[name], asked.precision, asked.steps))
            print(f"round {number + 1} {name:<26} {seconds[name][-1] * 1e3:8.1f} ms a step", flush=True)
    print(f"\n5.3 M parameters, {asked.precision}, global batch 16 x 256 tokens, median of {asked.rounds} rounds")
    against = [name for name in (ONE, APART, PEER) if name in names]
    print(f"{'layout':<26} {'ms a step':>10}" + "".join(f"{'against ' + name:>32}" for name in against))
    for name in names:
        ratios = [
            statistics.median(peer / own for peer, own in zip(seconds[other], seconds[name])) for other in against
        ]
        print(f"{name:<26} {statistics.median(seconds[name]) * 1e3:10.1f}" + "".join(f"{x:32.2f}" for x in ratios))


def step_time(contender: Contender, precision: str, steps: int) -> float:
    """Median seconds of a step of a run of its own, its first three steps left out; of copies, the slowest one's."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"metrics_{number}.jsonl" for number in range(contender.copies)]
        command = contender.command(precision, steps + 3)
        threads = str(2 // (contender.processes * contender.copies))
        runs = [
            subprocess.Popen(
                [*command, "--metrics-file", str(file)],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )
            for file in files
        ]
        if any([run.wait() for run in runs]):
            sys.exit(f"a run failed: {' '.join(command)}")
        return max(_median_step(file) for file in files)


def _median_step(metrics: Path) -> float:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median([record["seconds"] for record in records if record["kind"] == "step"][3:])


if __name__ == "__main__":
    main()
