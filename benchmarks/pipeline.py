# SPDX-License-Identifier: Apache-2.0
"""Is the pipeline simulator right? A step's time on two gloo ranks beside what it says from the time of each op.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --schedules 1f1b zb-h1 zb-v --micros 16 --rounds 9 --timeline step.json

Each schedule runs in turns, `--rounds` times: a step without any measuring inside (the figure to predict), then a step
that notes every op (the costs). The prediction simulates the same plan with the median cost of each kind of op on each
rank and with the time of a message, half of a measured round trip. The two ranks share this machine's cores with nobody,
or the figures mean nothing.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.data.loader import MicroBatch
from megatron.model.gpt.module import GPT
from megatron.mpu import collectives
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import init_parameter
from megatron.pipeline.build import build_stages
from megatron.pipeline.execute import P2PCommunicator, execute
from megatron.pipeline.simulate import bubble_of, simulate
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline import Timeline
from megatron.settings.schema import Model, Parallel

VOCABULARY, ROWS = 8191, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1"])
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--micros", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--timeline", help="file for the last schedule's noted step (megatron.pipeline.check --timeline)"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(
        num_layers=4, hidden_size=256, num_attention_heads=8, seq_length=256, hidden_dropout=0.0, attention_dropout=0.0
    )
    pipelines = {
        name: Pipeline.of(Parallel(pipeline_model_parallel_size=asked.pp, pipeline_schedule=name), 4, asked.micros)
        for name in asked.schedules
    }
    results = run_ranks(asked.pp, measure, model, pipelines, asked.micros, asked.rounds, timeout=600)
    message = statistics.median(seconds for seconds, _ in results)
    print(
        f"{asked.pp} ranks, {asked.micros} micro-batches of {ROWS} x 256 tokens, 5 M parameters; a message takes "
        f"{message * 1e3:.2f} ms"
    )
    print(f"{'schedule':>12}{'measured':>12}{'predicted':>12}{'ratio':>8}{'bubble':>9}")
    for name, pipeline in pipelines.items():
        steps = [max(seconds) for seconds in zip(*(found[name][0] for _, found in results))]
        noted = [found[name][1] for _, found in results]  # rank -> rounds -> record
        timeline = Timeline(
            name, pipeline.stages, [[entry for record in rounds for entry in record] for rounds in noted]
        )
        plan = [[op for op, _, _ in rounds[0]] for rounds in noted]
        times = simulate(plan, pipeline.stages, timeline.cost, wire=message)
        predicted, measured = max(end for _, end in times.values()), statistics.median(steps)
        print(
            f"{name:>12}{measured * 1e3:9.1f} ms{predicted * 1e3:9.1f} ms{measured / predicted:8.3f}"
            f"{bubble_of(times, asked.pp):9.1%}"
        )
        if asked.timeline:
            Timeline(name, pipeline.stages, [rounds[-1] for rounds in noted]).write(asked.timeline)


def measure(rank: int, model: Model, pipelines: dict[str, Pipeline], num_microbatches: int, rounds: int):
    """(seconds of a message, schedule -> (seconds of each plain step, records of each noted step)) on this rank."""
    mesh = Mesh(rank, pp=next(iter(pipelines.values())).pp)
    shape = (model.seq_length, ROWS, model.hidden_size)
    runs = {name: _prepare(model, pipeline, mesh, shape, num_microbatches) for name, pipeline in pipelines.items()}
    found = {name: ([], []) for name in pipelines}
    for number in range(rounds + 1):  # the first round warms up
        for name, run in runs.items():
            collectives.barrier(mesh.world)
            start = time.perf_counter()
            run(None)
            seconds, record = time.perf_counter() - start, []
            collectives.barrier(mesh.world)
            run(record)
            if number:
                found[name][0].append(seconds)
                found[name][1].append(record)
    return _message(mesh, shape), found


def _prepare(model, pipeline, mesh, shape, num_microbatches):
    """A function that runs a step and notes its ops in the list that it gets."""
    stages = build_stages(lambda **part: GPT(model, mesh, VOCABULARY, **part), pipeline, mesh, True)
    for name, (parameter, placement) in placements(stages).items():
        init_parameter(name, parameter, placement, mesh.coordinates, seed=1)
    wire = P2PCommunicator(mesh.pp, shape, torch.float32, torch.device("cpu"), stages=pipeline.stages)
    tokens = torch.randint(VOCABULARY, (model.seq_length + 1, ROWS), generator=torch.Generator().manual_seed(0))
    batches = [MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(ROWS))] * num_microbatches
    ops = pipeline.ops(mesh.pp.rank, num_microbatches)

    def run(record):
        execute(ops, stages, batches, wire, lambda sums, batch: sums["lm loss"] / sums["tokens"], timeline=record)

    return run


def _message(mesh, shape, times: int = 50) -> float:
    """Half of a round trip between the first two ranks."""
    x = torch.zeros(shape)
    collectives.barrier(mesh.world)
    start = time.perf_counter()
    for _ in range(times if mesh.rank < 2 else 0):
        for sender in (0, 1):
            if mesh.rank == sender:
                dist.send(x, 1 - sender)
            else:
                dist.recv(x, sender)
    seconds = (time.perf_counter() - start) / (2 * times)
    collectives.barrier(mesh.world)
    return seconds


if __name__ == "__main__":
    main()
