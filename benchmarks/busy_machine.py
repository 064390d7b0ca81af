# SPDX-License-Identifier: Apache-2.0
"""Training on a CPU beside other programs: threads that sleep while they wait, against libgomp's own way, taking turns.

    python benchmarks/busy_machine.py                        # beside two busy processes, and with the machine to itself
    python benchmarks/busy_machine.py --busy 4 --models tiny
    python benchmarks/busy_machine.py --busy 0 --rounds 9    # the quiet machine alone
    python benchmarks/busy_machine.py --late --contenders spin sleep    # busy processes that come while it trains

A contender is the same command with another environment: `sleep` leaves it to the suite; `spin` says what libgomp does when
nobody says anything (GOMP_SPINCOUNT=300000, a few milliseconds before a thread sleeps); `one` has one thread. Every round
runs each of them, beside processes that do nothing but compute; a ratio is the median over rounds of (median step of spin
/ median step of the other). With --late they come behind step 20, and steps count from ten later on: the suite begins to
train with spinning threads on a quiet machine, and lets them sleep when its steps crawl.
Also told: the fastest step of all, which other programs have disturbed least.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = "--mock-data --eval-iters 0 --device cpu --lr 1e-3 --log-interval 1000"
MODELS = {
    # The README's runs/tiny.yaml, and the quickstart's model: both in one process with a thread a core.
    "tiny": f"{COMMON} --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 1000 "
    "--micro-batch-size 1 --global-batch-size 8",
    "quickstart": f"{COMMON} --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8192 "
    "--micro-batch-size 4 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 --precision auto",
}
CONTENDERS = {"spin": dict(GOMP_SPINCOUNT="300000"), "sleep": {}, "one": dict(OMP_NUM_THREADS="1")}
OURS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # not what this shell happens to say
WARM_UP = 2  # steps
LATE, SETTLED = 20, 10  # --late: steps before the processes come, and behind that before steps count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--busy", type=int, nargs="+", default=[2, 0], help="busy processes beside the training")
    parser.add_argument("--late", action="store_true", help="they come behind step 20")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of a run that count")
    asked = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {asked.rounds} rounds of {asked.steps} steps, load {os.getloadavg()[0]:.1f} at the start"
    )
    for model in asked.models:
        for processes in asked.busy:
            compare(model, processes, asked)


def compare(model: str, processes: int, asked: argparse.Namespace) -> None:
    """Run all contenders in turns and print a table."""
    steps: dict[str, list[list[float]]] = {name: [] for name in asked.contenders}
    for _ in range(asked.rounds):
        for name in asked.contenders:
            with contextlib.nullcontext() if asked.late else busy(processes):
                late = processes if asked.late else 0
                steps[name].append(train(model, CONTENDERS[name], asked.steps, late))
    print(f"\n{model} beside {processes} busy processes{' that come late' * asked.late}")
    print(f"{'':>8}{'ms a step':>12}{'fastest':>10}{'against spin':>15}")
    for name, rounds in steps.items():
        medians = [statistics.median(times) for times in rounds]
        ratios = [
            statistics.median(theirs) / own for theirs, own in zip(steps.get("spin", rounds), medians, strict=True)
        ]
        print(
            f"{name:>8}{1000 * statistics.median(medians):12.1f}{1000 * min(map(min, rounds)):10.1f}"
            f"{statistics.median(ratios):15.2f}",
            flush=True,
        )


@contextlib.contextmanager
def busy(processes: int):
    """Inside, so many processes compute all the time."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def train(model: str, environment: dict[str, str], steps: int, late: int) -> list[float]:
    """Seconds of each step of a run, without the first ones. late: processes that come behind step 20 of it."""
    inherited = {name: value for name, value in os.environ.items() if name not in OURS}
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *MODELS[model].split()]
        first = LATE + SETTLED if late else WARM_UP
        command += ["--train-iters", str(first + steps), "--metrics-file", str(metrics)]
        run = subprocess.Popen(command, env=inherited | environment, stdout=subprocess.DEVNULL)
        while late and run.poll() is None and not (metrics.exists() and metrics.read_text().count('"step"') >= LATE):
            time.sleep(0.05)
        with busy(late):
            if run.wait():
                sys.exit("the training has failed")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["seconds"] for record in records if record["kind"] == "step"][first:]


if __name__ == "__main__":
    main()
