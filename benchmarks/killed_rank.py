# SPDX-License-Identifier: Apache-2.0
"""Seconds from kill -9 of a rank until the job has made its next step, under the supervisor, from memory and from the disk.

    python benchmarks/killed_rank.py --ranks 4 --repeats 3

A small GPT on ranks that share the cores; a snapshot in memory every 5 steps, copied to another rank, a checkpoint every 50
(`memory`), or a checkpoint every 5 steps (`disk`). The time that processes take to start (the launcher, and Python's
imports in the ranks) is told apart, since neither has a part in it. Then the rest: until the supervisor has seen the end of
all ranks, its pause before a restart (--backoff), the ranks' meeting, model, load and first step.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.guard.beat_files import read_beats

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 1000 --lr 1e-3 --mock-data "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 40 --eval-iters 0 --device cpu --num-workers 0 "
    "--precision fp32 --use-distributed-optimizer --log-interval 1"
)
WAYS = dict(memory="--save-interval 50 --non-persistent-save-interval 5 --replication", disk="--save-interval 5")
KILLED_AFTER = 22  # steps


def steps(folder: Path) -> list[int]:
    """The iterations of the steps that the job has recorded, of all launches."""
    try:
        lines = (folder / "a" / "metrics.jsonl").read_text().splitlines()
        return [record["iteration"] for record in map(json.loads, lines) if record["kind"] == "step"]
    except (OSError, ValueError):
        return []


def fallen_back(found: list[int]) -> Optional[int]:
    """The place of the last step before one that had been made already; None: there is none."""
    return next((place for place, (one, two) in enumerate(pairwise(found)) if two <= one), None)


def wait(condition, process: subprocess.Popen) -> float:
    """The time when the condition holds."""
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"the job ended early, with exit code {process.returncode}")
        time.sleep(0.005)
    return time.time()


def measure(way: str, ranks: int, folder: Path) -> dict[str, float]:
    """Part -> seconds of one job, of which a rank is killed."""
    job = ["-m", "megatron.tools.launch", "--nproc-per-node", str(ranks), str(ROOT / "pretrain_gpt.py")]
    job += [*MODEL.split(), *WAYS[way].split(), "--save", str(folder / "a"), "--load", str(folder / "a")]
    watch = [
        "-m",
        "megatron.tools.supervise",
        "--heartbeat-dir",
        str(folder / "beats"),
        "--log-dir",
        str(folder / "logs"),
    ]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    with (folder / "output").open("wb") as output:
        words = [sys.executable, *watch, "--", sys.executable, *job]
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=folder)
    wait(lambda: len(steps(folder)) >= KILLED_AFTER, process)
    victim = read_beats(folder / "beats")[-1]
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.time()
    done = wait(lambda: fallen_back(steps(folder)) is not None, process)
    found = steps(folder)
    at = fallen_back(found)
    beat = read_beats(folder / "beats")[0]
    process.wait()
    events = [json.loads(line) for line in (folder / "a" / "events.jsonl").read_text().splitlines()]
    [restart] = [event for event in events if event["event"] == "restart"]
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    began = boot + beat.born / os.sysconf("SC_CLK_TCK")
    launched = restart["time"] + restart["after"]
    starting = began - launched + beat.seconds["start"]
    parts = {name: beat.seconds.get(name, 0.0) for name in ("join", "model", "load", "index")}
    return {
        "in all": done - killed,
        "start of processes": starting,
        "without it": done - killed - starting,
        "seen": restart["time"] - killed,
        "pause": restart["after"],
        **parts,
        "steps lost": found[at] - found[at + 1] + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(given.repeats):
        for way in WAYS:
            folder = Path(tempfile.mkdtemp())
            try:
                results[way].append(measure(way, given.ranks, folder))
            finally:
                shutil.rmtree(folder)
    for way, turns in results.items():
        print(f"{way}, median of {len(turns)}:")
        for part in turns[0]:
            values = [turn[part] for turn in turns]
            print(f"  {part:<20} {statistics.median(values):7.2f}   ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
