# SPDX-License-Identifier: Apache-2.0
"""What events cost a step: the rules and the alarm on each record, and an event itself, in microseconds of CPU time.

    python benchmarks/events.py --steps 20000

All of it runs on the first rank, on the thread that trains, and is counted by that thread's own CPU time, so other programs
hardly matter. The share is of the step of `benchmarks/supervise.py`'s job, measured in the same process by its own records.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from megatron.guard.alarm import Alarm
from megatron.guard.heartbeat import Heartbeat
from megatron.telemetry.event_rules import RecordRules
from megatron.telemetry.events import EventLog
from megatron.telemetry.notify import Outbox

ROOT = Path(__file__).resolve().parent.parent
JOB = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --mock-data --vocab-size 1000 --lr 1e-3
    --micro-batch-size 2 --global-batch-size 16 --eval-iters 0 --device cpu --log-interval 1000 --train-iters 40"""


def each(work, count: int) -> float:
    """Microseconds of this thread's CPU time that a call takes; the median of ten rounds."""
    rounds = []
    for _ in range(10):
        start = time.thread_time()
        for _ in range(count // 10):
            work()
        rounds.append((time.thread_time() - start) / (count // 10))
    return 1e6 * statistics.median(rounds)


def records(folder: Path) -> list[dict]:
    """The records of the steps of a real run, on one thread."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *JOB.split(), "--metrics-file", str(folder / "m.jsonl")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    found = map(json.loads, (folder / "m.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="steps that are judged")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        recorded = records(Path(folder))
        log = EventLog(Path(folder) / "events.jsonl")
        rules, alarm = RecordRules({}, log.record), Alarm(log, Heartbeat())
        many = [{**recorded[number % len(recorded)], "iteration": number} for number in range(steps)]
        judged = each(partial(lambda one: rules(next(one)), iter(many)), steps)
        noted = each(partial(lambda one: alarm(next(one)), iter(many)), steps)
        alarm.look(1.0)
        looked = each(lambda: alarm.look(0.0), steps)
        facts = dict(what="loss", value=5.0, median=3.0, score=65.6, action="continue")
        written = each(lambda: log.record("spike", "loss 5 is far", iteration=40, level="info", **facts), 2000)
        outbox = Outbox("--webhook", lambda event: None, run="a")
        sent = EventLog(listeners=[outbox])
        queued = each(lambda: sent.record("spike", "loss 5 is far", iteration=40, **facts), 2000)
    step = 1e6 * statistics.median(record["seconds"] for record in recorded[10:])
    print(f"rules of a step                {judged:8.1f} us")
    print(f"alarm of a step                {noted:8.1f} us")
    print(f"alarm's thread, once a second  {looked:8.1f} us")
    print(f"an event: written              {written:8.1f} us")
    print(f"an event: queued for a webhook {queued:8.1f} us")
    print(
        f"share of a step of {step / 1000:.1f} ms: {(judged + noted) / step:.3%}; "
        f"it is 1 % of one of {(judged + noted) / 10:.1f} ms"
    )


if __name__ == "__main__":
    main()
