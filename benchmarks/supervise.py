# SPDX-License-Identifier: Apache-2.0
"""What being supervised costs a training: the same job with and without, in turns, and where the cost would come from.

    python benchmarks/supervise.py --repeats 5 --steps 100

Every launch is a real one (torchrun on two ranks of one thread, so that on two cores nothing is left for the supervisor).
The ratio is that of the median steps of the launches; the same of bare launches against each other says what this machine's
noise is. Below it what can be counted: beats a step with what one takes, and the supervisor's share of a core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron.guard import processes
from megatron.guard.attempt_watch import SHARE, Effort, note
from megatron.guard.beat_files import BeatReader
from megatron.guard.heartbeat import Heartbeat

ROOT = Path(__file__).resolve().parent.parent
JOB = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --mock-data --vocab-size 1000 --lr 1e-3
    --micro-batch-size 2 --global-batch-size 16 --eval-iters 0 --device cpu --log-interval 1000"""
TICKS = os.sysconf("SC_CLK_TCK")


def launch(supervised: bool, steps: int, folder: Path) -> tuple[float, float]:
    """(seconds of the median step, the supervisor's CPU seconds a second) of one launch."""
    metrics = folder / "metrics.jsonl"
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        str(ROOT / "pretrain_gpt.py"),
        *JOB.split(),
        "--train-iters",
        str(steps),
        "--metrics-file",
        str(metrics),
    ]
    if supervised:
        command = ["-m", "megatron.tools.supervise", "--log-dir", str(folder), "--", sys.executable, *command]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    job = subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    used = 0.0
    while job.poll() is None:
        fields = Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()
        used = max(used, (int(fields[11]) + int(fields[12])) / TICKS)
        time.sleep(0.1)
    wall = time.perf_counter() - start
    if job.returncode:
        raise SystemExit(f"the job ended with {job.returncode}")
    records = map(json.loads, metrics.read_text().splitlines())
    seconds = [record["seconds"] for record in records if record["kind"] == "step" and record["iteration"] > 10]
    return statistics.median(seconds), used / wall


def watch_many(ranks: int, each: int, seconds: float, poll: float = 0.5) -> tuple[float, float, int]:
    """(CPU seconds a second, seconds of a look, looks) of a supervisor whose ranks' nodes write every two seconds."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = [Path(folder) / f"node_n{number}.1.beats" for number in range(ranks // each)]
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(each), *map(str, nodes)])
        while len(list(Path(folder).iterdir())) < len(nodes):
            time.sleep(0.1)
        reader, watching, seen, looks = BeatReader(Path(folder)), Effort(SHARE), {}, 0
        began, used = time.monotonic(), time.thread_time()
        while time.monotonic() - began < seconds:
            time.sleep(poll)
            if watching.may_begin():
                beats, now, looks = reader.read(), time.monotonic(), looks + 1
                note(beats, now, seen)
                any(map(processes.is_gone, beats))
                [beat for beat in beats if now - seen[beat.rank][1] > 300]
        share = (time.thread_time() - used) / (time.monotonic() - began)
        writer.kill()
        writer.wait()
        assert len(seen) == ranks
        return share, share * seconds / looks, looks


WRITER = """
import json, sys, time
each, nodes, count = int(sys.argv[1]), sys.argv[2:], 0
seconds = dict.fromkeys(("data", "F", "B", "reduce", "update", "load", "index", "start"), 1.234)
same = dict(born=1, phase="F", op="F3", usual=.1, machine="m", memory="/dev/shm/x", slurm_step="7.0", seconds=seconds)
while True:
    count += 1
    for number, path in enumerate(nodes):
        beats = [dict(same, rank=number * each + n, host=f"n{number}", pid=n, count=count, step=count) for n in range(each)]
        lines = [json.dumps(beat) + "\\tdp group 1" for beat in beats]
        open(path, "w").write("\\n".join([*lines, "end", ""]))
    time.sleep(2)
"""


def cost(call, times: int = 20_000) -> float:
    """Seconds of a call, the best of three tries."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, (time.perf_counter() - start) / times)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="launches of each kind (default 5)")
    parser.add_argument("--steps", type=int, default=100, help="steps of a launch (default 100)")
    parser.add_argument(
        "--ranks", type=int, help="instead: what it costs to watch so many ranks, of simulated nodes of 8"
    )
    arguments = parser.parse_args()
    if arguments.ranks:
        share, look, looks = watch_many(arguments.ranks, 8, 30.0)
        print(f"{arguments.ranks} ranks: {share:.2%} of a core; a look takes {look * 1e3:.1f} ms, {looks} in 30 s")
        return
    bare, supervised, shares = [], [], []
    for number in range(2 * arguments.repeats):
        kind = number % 2 ^ (number // 2) % 2  # bare, supervised, supervised, bare, ...: a drift harms both alike
        with tempfile.TemporaryDirectory() as folder:
            seconds, share = launch(bool(kind), arguments.steps, Path(folder))
        (supervised if kind else bare).append(seconds)
        shares += [share] if kind else []
        print(f"{'supervised' if kind else 'bare':<10} {seconds * 1e3:8.2f} ms a step", flush=True)
    step = statistics.median(bare)
    print(
        f"supervised / bare: {statistics.median(supervised) / step:.4f} (medians of {arguments.repeats}); bare among "
        f"themselves: {min(bare) / step:.4f} to {max(bare) / step:.4f}"
    )
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        heartbeat = Heartbeat(folder)
        beat, enter_group = (
            cost(lambda: heartbeat.beat("F", op="F0")),
            cost(lambda: heartbeat.enter_group("dp group 1")),
        )
        heartbeat.close()
    beats = 3 + 2 * 4  # data, reduce, update; a forward and a backward pass for each of 4 micro-batches
    print(
        f"a beat {beat * 1e6:.1f} us, a collective's group {enter_group * 1e6:.1f} us: {beats} beats and 2 groups are "
        f"{(beats * beat + 2 * enter_group) / step:.3%} of a step"
    )
    print(f"the supervisor uses {statistics.median(shares):.2%} of a core, its start included")


if __name__ == "__main__":
    main()
